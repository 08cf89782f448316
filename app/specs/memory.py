"""`memory`: what takes the memory of a step, by phase and category, with allocator snapshots."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from app.specs._base import SpecBase, WarmupSteps, field_error
from app.specs._identity import Scalar
from app.specs._training import TrainingSpec

DEFAULT_WARMUP_STEPS = 2


class MemorySpec(TrainingSpec):
    """Record the allocations of one model's step. Mode `forward` is inference, which keeps nothing for a backward pass;
    `forward_backward` adds gradients; `train_step` is the full step.
    """

    kind: Literal["memory"] = "memory"
    warmup_steps: WarmupSteps = None
    """Steps before recording starts; null: 2, after which the optimizer's state exists and the allocator's cache has
    its size. With 0, the first step is recorded."""
    measure_steps: int = Field(default=1, ge=1, le=10)
    """Steps recorded. Peaks are sampled in each; categories, allocations and snapshots are those of the last."""
    history_entries: int = Field(default=100_000, ge=1_000, le=1_000_000)
    """Most entries of the allocator's history, of which an allocation and its release take three. In a longer one the
    oldest entries are lost; a check says so."""
    largest_allocations: int = Field(default=20, ge=1, le=1_000)
    """Rows of table `allocations` for each phase: the largest ones alive at its peak."""

    unmeasured: ClassVar[frozenset[str]] = SpecBase.unmeasured | {"history_entries", "largest_allocations"}
    table_rows: ClassVar[tuple[str, ...]] = ("model", "context_length", "mode", "precision")
    table_columns: ClassVar[tuple[str, ...]] = (
        "peak_memory_mib",
        "forward_peak_memory_mib",
        "backward_peak_memory_mib",
        "optimizer_peak_memory_mib",
        "parameter_mib",
        "gradient_mib",
        "optimizer_state_mib",
        "activation_mib",
        "temporary_mib",
        "unknown_percent",
        "fragmentation_mib",
    )

    @model_validator(mode="after")
    def _mode_can_be_recorded(self) -> Self:
        if self.mode == "generate":
            raise field_error(
                "mode", "memory is recorded of forward, forward_backward and train_step: choose forward for inference"
            )
        return self

    def _check_cuda_graph(self) -> None:
        raise field_error(
            "cuda_graph",
            "a replayed graph allocates nothing, so its memory has no history: leave it out, or take peak_memory_mib "
            "of kind benchmark",
        )

    def normalised(self, identity: dict[str, Scalar]) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        """Do as other training kinds, and spell out the length of the warm-up."""
        identity, labels = super().normalised(identity)
        if identity["warmup_steps"] is None:
            identity["warmup_steps"] = DEFAULT_WARMUP_STEPS
        return identity, labels
