"""Decides who sends a request and what they may do: tokens, sessions of browsers, and the limit of requests.

Tokens are read from the database at most once a second, so a request costs no query, and a token that another process
revoked counts for a second more. Sessions are in memory: a restart of the server ends them.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from app import tokens
from app.errors import FlopwatchError, InsufficientScope, TooManyRequests, Unauthorized
from app.settings import Settings
from app.store.tables import utc_now
from app.store.tokens import KnownToken, Tokens
from app.tokens import Scope

FRESH_S = 1.0
SESSION_S = 7 * 86_400
MAX_SESSIONS = 10_000
MAX_BUCKETS = 10_000
MINUTE_S = 60.0
SIGN_IN, SIGN_OUT = "/ui/sign-in", "/ui/sign-out"
COOKIE = "flopwatch_session"
"""The session's cookie; the port follows, if the address has one: all ports of a host get each other's cookies."""


@dataclass(frozen=True)
class Access:
    """Who sends a request, and what it may do."""

    scope: Scope
    name: str | None = None
    """The token's name; None without a token, and for FLOPWATCH_API_TOKEN."""
    token_id: str | None = None
    by_session: bool = False

    def allows(self, needed: Scope) -> bool:
        return tokens.includes(self.scope, needed)

    def own(self, route: str) -> str:
        """Return the route as an Idempotency-Key of this sender has it: two people may choose the same key."""
        return route if self.token_id is None else f"{route} by {self.name}"

    def require(self, needed: Scope, what: str) -> None:
        """Raise InsufficientScope, which names the scope that `what` asks for, unless this has it."""
        if not self.allows(needed):
            raise InsufficientScope(
                f"{what} asks for a token with the scope `{needed}`; {self.name!r} has `{self.scope}`.", needed
            )


@dataclass(frozen=True)
class Session:
    token_id: str | None
    """None: FLOPWATCH_API_TOKEN."""
    ends: float
    """On the guard's clock."""


class Guard:
    """The access to one server. `reload` must have read the tokens once before the first request."""

    def __init__(self, settings: Settings, stored: Tokens, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bootstrap = settings.api_token.get_secret_value().encode() if settings.api_token else None
        self._stored = stored
        self._known: dict[str, KnownToken] = {}
        self._closed = self._bootstrap is not None
        self._read_at = -math.inf
        self._thread = CapacityLimiter(1)
        self._sessions: dict[str, Session] = {}
        self._used: dict[str, datetime] = {}
        per_minute = settings.requests_per_minute
        self._limit = None if per_minute is None else RequestLimit(per_minute, clock)

    async def reload(self) -> None:
        """Read the tokens; raises the errors of reading."""
        self._read_at = self._clock()
        self._known = await run_sync(self._stored.known, limiter=self._thread)
        self._closed = self._closed or bool(self._known)

    async def refresh(self, *, at_once: bool = False) -> None:
        """Read the tokens if they were not read within FRESH_S, or `at_once`. While the database cannot be read, or
        takes long, those read last count."""
        is_being_read = self._thread.borrowed_tokens > 0
        if at_once or (not is_being_read and self._clock() - self._read_at >= FRESH_S):
            try:
                await self.reload()
            except FlopwatchError:  # whatever reads next reports it
                self._read_at = self._clock()

    @property
    def is_open(self) -> bool:
        """True if there never was a token since the start: then whoever reaches the server may do everything. It stays
        closed when another server of its database revokes the last one: it may listen to other hosts."""
        return not self._closed

    def by_token(self, sent: bytes) -> Access:
        """Return the access that this token gives. Raises Unauthorized."""
        if self._bootstrap is not None and secrets.compare_digest(sent, self._bootstrap):
            return Access("admin")
        text = sent.decode("utf-8", "replace")
        token_id = tokens.id_of(text)
        if token_id is None:
            like = "looks like a token, but a part is missing or mistyped" if text.startswith("fw_") else "is no token"
            raise Unauthorized(f"What was sent {like}.")
        known = self._known.get(token_id)
        if known is None or not secrets.compare_digest(tokens.digest(text), known.digest):
            raise Unauthorized(f"There is no token {token_id}: it was revoked, or belongs to another server.")
        return self._of(known)

    def by_session(self, cookie: str) -> Access:
        """Return the access of the browser that has this cookie. Raises Unauthorized."""
        session = self._sessions.get(_key(cookie))
        if session is None or session.ends <= self._clock():
            raise Unauthorized(f"The session has ended: sign in at {SIGN_IN}.")
        if session.token_id is None:
            return Access("admin", by_session=True)
        known = self._known.get(session.token_id)
        if known is None:
            raise Unauthorized(f"The session's token {session.token_id} was revoked.")
        return self._of(known, by_session=True)

    def begin_session(self, access: Access) -> str:
        """Begin a session with the access of a token; returns the cookie's value."""
        now = self._clock()
        if len(self._sessions) >= MAX_SESSIONS:
            self._sessions = {key: one for key, one in self._sessions.items() if one.ends > now}
        if len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        cookie = secrets.token_urlsafe(32)
        self._sessions[_key(cookie)] = Session(access.token_id, now + SESSION_S)
        return cookie

    def end_session(self, cookie: str) -> None:
        self._sessions.pop(_key(cookie), None)

    def count(self, access: Access | None, address: str) -> None:
        """Count a request of this token, or without one of this address. Raises TooManyRequests."""
        if self._limit is not None:
            self._limit.count((access and access.token_id) or address)

    def note_uses(self) -> None:
        """Store when tokens were last used since the last call."""
        used, self._used = self._used, {}
        if used:
            self._stored.note_uses(used)

    def _of(self, known: KnownToken, *, by_session: bool = False) -> Access:
        now = utc_now()
        if known.expires_at is not None and known.expires_at <= now:
            raise Unauthorized(f"The token {known.id} expired on {known.expires_at:%Y-%m-%d}: ask for a new one.")
        self._used[known.id] = now
        return Access(known.scope, known.name, known.id, by_session)


def cookie_name(host: str) -> str:
    """Return the name of the session's cookie of the server with this Host."""
    port = re.search(r":(\d+)$", host)
    return f"{COOKIE}_{port[1]}" if port else COOKIE


def _key(cookie: str) -> str:
    """Return what the server keeps of a cookie, so that looking it up takes no time that depends on it."""
    return hashlib.sha256(cookie.encode()).hexdigest()


@dataclass
class RequestLimit:
    """A token bucket for each sender: `per_minute` requests at once, which fill up again within a minute."""

    per_minute: int
    _clock: Callable[[], float] = time.monotonic
    _full_at: dict[str, float] = field(default_factory=dict)
    """When each bucket will be full again."""

    def count(self, who: str) -> None:
        """Take one request from the sender's bucket. Raises TooManyRequests if it is empty."""
        now, each_s = self._clock(), MINUTE_S / self.per_minute
        full_at = max(self._full_at.get(who, now), now) + each_s
        too_early_s = round(full_at - now - MINUTE_S, 6)
        if too_early_s > 0:
            wait_s = math.ceil(too_early_s)
            raise TooManyRequests(
                f"More than {self.per_minute} requests a minute (FLOPWATCH_REQUESTS_PER_MINUTE): wait {wait_s} s.",
                wait_s,
            )
        if len(self._full_at) >= MAX_BUCKETS:
            self._full_at = {one: at for one, at in self._full_at.items() if at > now}
        self._full_at[who] = full_at
