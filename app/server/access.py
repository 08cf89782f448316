"""Checks who may use a server. It is separate from the server, so that `flopwatch up` starts without importing that."""

from __future__ import annotations

from app.api.hosts import is_loopback
from app.errors import CannotRunHere
from app.settings import Settings
from app.store.database.engine import Database
from app.store.tokens import Tokens


def refuse_open_access(settings: Settings, database: Database | None) -> None:
    """Raise CannotRunHere for a server that other hosts could use without a token; None: there is no database yet, and
    so no token in it."""
    if settings.api_token is not None or settings.insecure or is_loopback(settings.host):
        return
    if database is None or not Tokens(database).known():
        raise CannotRunHere(
            f"Without a token, whoever reaches {settings.host or 'any address of this host'} could run jobs here: set "
            "FLOPWATCH_API_TOKEN, make a token while it listens on 127.0.0.1, or say --insecure "
            "(FLOPWATCH_INSECURE=true) if that is meant."
        )
