"""Checks every request before its route: the host, the token or session with its scope, and that no other site made a
browser send it. Runs HEAD as GET, and adds security headers to the answer.

Reading asks for the scope `read` and everything else for `submit`; routes that ask for more say so (access.py).
"""

import contextlib
import re
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request, cookie_parser
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.guard import SIGN_IN, SIGN_OUT, Access, Guard, cookie_name
from app.api.hosts import AllowedHosts
from app.api.problems import ErrorPage, problem, problem_response
from app.errors import CrossSiteRequest, FlopwatchError, MisdirectedRequest, TooManyRequests, Unauthorized
from app.logs import note_job

PROBES = frozenset({"/healthz"})
"""Paths that ask for no token, whatever the Host: probes of clusters send an address."""
OF_A_JOB = re.compile(r"(?:/ui)?/jobs/(\d{1,18})(?:/|$)", re.ASCII)
OPEN = frozenset({SIGN_IN, SIGN_OUT})
STATIC = "/static/"
"""The files of the page for signing in ask for no token either: they are the same on every server."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


class Gate:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts, error_page: ErrorPage) -> None:
        self.app = app
        self.hosts = hosts
        self.error_page = error_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if job := OF_A_JOB.match(scope["path"]):
            note_job(int(job[1]))  # of this request's task alone
        send = _with_security_headers(send)
        if scope["path"] not in PROBES:
            try:
                scope.setdefault("state", {})["access"] = await self._admit(scope)
            except FlopwatchError as error:
                await self._refuse(scope, error)(scope, receive, send)
                return
        if scope["method"] == "HEAD":
            await _head(self.app, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _admit(self, scope: Scope) -> Access | None:
        """Return who sends the request; None on an open path. Raises why it is refused."""
        headers = Headers(scope=scope)
        # The host is checked first: another site's page must not even make the browser ask for the token.
        self.hosts.check(headers.get("host"), (scope.get("server") or (None,))[0])
        guard: Guard = scope["app"].state.services.guard
        await guard.refresh()
        safe = scope["method"] in SAFE_METHODS
        is_open = scope["path"] in OPEN or scope["path"].startswith(STATIC)
        access, unknown, address = None, None, address_of(scope)
        try:
            access = identify(headers, guard, address)
        except (Unauthorized, TooManyRequests) as error:
            unknown = error
        if not is_open:  # whatever others at an address do, its people can sign in
            guard.count(access, address)
        if not safe and is_cross_site(headers, unsaid=access is not None and access.by_session):
            raise CrossSiteRequest("A page of another site sent this request; nothing was changed.")
        if unknown is not None and not is_open:
            raise unknown
        if access is not None and not is_open:
            access.require("read" if safe else "submit", f"{scope['method']} {scope['path']}")
        return access

    def _refuse(self, scope: Scope, error: FlopwatchError) -> Response:
        """Return the answer to a refused request: a browser without a token is sent to the page for signing in."""
        headers, request = Headers(scope=scope), Request(scope)
        body, closing = problem(error, scope["path"]), {**error.headers, **_closing(scope)}
        if isinstance(error, Unauthorized) and scope["method"] in SAFE_METHODS:
            if "hx-request" in headers:
                return problem_response(body, {**closing, "HX-Refresh": "true"})  # the page then signs in
            if "text/html" in headers.get("accept", ""):
                wanted = scope["path"] + (f"?{request.url.query}" if request.url.query else "")
                return RedirectResponse(f"{SIGN_IN}?next={quote(wanted, safe='')}", status_code=303)
        page = None if isinstance(error, MisdirectedRequest) else self.error_page(request, body)
        if page is None:
            return problem_response(body, closing)
        page.headers.update(closing)
        return page


def address_of(scope: Scope) -> str:
    """Return the sender's address, as the connection or a trusted proxy says; "" for a socket without one."""
    return str((scope.get("client") or ("",))[0])


def identify(headers: Headers, guard: Guard, address: str) -> Access:
    """Return who sends a request, by token or session. Raises Unauthorized; TooManyRequests after wrong tokens."""
    if guard.is_open:
        return Access("admin")
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return guard.by_token(credentials.strip().encode("latin-1"), address)  # the bytes as they came
    cookie = cookie_of(headers)
    if cookie and not scheme:
        return guard.by_session(cookie)
    raise Unauthorized(
        f"Send a token as `Authorization: Bearer TOKEN`; browsers sign in at {SIGN_IN}, and the command line and the "
        "Python client read FLOPWATCH_API_TOKEN."
    )


async def stays(request: Request) -> bool:
    """Return False once the sender would no longer be admitted: a token was revoked or expired, or a session ended."""
    guard: Guard = request.app.state.services.guard
    await guard.refresh()
    try:
        identify(request.headers, guard, address_of(request.scope))
    except FlopwatchError:
        return False
    return True


def cookie_of(headers: Headers) -> str:
    """Return the session's cookie, an empty text if there is none."""
    return cookie_parser(headers.get("cookie", "")).get(cookie_name(headers.get("host", "")), "")


def _closing(scope: Scope) -> dict[str, str]:
    """Return headers that close the connection of a refused request with a body, which the server does not read."""
    sent = Headers(scope=scope)
    return {"Connection": "close"} if "content-length" in sent or "transfer-encoding" in sent else {}


def is_cross_site(headers: Headers, *, unsaid: bool = False) -> bool:
    """Return True if a browser says that the request comes from another origin's page; `unsaid` if nothing is said.

    Programs say nothing. All browsers say one of these, so a request with a session that says nothing is refused.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin", headers.get("referer"))
    try:
        return unsaid if origin is None else urlsplit(origin).netloc != headers.get("host")
    except ValueError:  # no URL at all, "http://[::1"
        return True


class _HeadSent(Exception):  # not an error: it ends a route that would continue sending
    """Raised in a route that answers HEAD, when it begins to send a body after the headers."""


async def _head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer HEAD: the routes know GET only, so the GET route runs up to its first piece of body; a stream would never
    end. The server sends no body, since its own scope still says HEAD."""
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


FILES = re.compile(r"/jobs/[^/]+/artifacts/.|/files/.")
"""Paths of stored files, which have a strong ETag and answer Range: both are of the bytes as they are stored."""
LEVEL = 5
"""Levels above make answers 1 % smaller and take a third more time of a core that may be measuring."""
LEAST_BYTES = 1000


class Compression(GZipMiddleware):
    """As Starlette's, which leaves event streams and compressed media types alone; stored files are sent unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app, minimum_size=LEAST_BYTES, compresslevel=LEVEL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and FILES.match(scope["path"]):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)
