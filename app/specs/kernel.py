"""`kernel`: compares kernels other than attention with the plain PyTorch that they replace."""

import itertools
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from app.presets import BATCH_SIZE
from app.specs._base import Cell, Device, Name, Named, Seed, WarmupSteps, check_number_of_cells, field_error
from app.specs._code import Arguments, CodeSpec, ImplementationsSpec, Uploaded, coordinates, names
from app.specs._identity import Scalar
from app.specs._training import HYPER_PARAMETERS, Fp8Recipe, ModelSpec

BY_MODEL_SIZE = {
    "rms_norm": [1600, 4096, 8192],
    "swiglu": [6400, 11_008, 28_672],
    "rope": [25, 64, 128],
    "linear_cross_entropy": [1600, 4096, 8192],
}
"""The columns of kernels in models of width 1600, 4096 and 8192."""
Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
LINEAR = "linear"
"""The operation that is no grid."""
OF_MODEL = tuple(f"model.{name}" for name in HYPER_PARAMETERS)


@dataclass(frozen=True)
class PlanCell(Cell):
    """All linear layers of a step."""

    @property
    def title(self) -> str:
        return "linear layers"


@dataclass(frozen=True)
class KernelCell(Cell):
    """One implementation of a kernel at one size."""

    implementation: str
    dtype: str
    rows: int
    columns: int

    @property
    def title(self) -> str:
        return f"{self.implementation}, {self.dtype}, {self.rows} × {self.columns}"


class KernelSpec(ImplementationsSpec):
    """Time a kernel and its plain PyTorch over a grid of sizes."""

    kind: Literal["kernel"] = "kernel"
    kernel: Annotated[Name, Named("kernel")] = "weighted_sum"
    """The operation, as workers register it. `weighted_sum`: x (rows, columns) times weight (columns), summed over
    columns. `rms_norm`: of x (rows, columns) over columns, times weight (columns). `swiglu`: silu(gate) times up, both
    (rows, columns). `rope`: rotary embedding of x (rows, columns, 64), whose rows are positions and columns are heads.
    `linear_cross_entropy`: mean cross-entropy of hidden (rows, columns) times an output layer's weight with a
    vocabulary of 10 000. `linear` has no grid: it measures all linear layers of a training step, a `model`'s or your
    own (`step_code`), in bf16 and in FP8, and which of them pay."""
    implementations: list[Name] = Field(default=["torch", "triton"], max_length=100)
    """`torch` is the plain PyTorch, `compiled` the same by torch.compile, `triton` our kernel, on a GPU; `swiglu`
    has none. `liger` is Liger-Kernel's, where it is installed: for `rms_norm`, `swiglu` (mode `forward`)
    and `linear_cross_entropy`, which also has `chunked`: plain PyTorch without the full logits. Empty with `code`: none
    beside it."""
    code: Annotated[CodeSpec | None, Uploaded("kernel")] = None
    """A function of your own, measured and checked beside them: it takes the operation's inputs and returns its output,
    which autograd can differentiate unless the mode is `forward`. Only workers started with --allow-code run it."""
    rows: list[Size] = Field(default=[4096], min_length=1, max_length=100)
    """Rows of the input."""
    columns: list[Size] = Field(default=[1024], min_length=1, max_length=100)
    """Columns of the input."""
    dtypes: list[Literal["fp32", "bf16", "fp16"]] = Field(default=["fp32"], min_length=1, max_length=3)
    """Data types of the inputs."""
    model: ModelSpec | None = None
    """`linear` only: the model whose layers are planned, for a step of `batch_size` sequences of `context_length`."""
    step_code: Annotated[CodeSpec | None, Uploaded("step")] = None
    """`linear` only, in place of `model`: a function of your own that makes a training step, as `benchmark` takes it.
    One step runs, uncompiled, to find its torch.nn.Linear. Only workers started with --allow-code run it."""
    arguments: Arguments = Field(default={})
    """With `step_code`: the arguments of the function, by name."""
    batch_size: int = Field(default=BATCH_SIZE, ge=1, le=65_536)
    """With `model`: sequences of a micro-batch."""
    context_length: int = Field(default=256, ge=1, le=1_048_576)
    """With `model`: tokens of a sequence."""
    recipes: list[Fp8Recipe] = Field(
        default=["tensorwise", "rowwise", "rowwise_with_gw_hp"], min_length=1, max_length=3
    )
    """With `linear`: the recipes of FP8 that are measured beside bf16."""
    parameter_dtype: Literal["fp32", "bf16"] = "fp32"
    """With `linear`: data type of the weights."""
    mode: Literal["forward", "forward_backward"] = "forward_backward"
    """`forward` keeps no gradients; `forward_backward` times each pass, and both."""
    warmup_steps: WarmupSteps = None
    """Calls of each pass before measuring starts; null: until their times are steady, at least 5."""
    measure_steps: int = Field(default=20, ge=1, le=10_000)
    """Calls of each pass measured."""
    device: Device = "auto"
    """`auto` takes a GPU where the worker has one."""
    seed: Seed = 0
    """Seed of the random inputs."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "weighted_sum": {"rows": [2**power for power in range(10, 18)], "columns": [512, 1000, 1024, 4096]},
        **{
            name: {
                "kernel": name,
                "implementations": ["torch", "compiled", *(["triton"] if name != "swiglu" else [])],
                "rows": [2048, 16_384],
                "columns": columns,
                "dtypes": ["bf16"],
            }
            for name, columns in BY_MODEL_SIZE.items()
        },
    }
    axes: ClassVar[dict[str, str]] = {
        "implementations": "implementation",
        "dtypes": "dtype",
        "rows": "rows",
        "columns": "columns",
    }
    labels: ClassVar[dict[str, tuple[str, ...]]] = {
        "implementation": names("code"),
        "model": (*OF_MODEL, *names("step_code")),
    }
    answers: ClassVar[tuple[str, ...]] = ("plan",)
    first_tables: ClassVar[tuple[str, ...]] = ("plan", "linears")
    table_rows: ClassVar[tuple[str, ...]] = ("kernel", "implementation", "dtype", "rows", "columns")
    table_columns: ClassVar[tuple[str, ...]] = (
        "forward_ms", "backward_ms", "forward_backward_ms", "host_us", "gb_per_s", "ceiling_percent", "peak_memory_mib",
        "bf16_ms", "planned_tensorwise_ms", "planned_rowwise_ms", "planned_rowwise_with_gw_hp_ms",
    )  # fmt: skip

    @model_validator(mode="after")
    def _lists_make_sense(self) -> Self:
        check_number_of_cells(self, "rows")
        self._check_plan()
        return self

    def _check_plan(self) -> None:
        for field in ("model", "step_code"):
            if getattr(self, field) is not None and not self.plans:
                raise field_error(field, "is for kernel linear, which plans its layers: leave it out")
        if self.plans and (self.model is None) == (self.step_code is None):
            raise field_error("model", "kernel linear plans the layers of one step: give model.size, or step_code")
        if self.arguments and self.step_code is None:
            raise field_error("arguments", "are those of a step of your own: choose step_code, or leave them out")
        if self.plans and self.code is not None:
            raise field_error("code", "is measured on matrices of rows and columns: leave it out, or the plan")
        if len(set(self.recipes)) < len(self.recipes):
            raise field_error("recipes", "one of them is there twice")

    @property
    def plans(self) -> bool:
        """True if the job measures all linear layers of a step in FP8, in place of a grid."""
        return self.kernel == LINEAR

    def cells(self) -> list[KernelCell] | list[PlanCell]:
        """Return the cells in the order they run: cells that share an oracle are neighbours."""
        if self.plans:
            return [PlanCell()]
        grid = itertools.product(self.dtypes, sorted(self.rows), sorted(self.columns), self.names())
        return [KernelCell(name, dtype, rows, columns) for dtype, rows, columns, name in grid]

    def number_of_cells(self) -> int:
        if self.plans:
            return 1
        return len(self.dtypes) * len(self.rows) * len(self.columns) * len(self.names())

    def normalised(self, identity: dict[str, Scalar]) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        """Set `code` to null for all implementations but that code, and fields without effect."""
        identity = coordinates(identity, "code", self.code if self.is_code(identity.get("implementation")) else None)
        identity = coordinates(identity, "step_code", self.step_code)
        if self.plans:
            identity["mode"] = None
        else:
            identity |= dict.fromkeys(("recipes", "parameter_dtype"))
        if self.model is None:
            of_model = (*OF_MODEL, "batch_size", "context_length")
            identity["model"] = None if self.step_code is None else self.step_code.label()
            return identity | dict.fromkeys(of_model), {}
        identity.pop("model.size", None)
        return identity | self.model.coordinates(self.context_length), {"model": self.model.label()}

    def overview(self) -> dict[str, Scalar]:
        """Return all coordinates of the job, with the uploaded code among the implementations."""
        if self.plans:
            return dict(self.case(PlanCell()).coordinates)
        return super().overview()
