"""Pausing: kinds whose jobs no worker claims. They stay queued; what runs goes on.

Claims and pauses are write transactions of one database, and a claim reads what is paused in its own: once a pause is
committed, no job of that kind starts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, delete, insert, select

from app.store import tables
from app.store.engine import Database
from app.store.tables import utc_now

EVERY_KIND = "*"
"""In the table: all kinds, also those to come. No kind has this name."""
ALL: Literal["all"] = "all"

Kinds = list[str] | Literal["all"]
"""Paused kinds, sorted, as clients see them; "all" also holds for kinds to come."""


@dataclass(frozen=True)
class Paused:
    """What is paused, as one transaction read it."""

    kinds: frozenset[str]

    @property
    def everything(self) -> bool:
        return EVERY_KIND in self.kinds

    def __contains__(self, kind: object) -> bool:
        return self.everything or kind in self.kinds

    def why(self, kind: str) -> str | None:
        """Say why a queued job of this kind waits; None if the kind is not paused."""
        if self.everything:
            return "the queue is paused: `flopwatch resume` lets it go on"
        return f"its kind is paused: `flopwatch resume --kind {kind}` lets it go on" if kind in self.kinds else None


def paused(connection: Connection) -> Paused:
    """Return what is paused now."""
    return Paused(frozenset(connection.execute(select(tables.paused_kind.c.kind)).scalars()))


class Pausing:
    """Pauses kinds of one database. Every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def kinds(self) -> Kinds:
        """Return the kinds that are paused."""
        with self._database.read() as connection:
            return _public(paused(connection))

    def pause(self, kinds: Collection[str] | Literal["all"]) -> Kinds:
        """Pause these kinds and no others; returns the same as `kinds`. An empty collection pauses nothing."""
        wanted = {EVERY_KIND} if kinds == ALL else set(kinds)
        with self._database.write() as connection:
            known = paused(connection).kinds
            connection.execute(delete(tables.paused_kind).where(tables.paused_kind.c.kind.in_(known - wanted)))
            new = [{"kind": kind, "paused_at": utc_now()} for kind in sorted(wanted - known)]
            if new:
                connection.execute(insert(tables.paused_kind), new)
            return _public(Paused(frozenset(wanted)))


def _public(found: Paused) -> Kinds:
    return ALL if found.everything else sorted(found.kinds)
