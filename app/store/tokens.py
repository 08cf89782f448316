"""The access tokens of one database. Of a token only its digest is stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from app import tokens
from app.errors import Conflict, NotFound
from app.store import tables
from app.store.database.engine import Database
from app.store.public import values_of
from app.store.tables import utc_now
from app.tokens import Scope

_token = tables.api_token.c
_PUBLIC = ("id", "name", "scope", "created_at", "expires_at", "last_used_at")
_NOTE_USE = update(tables.api_token).where(_token.id == bindparam("of_id")).values(last_used_at=bindparam("used_at"))


@dataclass(frozen=True)
class KnownToken:
    """A stored token, against which a request with it is checked."""

    id: str
    name: str
    scope: Scope
    digest: str
    expires_at: datetime | None


def number_of_names(connection: Connection) -> int:
    """Return how many names the tokens have that are still good."""
    good = _token.expires_at.is_(None) | (_token.expires_at > utc_now())
    return int(connection.execute(select(func.count(_token.name.distinct())).where(good)).scalar_one())


class Tokens:
    """Makes, lists and revokes tokens. Every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, name: str, scope: Scope, expires_at: datetime | None) -> tuple[dict[str, Any], str]:
        """Store a new token; returns it as the API shows it, and its text, which nobody can read again."""
        token_id, text = tokens.mint()
        row = {
            "id": token_id,
            "name": name,
            "scope": scope,
            "created_at": utc_now(),
            "expires_at": expires_at,
            "last_used_at": None,
        }
        with self._database.write() as connection:
            connection.execute(insert(tables.api_token), {**row, "digest": tokens.digest(text)})
        return values_of(row, _PUBLIC), text

    def all(self) -> list[dict[str, Any]]:
        """Return every token as the API shows it, oldest first."""
        with self._database.read() as connection:
            rows = connection.execute(select(tables.api_token).order_by(_token.created_at, _token.id)).mappings()
            return [values_of(row, _PUBLIC) for row in rows]

    def revoke(self, token_id: str, *, keep_one: bool = False) -> None:
        """Delete a token. Raises NotFound, and with `keep_one` Conflict if no other is left."""
        with self._database.write() as connection:
            if connection.execute(delete(tables.api_token).where(_token.id == token_id)).rowcount == 0:
                raise NotFound(f"There is no token {token_id!r}; `flopwatch token list` lists their ids.")
            if keep_one and connection.execute(select(_token.id).limit(1)).first() is None:
                raise Conflict(
                    "This is the last token, and without one the server would be open to whoever reaches it: make "
                    "another first, or start the server with FLOPWATCH_API_TOKEN."
                )

    def known(self) -> dict[str, KnownToken]:
        query = select(_token.id, _token.name, _token.scope, _token.digest, _token.expires_at)
        with self._database.read() as connection:
            return {row.id: KnownToken(*row) for row in connection.execute(query)}

    def note_uses(self, last_used: Mapping[str, datetime]) -> None:
        """Store when tokens were last used, by their ids; those that were revoked meanwhile are passed over."""
        rows = [{"of_id": token_id, "used_at": used_at} for token_id, used_at in last_used.items()]
        with self._database.write() as connection:
            connection.execute(_NOTE_USE, rows)
