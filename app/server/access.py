"""Checks who may use a server. It is separate from the server, so that `flopwatch up` starts without importing that."""

from __future__ import annotations

from app.api.hosts import is_loopback
from app.errors import CannotRunHere
from app.settings import Settings


def refuse_open_access(settings: Settings) -> None:
    """Raise CannotRunHere for a server that other hosts could use without a token."""
    if settings.api_token is None and not settings.insecure and not is_loopback(settings.host):
        raise CannotRunHere(
            f"Without a token, whoever reaches {settings.host or 'any address of this host'} could run jobs here: set "
            "FLOPWATCH_API_TOKEN, listen on 127.0.0.1, or say --insecure (FLOPWATCH_INSECURE=true) if that is meant."
        )
