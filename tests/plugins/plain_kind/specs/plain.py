"""`plain`, a kind for tests of workers: what a job does is told in one word, and it needs no torch."""

from typing import ClassVar, Literal

from pydantic import Field

from app.specs._base import Resources, SpecBase


class PlainSpec(SpecBase):
    """Behave as a model of misbehaving_models does, and measure a few times."""

    kind: Literal["plain"] = "plain"
    behaviour: Literal["counted", "alone", "gated", "stubborn", "segfault", "chatty", "curious"] = "counted"
    """What the job does."""
    number: int = Field(default=0, ge=0)
    """What a counted job writes down."""
    file_mib: int = Field(default=0, ge=0)
    """The size of its file, beyond its samples."""
    start: Literal["fork", "exec"] = "fork"
    """How its process starts: from the warm parent, or as a new interpreter."""

    unmeasured: ClassVar[frozenset[str]] = SpecBase.unmeasured | {"start", "file_mib"}
    table_rows: ClassVar[tuple[str, ...]] = ("behaviour", "number")
    table_columns: ClassVar[tuple[str, ...]] = ("step_ms",)

    def resources(self) -> Resources:
        return Resources(device_type="cpu", devices=1)
