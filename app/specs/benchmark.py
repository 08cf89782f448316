"""`benchmark`: end-to-end time of a transformer's forward pass, backward pass, optimizer and generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from app.specs._base import SpecBase
from app.specs._identity import Scalar
from app.specs._training import TrainingSpec


class BenchmarkSpec(TrainingSpec):
    """Time the steps of one model at one batch size and context length."""

    kind: Literal["benchmark"] = "benchmark"
    pacing: Literal["step", "loop"] = "step"
    """`step`: each step starts on an idle device. `loop`: steps follow each other as in training, so that the host may
    run ahead of the device; step time and rates are then those of the loop, phases still those of single steps."""
    replicates: int = Field(default=1, ge=1, le=100)
    """Fresh processes that repeat the whole measurement."""

    unmeasured: ClassVar[frozenset[str]] = SpecBase.unmeasured | {"replicates"}
    table_notes: ClassVar[Mapping[str, Mapping[Scalar, str]]] = {
        "pacing": {
            "step": "Pacing step: each step begins on an idle device.",
            "loop": "Pacing loop: times and rates of whole steps are those of steps that follow each other; times of "
            "phases are those of isolated steps.",
        }
    }
    has_own_phases: ClassVar[bool] = True
    table_columns: ClassVar[tuple[str, ...]] = (
        "forward_ms",
        "backward_ms",
        "optimizer_ms",
        "accumulation_ms",
        "rest_ms",
        "step_ms",
        "prefill_ms",
        "decode_ms_per_token",
        "tokens_per_s",
        "items_per_s",
        "mfu",
        "peak_memory_mib",
    )
