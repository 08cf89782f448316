"""Decides who sends a request and what they may do: tokens, sessions of browsers, and the limits of requests and of
guessed tokens.

Tokens are read from the database at most once a second, so a request costs no query, and a token that another process
revoked counts for a second more. Sessions are in memory: a restart of the server ends them.
"""

import hashlib
import math
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from ipaddress import IPv6Address, ip_address, ip_network

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
MAX_SESSIONS = 1000
"""Of one token; its oldest session ends for a further one."""
MAX_BUCKETS = 10_000
GUESSES, ALL_GUESSES = 10, 60
"""Different wrong tokens a minute, from one address and from all together."""
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
        self._guesses = GuessLimit(clock)

    async def reload(self) -> None:
        """Read the tokens; raises the errors of reading."""
        self._read_at = self._clock()
        self._known = await run_sync(self._stored.known, limiter=self._thread)
        self._closed = self._closed or bool(self._known)

    async def refresh(self, *, at_once: bool = False) -> None:
        """Read the tokens if they were not read within FRESH_S, or `at_once`. While the database cannot be read, those
        read last count."""
        if at_once or self._clock() - self._read_at >= FRESH_S:
            try:
                await self.reload()
            except FlopwatchError:  # whatever reads next reports it
                self._read_at = self._clock()

    @property
    def is_open(self) -> bool:
        """True if there never was a token since the start: then whoever reaches the server may do everything. It stays
        closed when another server of its database revokes the last one: it may listen to other hosts."""
        return not self._closed

    def by_token(self, sent: bytes, address: str) -> Access:
        """Return the access that this token gives to the sender at this address. Raises Unauthorized, and
        TooManyRequests instead of looking at a token if too many wrong ones came.

        Whoever has a token that was made is never kept waiting: it has 256 random bits, which nobody guesses. Only
        FLOPWATCH_API_TOKEN may be a word.
        """
        text = sent.decode("utf-8", "replace")
        token_id = tokens.id_of(text)
        if token_id is None:
            self._guesses.check(sent, address)
        if self._bootstrap is not None and secrets.compare_digest(sent, self._bootstrap):
            self._guesses.note(sent, address)
            return Access("admin")
        if token_id is None:
            self._guesses.note(sent, address, wrong=True)
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
        self._sessions = {key: one for key, one in self._sessions.items() if one.ends > now}
        own = [key for key, one in self._sessions.items() if one.token_id == access.token_id]
        if len(own) >= MAX_SESSIONS:
            del self._sessions[own[0]]
        cookie = secrets.token_urlsafe(32)
        self._sessions[_key(cookie)] = Session(access.token_id, now + SESSION_S)
        return cookie

    def end_session(self, cookie: str) -> None:
        self._sessions.pop(_key(cookie), None)

    def count(self, access: Access | None, address: str) -> None:
        """Count a request of this token, or without one of this address; of FLOPWATCH_API_TOKEN, which a proxy may send
        for everybody, at this address. Raises TooManyRequests."""
        if self._limit is not None:
            here = network_of(address)
            self._limit.count(here if access is None else access.token_id or f"admin at {here}")

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


def network_of(address: str) -> str:
    """Return what is limited as one sender: an IPv4 address, or an IPv6 network of 64 bits, of which a host may choose
    any address; "" for what is no address, which a proxy may pass on."""
    try:
        known = ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if not isinstance(known, IPv6Address):
        return str(known)
    return str(known.ipv4_mapped or ip_network((known, 64), strict=False))


class GuessLimit:
    """Limits how many different wrong tokens are tried. What was tried at an address before is no further guess: a
    program goes on with its token, be it right or wrong, while others at its address guess."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        what = "different wrong tokens"
        self._here, self._all = RequestLimit(GUESSES, clock, what), RequestLimit(ALL_GUESSES, clock, what)
        self._tried: dict[tuple[str, bytes], None] = {}

    def check(self, sent: bytes, address: str) -> None:
        """Raise TooManyRequests if this would be one guess too many."""
        here = network_of(address)
        if (here, hashlib.sha256(sent).digest()) not in self._tried:
            self._here.check(here)
            self._all.check("")

    def note(self, sent: bytes, address: str, *, wrong: bool = False) -> None:
        """Remember that a token was tried, and count a wrong one that is new."""
        here = network_of(address)
        tried = (here, hashlib.sha256(sent).digest())
        if wrong and tried not in self._tried:
            self._here.count(here)
            self._all.count("")
        self._tried.pop(tried, None)
        self._tried[tried] = None  # the latest is last
        if len(self._tried) > MAX_BUCKETS:
            del self._tried[next(iter(self._tried))]


@dataclass
class RequestLimit:
    """A token bucket for each sender: `per_minute` requests at once, which fill up again within a minute."""

    per_minute: int
    _clock: Callable[[], float] = time.monotonic
    what: str = "requests"
    _full_at: dict[str, float] = field(default_factory=dict)
    """When each bucket will be full again."""

    def check(self, who: str) -> float:
        """Return when the sender's bucket would be full again after one more. Raises TooManyRequests if it is empty."""
        now, each_s = self._clock(), MINUTE_S / self.per_minute
        full_at = max(self._full_at.get(who, now), now) + each_s
        too_early_s = round(full_at - now - MINUTE_S, 6)
        if too_early_s > 0:
            wait_s = math.ceil(too_early_s)
            setting = " (FLOPWATCH_REQUESTS_PER_MINUTE)" if self.what == "requests" else ""
            raise TooManyRequests(
                f"More than {self.per_minute} {self.what} a minute{setting}: wait {wait_s} s.", wait_s
            )
        return full_at

    def count(self, who: str) -> None:
        """Take one from the sender's bucket. Raises TooManyRequests if it is empty."""
        full_at = self.check(who)
        self._full_at.pop(who, None)
        if len(self._full_at) >= MAX_BUCKETS:  # the one that was used least lately
            del self._full_at[next(iter(self._full_at))]
        self._full_at[who] = full_at
