"""`memory`: the memory of a step by phase and category, with allocator snapshots."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from app.specs._base import SpecBase, WarmupSteps, field_error
from app.specs._identity import Scalar
from app.specs._training import TrainingSpec, always

DEFAULT_WARMUP_STEPS = 2
FEWEST_STEPS = 4
"""Fewest steps between two moments: in each half of them, memory that leaks grows."""


class MemorySpec(TrainingSpec):
    """Record the allocations of one model's steps, in inference or in training."""

    kind: Literal["memory"] = "memory"
    mode: Literal["forward", "forward_backward", "train_step"] = "train_step"
    """`forward` is inference: it keeps no gradients; `forward_backward` adds them; `train_step` is the full step, with
    the optimizer. Memory of `generate` is not recorded."""
    accumulation_steps: Literal[1] = 1
    """Always 1: the recorded step has one micro-batch."""
    cuda_graph: Literal[False] = False
    """Always false: a replayed CUDA graph allocates nothing."""
    new_tokens: int = Field(default=32, ge=2, le=1_048_576)
    """Without effect: nothing is generated."""
    warmup_steps: WarmupSteps = None
    """Steps before recording starts; null: 2, after which the optimizer's state exists and the allocator's cache has
    its size. With 0, the first step is recorded."""
    measure_steps: int = Field(default=1, ge=1, le=10)
    """Steps recorded. Table `timeline` shows all of them; all else is of the last."""
    snapshot_steps: list[Annotated[int, Field(ge=1, le=10_000)]] | None = Field(
        default=None, min_length=2, max_length=10
    )
    """Steps of the warm-up, counted from 1, after which snapshots are taken, such as `[10,20]`: table `growth` has what
    is alive after the last that was not after the first. The recorded steps follow. Null: none."""
    history_entries: int = Field(default=100_000, ge=1_000, le=1_000_000)
    """Largest number of entries of the allocator's history; an allocation and its release take three. In a longer one
    the oldest entries are lost; a check says so."""
    largest_allocations: int = Field(default=500, ge=1, le=1_000)
    """Rows of table `allocations` for each phase: the largest ones alive at its peak. A comparison matches them."""

    unmeasured: ClassVar[frozenset[str]] = SpecBase.unmeasured | {
        *("history_entries", "largest_allocations", "new_tokens", "snapshot_steps")
    }
    finding: ClassVar[str] = "growth"
    metric_notes: ClassVar[Mapping[frozenset[str], str]] = {
        frozenset(
            {"peak_memory_mib"}
        ): "peak_memory_mib is that of one step; what leaks from step to step, and where, is in table growth, with "
        "snapshot_steps such as [10,20]."
    }
    table_rows: ClassVar[tuple[str, ...]] = ("model", "context_length", "mode", "precision")
    first_tables: ClassVar[tuple[str, ...]] = (
        "categories-backward", "categories-optimizer", "categories", "growth", "allocations", "saved", "timeline",
        "snapshots", "categories-initialisation",
    )  # fmt: skip
    """The peak of a step is in its backward pass or its optimizer phase, so these come first."""
    first_columns: ClassVar[dict[str, tuple[str, ...]]] = {
        "categories": ("category", "peak_mib", "peak_percent", "end_mib", "end_percent"),
        "allocations": ("at_peak_of", "size_mib", "count", "total_mib", "category", "name", "site"),
        "growth": ("per_step_mib", "keeps_growing", "first_mib", "last_mib", "category", "name", "site", "code"),
        "timeline": (
            *("entry", "step", "phase", "total_mib", "parameter_mib", "gradient_mib", "optimizer_state_mib"),
            *("activation_mib", "input_mib", "temporary_mib", "unknown_mib", "change_mib", "category", "name"),
        ),
    }
    table_columns: ClassVar[tuple[str, ...]] = (
        "peak_memory_mib", "parameter_mib", "gradient_mib", "optimizer_state_mib", "activation_mib", "input_mib",
        "temporary_mib", "unknown_percent",
    )  # fmt: skip

    _one_micro_batch = always(
        "accumulation_steps",
        1,
        "the recorded step has one micro-batch: leave it out, or take peak_memory_mib of kind benchmark",
    )
    _no_graph = always(
        "cuda_graph",
        False,
        "a replayed graph allocates nothing, so its memory has no history: leave it out, or take peak_memory_mib of "
        "kind benchmark",
    )

    @model_validator(mode="after")
    def _moments_are_apart(self) -> Self:
        moments = self.snapshot_steps or [0, FEWEST_STEPS]
        if moments != sorted({*moments}):
            raise field_error("snapshot_steps", "list each step once, the first one first, such as [10,20]")
        if moments[-1] - moments[0] < FEWEST_STEPS:
            detail = f"the last must be at least {FEWEST_STEPS} steps after the first: what grows once is no leak"
            raise field_error("snapshot_steps", detail)
        return self

    def without_effect(self) -> list[str]:
        return [*super().without_effect(), *self.changed("new_tokens")]

    def normalised(self, identity: dict[str, Scalar]) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        """Normalise as other training kinds do, and spell out the length of the warm-up."""
        identity, labels = super().normalised(identity)
        identity.pop("new_tokens", None)
        if identity["warmup_steps"] is None:
            identity["warmup_steps"] = DEFAULT_WARMUP_STEPS
        return identity, labels
