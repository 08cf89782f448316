"""`benchmark`: end-to-end time of a transformer's forward pass, backward pass, optimizer and generation."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from app.presets import BATCH_SIZE, MODEL_SIZES, VOCABULARY_SIZE
from app.specs.base import Device, Resources, Scalar, SpecBase, StrictModel, field_error

ModelSize = Literal["tiny", "small", "medium", "large", "xl", "2.7b"]
HYPER_PARAMETERS = ("d_model", "d_ff", "num_layers", "num_heads")


class ModelSpec(StrictModel):
    """The model under test: a preset `size`, or all of d_model, d_ff, num_layers and num_heads."""

    name: str = Field(default="transformer_lm", min_length=1, max_length=100, pattern=r"^[\w.-]+$")
    """Model implementation, as a worker registers it."""
    size: ModelSize | None = None
    """Preset; sets the four hyper-parameters below."""
    d_model: int | None = Field(default=None, ge=2, le=65_536)
    """Width of the residual stream."""
    d_ff: int | None = Field(default=None, ge=1, le=262_144)
    """Width of the feed-forward layer."""
    num_layers: int | None = Field(default=None, ge=1, le=1024)
    """Number of transformer blocks."""
    num_heads: int | None = Field(default=None, ge=1, le=1024)
    """Number of attention heads; divides d_model into even head dimensions."""
    vocab_size: int = Field(default=VOCABULARY_SIZE, ge=2, le=4_194_304)
    """Number of tokens in the vocabulary."""
    rope_theta: float = Field(default=10_000.0, gt=0, le=1e12)
    """Base of the rotary position embedding's angles."""

    @model_validator(mode="after")
    def _size_or_all_hyper_parameters(self) -> Self:
        given = [name for name in HYPER_PARAMETERS if getattr(self, name) is not None]
        if self.size is not None:
            if given:
                raise field_error(given[0], f"leave {given[0]} out, or leave size out and give all hyper-parameters")
            return self
        missing = [name for name in HYPER_PARAMETERS if name not in given]
        if missing:
            raise field_error(missing[0], f"give size, or all of {', '.join(HYPER_PARAMETERS)}")
        shape = self.shape()
        if shape["d_model"] % (2 * shape["num_heads"]):
            raise field_error(
                "d_model",
                f"d_model ({shape['d_model']}) must be a multiple of 2 × num_heads ({shape['num_heads']}): "
                "rotary embeddings need an even head dimension",
            )
        return self

    def shape(self) -> dict[str, int]:
        """The four hyper-parameters, from the preset or as given."""
        if self.size is not None:
            return dict(MODEL_SIZES[self.size])  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in HYPER_PARAMETERS}

    def label(self) -> str:
        """The name tables show: the preset's, or the hyper-parameters."""
        if self.size is not None:
            return self.size
        shape = self.shape()
        return f"d{shape['d_model']}-f{shape['d_ff']}-l{shape['num_layers']}-h{shape['num_heads']}"


class BenchmarkSpec(SpecBase):
    """Time the steps of one model at one batch size and context length."""

    kind: Literal["benchmark"] = "benchmark"
    model: ModelSpec = ModelSpec(size="small")
    batch_size: int = Field(default=BATCH_SIZE, ge=1, le=65_536)
    """Sequences per step."""
    context_length: int = Field(default=256, ge=1, le=1_048_576)
    """Tokens per sequence; in `generate`, of the prompt."""
    mode: Literal["forward", "forward_backward", "train_step", "generate"] = "train_step"
    """`forward` keeps no gradients; `train_step` adds the optimizer; `generate` times prefill and decoding."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """`bf16` and `fp16` by autocast, `fp16` with gradient scaling; `tf32` needs a GPU."""
    compile: bool = False
    """Run the model through torch.compile."""
    attention: str = Field(default="eager", min_length=1, max_length=100, pattern=r"^[\w.-]+$")
    """Attention implementation, as a worker registers it."""
    activation_checkpointing: bool = False
    """Recompute each block's activations in the backward pass."""
    optimizer: Literal["adamw", "torch_adamw", "torch_fused_adamw"] = "adamw"
    """`adamw` is written out in PyTorch, one parameter at a time; the others are torch's."""
    gradient_clip_norm: float | None = Field(default=None, gt=0, le=1e9)
    """Clip gradients to this global L2 norm, inside the optimizer's time; null: no clipping."""
    new_tokens: int = Field(default=32, ge=2, le=1_048_576)
    """`generate` only: tokens to generate after the prompt."""
    warmup_steps: int = Field(default=5, ge=0, le=100_000)
    """Steps before measuring starts."""
    measure_steps: int = Field(default=10, ge=1, le=1_000_000)
    """Steps measured."""
    device: Device = "auto"
    """`auto` takes a GPU where the worker has one."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Seed of the weights and the random batches."""
    replicates: int = Field(default=1, ge=1, le=100)
    """Fresh processes that repeat the whole measurement."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        size: {"model": {"size": size}, "batch_size": BATCH_SIZE} for size in MODEL_SIZES
    }
    table_rows: ClassVar[tuple[str, ...]] = ("model", "context_length")
    table_columns: ClassVar[tuple[str, ...]] = (
        "forward_ms",
        "backward_ms",
        "optimizer_ms",
        "step_ms",
        "prefill_ms",
        "decode_ms_per_token",
        "tokens_per_s",
        "tflops",
        "mfu",
        "peak_memory_mib",
    )

    @model_validator(mode="after")
    def _device_can_do_it(self) -> Self:
        if self.device == "cpu" and self.precision == "tf32":
            raise field_error("precision", "tf32 is a GPU format: choose fp32 or bf16, or device cuda")
        return self

    def resources(self) -> Resources:
        return Resources(device_type=self.device, devices=1)

    def requirements(self) -> frozenset[str]:
        return frozenset({f"model:{self.model.name}", f"attention:{self.attention}"})

    def coordinates(self) -> dict[str, Scalar]:
        """Every field that changes the measured work, flat; `model` is the preset's name or the hyper-parameters."""
        coordinates: dict[str, Scalar] = {
            "model": self.model.label(),
            "batch_size": self.batch_size,
            "context_length": self.context_length,
            "mode": self.mode,
            "precision": self.precision,
            "compile": self.compile,
            "attention": self.attention,
            "activation_checkpointing": self.activation_checkpointing,
            "optimizer": self.optimizer if self.mode == "train_step" else None,
            "warmup_steps": self.warmup_steps,
        }
        if self.mode == "generate":
            coordinates["new_tokens"] = self.new_tokens
        return coordinates
