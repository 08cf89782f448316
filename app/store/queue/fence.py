"""The fence: each transaction in which a worker writes about its claim first renews the claim here.

Renewing raises the heartbeat counter of the attempt, if job, number and token match and the attempt still runs. Once
the worker has lost the attempt, no row matches.
"""

from typing import Any

from sqlalchemy import Connection, bindparam, select, update

from app.errors import LeaseLost
from app.store import tables
from app.store.records import Claim

_attempt = tables.attempt.c

_OF_CLAIM = (
    _attempt.id == bindparam("attempt_id"),
    _attempt.job_id == bindparam("of_job"),
    _attempt.number == bindparam("of_number"),
    _attempt.token == bindparam("of_token"),
)
_RENEW = update(tables.attempt).where(*_OF_CLAIM, _attempt.state == "running").values(beat=_attempt.beat + 1)
_TAKE_OVER = (
    update(tables.attempt)
    .where(
        _attempt.job_id == bindparam("of_job"),
        _attempt.number == bindparam("of_number"),
        _attempt.token.in_([bindparam("of_token"), bindparam("new_token")]),
        _attempt.state == "running",
    )
    .values(token=bindparam("new_token"), worker_id=bindparam("by"), beat=_attempt.beat + 1)
    .returning(_attempt.id)
)
_STATE = select(_attempt.state).where(*_OF_CLAIM)


def renew(connection: Connection, claim: Claim) -> bool:
    """Renew the claim; returns False if the worker has lost it."""
    return connection.execute(_RENEW, _values(claim)).rowcount == 1


def check(connection: Connection, claim: Claim) -> None:
    """Renew the claim, or raise LeaseLost."""
    if not renew(connection, claim):
        raise LeaseLost(f"Attempt {claim.attempt} of job {claim.job_id} is no longer this worker's.")


def take_over(connection: Connection, job_id: int, attempt: int, tokens: tuple[str, str], worker_id: str) -> int:
    """Give the claim with the first of these tokens to another worker, under the second one; returns the attempt's id.

    A call whose answer was lost can be repeated. Raises LeaseLost if the attempt is over, or has another token.
    """
    token, new_token = tokens
    values = {"of_job": job_id, "of_number": attempt, "of_token": token, "new_token": new_token, "by": worker_id}
    attempt_id: int | None = connection.execute(_TAKE_OVER, values).scalar_one_or_none()
    if attempt_id is None:
        raise LeaseLost(f"Attempt {attempt} of job {job_id} is over, or was taken over by another worker.")
    return attempt_id


def state_of(connection: Connection, claim: Claim) -> str | None:
    """Return the state of the claim's attempt; None if it is gone."""
    state: str | None = connection.execute(_STATE, _values(claim)).scalar_one_or_none()
    return state


def _values(claim: Claim) -> dict[str, Any]:
    return {"attempt_id": claim.attempt_id, "of_job": claim.job_id, "of_number": claim.attempt, "of_token": claim.token}
