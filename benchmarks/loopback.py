"""The cheapest client: one kept connection, so that figures are the server's and not the client's."""

from __future__ import annotations

import http.client
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

JSON = {"Content-Type": "application/json"}
TIMEOUT_S = 60.0


class Loopback:
    """Requests to a server on this host, one after the other."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)

    def __enter__(self) -> Self:
        self._connection.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def get(self, path: str) -> bytes:
        """The body of the answer.

        Raises:
            RuntimeError: it was not 200.
        """
        return self._request("GET", path, None, http.client.OK)

    def post(self, path: str, body: bytes) -> bytes:
        """The body of the answer to a JSON body.

        Raises:
            RuntimeError: it was not 201.
        """
        return self._request("POST", path, body, http.client.CREATED)

    def _request(self, method: str, path: str, body: bytes | None, expected: int) -> bytes:
        self._connection.request(method, path, body, JSON if body is not None else {})
        with self._connection.getresponse() as response:
            answer = response.read()
            if response.status != expected:
                raise RuntimeError(f"{method} {path}: {response.status}: {answer.decode(errors='replace')}")
        return answer
