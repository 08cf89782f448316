"""How a unit or a job ended, as values, and the exit codes that go with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

EXIT_CODES = {"failed": 1, "unsupported": 69, "invalid_environment": 78}
"""Exit codes of a job's process by failure code; 69 and 78 are sysexits' EX_UNAVAILABLE and EX_CONFIG."""


class RunnerError(Exception):
    """A failure that a runner names itself; the job fails with `code`."""

    code = "failed"


class Unsupported(RunnerError):
    """This worker has no such implementation, model, dtype or device."""

    code = "unsupported"


class InvalidEnvironment(RunnerError):
    """This host is not in a state to run the job."""

    code = "invalid_environment"


@dataclass(frozen=True)
class Succeeded:
    """Every unit ran to its end. Cells that ran out of memory are results, so they count as success."""


@dataclass(frozen=True)
class Failed:
    """The job failed; `code` is one of app.errors.JOB_PROBLEM_TITLES."""

    code: str
    detail: str
    extensions: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cancelled:
    """Somebody asked for it."""


@dataclass(frozen=True)
class GivenBack:
    """The worker is shutting down; the job goes back to the queue and the attempt does not count."""


@dataclass(frozen=True)
class Abandoned:
    """The lease was lost; the job belongs to somebody else and nothing may be recorded."""


Outcome = Succeeded | Failed | Cancelled | GivenBack | Abandoned
