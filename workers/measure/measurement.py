"""One metric of one case, as a runner reports it, and the message that it sends to the agent."""

from __future__ import annotations

import base64
import math
import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.measure.table import Scalar


@dataclass(frozen=True)
class Measurement:
    """One metric of one case.

    `case` holds the case's coordinates and `case_key` identifies it (app.specs has both); `device_key` says on what it
    was measured (see `environment.device_key`). (metric, phase) names the column: a rate without a phase covers the
    mode's whole measured work. Without samples there is no value, and `outcome` ("oom", "unknown", …) and `reason` say
    why; a missing value is never 0.

    Raises:
        ValueError: outcome "ok" without samples, another outcome with samples or without a reason; a sample that is not
            finite.
    """

    case: Mapping[str, Scalar]
    case_key: str
    device_key: str
    phase: str | None
    metric: str
    unit: str
    outcome: str = "ok"
    reason: str | None = None
    samples: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if (self.outcome == "ok") != bool(self.samples):
            raise ValueError(f"{self.metric}: outcome {self.outcome!r} with {len(self.samples or ())} samples")
        if self.outcome != "ok" and not self.reason:
            raise ValueError(f"{self.metric}: outcome {self.outcome!r} needs a reason")
        if not all(map(math.isfinite, self.samples or ())):
            raise ValueError(f"{self.metric}: a sample is not finite")

    def to_wire(self) -> dict[str, Any]:
        """Return the fields, JSON-ready; samples are base64 of zlib of little-endian float64."""
        samples = base64.b64encode(pack(self.samples)).decode() if self.samples else None
        return {**vars(self), "case": dict(self.case), "samples": samples}


def pack(samples: Sequence[float]) -> bytes:
    """Pack samples as zlib of little-endian float64."""
    values = array("d", samples)
    if sys.byteorder == "big":
        values.byteswap()
    return zlib.compress(values.tobytes(), 1)
