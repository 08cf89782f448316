"""`benchmark`: end-to-end time of a transformer's forward pass, backward pass, optimizer and generation."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from app.specs._base import SpecBase
from app.specs._training import TrainingSpec


class BenchmarkSpec(TrainingSpec):
    """Time the steps of one model at one batch size and context length."""

    kind: Literal["benchmark"] = "benchmark"
    replicates: int = Field(default=1, ge=1, le=100)
    """Fresh processes that repeat the whole measurement."""

    unmeasured: ClassVar[frozenset[str]] = SpecBase.unmeasured | {"replicates"}
    table_columns: ClassVar[tuple[str, ...]] = (
        "forward_ms",
        "backward_ms",
        "optimizer_ms",
        "step_ms",
        "prefill_ms",
        "decode_ms_per_token",
        "tokens_per_s",
        "mfu",
        "peak_memory_mib",
    )
