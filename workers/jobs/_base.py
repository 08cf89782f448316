"""The protocols of a job kind's runner, and of the reporter of a running unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from app.specs import SpecBase
    from workers.measure.measurement import Measurement
    from workers.measure.table import Column, Scalar
    from workers.outcome import Failed


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

    def __post_init__(self) -> None:
        if isinstance(self.wrap, str):
            raise TypeError(f"unit {self.title!r}: wrap is a sequence of words, not one string: {self.wrap!r}")
        if self.wrap and self.start != "exec":
            raise ValueError(f"unit {self.title!r} runs under {self.wrap[0]}, so it needs start='exec'")


class Reporter(Protocol):
    """Takes the reports of a running unit, and sends each to the agent at once."""

    def progress(self, done: int, total: int, message: str) -> None:
        """Report that `done` of `total` steps of this unit are done."""

    def finished(self, done: int, total: int, *, title: str, outcome: str, headline: str, seconds: float) -> None:
        """Report that a cell is finished, after `seconds`, as number `done` of `total`.

        Every finished cell is shown, in order, whereas only the newest `progress` is. `headline` is the cell's first
        number, or the reason why it has none.
        """

    def cursor(self, position: int) -> None:
        """Report that the unit now works on step `position`, counted from 0; `Resumable.resume` gets the position if
        this process dies.
        """

    def measure(self, measurement: Measurement) -> None:
        """Report one metric of one finished case; the agent keeps it even if the unit fails later."""

    def table(self, name: str, columns: Sequence[Column], rows: Sequence[Sequence[Scalar]]) -> None:
        """Report a finished table. Several units may report tables of one name, if their columns are the same.

        Raises:
            ValueError: it is not a valid table, is too large (workers.measure.table.TooLarge), or its name was already
                used.
        """

    def artifact(self, path: Path, *, name: str, kind: str, media_type: str) -> None:
        """Report a finished file below `scratch`; the agent moves it into the store under `name`, which is new in this
        unit.
        """

    def environment(self, fingerprint: Mapping[str, Any]) -> None:
        """Report the environment in which this unit measured."""

    def validity(self, verdict: Mapping[str, Any], case_key: str | None = None, title: str = "") -> None:
        """Report a verdict, {"verdict", "checks"}, on one case or, without a key, on all other cases of the unit.

        Args:
            verdict: the return value of workers.measure.validity.verdict.
            case_key: the case's key.
            title: the case, for people.
        """

    @property
    def scratch(self) -> Path:
        """The folder that only this unit uses; the agent removes it after the unit."""
        ...

    @property
    def ceilings(self) -> Path:
        """The folder of this host's measured ceilings (workers.measure.ceilings.Ceilings)."""
        ...


class Runner(Protocol):
    """Runs the jobs of one kind. Its module imports torch, models and kernels inside functions only: the agent imports
    it. A unit's new interpreter imports torch before it calls `run`, unless the runner says `needs_torch = False`.
    """

    kind: str

    def plan(self, spec: Any) -> list[Unit]:
        """Return the units of a job, in the order they run. The agent calls this."""

    def run(self, spec: Any, unit: Unit, report: Reporter) -> None:
        """Run one unit. A fresh process that sees only the job's devices calls this.

        Raises:
            Unsupported, InvalidEnvironment: the job fails with that code.
            Crashed: this process can compute nothing any more; the agent treats it as if the process had died.
        """


@runtime_checkable
class Resumable(Protocol):
    """The additional method of a Runner whose units can resume after a crash."""

    def resume(self, spec: Any, unit: Unit, position: int, failure: Failed) -> Unit | None:
        """Return the unit that continues, in a fresh process, after `unit` has crashed. The agent calls this.

        Args:
            spec: the job's spec.
            unit: the unit that crashed; it may itself be a resumed one.
            position: the last `cursor` of the unit, which is the step that crashed the process. A unit that crashes
                before it reports one is not resumed.
            failure: how the unit ended.

        Returns:
            None if the job must fail. A resumed unit must get beyond `position`, or the job would be resumed for ever.
        """


@runtime_checkable
class Collecting(Protocol):
    """The additional method of a Runner that reads the files of a unit's wrapper."""

    def collect(self, spec: Any, unit: Unit, scratch: Path, report: Reporter) -> None:
        """Report the files that the wrapper of `unit` left in `scratch`. A fresh process calls this after the wrapper
        has ended.

        Raises:
            Unsupported, InvalidEnvironment: the job fails with that code.
        """


@runtime_checkable
class Wrapping(Protocol):
    """The additional method of a Runner that recognises the error messages of its units' wrappers."""

    def wrapper_error(self, spec: Any, unit: Unit, scratch: Path, output: str, *, succeeded: bool) -> str | None:
        """Return the error message of the command that `unit` ran under; None if it printed none.

        The job then fails as `invalid_environment` with this message. The agent calls this when command and unit have
        ended, and trusts neither the command's exit code nor an error that the unit met only because of the command.

        Args:
            spec: the job's spec.
            unit: the unit that has ended.
            scratch: its scratch folder, with the files that the command has written.
            output: the output of command and unit; the middle is cut if it is long.
            succeeded: whether both have succeeded, as far as they know.
        """


def parse_spec(spec: Mapping[str, Any]) -> SpecBase:
    """Return the validated spec of a claimed job."""
    import json

    from app.specs import spec_adapter

    # The server validated JSON too; strict validation treats Python's values differently.
    return spec_adapter.validate_json(json.dumps(spec))
