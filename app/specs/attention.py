"""`attention`: implementations of attention beside each other, over sizes and data types."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from app.presets import ATTENTION_PRESETS
from app.specs.base import Device, Resources, Scalar, SpecBase, check_lists, check_number_of_cells, field_error, listed

BLOCK_SIZES = {"cpu_flash": ("br", "bc"), "cpu_blocked": ("br",)}
"""Implementations that take block sizes, and which."""

Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[\w.-]+$")]
BlockSize = Annotated[int, Field(ge=1, le=65_536)]


@dataclass(frozen=True)
class AttentionCell:
    """One implementation at one size. The block sizes are None where the implementation takes none."""

    implementation: str
    dtype: str
    causal: bool
    head_dim: int
    sequence_length: int
    br: int | None = None
    bc: int | None = None

    def coordinates(self) -> dict[str, Scalar]:
        """Everything that tells cells of one job apart."""
        return asdict(self)

    @property
    def title(self) -> str:
        """For progress lines."""
        blocks = [f"{name} {size}" for name, size in (("br", self.br), ("bc", self.bc)) if size is not None]
        sizes = f"length {self.sequence_length}, head dimension {self.head_dim}"
        return ", ".join([self.implementation, self.dtype, sizes, "causal" if self.causal else "no mask", *blocks])


class AttentionSpec(SpecBase):
    """Time attention alone: every implementation at every size, checked against one oracle."""

    kind: Literal["attention"] = "attention"
    implementations: list[Name] = Field(default=["eager", "sdpa_flash"], min_length=1, max_length=100)
    """Attention implementations, as workers register them."""
    head_dims: list[Annotated[int, Field(ge=1, le=1024)]] = Field(default=[64], min_length=1, max_length=100)
    """Head dimensions."""
    sequence_lengths: list[Annotated[int, Field(ge=1, le=1_048_576)]] = Field(
        default=[256, 1024], min_length=1, max_length=100
    )
    """Sequence lengths, of queries and keys alike, in tokens."""
    dtypes: list[Literal["fp32", "tf32", "bf16", "fp16"]] = Field(default=["bf16"], min_length=1, max_length=4)
    """Data types of the inputs; `tf32` is fp32 inputs whose products may be rounded to tf32 (a GPU format)."""
    causal: list[bool] = Field(default=[True], min_length=1, max_length=2)
    """Whether query i sees keys 0 … i only."""
    batch_size: int = Field(default=8, ge=1, le=65_536)
    """Sequences."""
    num_heads: int = Field(default=1, ge=1, le=1024)
    """Attention heads."""
    br: list[BlockSize] = Field(default=[64], min_length=1, max_length=100)
    """Queries per tile, for `cpu_flash`; block size of the products of `cpu_blocked`."""
    bc: list[BlockSize] = Field(default=[128], min_length=1, max_length=100)
    """Keys per tile, for `cpu_flash`."""
    autotune: bool = False
    """Before a cell is measured, search for what is fastest for it on this device, where its implementation has
    something to choose (`triton`: sizes of tiles; minutes per cell). Otherwise what was measured before is taken."""
    mode: Literal["forward", "forward_backward"] = "forward_backward"
    """`forward` keeps no gradients; `forward_backward` times each pass, and both."""
    warmup_steps: int = Field(default=5, ge=0, le=10_000)
    """Calls of each pass before measuring starts."""
    measure_steps: int = Field(default=20, ge=1, le=10_000)
    """Calls of each pass measured."""
    device: Device = "auto"
    """`auto` takes a GPU where the worker has one."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Seed of the random inputs."""

    presets: ClassVar[dict[str, dict[str, Any]]] = ATTENTION_PRESETS
    table_rows: ClassVar[tuple[str, ...]] = ("implementation", "dtype", "causal", "head_dim", "sequence_length")
    table_columns: ClassVar[tuple[str, ...]] = (
        "forward_ms",
        "backward_ms",
        "forward_backward_ms",
        "tflops",
        "forward_tflops",
        "backward_tflops",
        "forward_backward_tflops",
        "ceiling_percent",
        "forward_ceiling_percent",
        "backward_ceiling_percent",
        "forward_backward_ceiling_percent",
        "memory_before_backward_mib",
        "peak_memory_mib",
        "intermediates_mib",
        "working_memory_mib",
        "output_error",
        "gradient_error",
    )

    @model_validator(mode="after")
    def _lists_make_sense(self) -> Self:
        check_lists(self, ("implementations", "head_dims", "sequence_lengths", "dtypes", "causal", "br", "bc"))
        if self.device == "cpu" and "tf32" in self.dtypes:
            raise field_error("dtypes", "tf32 is a GPU format: leave it out, or choose device cuda")
        check_number_of_cells(self._cells(), "implementations")
        return self

    def cells(self) -> list[AttentionCell]:
        """What is measured, in this order: those that share an oracle follow each other, the longest come last."""
        return list(self._cells())

    def _cells(self) -> Iterator[AttentionCell]:
        sizes = itertools.product(self.dtypes, self.causal, self.head_dims, sorted(self.sequence_lengths))
        for (dtype, causal, head_dim, length), name in itertools.product(sizes, self.implementations):
            taken = BLOCK_SIZES.get(name, ())
            for br, bc in itertools.product(self.br if "br" in taken else [None], self.bc if "bc" in taken else [None]):
                yield AttentionCell(name, dtype, causal, head_dim, length, br, bc)

    def resources(self) -> Resources:
        return Resources(device_type=self.device, devices=1)

    def requirements(self) -> frozenset[str]:
        return frozenset(f"attention:{name}" for name in self.implementations)

    def common(self) -> dict[str, Scalar]:
        """Coordinates that all cells share."""
        return {
            "batch_size": self.batch_size,
            "num_heads": self.num_heads,
            "mode": self.mode,
            "warmup_steps": self.warmup_steps,
            "autotune": self.autotune,
        }

    def coordinates(self) -> dict[str, Scalar]:
        """The whole grid at one glance; a measurement has its cell's instead."""
        return {
            "implementation": listed(self.implementations),
            "dtype": listed(self.dtypes),
            "causal": listed(self.causal),
            "head_dim": listed(self.head_dims),
            "sequence_length": listed(self.sequence_lengths),
            **self.common(),
        }
