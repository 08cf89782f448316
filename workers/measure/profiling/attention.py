"""The parts of attention in the roofline model: their time, FLOPs and bytes, and which of the two limits them.

The roofline (Williams, Waterman & Patterson, 2009): a device that computes at most C FLOP/s and moves at most B bytes/s
is limited by its memory below C/B FLOPs per byte, and by its arithmetic above. C and B are this device's own measured
ceilings, in the precision of the products.
"""

from dataclasses import dataclass
from typing import Literal

from workers.measure.ceilings import Ceiling
from workers.model.accounting import Cost

Side = Literal["memory-bound", "compute-bound"]


@dataclass(frozen=True)
class Roofline:
    """A device's ceilings: of matrix products in one precision, and of copies."""

    tflops: float
    gb_per_s: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte at which both limits meet."""
        return 1e3 * self.tflops / self.gb_per_s

    def side(self, intensity: float) -> Side:
        """Return the limit that applies to work with this many FLOPs per byte."""
        return "memory-bound" if intensity < self.ridge else "compute-bound"

    def limit_tflops(self, intensity: float) -> float:
        """Return the highest rate in TFLOP/s that the roofline allows for work with this many FLOPs per byte."""
        return min(self.tflops, 1e-3 * intensity * self.gb_per_s)


def roofline(ceiling: Ceiling | None, precision: str) -> Roofline | str:
    """Return a device's roofline in a precision, or the reason why it is unknown."""
    if ceiling is None or precision not in ceiling.tflops:
        return f"no measured ceiling of this device's matrix products in {precision} is on record"
    if ceiling.copy_gb_per_s is None:
        return "no measured ceiling of this device's copies is on record"
    return Roofline(ceiling.tflops[precision].value, ceiling.copy_gb_per_s.value)


@dataclass(frozen=True)
class Part:
    """One part of attention in one phase, per step."""

    name: str
    phase: str
    time_ms: float
    product_ms: float
    """The share of `time_ms` that is in matrix products. The rest of `scores` scales and masks them."""
    cost: Cost | None
    """Its FLOPs and bytes; None if unknown."""

    @property
    def tflops(self) -> float | None:
        """The rate in TFLOP/s."""
        return None if self.cost is None or not self.time_ms else 1e-9 * self.cost.flops / self.time_ms

    @property
    def gb_per_s(self) -> float | None:
        """The smallest traffic in GB/s that explains the time."""
        return None if self.cost is None or not self.time_ms else 1e-6 * self.cost.bytes / self.time_ms

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte."""
        return None if self.cost is None else self.cost.flops / self.cost.bytes
