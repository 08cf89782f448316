"""The outcomes of units and jobs, as values, with their exit codes."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from app.errors import is_no_space
from workers.measure.errors import with_type
from workers.measure.table import TooLarge

EXIT_CODES = {
    "failed": 1,
    "too_large": 65,
    "unsupported": 69,
    "crashed": 70,
    "storage_full": 73,
    "invalid_environment": 78,
}
"""Exit codes of a job's process by failure code, from sysexits where there is one: EX_DATAERR, EX_UNAVAILABLE,
EX_SOFTWARE, EX_CANTCREAT, EX_CONFIG."""
WRONG = 8
"""Exit code of `flopwatch run` if a result is not that of the reference."""


class RunnerError(Exception):
    """A failure that a runner names itself; the job fails with `code`."""

    code = "failed"


class Unsupported(RunnerError):
    """This worker has no such implementation, model, dtype or device."""

    code = "unsupported"


class InvalidEnvironment(RunnerError):
    """This host is not in a state to run the job."""

    code = "invalid_environment"


class Crashed(RunnerError):
    """This process can compute nothing any more, since the device's context is lost. A fresh process may be able to."""

    code = "crashed"


class UnfitResult(RunnerError):
    """A unit's report cannot be stored beside an earlier one of the same job."""


class HostExhausted(Exception):
    """The host has no processes or descriptors left. This is not the job's fault, and the job may run later."""


_EXHAUSTED = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def is_exhausted(error: BaseException) -> bool:
    """Return True if an error of the agent's own says that processes, descriptors or memory are used up."""
    if isinstance(error, OSError):
        return error.errno in _EXHAUSTED
    return isinstance(error, HostExhausted | MemoryError)


@contextmanager
def ending_forks() -> Iterator[None]:
    """End a fork of this process that comes back from the user's code, whether or not by an error."""
    process = os.getpid()
    try:
        yield
    finally:
        leave_fork(process)


def leave_fork(process: int) -> None:
    """End this process if it is not the given one, but a fork of it which came back from the user's code."""
    if os.getpid() != process:
        sys.stderr.write("a fork of the job's process has come back from the user's code: it ends here, unmeasured\n")
        sys.stderr.flush()
        os._exit(EXIT_CODES["crashed"])


def failure_code(error: BaseException) -> str:
    """Return the failure code of an error that a runner raised; a key of EXIT_CODES."""
    if isinstance(error, RunnerError):
        return error.code
    if isinstance(error, TooLarge):
        return "too_large"
    if isinstance(error, ModuleNotFoundError):
        return "invalid_environment"
    return "storage_full" if is_no_space(error) else "failed"


def describe_error(error: BaseException, text: str | None = None) -> str:
    """Return `with_type`. A unit that exits by sys.exit has not done its work."""
    text = with_type(error, text)
    return f"{text} (sys.exit was called before the work was done)" if isinstance(error, SystemExit) else text


@dataclass(frozen=True)
class Succeeded:
    """Every unit ran to its end. Cells that ran out of memory are results, so they count as success."""


@dataclass(frozen=True)
class Failed:
    """The job failed; `code` is one of app.errors.JOB_PROBLEM_TITLES."""

    code: str
    detail: str
    extensions: dict[str, Any] = field(default_factory=dict)
    where: str = ""
    """Where its process was, which two jobs that fail for the same reason need not share."""


@dataclass(frozen=True)
class Cancelled:
    """A user cancelled the job."""


@dataclass(frozen=True)
class GivenBack:
    """The worker is ending, or its host cannot run the job now; the job goes back to the queue. The attempt counts only
    if an `error` of the worker's own ends it, since the job may be the cause."""

    error: str | None = None


@dataclass(frozen=True)
class Abandoned:
    """The lease was lost; the job belongs to somebody else and nothing may be recorded."""


Outcome = Succeeded | Failed | Cancelled | GivenBack | Abandoned
