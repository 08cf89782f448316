"""`estimate`: computes memory and communication of a training step from formulas, for a model and a mesh of devices."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from app.presets import BATCH_SIZE, MODEL_SIZES
from app.specs._base import Device, Resources, SpecBase, StrictModel, field_error
from app.specs._identity import Scalar
from app.specs._training import HYPER_PARAMETERS, ModelSpec, check_master_weights

STACK_LIMIT_GB = 95.0
"""Memory of a TPU v5p, which CS336's problem communication_accounting asks about in part b."""
STACK_SIZES = ("d_model", "d_ff", "num_blocks")
ROPE_THETA = ModelSpec.model_fields["rope_theta"].default
OF_A_STEP = frozenset({
    "parameter_dtype", "communication_dtype", "activation_checkpointing", "fused_linear_cross_entropy", "optimizer",
    "master_weights", "mesh", "sharded_activation_fraction", "shard_limit_gb",
})  # fmt: skip
"""Fields without effect on attention alone."""


class StackSpec(StrictModel):
    """A stack of feed-forward blocks: each has two linear layers, and nothing else."""

    d_model: int = Field(default=16_384, ge=1, le=1_048_576)
    """Width of a block's input and output."""
    d_ff: int = Field(default=53_248, ge=1, le=4_194_304)
    """Width between the two layers."""
    num_blocks: int = Field(default=126, ge=1, le=65_536)
    """Number of blocks."""

    def label(self) -> str:
        return f"stack-d{self.d_model}-f{self.d_ff}-b{self.num_blocks}"


class AttentionLayerSpec(StrictModel):
    """Attention alone: queries, keys and values of `batch_size` sequences of `context_length`, and nothing else."""

    num_heads: int = Field(default=1, ge=1, le=1024)
    """Heads of queries, keys and values."""
    head_dim: int = Field(default=64, ge=1, le=1024)
    """Width of a head."""
    causal: bool = False
    """True: query i sees only keys 0 … i, by a mask of context_length² bytes with `attention` eager."""

    def label(self) -> str:
        return f"attention-h{self.num_heads}-d{self.head_dim}{'-causal' if self.causal else ''}"


class MeshSpec(StrictModel):
    """A mesh of fsdp × tensor devices and its links. The defaults are a TPU v5p's, as in "How to Scale Your Model"."""

    fsdp: int = Field(default=16, ge=1, le=1_048_576)
    """Devices along the data-parallel axis, which shards parameters, gradients and optimizer state (X)."""
    tensor: int = Field(default=4, ge=1, le=65_536)
    """Devices along the tensor-parallel axis, which splits each matrix product (Y); divides the model's heads and
    d_ff."""
    fsdp_axes: int = Field(default=2, ge=1, le=16)
    """Links of a device that serve the data-parallel axis at the same time (Mx)."""
    tensor_axes: int = Field(default=1, ge=1, le=16)
    """Links of a device that serve the tensor-parallel axis at the same time (My)."""
    link_bytes_per_s: float = Field(default=1.8e11, ge=1, le=1e18)
    """Bandwidth of one link, both directions together, in bytes per second (W)."""
    flops_per_s: float = Field(default=4.6e14, ge=1, le=1e24)
    """Rate of one device's matrix products in FLOP per second (C)."""


class EstimateSpec(SpecBase):
    """Compute on paper whether a training step fits: bytes on each device, and the batch that hides communication."""

    kind: Literal["estimate"] = "estimate"
    architecture: Literal["transformer", "feed_forward_stack", "attention"] = "transformer"
    """`transformer` takes the sizes of `model`, `feed_forward_stack` those of `stack`, and `attention`, which is one
    call of it on tensors of `precision`, those of `attention_layer`."""
    model: ModelSpec = ModelSpec(size="small")
    stack: StackSpec = StackSpec()
    attention_layer: AttentionLayerSpec = AttentionLayerSpec()
    batch_size: int = Field(default=BATCH_SIZE, ge=1, le=65_536)
    """Sequences per step of one data-parallel rank; the devices of a tensor-parallel group share them."""
    context_length: int = Field(default=256, ge=1, le=1_048_576)
    """Tokens per sequence."""
    mode: Literal["forward", "forward_backward", "train_step"] = "train_step"
    """`forward` is inference; `forward_backward` has gradients; `train_step` is the full step, from the second one on:
    the optimizer's state exists. Attention alone has no optimizer."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "bf16"
    """Data type of matrix products and of the activations between them; `bf16` and `fp16` by autocast. Of attention
    alone, the data type of all tensors, without autocast."""
    parameter_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of parameters, accumulated gradients and optimizer state."""
    communication_dtype: Literal["fp32", "bf16"] = "bf16"
    """Data type of the weights and activations that devices send each other. With `fp32`, autocast keeps 16-bit copies
    of all weights on the devices of fully sharded strategies, too."""
    attention: Literal["eager", "fused", "triton", "tiled", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn"] = "eager"
    """`eager` saves whole matrices of attention weights for the backward pass; the others save, like FlashAttention,
    their output and the log-sum-exp of each query. `fused` is `triton` on a GPU and `sdpa_flash` on a CPU."""
    activation_checkpointing: bool = False
    """Save each block's input only, and recompute one block at a time in the backward pass."""
    fused_linear_cross_entropy: bool = False
    """Compute output layer and loss together and chunk by chunk, so that the full logits never exist."""
    optimizer: Literal["adamw", "torch_adamw", "torch_fused_adamw", "triton_adamw"] = "adamw"
    """`train_step` only: the optimizer, as in the training kinds."""
    master_weights: bool = False
    """`train_step` only, with `precision` and `parameter_dtype` bf16: the optimizer, `adamw` or `triton_adamw`, keeps a
    float32 copy of each parameter and float32 moments."""
    device: Device = "auto"
    """Where the step would run: softmax, workspaces and temporaries differ. `auto`: on a GPU where the worker's host
    has one, else on its CPU. Before you rent a GPU, say `cuda`."""
    mesh: MeshSpec = MeshSpec()
    sharded_activation_fraction: float = Field(default=0.5, ge=0, le=1)
    """Fraction of the activations that is also sharded over mesh.fsdp devices; the rest is replicated on each."""
    device_gb: float = Field(default=80.0, ge=0.001, le=1e6)
    """Memory of one device, into which everything has to fit, in GB (10⁹ bytes): an H100 of 80 GB has 85. On a CPU
    the answer says what the worker's host gives to a job, if that is less."""
    shard_limit_gb: float | None = Field(default=None, ge=0.001, le=1e6)
    """The smallest number of shards keeps each device under this, in GB (10⁹ bytes). Null: `device_gb`; for
    `feed_forward_stack` 95, which CS336 asks for."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        **{size: {"model": {"size": size}, "batch_size": BATCH_SIZE} for size in MODEL_SIZES},
        # CS336's problem communication_accounting.
        "communication_accounting": {"architecture": "feed_forward_stack", "batch_size": 1, "context_length": 1024},
        # CS336's problem pytorch_attention, as the preset of kind attention.
        "classic": {
            "architecture": "attention",
            "batch_size": 8,
            "context_length": 16_384,
            "precision": "fp32",
            "device": "cuda",
        },
    }
    unmeasured: ClassVar[frozenset[str]] = frozenset({"device", "model.rope_theta"})
    added: ClassVar[Mapping[str, Scalar]] = {
        **SpecBase.added,
        "mode": "train_step",
        "fused_linear_cross_entropy": False,
        "optimizer": "adamw",
        "master_weights": False,
    }
    labels: ClassVar[dict[str, tuple[str, ...]]] = {
        "model": (
            *(f"model.{name}" for name in HYPER_PARAMETERS),
            *(f"stack.{name}" for name in STACK_SIZES),
            *(f"attention_layer.{name}" for name in AttentionLayerSpec.model_fields),
        )
    }
    table_rows: ClassVar[tuple[str, ...]] = ("model", "batch_size", "context_length", "precision")
    table_columns: ClassVar[tuple[str, ...]] = (
        "forward_peak_memory_mib", "memory_before_backward_mib", "peak_memory_mib", "forward_oom_length",
        "backward_oom_length", "step_peak_gib", "free_gib", "summed_device_tokens",
    )  # fmt: skip
    first_plotted: ClassVar[str | None] = "step_peak_gib"
    answers: ClassVar[tuple[str, ...]] = ("answer", "fits")
    first_tables: ClassVar[tuple[str, ...]] = ("answer", "fits", "moments", "per-device")

    @model_validator(mode="after")
    def _fields_go_together(self) -> Self:
        if self.parameter_dtype == "bf16" and self.precision != "bf16":
            raise field_error("parameter_dtype", "parameters in bf16 need precision bf16")
        if self.architecture == "transformer":
            self.model.check_documents(self.context_length)
        if self.master_weights and self.mode == "train_step":
            check_master_weights(self.parameter_dtype, self.optimizer)
        return self

    @property
    def limit_gb(self) -> float:
        """What the smallest number of shards keeps each device under, in GB."""
        if self.shard_limit_gb is not None:
            return self.shard_limit_gb
        return STACK_LIMIT_GB if self.architecture == "feed_forward_stack" else self.device_gb

    def resources(self) -> Resources:
        return Resources(device_type="none", devices=0)

    def label(self) -> str:
        layers: dict[str, StackSpec | AttentionLayerSpec]
        layers = {"feed_forward_stack": self.stack, "attention": self.attention_layer}
        return layers.get(self.architecture, self.model).label()

    def without_effect(self) -> list[str]:
        """Name `model.rope_theta`, too, which is in no formula."""
        idle = ["model.rope_theta"] if self.model.rope_theta != ROPE_THETA else []
        return list(dict.fromkeys([*super().without_effect(), *idle]))

    def normalised(self, identity: dict[str, Scalar]) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        """Spell out the model's preset, and set to null the sizes of the other architectures and what they alone do."""
        del identity["model.size"]
        identity["model.rope_theta"] = ROPE_THETA  # the keys of stored cases have it
        identity |= self.model.coordinates(self.context_length)
        sizes = {"transformer": "model", "feed_forward_stack": "stack", "attention": "attention_layer"}
        idle = {field for architecture, field in sizes.items() if architecture != self.architecture}
        identity["shard_limit_gb"] = self.limit_gb
        if self.architecture == "feed_forward_stack":
            idle |= {"attention", "fused_linear_cross_entropy", "optimizer"}
        if self.architecture == "attention":
            idle |= OF_A_STEP
            identity["mode"] = "forward" if self.mode == "forward" else "forward_backward"
        if self.mode != "train_step":
            idle |= {"optimizer", "master_weights"}
        if self.mode == "forward":
            idle.add("activation_checkpointing")
        identity |= dict.fromkeys(name for name in identity if name.partition(".")[0] in idle)
        return identity, {"model": self.label()}
