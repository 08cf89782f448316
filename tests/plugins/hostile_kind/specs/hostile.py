"""`hostile`, a kind for tests: jobs that do what no job should."""

from typing import ClassVar, Literal

from pydantic import Field

from app.specs._base import Resources, SpecBase

Behaviour = Literal[
    "good",
    "many_measurements",
    "many_artifacts",
    "sparse_artifact",
    "changing_artifact",
    "stolen_artifact",
    "output",
    "garbage",
    "raises",
    "exits",
    "segfault",
    "hungry",
    "daemon",
    "ignores_sigterm",
    "fork_bomb",
    "closes_pipes",
    "kills_keeper",
    "stops_keeper",
    "kills_agent",
]


class HostileSpec(SpecBase):
    """Report a few results, and misbehave."""

    kind: Literal["hostile"] = "hostile"
    behaviour: Behaviour = "good"
    """What is wrong with the job."""
    number: int = Field(default=0, ge=0)
    """Chooses among the variants of a behaviour, and some results."""
    amount: int = Field(default=1, ge=0, le=1_000_000_000)
    """How much of it: megabytes, or things."""
    seconds: float = Field(default=0.1, ge=0, le=3600)
    """How long it takes."""
    units: int = Field(default=1, ge=1, le=5)
    """Fresh processes, one after the other."""
    start: Literal["fork", "exec"] = "fork"
    """How they start."""
    device: Literal["cpu", "none"] = "none"
    """`none`: several run at a time; `cpu`: one at a time on each host."""

    unmeasured: ClassVar[frozenset[str]] = SpecBase.unmeasured | {"amount", "seconds", "units", "start"}
    table_rows: ClassVar[tuple[str, ...]] = ("behaviour", "number")
    table_columns: ClassVar[tuple[str, ...]] = ("nonce",)

    def resources(self) -> Resources:
        return Resources(device_type=self.device, devices=1)
