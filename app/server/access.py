"""Checks who may use a server, and that it is its data folder's only one. It is separate from the server, so that
`flopwatch up` starts without importing that."""

import fcntl
import logging
import os

from app.api.hosts import is_loopback
from app.errors import CannotRunHere
from app.settings import Settings
from app.store.database.engine import Database
from app.store.tokens import Tokens
from flopwatch import address

logger = logging.getLogger(__name__)

LOCK = "server.lock"
"""The file in the data folder that a server locks as long as it lives; the kernel ends the lock of a killed one."""


def lock_folder(settings: Settings, how: int = fcntl.LOCK_EX) -> int | None:
    """Lock the data folder for a server; returns the descriptor that holds the lock, None where no file can be locked.
    LOCK_SH only tries it.

    Raises CannotRunHere while another server has it: clients would find one of the two only.
    """
    folder = settings.data_dir
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        logger.warning("no other server can be kept from %s: %s", folder, error.strerror)
        return None
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        url = address.read(folder)
        raise CannotRunHere(
            f"A server runs on {folder} already{f': {url}' if url else ''}. Use that one (`flopwatch worker` adds a "
            "worker), stop it, or choose another folder with --data-dir (FLOPWATCH_DATA_DIR)."
        ) from None
    except OSError as error:
        logger.warning("no other server can be kept from %s: %s", folder, error.strerror)
    return descriptor


def refuse_second_server(settings: Settings) -> None:
    """Raise CannotRunHere if a server runs on the data folder."""
    if (settings.data_dir / LOCK).exists() and (tried := lock_folder(settings, fcntl.LOCK_SH)) is not None:
        os.close(tried)


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
