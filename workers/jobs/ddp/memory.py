"""The memory of one rank at certain moments of a step."""

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from parallel.sharded_gradient import ShardedPart
from workers.jobs.ddp.strategies import Trained
from workers.measure.allocations.categories import tensors_in
from workers.measure.memory import MIB, CudaMemory, MemoryMeter
from workers.measure.timing import Observer


@dataclass
class Memory:
    """Memory of one rank in MiB at three moments (see `memory_now`), and its parts; None if it is unknown."""

    after_init_mib: float | None = None
    after_init_peak_mib: float | None = None
    before_optimizer_mib: float | None = None
    before_optimizer_peak_mib: float | None = None
    after_optimizer_mib: float | None = None
    after_optimizer_peak_mib: float | None = None
    parameters_mib: float | None = None
    gradients_mib: float | None = None
    optimizer_state_mib: float | None = None


class MemoryMarks(Observer):
    """An observer that records the memory just before the optimizer's phase and at the step's end."""

    def __init__(self, trained: Trained, memory: Memory, meter: MemoryMeter) -> None:
        self._trained, self._memory, self._meter = trained, memory, meter

    def step_begins(self) -> None:
        self._meter.reset()

    def phase_begins(self, name: str) -> None:
        if name == "optimizer":
            self._before()

    def step_ends(self) -> None:
        if self._memory.parameters_mib is None:  # no phase is called so
            self._before()
            if self._trained.own is not None:  # it may have updated already, and freed its gradients
                self._memory.gradients_mib = self._memory.gradients_mib or None
                self._memory.before_optimizer_mib = self._memory.before_optimizer_peak_mib = None
        if not self._trained.optimizers:
            return
        self._memory.optimizer_state_mib = state_bytes(self._trained.optimizers) / MIB
        self._memory.after_optimizer_mib, self._memory.after_optimizer_peak_mib = self._now()

    def _before(self) -> None:
        parameters = self._trained.parameters
        self._memory.parameters_mib = sum(map(local_bytes, parameters)) / MIB
        self._memory.gradients_mib = sum(local_bytes(parameter.grad) for parameter in parameters) / MIB
        self._memory.before_optimizer_mib, self._memory.before_optimizer_peak_mib = self._now()

    def _now(self) -> tuple[float | None, float | None]:
        """Return the memory, and the peak since the last call."""
        found = memory_now(self._meter)
        self._meter.reset()
        return found


def memory_now(meter: MemoryMeter) -> tuple[float | None, float | None]:
    """Return the memory of this rank's tensors now, and its peak since the meter's reset, in MiB.

    On a GPU torch's allocator knows both. On a CPU nobody knows the peak, and the process keeps what is freed, so what
    counts there are the storages of the tensors that live.
    """
    if isinstance(meter, CudaMemory):
        return meter.now_mib(), meter.peak_mib()[0]
    return live_bytes() / MIB, None


def live_bytes() -> int:
    """Return the bytes of the storages on the CPU of all tensors that Python can reach, and of their gradients. Objects
    that `gc.freeze` has hidden do not count."""
    # Others wrap such tensors, as DTensor does, or have no storage, as FakeTensor.
    found = [one for one in gc.get_objects() if type(one) in (Tensor, torch.nn.Parameter, ShardedPart)]
    tensors = [*found, *(one.grad for one in found if one.is_leaf and one.grad is not None)]
    strided = (one for one in tensors if one.layout == torch.strided and one.device.type == "cpu")
    storages = (one.untyped_storage() for one in strided)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def local_bytes(tensor: Any) -> int:
    """Return the bytes that a tensor takes on this rank; 0 for other values."""
    local = getattr(tensor, "to_local", None)
    if local is not None:
        tensor = local()
    return int(tensor.nbytes) if isinstance(tensor, Tensor) else 0


def state_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of the state of optimizers on this rank. Those that wrap others may have the others' state."""
    # ZeroRedundancyOptimizer has this rank's optimizer inside.
    found = [one for optimizer in optimizers for one in tensors_in(getattr(optimizer, "optim", optimizer).state)]
    return sum(map(local_bytes, {id(one): one for one in found}.values()))
