"""`ceiling`: what a device really reaches, copying memory and multiplying matrices; percentages are of that."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from app.specs.base import Device, Resources, Scalar, SpecBase, check_lists, listed


class CeilingSpec(SpecBase):
    """Measure this device's copy bandwidth and matrix-product rates; the worker's host remembers them."""

    kind: Literal["ceiling"] = "ceiling"
    dtypes: list[Literal["fp32", "tf32", "bf16", "fp16"]] = Field(
        default=["fp32", "tf32", "bf16", "fp16"], min_length=1, max_length=4
    )
    """Data types of the products; `tf32` is fp32 rounded to tf32, which only GPUs have."""
    matrix_size: int | None = Field(default=None, ge=16, le=65_536)
    """Rows and columns of the square matrices; null: as large as the device needs to reach its rate, and the
    only ones whose rates the host remembers."""
    copy_mib: int | None = Field(default=None, ge=1, le=65_536)
    """Size of the tensor that is copied, in MiB; null: many times the device's cache, and the only one whose rate
    the host remembers."""
    warmup_steps: int = Field(default=5, ge=0, le=10_000)
    """Calls before measuring starts."""
    measure_steps: int = Field(default=20, ge=1, le=10_000)
    """Calls measured."""
    device: Device = "auto"
    """`auto` takes a GPU where the worker has one."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Seed of the random data."""

    table_rows: ClassVar[tuple[str, ...]] = ("operation", "dtype")
    table_columns: ClassVar[tuple[str, ...]] = ("copy_gb_per_s", "tflops")

    @model_validator(mode="after")
    def _lists_make_sense(self) -> Self:
        check_lists(self, ("dtypes",))
        return self

    def resources(self) -> Resources:
        return Resources(device_type=self.device, devices=1)

    def coordinates(self) -> dict[str, Scalar]:
        """The whole job at one glance; a measurement has its own operation and type instead."""
        return {"operation": "copy, matrix product", "dtype": listed(self.dtypes), "warmup_steps": self.warmup_steps}
