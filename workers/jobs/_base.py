"""What a job kind's runner is, and what it may say while it runs."""

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

    The agent numbers a job's units from 0 in the order of the plan, and keeps number and title with everything that a
    unit reports.

    `start` "fork" forks it from the warm parent, in milliseconds; "exec" starts a new interpreter: for units that need
    `environment` set before start, and for replicates, since forks of one parent share address layout and hash seed and
    so are no independent samples.
    """

    title: str
    params: Mapping[str, Any] = field(default_factory=dict)
    start: Literal["fork", "exec"] = "fork"
    environment: Mapping[str, str] = field(default_factory=dict)
    side: Literal["baseline", "candidate"] | None = None
    """In a comparison: what it measures."""
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
    """How a running unit tells of itself; each call is sent at once."""

    def progress(self, done: int, total: int, message: str) -> None:
        """`done` of `total` steps of this unit, for people."""

    def cursor(self, position: int) -> None:
        """The unit works on step `position` now, from 0: where `Resumable.resume` goes on if this process dies."""

    def measure(self, measurement: Measurement) -> None:
        """One metric of one finished case; kept even if the unit fails later."""

    def table(self, name: str, columns: Sequence[Column], rows: Sequence[Sequence[Scalar]]) -> None:
        """A finished table. Several units may report tables of one name, if their columns are the same.

        Raises:
            ValueError: it is no table, is too large (workers.measure.table.TooLarge), or its name was used already.
        """

    def artifact(self, path: Path, *, name: str, kind: str, media_type: str) -> None:
        """A finished file, below `scratch`; it is moved into the store under `name`, which is new in this unit."""

    def environment(self, fingerprint: Mapping[str, Any]) -> None:
        """Where this was measured."""

    def validity(self, verdict: Mapping[str, Any], case_key: str | None = None, title: str = "") -> None:
        """Whether numbers can be trusted: {"verdict", "checks"}, of one case or, without a key, of the unit's others.

        Args:
            verdict: as workers.measure.validity.verdict gives it.
            case_key: the case's.
            title: the case, for people.
        """

    @property
    def scratch(self) -> Path:
        """A folder of this unit's own, removed after it."""
        ...

    @property
    def ceilings(self) -> Path:
        """The folder of this host's measured ceilings (workers.measure.ceilings.Ceilings)."""
        ...


class Runner(Protocol):
    """How one kind runs. Its module imports torch, models and kernels inside functions only: the agent imports it."""

    kind: str

    def plan(self, spec: Any) -> list[Unit]:
        """The units of a job, in the order they run. Called in the agent."""

    def run(self, spec: Any, unit: Unit, report: Reporter) -> None:
        """Run one unit. Called in a fresh process that sees only the job's devices.

        Raises:
            Unsupported, InvalidEnvironment: the job fails with that code.
            Crashed: this process can compute no more; the same as if it had died.
        """


@runtime_checkable
class Resumable(Protocol):
    """What a Runner has besides, if its units can go on after a crash."""

    def resume(self, spec: Any, unit: Unit, position: int, failure: Failed) -> Unit | None:
        """The unit that goes on, in a fresh process, where `unit` crashed. Called in the agent.

        Args:
            spec: the job's.
            unit: the one that crashed; it may itself be a resumed one.
            position: of its last `cursor`, so the step that took the process down. A unit that crashes before it tells
                one is not resumed.
            failure: how it ended.

        Returns:
            None if the job is to fail. A resumed unit must get further than `position`, or there is no end to it.
        """


@runtime_checkable
class Collecting(Protocol):
    """What a Runner has besides, if it reads what a unit's wrapper has written."""

    def collect(self, spec: Any, unit: Unit, scratch: Path, report: Reporter) -> None:
        """Report what the wrapper of `unit` left in `scratch`. Called in a fresh process, after the wrapper has ended.

        Raises:
            Unsupported, InvalidEnvironment: the job fails with that code.
        """


def parse_spec(spec: Mapping[str, Any]) -> SpecBase:
    """The validated spec of a claimed job."""
    import json

    from app.specs import spec_adapter

    # As JSON, which is how the server validated it: strict validation treats Python's values otherwise.
    return spec_adapter.validate_json(json.dumps(spec))
