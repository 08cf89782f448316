"""Checks every request before its route: the host, the API token, and that no other site made a browser send it. Runs
HEAD as GET, and adds security headers to the answer.
"""

from __future__ import annotations

import base64
import contextlib
import secrets
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.hosts import AllowedHosts
from app.api.problems import problem, problem_response
from app.errors import CrossSiteRequest, FlopwatchError, Unauthorized

OPEN_PATHS = frozenset({"/healthz"})
"""Paths that ask for no token, whatever the Host: probes of clusters send an address."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


class Gate:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, token: str | None, hosts: AllowedHosts) -> None:
        self.app = app
        self.token = token
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._admit(scope)
        except FlopwatchError as error:
            headers = {**error.headers, **_closing(scope)}
            await problem_response(problem(error, scope["path"]), headers)(scope, receive, send)
            return
        send = _with_security_headers(send)
        if scope["method"] == "HEAD":
            await _head(self.app, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _admit(self, scope: MutableMapping[str, Any]) -> None:
        headers = Headers(scope=scope)
        if scope["path"] not in OPEN_PATHS:
            self._check_host_and_token(scope, headers)
        if scope["method"] not in SAFE_METHODS and is_cross_site(headers):
            raise CrossSiteRequest("A page of another site sent this request; nothing was changed.")

    def _check_host_and_token(self, scope: MutableMapping[str, Any], headers: Headers) -> None:
        # The host is checked first: another site's page must not even make the browser ask for the token.
        self.hosts.check(headers.get("host"), (scope.get("server") or (None,))[0])
        if self.token is not None and not has_token(headers, self.token):
            raise Unauthorized(
                "Send the API token as `Authorization: Bearer TOKEN`, or as the password of HTTP Basic with any user."
            )


def _closing(scope: Scope) -> dict[str, str]:
    """Return headers that close the connection of a refused request with a body, which the server does not read."""
    sent = Headers(scope=scope)
    return {"Connection": "close"} if "content-length" in sent or "transfer-encoding" in sent else {}


def has_token(headers: Headers, token: str) -> bool:
    """Return True if the request carries the token, as a bearer token or as Basic's password."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "basic":
        try:
            decoded = base64.b64decode(credentials, validate=True)
        except ValueError:  # binascii.Error, and plain when there are characters beyond ASCII
            return False
        sent = decoded.partition(b":")[2]
    elif scheme.lower() == "bearer":
        sent = credentials.strip().encode("latin-1")  # the bytes as they came
    else:
        return False
    return secrets.compare_digest(sent, token.encode())


def is_cross_site(headers: Headers) -> bool:
    """Return True if a browser says that the request comes from another origin's page."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin", headers.get("referer"))
    try:
        return origin is not None and urlsplit(origin).netloc != headers.get("host")
    except ValueError:  # no URL at all, "http://[::1"
        return True


class _HeadSent(Exception):  # not an error: it ends a route that would continue sending
    """Raised in a route that answers HEAD, when it begins to send a body after the headers."""


async def _head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer HEAD: the routes know GET only, so the GET route runs up to its first piece of body; a stream would never
    end.

    The server sends no body, since its own scope still says HEAD.
    """
    ended = False

    async def send_head(message: Message) -> None:
        nonlocal ended
        if message["type"] == "http.response.body":
            if not ended:
                ended = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            if message.get("more_body", False):
                raise _HeadSent
        else:
            await send(message)

    with contextlib.suppress(_HeadSent):
        await app({**scope, "method": "GET"}, receive, send_head)


def _with_security_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.setdefault("X-Content-Type-Options", "nosniff")
            headers.setdefault("Referrer-Policy", "same-origin")
            headers.setdefault("Content-Security-Policy", PAGE_POLICY)
        await send(message)

    return send_with_headers
