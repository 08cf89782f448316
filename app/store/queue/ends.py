"""Logs how jobs ended, once that is committed: in the process that ended them."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from app.logs import about
from app.store.database.engine import Database
from flopwatch.text.times import duration

logger = logging.getLogger(__name__)

MOST_LINES = 20
"""Ends of one transaction that are logged one by one."""
_ENDED = "flopwatch jobs that ended"


@dataclass(frozen=True)
class Ended:
    """How a job ended. `ran_s`: seconds of its last attempt; None if it never ran."""

    job_id: int
    attempt: int
    kind: str
    state: str
    error: Mapping[str, Any] | None
    ran_s: float | None

    def log(self) -> None:
        code = None if self.error is None else self.error.get("code")
        why = "" if code in (None, self.state) else f" ({code})"
        after = "before it ran" if self.ran_s is None else f"after {duration(self.ran_s)}"
        fields = {"kind": self.kind, "state": self.state, "code": code, "ran_s": self.ran_s}
        with about(self.job_id, self.attempt):
            logger.info("the %s job %s%s %s", self.kind, _WORDS[self.state], why, after, extra={"fields": fields})


_WORDS = {"succeeded": "succeeded", "failed": "failed", "cancelled": "was cancelled"}


@contextmanager
def logging_ends(database: Database) -> Iterator[Connection]:
    """Begin a write transaction; when it is committed, the ends noted in it are logged."""
    with database.write() as connection:
        ended: list[Ended] = []
        connection.info[_ENDED] = ended
        yield connection
    for one in ended[:MOST_LINES]:
        one.log()
    if more := ended[MOST_LINES:]:  # only a cancel ends so many
        logger.info("%d more jobs were cancelled, up to job %d", len(more), more[-1].job_id)


def note(connection: Connection, ended: Ended) -> None:
    """Let this end be logged."""
    connection.info[_ENDED].append(ended)
