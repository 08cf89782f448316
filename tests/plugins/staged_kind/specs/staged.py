"""`staged`, a kind for tests: two stages, of which the first runs under a wrapper and the second may crash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from app.specs._base import Resources, SpecBase, check_lists


@dataclass(frozen=True)
class StagedCell:
    """One length."""

    length: int

    def coordinates(self) -> dict[str, Any]:
        return {"length": self.length}


class StagedSpec(SpecBase):
    """Sum numbers in two stages, each a unit."""

    kind: Literal["staged"] = "staged"
    lengths: list[int] = Field(default=[1, 2, 3], min_length=1, max_length=10)
    """Numbers to sum."""
    crash_at: int | None = Field(default=None, ge=1, le=10)
    """The length at which the second stage dies; null: it does not."""
    goes_on: bool = False
    """Whether the second stage goes on after that, in a fresh process."""
    device: Literal["cpu", "none"] = "cpu"
    """`none`: it takes no device."""

    axes: ClassVar[dict[str, str]] = {"lengths": "length"}
    unmeasured: ClassVar[frozenset[str]] = SpecBase.unmeasured | {"crash_at", "goes_on"}
    table_rows: ClassVar[tuple[str, ...]] = ("length",)
    table_columns: ClassVar[tuple[str, ...]] = ("sum_ms",)

    def resources(self) -> Resources:
        return Resources(device_type=self.device, devices=1)

    def cells(self) -> Sequence[StagedCell]:
        check_lists(self)
        return [StagedCell(length) for length in self.lengths]
