"""Pausing: kinds whose jobs no worker claims. Their jobs stay queued; running ones continue.

Claims and pauses are write transactions of one database, and a claim reads what is paused in its own: once a pause is
committed, no job of that kind starts.
"""

from collections.abc import Collection
from typing import Literal

from sqlalchemy import Connection

from app.store import service_settings
from app.store.database.engine import Database

ALL: Literal["all"] = "all"
PausedKinds = list[str] | Literal["all"]
"""Kinds that are paused, sorted. "all" includes kinds that are added later."""

_SETTING = "paused_kinds"


class Pausing:
    """Pauses kinds of one database. Every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def kinds(self) -> PausedKinds:
        with self._database.read() as connection:
            return paused_kinds(connection)

    def pause(self, kinds: Collection[str] | Literal["all"]) -> PausedKinds:
        """Pause these kinds and no others; returns them. An empty collection pauses nothing."""
        wanted: PausedKinds = ALL if kinds == ALL else sorted(set(kinds))
        with self._database.write() as connection:
            service_settings.put(connection, _SETTING, wanted)
        return wanted


def paused_kinds(connection: Connection) -> PausedKinds:
    """Return the kinds that are paused; none if what is stored cannot be read."""
    stored = service_settings.get(connection, _SETTING)
    return ALL if stored == ALL else [str(kind) for kind in stored] if isinstance(stored, list) else []


def unpaused(kinds: frozenset[str], paused: PausedKinds) -> frozenset[str]:
    return frozenset() if paused == ALL else kinds.difference(paused)


def pause_reason(kind: str, paused: PausedKinds) -> str | None:
    """Say why a queued job of this kind waits; None if the kind is not paused."""
    if paused == ALL:
        return "the queue is paused: `flopwatch resume` lets it go on"
    return f"its kind is paused: `flopwatch resume --kind {kind}` lets it go on" if kind in paused else None
