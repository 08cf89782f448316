"""`benchmark`: end-to-end time of a transformer's forward pass, backward pass, optimizer and generation."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from app.specs._base import SpecBase, field_error
from app.specs._identity import Scalar
from app.specs._training import TrainingSpec

OF_GENERATION = ("temperature", "top_k")
"""How tokens are drawn."""


class BenchmarkSpec(TrainingSpec):
    """Time the steps of one model at one batch size and context length."""

    kind: Literal["benchmark"] = "benchmark"
    pacing: Literal["step", "loop"] = "step"
    """`step`: each step starts on an idle device. `loop`: steps follow each other as in training, so that the host may
    run ahead of the device; step time and rates are then those of the loop, phases still those of single steps."""
    replicates: int = Field(default=1, ge=1, le=100)
    """Fresh processes that repeat the whole measurement."""
    temperature: float = Field(default=0.0, ge=0, le=1000)
    """`generate` only: divides the logits before a token is drawn; 0 takes the most likely one."""
    top_k: int | None = Field(default=None, ge=1, le=4_194_304)
    """`generate` only: draw among the k most likely tokens; null: among all."""

    added: ClassVar[Mapping[str, Scalar]] = {**TrainingSpec.added, "temperature": 0.0}
    first_tables: ClassVar[tuple[str, ...]] = ("generated",)
    first_columns: ClassVar[Mapping[str, tuple[str, ...]]] = {"generated": ("sequence", "token_ids", "note")}
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
        "forward_ms", "backward_ms", "optimizer_ms", "accumulation_ms", "rest_ms", "step_ms", "prefill_ms",
        "decode_ms_per_token", "tokens_per_s", "items_per_s", "mfu", "peak_memory_mib",
    )  # fmt: skip

    @model_validator(mode="after")
    def _generation_makes_sense(self) -> Self:
        generates = self.mode == "generate" and self.step_code is None
        if generates and self.temperature == 0 and self.top_k is not None:
            raise field_error("top_k", "temperature 0 takes the most likely token: set a temperature, such as 1")
        return self

    def sampling(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*OF_GENERATION, "seed")}

    def normalised(self, identity: dict[str, Scalar]) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        """Normalise as all training kinds do, and set how tokens are drawn to null where none are."""
        identity, labels = super().normalised(identity)
        if self.mode != "generate" or self.step_code is not None:
            identity |= dict.fromkeys(OF_GENERATION)
        return identity, labels
