"""The states of jobs and workers, and verdicts. Standard library only: the command line reads them too."""

from collections.abc import Collection
from typing import Final, Literal, get_args

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
JOB_STATES: Final[tuple[JobState, ...]] = get_args(JobState)
FINISHED_STATES: Final[frozenset[JobState]] = frozenset({"succeeded", "failed", "cancelled"})

LivingState = Literal["active", "unfit", "draining"]
"""States of a worker that sends heartbeats: "active" takes jobs, "unfit" takes none until what it needs works again,
"draining" only finishes those it has."""
WorkerState = Literal[LivingState, "stopped", "lost"]
WORKER_STATES: Final[tuple[WorkerState, ...]] = get_args(WorkerState)

Verdict = Literal["valid", "suspect", "invalid", "wrong"]
VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)
"""Verdicts on measurements, from the best to the worst."""
UNFIT: Final[tuple[Verdict, ...]] = ("wrong", "invalid")
"""Of results against which nothing can be judged: wrong ones, and those of other work than was asked for."""

FIRST_IN_QUEUE = (
    "It starts as soon as a worker has its devices free. Jobs of another Flopwatch on the same host may hold them."
)
"""Explains why the first job of the queue has not started, unless another reason is known."""


def worst(verdicts: Collection[str | None]) -> Verdict | None:
    """Return the worst of these verdicts; None if there is none."""
    return next((verdict for verdict in reversed(VERDICTS) if verdict in verdicts), None)
