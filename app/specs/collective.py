"""`collective`: times of collective operations between processes, over sizes and data types."""

import itertools
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from app.specs._base import (
    Cell,
    Device,
    Resources,
    Seed,
    SpecBase,
    WarmupSteps,
    check_lists,
    check_nodes,
    check_number_of_cells,
    field_error,
)

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_receive"]
Dtype = Literal["fp32", "bf16", "fp16"]

DEVICE_TYPES: dict[str, Literal["cpu", "cuda"]] = {"gloo": "cpu", "nccl": "cuda"}
"""The type of device that each backend's ranks run on."""


def _integral(size: float) -> float:
    """Return 1 for 1.0: they are one size, and have one case and one text everywhere."""
    return int(size) if size == int(size) else size


@dataclass(frozen=True)
class CollectiveCell(Cell):
    """One operation on a tensor of one size and data type."""

    operation: Operation
    dtype: Dtype
    size_mb: float

    @property
    def title(self) -> str:
        return f"{self.operation}, {self.size_mb} MB, {self.dtype}"


class CollectiveSpec(SpecBase):
    """Time collective operations between ranks: latency, skew between ranks, and bandwidth."""

    kind: Literal["collective"] = "collective"
    operations: list[Operation] = Field(
        default=["all_reduce", "all_gather", "reduce_scatter", "broadcast"], min_length=1, max_length=6
    )
    """Operations. Reductions are sums (`all_reduce`, `reduce_scatter`), rank 0 broadcasts, and with `send_receive` each
    rank sends its tensor to the next one while it receives another."""
    size_mb: list[Annotated[float, Field(ge=0.001, le=16_384), AfterValidator(_integral)]] = Field(
        default=[1, 10, 100], min_length=1, max_length=100
    )
    """Sizes of the full tensor in MB of 2**20 bytes: the tensor that every rank reduces, broadcasts or sends, the
    result of an all-gather, and the input of a reduce-scatter or an all-to-all. Rounded down to a multiple of 16 bytes
    per rank."""
    dtypes: list[Dtype] = Field(default=["fp32"], min_length=1, max_length=3)
    """Data types of the tensors."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """`gloo`: the ranks are processes on the CPU. `nccl`: each rank has a GPU of its own."""
    world_size: int = Field(default=2, ge=2, le=64)
    """Ranks; a sweep compares several numbers. With `nccl` the job waits for a host with this many GPUs; with `gloo`
    there may be more ranks than cores, and the verdict says so."""
    nodes: int = Field(default=1, ge=1, le=64)
    """Nodes of a cluster on which the ranks run, as many on each. Several need a worker with `--executor slurm`."""
    warmup_steps: WarmupSteps = None
    """Calls of each cell before measuring starts; null: until their times are steady, at least 5."""
    measure_steps: int = Field(default=20, ge=1, le=10_000)
    """Calls of each cell measured."""
    device: Device = "auto"
    """`auto`: the device that the backend needs, `cpu` for gloo and `cuda` for nccl."""
    seed: Seed = 0
    """Seed of the numbers in the tensors."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "two_gpus": {"backend": "nccl", "world_size": 2, "size_mb": [1, 10, 100, 1024]},
    }
    axes: ClassVar[dict[str, str]] = {"operations": "operation", "dtypes": "dtype", "size_mb": "size_mb"}
    added: ClassVar[dict[str, Any]] = {"nodes": 1}
    table_rows: ClassVar[tuple[str, ...]] = ("operation", "backend", "world_size", "dtype", "size_mb")
    table_columns: ClassVar[tuple[str, ...]] = ("latency_ms", "skew_ms", "algorithm_gb_per_s", "bus_gb_per_s")

    @model_validator(mode="after")
    def _fields_go_together(self) -> Self:
        check_lists(self)
        needed = DEVICE_TYPES[self.backend]
        if self.device not in ("auto", needed):
            other = next(backend for backend, device in DEVICE_TYPES.items() if device == self.device)
            raise field_error(
                "backend",
                f"{self.backend} runs on {needed}, and device is {self.device}: choose {other}, or device {needed}",
            )
        check_nodes(self.nodes, self.world_size)
        check_number_of_cells(self, "size_mb")
        return self

    def cells(self) -> list[CollectiveCell]:
        """Return the cells in the order they run: each operation by itself, the largest size last."""
        grid = itertools.product(self.operations, self.dtypes, sorted(self.size_mb))
        return [CollectiveCell(*cell) for cell in grid]

    def number_of_cells(self) -> int:
        return len(self.operations) * len(self.dtypes) * len(self.size_mb)

    def resources(self) -> Resources:
        devices = self.world_size // self.nodes
        return Resources(device_type=DEVICE_TYPES[self.backend], devices=devices, nodes=self.nodes)
