"""`ceiling`: the rates that a device reaches when it copies memory and multiplies matrices; percentages in other jobs
refer to them."""

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from app.specs._base import Cell, Device, Seed, SpecBase, WarmupSteps, check_lists
from app.specs._identity import Scalar


@dataclass(frozen=True)
class CeilingCell(Cell):
    """The copy, which has no data type, or one matrix product."""

    operation: Literal["copy", "matrix product"]
    dtype: str | None

    @property
    def title(self) -> str:
        return self.operation if self.dtype is None else f"{self.operation}, {self.dtype}"


class CeilingSpec(SpecBase):
    """Measure this device's copy bandwidth and matrix-product rates; the worker's host remembers them."""

    kind: Literal["ceiling"] = "ceiling"
    dtypes: list[Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp8_rowwise"]] = Field(
        default=["fp32", "tf32", "bf16", "fp16"], min_length=1, max_length=6
    )
    """Data types of the products; `tf32` is fp32 rounded to tf32, which only GPUs have. `fp8` has one scale for each
    matrix, `fp8_rowwise` one for each row of the first and column of the second; a CPU only emulates them."""
    matrix_size: int | None = Field(default=None, ge=16, le=65_536)
    """Rows and columns of the square matrices. Null: a fixed size, at which this type of device reaches its rate in the
    data type; the host remembers rates of this size only."""
    copy_mib: int | None = Field(default=None, ge=1, le=65_536)
    """Size of the copied tensor in MiB. Null: a fixed size, many times the cache of this type of device; the host
    remembers the rate of this size only."""
    warmup_steps: WarmupSteps = None
    """Calls before measuring starts; null: until their times are steady, at least 5."""
    measure_steps: int = Field(default=20, ge=1, le=10_000)
    """Calls measured."""
    device: Device = "auto"
    """`auto` takes a GPU where the worker has one."""
    seed: Seed = 0
    """Seed of the random data."""

    axes: ClassVar[dict[str, str]] = {"dtypes": "dtype"}
    table_rows: ClassVar[tuple[str, ...]] = ("operation", "dtype")
    table_columns: ClassVar[tuple[str, ...]] = ("copy_gb_per_s", "tflops")

    @model_validator(mode="after")
    def _lists_make_sense(self) -> Self:
        check_lists(self)
        return self

    def cells(self) -> list[CeilingCell]:
        return [CeilingCell("copy", None), *(CeilingCell("matrix product", dtype) for dtype in self.dtypes)]

    def normalised(self, identity: dict[str, Scalar]) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        """Set fields without effect to null: a copy has no matrices, and a product copies no tensor."""
        other = "matrix_size" if identity.get("operation") == "copy" else "copy_mib"
        return {**identity, other: None}, {}
