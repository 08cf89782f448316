"""The protocols of a job kind's runner."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from app.specs import SpecBase, spec_adapter
from workers.outcome import Failed
from workers.reporter import Reporter


@dataclass(frozen=True)
class Unit:
    """One part of a job that is measured in a fresh process.

    The agent numbers a job's units from 0 in the order of the plan, and stores number and title with everything that a
    unit reports.

    `start` "fork" forks the unit from the warm parent, in milliseconds; "exec" starts a new interpreter. Use "exec" for
    units that need `environment` set before start, and for replicates: forks of one parent share address layout and
    hash seed, so they are not independent samples.
    """

    title: str
    params: Mapping[str, Any] = field(default_factory=dict)
    start: Literal["fork", "exec"] = "fork"
    environment: Mapping[str, str] = field(default_factory=dict)
    side: Literal["baseline", "candidate"] | None = None
    """The side of a comparison that the unit measures."""
    wrap: Sequence[str] = ()
    """A command that the unit runs under, with `{scratch}` for its scratch folder: ("nsys", "profile", "-o",
    "{scratch}/report"). The unit's own command line is appended. Only for units that are exec'd.

    The command must exit with 0 when its unit has succeeded. If it starts the unit more than once, only the first one
    reports."""


class Runner(Protocol):
    """Runs the jobs of one kind. Its module imports torch, models and kernels inside functions only: the agent imports
    it. A unit's new interpreter imports torch before it calls `run`, unless the runner says `needs_torch = False`."""

    kind: str

    def plan(self, spec: Any) -> list[Unit]:
        """Return the units of a job, in the order they run. The agent calls this."""

    def run(self, spec: Any, unit: Unit, report: Reporter) -> None:
        """Run one unit. A fresh process that sees only the job's devices calls this. Raises Unsupported,
        InvalidEnvironment: the job fails with that code; Crashed: this process can compute nothing any more; the agent
        treats it as if the process had died."""


@runtime_checkable
class Resumable(Protocol):
    """The additional method of a Runner whose units can resume after a crash."""

    def resume(self, spec: Any, unit: Unit, position: int, failure: Failed) -> Unit | None:
        """Return the unit that continues, in a fresh process, after `unit` has crashed. The agent calls this.

        Args:
            unit: the unit that crashed; it may itself be a resumed one.
            position: the last `cursor` of the unit, which is the step that crashed the process. A unit that crashes
                before it reports one is not resumed.

        Returns:
            None if the job must fail. A resumed unit must get beyond `position`, or the job would be resumed for ever.
        """


@dataclass(frozen=True)
class SoFar:
    """What the units of a job have done so far."""

    units: Sequence[Unit]
    seconds: Sequence[float]
    """How long each took, with the start of its process."""
    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    """The rows that they reported, by the table's name; each has its `unit_index`."""


@runtime_checkable
class Adaptive(Protocol):
    """The additional method of a Runner whose later units depend on the results of the earlier ones."""

    def further(self, spec: Any, so_far: SoFar) -> list[Unit]:
        """Return the units that follow those of `plan`, or of the call before; none at the end. The agent calls this
        when all units so far have succeeded."""


@runtime_checkable
class Collecting(Protocol):
    """The additional method of a Runner that reads the files of a unit's wrapper."""

    def collect(self, spec: Any, unit: Unit, scratch: Path, report: Reporter) -> None:
        """Report the files that the wrapper of `unit` left in `scratch`. A fresh process calls this after the wrapper
        has ended. Raises Unsupported, InvalidEnvironment: the job fails with that code."""


@runtime_checkable
class Wrapping(Protocol):
    """The additional method of a Runner that recognises the error messages of its units' wrappers."""

    def wrapper_error(self, spec: Any, unit: Unit, scratch: Path, output: str, *, succeeded: bool) -> str | None:
        """Return the error message of the command that `unit` ran under; None if it printed none.

        The job then fails as `invalid_environment` with this message. The agent calls this when command and unit have
        ended, and trusts neither the command's exit code nor an error that the unit met only because of the command.

        Args:
            spec: the job's spec.
            scratch: its scratch folder, with the files that the command has written.
            output: the output of command and unit; the middle is cut if it is long.
            succeeded: whether both have succeeded, as far as they know.
        """


def parse_spec(spec: Mapping[str, Any]) -> SpecBase:
    # The server validated JSON too; strict validation treats Python's values differently.
    return spec_adapter.validate_json(json.dumps(spec))
