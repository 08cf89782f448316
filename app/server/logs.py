"""The server's log, which goes to standard error."""

from __future__ import annotations

import logging

from app import logs
from app.store.queue import ends


def set_up(form: logs.LogFormat) -> None:
    """Log the ends of jobs, and warnings and worse of everything in this process, uvicorn and asyncio included."""
    logs.set_up("WARNING", form)
    ends.logger.setLevel(logging.INFO)
