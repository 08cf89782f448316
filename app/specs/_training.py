"""The fields that all training kinds share: the model, the step, and how both run."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from app.presets import BATCH_SIZE, MODEL_SIZES, VOCABULARY_SIZE, VOCABULARY_SIZES
from app.specs._base import (
    Device,
    DocumentLengths,
    KeyHeads,
    Name,
    Named,
    Resources,
    Seed,
    SpecBase,
    StrictModel,
    WarmupSteps,
    Window,
    check_documents,
    field_error,
    masks_with_effect,
)
from app.specs._code import Arguments, CodeSpec, Uploaded, coordinates, names
from app.specs._identity import Scalar

ModelSize = Literal["tiny", "small", "medium", "large", "xl", "2.7b", "8b"]
HYPER_PARAMETERS = ("d_model", "d_ff", "num_layers", "num_heads")
WITH_BACKWARD = ("forward_backward", "train_step")
PHASES = {
    "forward": ("forward",),
    "forward_backward": ("forward", "backward"),
    "train_step": ("forward", "backward", "optimizer"),
    "generate": ("prefill", "decode"),
}
"""The phases of each mode's step, in order."""
OF_OUR_STEP = frozenset({
    "model", "code", "batch_size", "accumulation_steps", "context_length", "mode", "parameter_dtype", "compile",
    "compile_scope", "cuda_graph", "attention", "attention_code", "activation_checkpointing", "checkpoint_scope",
    "checkpoint_layers", "checkpoint_blocks", "fused_linear_cross_entropy", "fused", "optimizer", "master_weights",
    "gradient_clip_norm", "new_tokens",
})  # fmt: skip
"""Fields without effect where `step_code` does the step."""
THE_STEPS_OWN = {
    "code": "make the model there, and leave this out",
    "attention_code": "call the attention there, and leave this out",
    "compile": "call torch.compile there, and leave this out",
    "cuda_graph": "capture the graph there, and leave this out",
}
"""Fields that are refused where `step_code` does the step, with what to do instead."""
Fused = Literal["linear_cross_entropy", "rms_norm", "rope"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
LayerPattern = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[\w.*?\[\]!-]+$")]
IN_BF16 = ("bf16", "fp8")
"""Precisions that compute in bf16 by autocast; fp8 does so in all but its linear layers."""
FP8_MULTIPLE = 16
"""Sizes of an fp8 product are multiples of it (torch._scaled_mm)."""
ACCUMULATION = "accumulation"
"""The first phase of a step with several micro-batches: the passes of all but the last of them."""


def always(field: str, only: int, reason: str) -> Any:
    """Return the validator of a field that has one value in a kind; its error for a larger one gives the reason."""

    def refuse(value: Any) -> Any:
        if type(value) is type(only) and value > only:
            raise PydanticCustomError("always", "{reason}", {"reason": reason})
        return value

    return field_validator(field, mode="before")(refuse)


def check_master_weights(parameter_dtype: str, optimizer: str) -> None:
    """Raise PydanticCustomError, which blames `master_weights`, unless an optimizer can keep float32 copies of such
    parameters."""
    if parameter_dtype != "bf16":
        raise field_error("master_weights", "needs parameter_dtype bf16, and precision bf16 or fp8")
    if optimizer not in ("adamw", "triton_adamw"):
        raise field_error("master_weights", "torch's optimizers have none: choose optimizer adamw or triton_adamw")


class ModelSpec(StrictModel):
    """The model under test: a preset `size`, or all of d_model, d_ff, num_layers and num_heads. Hyper-parameters that
    are given beside a size replace the preset's."""

    name: Annotated[Name, Named("model")] = "transformer_lm"
    """Model implementation, as a worker registers it."""
    size: ModelSize | None = Field(
        default=None,
        description="Preset; sets those of d_model, d_ff, num_layers, num_heads that are not given. "
        + "".join(f"`{size}`: {', '.join(map(str, shape.values()))}. " for size, shape in MODEL_SIZES.items())
        + "`8b` sets the vocabulary, too.",
    )
    d_model: int | None = Field(default=None, ge=2, le=65_536)
    """Width of the residual stream."""
    d_ff: int | None = Field(default=None, ge=1, le=262_144)
    """Width of the feed-forward layer."""
    num_layers: int | None = Field(default=None, ge=1, le=1024)
    """Number of transformer blocks."""
    num_heads: int | None = Field(default=None, ge=1, le=1024)
    """Number of attention heads; divides d_model into even head dimensions."""
    vocab_size: int = Field(default=VOCABULARY_SIZE, ge=2, le=4_194_304)
    """Number of tokens in the vocabulary; of size `8b` 151 936 by default."""
    rope_theta: float = Field(default=10_000.0, gt=0, le=1e12)
    """Base of the rotary position embedding's angles."""
    num_kv_heads: KeyHeads = None
    """Heads of keys and values, each shared by as many query heads; divides num_heads. Null: as many as query heads."""
    window: Window = None
    """Tokens that a token sees back, itself included. Null: all before it, as where it is not shorter than the
    sequence."""
    document_lengths: DocumentLengths = None
    """Lengths of the documents that are packed into each sequence, together context_length: a token sees its own
    document only. Null: one document."""

    @model_validator(mode="before")
    @classmethod
    def _vocabulary_of_the_preset(cls, fields: Any) -> Any:
        if isinstance(fields, Mapping) and "vocab_size" not in fields:
            size = fields.get("size")
            if isinstance(size, str) and size in VOCABULARY_SIZES:
                return {**fields, "vocab_size": VOCABULARY_SIZES[size]}
        return fields

    @model_validator(mode="after")
    def _size_or_all_hyper_parameters(self) -> Self:
        shape = self.shape()
        missing = [name for name in HYPER_PARAMETERS if name not in shape]
        known = not {"d_model", "num_heads"} & {*missing}
        if known and shape["d_model"] % (2 * shape["num_heads"]):
            raise field_error(
                "num_heads" if self.d_model is None else "d_model",
                f"d_model ({shape['d_model']}) must be a multiple of 2 × num_heads ({shape['num_heads']}): "
                "rotary embeddings need an even head dimension",
            )
        if missing:
            raise field_error(missing[0], f"give size, or all of {', '.join(HYPER_PARAMETERS)}")
        if self.num_kv_heads is not None and shape["num_heads"] % self.num_kv_heads:
            raise field_error("num_kv_heads", f"must divide num_heads ({shape['num_heads']}): choose one that does")
        return self

    def shape(self) -> dict[str, int]:
        """Return the four hyper-parameters: those given, and the others from the preset."""
        own = {name: getattr(self, name) for name in HYPER_PARAMETERS if getattr(self, name) is not None}
        preset: Mapping[str, int] = {} if self.size is None else MODEL_SIZES[self.size]  # type: ignore[assignment]
        return {**preset, **own}

    def coordinates(self, tokens: int) -> dict[str, Scalar]:
        """Return the coordinates that spell out `size`, and leave out what is as without it in sequences of so many
        tokens."""
        shape = self.shape()
        key_heads = None if self.num_kv_heads == shape["num_heads"] else self.num_kv_heads
        window, documents = self.masks(tokens)
        few = {"num_kv_heads": key_heads, "window": window, **({"document_lengths": None} if documents is None else {})}
        return {f"model.{name}": value for name, value in {**shape, **few}.items()}

    def masks(self, tokens: int) -> tuple[int | None, list[int] | None]:
        """Return the window and the documents, None where they hide nothing in sequences of so many tokens."""
        return masks_with_effect(self.window, self.document_lengths, tokens)

    def check_documents(self, context_length: int) -> None:
        """Check that the documents fill a spec's sequences; for its model validator."""
        check_documents(self.document_lengths, "model/document_lengths", context_length, "context_length")

    def label(self) -> str:
        """Return the name that tables show: the preset with these hyper-parameters, else the hyper-parameters."""
        shape = self.shape()
        known = next((size for size, preset in MODEL_SIZES.items() if dict(preset) == shape), None)
        return known or f"d{shape['d_model']}-f{shape['d_ff']}-l{shape['num_layers']}-h{shape['num_heads']}"


class TrainingSpec(SpecBase):
    """A training step of one model at one batch size and context length, or a part of one."""

    model: ModelSpec = ModelSpec(size="small")
    code: Annotated[CodeSpec | None, Uploaded("model")] = None
    """A model class of your own in place of `model.name`, which takes the sizes of `model` as TransformerLM does. Only
    workers started with --allow-code run it."""
    step_code: Annotated[CodeSpec | None, Uploaded("step")] = None
    """A function of your own that makes the whole step: make_step(device, **arguments) returns a function that does
    one. Model, batch, mode, compiler, attention and optimizer are then those of the code, and the fields for them have
    no effect; `precision` says for which rates MFU and ceiling are. Only workers started with --allow-code run it."""
    arguments: Arguments = Field(default={})
    """With `step_code`: the arguments of the function, by name."""
    batch_size: int = Field(default=BATCH_SIZE, ge=1, le=65_536)
    """Sequences per step; with `accumulation_steps`, per micro-batch."""
    accumulation_steps: int = Field(default=1, ge=1, le=65_536)
    """Micro-batches of `batch_size` sequences per step, whose gradients are added up; more than 1 needs a mode with a
    backward pass."""
    context_length: int = Field(default=256, ge=1, le=1_048_576)
    """Tokens per sequence; in mode `generate`, of the prompt."""
    mode: Literal["forward", "forward_backward", "train_step", "generate"] = "train_step"
    """`forward` keeps no gradients; `train_step` adds the optimizer; `generate` times prefill and decoding."""
    precision: Precision = "fp32"
    """`bf16` and `fp16` by autocast, `fp16` with gradient scaling; `tf32` needs a GPU. `fp8` is `bf16` with the linear
    layers of `fp8_filter` in 8 bits, by torchao; on a CPU it is emulated: right, and slow."""
    fp8_recipe: Fp8Recipe = "tensorwise"
    """With precision fp8, what shares a scale: `tensorwise` a whole tensor, `rowwise` a row; `rowwise_with_gw_hp`
    computes gradients of weights in bf16."""
    fp8_filter: Annotated[list[LayerPattern], Field(min_length=1, max_length=100)] = Field(default=["auto"])
    """With precision fp8, the linear layers that compute in it: `auto` where it is estimated to pay, `all`, or patterns
    of their names ("layers.*.ffn.*"). `auto` leaves those outside the blocks in bf16."""
    parameter_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of parameters and gradients, and of the optimizer's state unless `master_weights` is set."""
    compile: bool = False
    """Run the model through torch.compile."""
    compile_scope: Literal["blocks", "model"] = "blocks"
    """With `compile`: `blocks` compiles one transformer block for all of them; `model` compiles the whole model, which
    takes many times longer. For `blocks`, the model must expose its blocks."""
    cuda_graph: bool = False
    """Capture the whole step in one CUDA graph and replay that, so that the host launches once for each step."""
    attention: Annotated[Name, Named("attention")] = "eager"
    """Attention implementation, as a worker registers it."""
    attention_code: Annotated[CodeSpec | None, Uploaded("attention")] = None
    """A function of your own in place of `attention`: (q, k, v, is_causal) → output. Only workers started with
    --allow-code run it."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass, which saves memory and takes more time."""
    checkpoint_scope: Literal["block", "selective"] = "block"
    """With `activation_checkpointing`, what is recomputed: `block`: blocks from their inputs. `selective`: in all
    blocks what costs memory traffic only (norms, SwiGLU's product), in some also the products of the feed-forward
    layer's hidden layer, and attention in none."""
    checkpoint_layers: int | None = Field(default=None, ge=0, le=1024)
    """With `activation_checkpointing`: number of blocks, from the first on, that are recomputed or, with `selective`,
    recompute their feed-forward layer's products; null: all."""
    checkpoint_blocks: int = Field(default=1, ge=1, le=1024)
    """With `checkpoint_scope` block: blocks in a row that are recomputed together, from the first one's input."""
    fused_linear_cross_entropy: bool = False
    """Compute output layer and loss together and chunk by chunk, with the gradients in the forward pass, so that the
    full logits never exist. The model must take `targets`."""
    fused: list[Fused] = Field(default=[], max_length=3)
    """Parts of the model that Triton kernels compute instead of PyTorch's operations, on a GPU; `linear_cross_entropy`
    is `fused_linear_cross_entropy` with a kernel. The model must take `fused`."""
    optimizer: Literal["adamw", "torch_adamw", "torch_fused_adamw", "triton_adamw"] = "adamw"
    """`train_step` only: `adamw` is written out in PyTorch, one parameter at a time; `triton_adamw` updates each in one
    Triton kernel, on a GPU; the others are torch's."""
    master_weights: bool = False
    """`train_step` only, with `parameter_dtype` bf16: the optimizer, `adamw` or `triton_adamw`, keeps a
    float32 copy of each parameter and float32 moments, so that no small update is rounded away."""
    gradient_clip_norm: float | None = Field(default=None, gt=0, le=1e9)
    """`train_step` only: clip gradients to this global L2 norm, inside the optimizer's time; null: no clipping."""
    new_tokens: int = Field(default=32, ge=2, le=1_048_576)
    """`generate` only: tokens to generate after the prompt."""
    warmup_steps: WarmupSteps = None
    """Steps before measuring starts; null: until their times are steady, at least 5."""
    measure_steps: int | None = Field(default=None, ge=1, le=1_000_000)
    """Steps measured; null: 10, and on a CPU as many as take about a second, 10 to 1000."""
    device: Device = "auto"
    """`auto` takes a GPU where the worker has one."""
    seed: Seed = 0
    """Seed of the weights and the random batches."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        size: {"model": {"size": size}, "batch_size": BATCH_SIZE} for size in MODEL_SIZES
    }
    added: ClassVar[Mapping[str, Scalar]] = {
        **SpecBase.added,
        "checkpoint_blocks": 1,
        "checkpoint_scope": "block",
        "fused_linear_cross_entropy": False,
        "master_weights": False,
    }
    labels: ClassVar[dict[str, tuple[str, ...]]] = {
        "model": (*(f"model.{name}" for name in HYPER_PARAMETERS), *names("code"), *names("step_code")),
        "attention": names("attention_code"),
    }
    table_rows: ClassVar[tuple[str, ...]] = ("model", "context_length")

    @field_validator("fp8_filter", mode="before")
    @classmethod
    def _one_pattern(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("fp8_filter")
    @classmethod
    def _patterns_in_order(cls, value: list[str]) -> list[str]:
        return sorted(value)

    @model_validator(mode="after")
    def _step_goes_alone(self) -> Self:
        if self.step_code is None:
            if self.arguments:
                raise field_error("arguments", "are those of a step of your own: choose step_code, or leave them out")
            return self
        if "device" in self.arguments:
            raise field_error("arguments/device", "the function gets the job's device: set the field device instead")
        if self.precision == "fp8":
            raise field_error(
                "precision", "step_code converts its own layers, and MFU is by the products it computes: bf16"
            )
        for field, cure in THE_STEPS_OWN.items():
            if getattr(self, field):
                raise field_error(field, f"your own step (step_code, --step) does this in its own way: {cure}")
        return self

    @model_validator(mode="after")
    def _fields_go_together(self) -> Self:
        if self.device == "cpu" and self.precision == "tf32":
            raise field_error("precision", "tf32 is a GPU format: choose fp32 or bf16, or device cuda")
        if self.step_code is not None:
            return self
        if self.parameter_dtype == "bf16" and self.precision not in IN_BF16:
            raise field_error("parameter_dtype", "parameters in bf16 need precision bf16 or fp8")
        if self.precision == "fp8":
            self._check_fp8()
        if self.master_weights and self.mode == "train_step":
            check_master_weights(self.parameter_dtype, self.optimizer)
        if self.accumulation_steps > 1 and self.mode not in WITH_BACKWARD:
            raise field_error(
                "accumulation_steps",
                f"mode {self.mode} has no gradients to accumulate: leave it out, or choose train_step",
            )
        if self.cuda_graph:
            self._check_cuda_graph()
        self._check_memory_savers()
        self._check_fused()
        self.model.check_documents(self.context_length)
        if self.model.document_lengths is not None and self.mode == "generate":
            raise field_error(
                "model/document_lengths", "a prompt is one document: leave them out, or choose another mode"
            )
        for field, name, default in (
            ("code", self.model.name, type(self.model).model_fields["name"].default),
            ("attention_code", self.attention, type(self).model_fields["attention"].default),
        ):
            if getattr(self, field) is not None and name != default:
                raise field_error(field, f"replaces {name!r}; give only one of them")
        return self

    def _check_fp8(self) -> None:
        if self.mode == "generate":
            raise field_error("precision", "fp8 is for training: choose bf16, or another mode")
        if len(self.fp8_filter) > 1 and (alone := {"auto", "all"} & {*self.fp8_filter}):
            raise field_error("fp8_filter", f"{min(alone)!r} goes alone: leave it out, or the patterns")
        if len(set(self.fp8_filter)) < len(self.fp8_filter):
            raise field_error("fp8_filter", "one of them is there twice")
        tokens = self.batch_size * self.context_length
        if self.mode in WITH_BACKWARD and tokens % FP8_MULTIPLE:
            raise field_error(
                "context_length",
                f"gradients of weights sum over batch_size × context_length = {tokens} tokens, and fp8 takes "
                f"multiples of {FP8_MULTIPLE}: choose another length",
            )

    def _check_cuda_graph(self) -> None:
        if self.device == "cpu":
            raise field_error("cuda_graph", "a CPU has no CUDA graphs: leave it out, or choose device cuda")
        if self.mode == "generate":
            raise field_error("cuda_graph", "generation's cache grows with each token, and a graph repeats one step")
        if self.mode == "train_step" and self.precision == "fp16" and self.optimizer != "torch_fused_adamw":
            raise field_error(
                "optimizer",
                "with fp16, each step is skipped if a gradient overflowed, and in a CUDA graph only torch_fused_adamw "
                "can decide that on the GPU: choose it, or precision bf16",
            )

    def _check_memory_savers(self) -> None:
        num_layers = self.model.shape()["num_layers"]
        if self.checkpoint_layers is not None and self.checkpoint_layers > num_layers:
            raise field_error("checkpoint_layers", f"the model has {num_layers} layers: choose that many at most")
        recomputed = num_layers if self.checkpoint_layers is None else self.checkpoint_layers
        if self._has_blocks and self.checkpoint_blocks > recomputed:
            raise field_error("checkpoint_blocks", f"{recomputed} blocks are recomputed: choose that many at most")
        if self.fused_linear_cross_entropy and self.mode == "generate":
            raise field_error(
                "fused_linear_cross_entropy",
                "mode generate needs logits and no loss: leave it out, or choose another mode",
            )

    def _check_fused(self) -> None:
        if self.fused and self.device == "cpu":
            raise field_error("fused", "Triton has no kernels for a CPU: leave it out, or choose device cuda")
        if self.updates_by_triton and self.device == "cpu":
            raise field_error("optimizer", "Triton has no kernels for a CPU: choose adamw, or device cuda")
        if twice := next((name for name in self.fused if self.fused.count(name) > 1), None):
            raise field_error("fused", f"{twice!r} is there twice")
        if "linear_cross_entropy" not in self.fused:
            return
        if self.mode == "generate":
            raise field_error(
                "fused", "mode generate has no loss: leave linear_cross_entropy out, or choose another mode"
            )
        if self.fused_linear_cross_entropy:
            raise field_error(
                "fused_linear_cross_entropy",
                "fused has linear_cross_entropy, which does the same: leave one of them out",
            )

    @property
    def _has_blocks(self) -> bool:
        is_on = self.activation_checkpointing and self.mode in WITH_BACKWARD and self.checkpoint_layers != 0
        return is_on and self.checkpoint_scope == "block"

    @property
    def longest(self) -> int:
        """Tokens of a sequence, with those that mode `generate` adds."""
        return self.context_length + (self.new_tokens if self.mode == "generate" else 0)

    def sampling(self) -> dict[str, Any]:
        """Return how mode `generate` draws tokens: arguments of workers.model.steps.GenerateStep."""
        return {}

    @property
    def updates_by_triton(self) -> bool:
        """True if a Triton kernel updates the parameters."""
        return self.mode == "train_step" and self.optimizer == "triton_adamw"

    @property
    def model_has_loss(self) -> bool:
        """True if the model computes the loss itself."""
        return self.fused_linear_cross_entropy or "linear_cross_entropy" in self.fused

    def resources(self) -> Resources:
        needs_gpu = self.step_code is None and (self.cuda_graph or self.fused or self.updates_by_triton)
        return Resources(device_type="cuda" if needs_gpu else self.device, devices=1)

    def normalised(self, identity: dict[str, Scalar]) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        """Spell out the model's preset, and set fields that the mode does not use to null."""
        del identity["model.size"]
        identity |= self.model.coordinates(self.longest)
        identity = coordinates(identity, "code", self.code)
        identity = coordinates(identity, "attention_code", self.attention_code)
        identity = coordinates(identity, "step_code", self.step_code)
        if self.precision != "fp8":
            identity |= {"fp8_recipe": None, "fp8_filter": None}
        if self.step_code is not None:
            idle = [name for name in identity if name.partition(".")[0] in OF_OUR_STEP]
            return {**identity, **dict.fromkeys(idle)}, {"model": self.label()}
        if self.code is not None:
            identity["model.name"] = None
        if self.attention_code is not None:
            identity["attention"] = self.attention_code.label()
        if not self.compile:
            identity["compile_scope"] = None
        identity["fused"] = "/".join(sorted(self.fused)) or None
        if self.mode not in WITH_BACKWARD:
            identity["activation_checkpointing"] = None
        if self.mode not in WITH_BACKWARD or not self.activation_checkpointing:
            identity |= {"checkpoint_scope": None, "checkpoint_layers": None, "checkpoint_blocks": None}
        elif self.checkpoint_layers == self.model.shape()["num_layers"]:
            identity["checkpoint_layers"] = None  # which means all of them
        if not self._has_blocks:
            identity["checkpoint_blocks"] = None
        if self.mode != "train_step":
            identity |= {"optimizer": None, "master_weights": None, "gradient_clip_norm": None}
        if self.mode != "generate":
            identity["new_tokens"] = None
        return identity, {"model": self.label()}

    def idle_fields(self) -> Collection[str]:
        return () if self.step_code is None else OF_OUR_STEP

    def step_phases(self) -> tuple[str, ...]:
        """Return the phases of a step, in order; a step of the user's own names its phases when it runs."""
        if self.step_code is not None:
            return ()
        return ((ACCUMULATION,) if self.accumulation_steps > 1 else ()) + PHASES[self.mode]

    def label(self) -> str:
        """Return the model's name for people, with that of uploaded code."""
        if self.step_code is not None:
            return self.step_code.label()
        return self.model.label() if self.code is None else f"{self.code.label()} {self.model.label()}"

    def title(self, *more: str) -> str:
        """Return the name of the job's work for progress lines and checks: the model, `more`, what is done to it; of a
        step of the user's own, its arguments."""
        if self.step_code is not None:
            return ", ".join([self.label(), *(f"{name} {value}" for name, value in self.arguments.items())])
        done = ["compiled"] if self.compile else []
        if self.fused:
            done.append(f"fused {'/'.join(sorted(self.fused))}")
        if self.activation_checkpointing and self.mode in WITH_BACKWARD:
            layers = "" if self.checkpoint_layers is None else f" in {self.checkpoint_layers} layers"
            of = (
                f" of {self.checkpoint_blocks}"
                if self.checkpoint_scope == "block" and self.checkpoint_blocks > 1
                else ""
            )
            done.append(f"{self.checkpoint_scope} checkpoints{of}{layers}")
        return ", ".join([self.label(), *more, *done])
