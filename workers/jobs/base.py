"""What a job kind's runner is, and what it may say while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from app.specs import SpecBase
    from workers.measure.measurement import Measurement
    from workers.outcome import Failed


@dataclass(frozen=True)
class Unit:
    """One part of a job that is measured in a fresh process.

    `start` "fork" forks it from the warm parent, in milliseconds; "exec" starts a new interpreter: for units that need
    `environment` set before start, and for replicates, since forks of one parent share address layout and hash seed and
    so are no independent samples.
    """

    title: str
    params: Mapping[str, Any] = field(default_factory=dict)
    start: Literal["fork", "exec"] = "fork"
    environment: Mapping[str, str] = field(default_factory=dict)


class Reporter(Protocol):
    """How a running unit tells of itself; each call is sent at once."""

    def progress(self, done: int, total: int, message: str) -> None:
        """`done` of `total` steps of this unit."""

    def measure(self, measurement: Measurement) -> None:
        """One metric of one finished case; kept even if the unit fails later."""

    def artifact(self, path: Path, *, name: str, kind: str, media_type: str) -> None:
        """A finished file, below `scratch`; it is moved into the store under `name`."""

    def environment(self, fingerprint: Mapping[str, Any]) -> None:
        """Where this was measured."""

    def validity(self, verdict: Mapping[str, Any]) -> None:
        """Whether the numbers can be trusted: {"verdict", "checks"}."""

    @property
    def scratch(self) -> Path:
        """A folder of this unit's own, removed after it."""
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

    def resume(self, spec: Any, unit: Unit, done: int, failure: Failed) -> Unit | None:
        """The unit that goes on, in a fresh process, where `unit` crashed. Called in the agent.

        Args:
            spec: the job's.
            unit: the one that crashed; it may itself be a resumed one.
            done: as in its last `progress`, so the number of the step that took the process down. A unit that
                crashes before it tells any progress is not resumed.
            failure: how it ended.

        Returns:
            None if the job is to fail. A resumed unit must get further than `done`, or there is no end to it.
        """


def parse_spec(spec: Mapping[str, Any]) -> SpecBase:
    """The validated spec of a claimed job."""
    from app.specs import spec_adapter

    return spec_adapter.validate_python(spec)
