"""`benchmark`: end-to-end time of a transformer's forward pass, backward pass, optimizer and generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from app.specs._base import SpecBase, field_error
from app.specs._identity import Scalar
from app.specs._training import TrainingSpec

GPT2_TOKENS = 50_257
"""Tokens of GPT-2's vocabulary."""
OF_GENERATION = ("temperature", "top_k", "top_p", "end_token")
"""How tokens are drawn."""


class BenchmarkSpec(TrainingSpec):
    """Time the steps of one model at one batch size and context length."""

    kind: Literal["benchmark"] = "benchmark"
    pacing: Literal["step", "loop"] = "step"
    """`step`: each step starts on an idle device. `loop`: steps follow each other as in training, so that the host may
    run ahead of the device; step time and rates are then those of the loop, phases still those of single steps."""
    replicates: int = Field(default=1, ge=1, le=100)
    """Fresh processes that repeat the whole measurement."""
    prompt: str | None = Field(default=None, min_length=1, max_length=10_000)
    """`generate` only: a text to continue, in GPT-2's tokens, in place of `context_length` random ones. It needs
    tiktoken on the worker, and model.vocab_size=50257."""
    temperature: float = Field(default=0.0, ge=0, le=1000)
    """`generate` only: divides the logits before a token is drawn; 0 takes the most likely one."""
    top_k: int | None = Field(default=None, ge=1, le=4_194_304)
    """`generate` only: draw among the k most likely tokens; null: among all."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """`generate` only: draw among the fewest most likely tokens that have this probability together; null: all."""
    end_token: int | None = Field(default=None, ge=0, le=4_194_303)
    """`generate` only: the token that ends a sequence. Times stay those of `new_tokens`; null: none does."""

    added: ClassVar[Mapping[str, Scalar]] = {**TrainingSpec.added, "temperature": 0.0}
    first_tables: ClassVar[tuple[str, ...]] = ("generated",)
    first_columns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "generated": ("sequence", "new_tokens", "ended", "token_ids", "text", "note")
    }
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

    @model_validator(mode="after")
    def _generation_makes_sense(self) -> Self:
        if self.mode != "generate" or self.step_code is not None:
            return self
        if self.temperature == 0:
            for name in ("top_k", "top_p"):
                if getattr(self, name) is not None:
                    raise field_error(name, "temperature 0 takes the most likely token: set a temperature, such as 1")
        if self.end_token is not None and self.end_token >= self.model.vocab_size:
            raise field_error("end_token", f"the vocabulary has tokens 0 to {self.model.vocab_size - 1}")
        if self.prompt is not None and self.model.vocab_size < GPT2_TOKENS:
            raise field_error("prompt", f"has GPT-2's tokens: set model.vocab_size to {GPT2_TOKENS} or more")
        return self

    def sampling(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*OF_GENERATION, "seed")}

    def normalised(self, identity: dict[str, Scalar]) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        """Normalise as all training kinds do; a prompt has its own length."""
        identity, labels = super().normalised(identity)
        if self.mode != "generate" or self.step_code is not None:
            identity |= dict.fromkeys(("prompt", *OF_GENERATION))
        elif self.prompt is not None:
            identity["context_length"] = None
        return identity, labels
