"""A connection to one server: its address, requests and their problems, pages, streams of events, files.

client.py has the methods of the API, and draws the tree of errors.
"""

import contextlib
import getpass
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, TypeVar
from urllib.parse import quote
from urllib.request import getproxies

import httpx

from flopwatch import address, defaults
from flopwatch.text.times import parsed_time, set_clock

T = TypeVar("T")
Answer: TypeAlias = dict[str, Any]
"""An answer of the server: a job, a sweep, a comparison, …"""
CONNECT_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 120.0
"""The longest silence of the server within an answer; a request that waits may be silent for longer (`Prefer`)."""
STREAM_TIMEOUT_S = 60.0
"""The longest silence within a stream. Must exceed the time between two of the server's keep-alive comments."""
MAX_PREFERRED_WAIT_S = 60
"""Longest time in seconds for which the server holds an answer."""
RECONNECT_S = 1.0
MAX_RECONNECTS = 30
AWAY = (429, 502, 503, 504)
"""Statuses of a server that is busy, or away behind a proxy."""
CLOCK_S = 1.0
"""Difference of clocks that does not count: the answer was under way."""
PAGE = 500
MAX_ANSWER_BYTES = 256 << 20
"""Most bytes of an answer that is kept in memory. Files are written to the disk, and have a size."""
NOT_OURS = (
    "That is not Flopwatch: another server may be there, or a proxy or sign-on before it. Check the address and the "
    "port (FLOPWATCH_URL, or --url; it ends before /ui), and ask who runs a sign-on for an address without it."
)


class ClientError(Exception):
    """Base of all errors of the client; the message is for people."""


class InvalidArgument(ClientError, ValueError):
    """The client refuses it without asking the server: a file is missing, or `make_step` does not take an argument."""


class Unreachable(ClientError):
    """No Flopwatch server answers at that address, or the connection broke."""


@dataclass(frozen=True)
class WrongField:
    """A field that the server refused: a JSON pointer (RFC 6901) into the body as sent, "" for something outside the
    body."""

    pointer: str
    detail: str


class Refused(ClientError):
    """The server answered with a problem (RFC 9457); `problem` is the whole of it.

    Example:
        >>> try:
        ...     flopwatch.submit({"kind": "benchmark", "context_lenght": 256})
        ... except Refused as refused:
        ...     print(refused.status, refused.pointer, refused.cure)
        422 /spec/context_lenght Unknown field; did you mean context_length?
    """

    def __init__(self, problem: Mapping[str, Any]) -> None:
        super().__init__(problem_text(problem))
        self.problem = dict(problem)

    @property
    def type(self) -> str:
        """The URI of the problem's type: "urn:flopwatch:problem:invalid_request"."""
        return str(self.problem.get("type", "about:blank"))

    @property
    def code(self) -> str:
        """The type's last part: "invalid_request", "not_found", "conflict", …"""
        return str(self.problem.get("code", self.type.rpartition(":")[2]))

    @property
    def status(self) -> int:
        """The HTTP status."""
        return int(self.problem.get("status", 0))

    @property
    def errors(self) -> tuple[WrongField, ...]:
        """The fields that were refused; none if the problem does not concern fields."""
        return tuple(WrongField(field["pointer"], field["detail"]) for field in self.problem.get("errors", ()))

    @property
    def pointer(self) -> str | None:
        """The JSON pointer to the first wrong field in the body as sent; None if the problem does not concern
        fields."""
        return self.errors[0].pointer if self.errors else None

    @property
    def cure(self) -> str:
        """The error of the first wrong field with its cure; without a wrong field, the problem's detail."""
        return self.errors[0].detail if self.errors else str(self.problem.get("detail", ""))


class WaitTimeout(ClientError, TimeoutError):
    """The job or sweep was not done in time. It continues."""


class DownloadFailed(ClientError):
    """A downloaded file is damaged, or a file of that name exists already."""


@dataclass(frozen=True)
class Event:
    """One server-sent event of a job: `state`, `progress`, `log` or `done`."""

    type: str
    data: dict[str, Any]


class Submitted(dict[str, Any]):
    """A new job or sweep, as the server answered. `replayed`: an earlier request with the same idempotency key has made
    it, and this is the answer of then."""

    def __init__(self, answer: Mapping[str, Any], *, replayed: bool) -> None:
        super().__init__(answer)
        self.replayed = replayed


State: TypeAlias = Literal["queued", "running", "succeeded", "failed", "cancelled"]


class Job(Submitted):
    """A job, as the server answered: every field by its key (docs/http-api.md), those that programs ask for most as
    attributes, too."""

    def __init__(self, answer: Mapping[str, Any], *, replayed: bool = False) -> None:
        super().__init__(answer, replayed=replayed)

    @property
    def id(self) -> int:
        """Its number."""
        return int(self["id"])

    @property
    def kind(self) -> str:
        """Its kind: "benchmark"."""
        return str(self["kind"])

    @property
    def state(self) -> State:
        """Its state when the server answered."""
        state: State = self["state"]
        return state

    @property
    def error(self) -> dict[str, Any] | None:
        """Why it failed or was cancelled, as a problem; else None."""
        error: dict[str, Any] | None = self["error"]
        return error

    @property
    def verdict(self) -> str | None:
        """The worst verdict on its cases: valid, suspect, invalid or wrong; None before it has measured."""
        verdict: str | None = (self["validity"] or {}).get("verdict")
        return verdict


class Connection:
    """A connection to one server. The subclass `Flopwatch` describes the arguments and errors."""

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self.url, self._named_by = (url.rstrip("/"), "") if url else _server_url(data_dir)
        token = _token_in_environment() if token is None else token
        with self._explained():
            self._http = httpx.Client(
                base_url=self.url,
                timeout=_timeout(timeout_s),
                headers=httpx.Headers({**({"Authorization": f"Bearer {token}"} if token else {}), **_user()}, "utf-8"),
                # Loading certificates takes longer than most commands, and plain HTTP has none.
                verify=not self.url.startswith("http://") or (bool(getproxies()) and not is_here(self.url)),
                trust_env=not is_here(self.url),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, path: str, **params: Any) -> Any:
        """Get a route's JSON; parameters that are None are left out."""
        return self.ask("GET", path, params=params)

    def text(self, path: str, **params: Any) -> str:
        """Get a route's text; parameters that are None are left out."""
        return self.send("GET", path, params=params).text

    def pages(self, path: str, limit: int, **params: Any) -> list[Answer]:
        """Get up to `limit` entries of a list, over as many pages as it takes."""
        entries: list[Answer] = []
        after = None
        while len(entries) < limit:
            page = self.get(path, limit=min(limit - len(entries), PAGE), after=after, **params)
            entries += page["data"]
            after = page["next"]
            if after is None:
                break
        return entries

    def post_once(
        self,
        path: str,
        body: Mapping[str, Any],
        idempotency_key: str | None = None,
        *,
        wait_s: int = 0,
        dry_run: bool = False,
    ) -> Submitted:
        """Post a body; the answer tells whether it is the first one to this key."""
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        if wait_s:
            headers["Prefer"] = f"wait={min(wait_s, MAX_PREFERRED_WAIT_S)}"
        params = {"dry_run": True if dry_run else None}
        response = self.send(
            "POST", path, params=params, body=body, headers=headers, timeout_s=self._timeout_s + wait_s
        )
        return Submitted(_object(response), replayed="Idempotency-Replayed" in response.headers)

    def ask(self, method: str, path: str, **options: Any) -> Answer:
        """Send one request, as `send`, and return the object that answers it; raises Unreachable if none does."""
        return _object(self.send(method, path, **options))

    def send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        """Send one request to any route, with JSON (`body`) or bytes (`content`); `timeout_s` is the longest silence of
        the server, by default the connection's.

        Raises:
            Refused: the server answered with a problem.
            Unreachable: no server answers.
        """
        chosen = {name: value for name, value in (params or {}).items() if value is not None}
        timeout = _timeout(timeout_s or self._timeout_s)
        options = {"params": chosen, "json": body, "content": content, "headers": headers, "timeout": timeout}
        with self._explained(), self._opened(method, path, **options) as response:
            whole = _whole(response)
        with contextlib.suppress(KeyError, ValueError):  # a server before this version does not tell
            set_clock(parsed_time(whole.headers[defaults.TIME]), CLOCK_S)
        return whole

    @contextlib.contextmanager
    def _opened(self, method: str, path: str, **options: Any) -> Iterator[httpx.Response]:
        """Send a request and give the answer, whose body is still to be read. The token goes to this server only.
        Raises Refused, and Unreachable for the answer of something else."""
        request = self._http.build_request(method, path, **options)
        here, there = self._http.base_url, request.url
        if (there.scheme, there.host, there.port) != (here.scheme, here.host, here.port):
            raise ClientError(f"{path} leads away from {self.url}, which alone gets requests with the token.")
        response = self._http.send(request, stream=True)
        try:
            if response.is_error:
                checked(_whole(response))
            is_page = response.headers.get("content-type", "").startswith("text/html")
            if response.has_redirect_location or (is_page and defaults.TIME not in response.headers):
                raise _other_server(response)
            yield response
        finally:
            response.close()

    def patiently(self, ask: Callable[[], T], deadline: float, command: str) -> T:
        """Return what `ask` answers; while the server is away, ask again as often as a lost stream is resumed.
        `command` shows later what is waited for, as the error says."""
        failures = 0
        while True:
            try:
                return ask()
            except ClientError as error:
                failures += 1
                cause = error.__cause__ or error
                if not _may_pass(cause):
                    raise
                if failures > MAX_RECONNECTS or time.monotonic() >= deadline:
                    raise self._lost(cause, command) from cause
                time.sleep(RECONNECT_S)

    def stream(self, path: str, what: str, command: str, timeout_s: float | None = None) -> Iterator[Event | None]:
        """Yield a route's events from the first to the last, and None for each sign of life between them; after a lost
        connection, resume where it stopped.

        `what` names the source of the events, for the error, and `command` shows it later.

        Raises:
            WaitTimeout: it was not done after `timeout_s` seconds; noticed when the server next sends something.
        """
        deadline = deadline_of(timeout_s)
        last_id, failures = "0", 0
        while True:
            headers = {"Accept": "text/event-stream", "Last-Event-ID": last_id}
            left_s = deadline - time.monotonic()
            timeout = _timeout(min(STREAM_TIMEOUT_S, max(left_s, 0.001)))
            try:
                with self._opened("GET", path, headers=headers, timeout=timeout) as response:
                    if response.status_code == httpx.codes.NO_CONTENT:
                        return
                    if not response.headers.get("content-type", "").startswith("text/event-stream"):
                        raise _other_server(response)
                    for event_id, event in parse_stream(_until(response.iter_lines(), deadline)):
                        last_id, failures = event_id or last_id, 0
                        yield event
                        if event is not None and event.type == "done":
                            return
            except httpx.InvalidURL as error:
                raise self._unreachable(error) from error
            except (httpx.TransportError, Refused) as error:
                if not _may_pass(error):
                    raise
                if time.monotonic() >= deadline:
                    raise WaitTimeout(f"{what} was not done after {timeout_s:g} s; it keeps running.") from None
                failures += 1
                if failures > MAX_RECONNECTS:
                    raise self._lost(error, command) from error
                time.sleep(RECONNECT_S)

    def all_rows(self, path: str, params: Mapping[str, Any], limit: int | None = None) -> Answer:
        """Get all pages of a list of rows, or `limit` rows; a column may have another type on each page."""
        rows: list[Answer] = []
        columns: dict[str, Answer] = {}
        after = None
        while True:
            remaining = None if limit is None else limit - len(rows)
            page = self.get(path, **params, limit=remaining, after=after)
            for column in page["columns"]:
                former = columns.setdefault(column["name"], column)
                if former["type"] == "null":
                    columns[column["name"]] = column
                elif column["type"] not in (former["type"], "null"):
                    columns[column["name"]] = {**column, "type": "any"}
            rows += page["rows"]
            after = page["next"]
            if after is None or (limit is not None and len(rows) >= limit):
                return {**page, "columns": list(columns.values()), "rows": rows}

    def download_file(self, file: Mapping[str, Any], target: Path) -> None:
        """Download one file, checked against its SHA-256; it is written whole or not at all."""
        partial = target.with_name(f".{target.name}.{os.getpid()}.part")
        digest, size = hashlib.sha256(), 0
        try:
            with self._explained(), self._opened("GET", file["url"]) as response, partial.open("wb") as opened:
                for chunk in _chunks(response, file["name"]):
                    size += len(chunk)
                    if size > file["size"]:
                        break
                    digest.update(chunk)
                    opened.write(chunk)
            if size != file["size"] or digest.hexdigest() != file["sha256"]:
                raise DownloadFailed(f"{file['name']} arrived damaged; try again.")
            _move(partial, target)
        except OSError as error:
            raise DownloadFailed(f"{target}: {error.strerror}.") from error
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        except (ImportError, ValueError) as error:  # of httpx: a scheme that it does not know, or only with socksio
            if "proxy" not in str(error).lower():
                raise
            raise ClientError(
                f"{_sentence(error)} (all_proxy, http_proxy or https_proxy in the environment)."
            ) from error

    def _unreachable(self, error: Exception) -> Unreachable:
        cure = "Start the server with `flopwatch up`, or say where it is: FLOPWATCH_URL, or --url."
        if "://" not in self.url:
            cure = f"Write http://{self.url} or https://{self.url}."
        return Unreachable(f"Cannot talk to {self.url}{self._named_by}: {_sentence(error)}. {cure}")

    def _lost(self, error: BaseException, command: str) -> Unreachable:
        kept = f"What was submitted is kept: `flopwatch {command}` when the server is back."
        return Unreachable(f"Lost {self.url}: {_sentence(error)}. {kept}")


def parse_stream(lines: Iterable[str]) -> Iterator[tuple[str, Event | None]]:
    """Yield the (id, event) pairs of a stream of server-sent events, and ("", None) for each comment between them."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield fields.get("id", "0"), Event(fields.get("event", "message"), json.loads(fields["data"]))
            fields = {}
        elif fields:
            yield "", None
            fields = {}


def is_here(url: str) -> bool:
    """Return True for plain HTTP to this very host, which no proxy can reach, whatever the environment says."""
    return re.match(r"http://(localhost|127\.[0-9.]+|\[::1\])(:|/|$)", url) is not None


def checked(response: httpx.Response) -> httpx.Response:
    """Return the response; raises Refused if it is a problem, or another server's error."""
    if not response.is_error:
        return response
    problem = None
    if response.headers.get("content-type", "").partition(";")[0].endswith("json"):
        with contextlib.suppress(ValueError):
            problem = response.json()
    if isinstance(problem, dict) and "title" in problem:
        raise Refused(problem)
    title = f"{response.url} answered {_status(response)}."
    raise Refused({"type": "about:blank", "title": title, "status": response.status_code, "detail": NOT_OURS})


def _whole(response: httpx.Response) -> httpx.Response:
    content = bytearray()
    for chunk in response.iter_bytes():
        content += chunk
        if len(content) > MAX_ANSWER_BYTES:
            raise ClientError(f"{response.url} answers with more than {MAX_ANSWER_BYTES >> 20} MiB: ask for less.")
    headers = [pair for pair in response.headers.multi_items() if pair[0] != "content-encoding"]
    return httpx.Response(response.status_code, headers=headers, content=bytes(content), request=response.request)


def _object(response: httpx.Response) -> Answer:
    with contextlib.suppress(ValueError):
        if isinstance(content := response.json(), dict):
            return content
    raise _other_server(response)


def _chunks(response: httpx.Response, name: str) -> Iterator[bytes]:
    """Yield a file's bytes. Raises DownloadFailed where the server breaks off, as it does at a damaged file."""
    try:
        yield from response.iter_bytes()
    except httpx.RemoteProtocolError as error:
        raise DownloadFailed(f"{name} broke off: it may be damaged on the server, whose log says so.") from error


def _may_pass(error: BaseException) -> bool:
    """Return True if the server, or a proxy before it, may answer the same request a moment later."""
    return isinstance(error, httpx.TransportError) or (isinstance(error, Refused) and error.status in AWAY)


def _status(response: httpx.Response) -> str:
    return f"{response.status_code} {response.reason_phrase}".strip()


def _other_server(response: httpx.Response) -> Unreachable:
    location = response.headers.get("location")
    what = response.headers.get("content-type", "no content type").partition(";")[0]
    said = f"it leads to {location}" if location is not None else f"no JSON object, but {what}"
    return Unreachable(f"{response.request.url} answered {_status(response)}: {said[:300]}. {NOT_OURS}")


def problem_text(problem: Mapping[str, Any]) -> str:
    """Write a problem (RFC 9457) for people: its title, then each field with its cure."""
    fields = [": ".join(filter(None, (field["pointer"], field["detail"]))) for field in problem.get("errors", ())]
    details = fields or [text for text in [problem.get("detail", "")] if text]
    return "\n".join([str(problem.get("title", "Error")), *(f"  {line}" for line in details)])


def _token_in_environment() -> str | None:
    token = os.environ.get("FLOPWATCH_API_TOKEN")
    if token is not None and (not token or token != token.strip()):
        raise ClientError("FLOPWATCH_API_TOKEN: is empty, or begins or ends with a blank, which no server takes")
    return token


def _user() -> dict[str, str]:
    """Return the header that names this process's user; none in a container whose user has no name."""
    try:
        name = getpass.getuser()
    except (ImportError, KeyError, OSError):
        return {}
    return {defaults.USER: quote(name)} if name.isprintable() else {}


def _server_url(data_dir: str | os.PathLike[str] | None) -> tuple[str, str]:
    """Return the server's address, and its source in words. A given folder takes precedence over FLOPWATCH_URL."""
    if data_dir is None and (url := os.environ.get("FLOPWATCH_URL")):
        return url.rstrip("/"), ""
    named = data_dir or os.environ.get("FLOPWATCH_DATA_DIR")
    folder = Path(named or defaults.data_dir())
    if url := address.read(folder):
        return url.rstrip("/"), f" (from {folder / address.FILE})"
    host, port = os.environ.get("FLOPWATCH_HOST", defaults.HOST), os.environ.get("FLOPWATCH_PORT", str(defaults.PORT))
    if not port.isdecimal():
        raise ClientError(f"FLOPWATCH_PORT: {port!r} is no number of a port")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    lacks = "has no server's address" if folder.is_dir() else "is no folder"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}", f" ({folder} {lacks})" if named else ""


def _timeout(silence_s: float) -> httpx.Timeout:
    return httpx.Timeout(CONNECT_TIMEOUT_S, read=silence_s)


def deadline_of(timeout_s: float | None) -> float:
    """Return the time `timeout_s` seconds from now on the monotonic clock; None means never."""
    return float("inf") if timeout_s is None else time.monotonic() + timeout_s


def _until(lines: Iterable[str], deadline: float) -> Iterator[str]:
    """Yield lines until the deadline; then raise the error of a connection that is silent for too long."""
    for line in lines:
        if time.monotonic() >= deadline:
            raise httpx.ReadTimeout("the time is over")
        yield line


def _sentence(error: BaseException) -> str:
    return (str(error) or type(error).__name__).rstrip(". ")


def _move(partial: Path, target: Path) -> None:
    """Rename a file to its final name, unless another file has taken that name meanwhile."""
    try:
        target.touch(exist_ok=False)
        partial.replace(target)
    except FileExistsError:
        raise DownloadFailed(f"{target} exists by now, and is not overwritten: choose another folder.") from None
