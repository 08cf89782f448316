"""Says what would decide a comparison that is inconclusive: the cheapest that suffices, as a command.

On a processor a process counts by its fastest sample. The more samples it takes, the likelier one of them met a quiet
moment, until it has measured for about a second; a further second of steps costs less than one more process. Only then
more processes are the answer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from flopwatch.steps import steps_of_a_second

ENOUGH_S = 1.0
"""Seconds of steps of a process, after which more steps hardly help."""
MAX_STEPS = 1_000_000
MAX_REPLICATES = 100
"""Most `replicates` of a job."""


@dataclass(frozen=True)
class Remedy:
    """The jobs of a comparison, as commands measure them again."""

    jobs: tuple[int, ...]
    """The job of kind `compare`, or the single job of each side."""
    fields: Collection[str]
    """The fields of these jobs' specs."""
    sides: Collection[str] = ()
    """The fields of `compare` that hold the sides' specs, whose fields `fields` then has; none for plain jobs."""

    def steps(self, number: int) -> str | None:
        """Return the command that measures so many steps; None if the kind counts none."""
        if "measure_steps" not in self.fields:
            return None
        return self._command([f"{side}.measure_steps={number}" for side in self.sides] or [f"measure_steps={number}"])

    def replicates(self, number: int) -> str | None:
        """Return the command that measures so many processes of each side; None if there is none."""
        if number > MAX_REPLICATES:
            return None
        if not self.sides and "replicates" not in self.fields:
            return f"`flopwatch compare {' '.join(map(str, self.jobs))} --alternate --replicates {number}`"
        return self._command([f"replicates={number}"])

    def _command(self, changes: Collection[str]) -> str:
        return "`" + " && ".join(f"flopwatch rerun {job} {' '.join(changes)}" for job in self.jobs) + "`"


def more_steps(samples: int, sample_s: float) -> int | None:
    """Return how many steps take about ENOUGH_S; None if `samples` of them nearly do.

    Args:
        samples: the number of steps of a process.
        sample_s: seconds of one.
    """
    if sample_s <= 0 or 2 * samples * sample_s > ENOUGH_S:
        return None
    return steps_of_a_second(1e3 * sample_s, MAX_STEPS)
