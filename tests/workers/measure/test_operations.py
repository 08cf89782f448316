import pytest
import torch
from torch import Tensor

from workers.measure.memory import OutOfMemory
from workers.measure.operations import Operation, measure_memory, time_passes
from workers.measure.stopwatch import HostStopwatch


class Calls:
    """A function that notes how it is called."""

    def __init__(self) -> None:
        self.forward: list[bool] = []
        self.backward = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.forward.append(torch.is_grad_enabled())
        out = 2 * x
        if out.requires_grad:
            out.register_hook(self._count)
        return out

    def _count(self, gradient: Tensor) -> Tensor:
        self.backward += 1
        return gradient


def test_each_pass_is_timed_by_itself() -> None:
    calls = Calls()
    x = torch.ones(3, requires_grad=True)
    times = time_passes(
        Operation(calls, (x,), torch.ones(3)),
        HostStopwatch(),
        ("forward", "backward", "forward_backward"),
        warmup=1,
        calls=4,
    )
    assert {name: len(timing.samples) for name, timing in times.items()} == {
        "forward": 4,
        "backward": 4,
        "forward_backward": 4,
    }
    assert calls.forward == 15 * [True]
    assert calls.backward == 10
    assert x.grad is None, "gradients do not accumulate"


def test_running_out_of_memory_names_the_pass() -> None:
    def fail(_x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    operation = Operation(fail, (torch.ones(3),), None)
    with pytest.raises(OutOfMemory, match="out of memory in forward: CUDA out of memory"):
        time_passes(operation, HostStopwatch(), ["forward"], warmup=0, calls=1)
    with pytest.raises(OutOfMemory, match="out of memory in the memory's measurement"):
        measure_memory(operation, torch.device("cpu"))


def test_memory_between_passes_is_unknown_on_a_cpu() -> None:
    x = torch.ones(8 << 20, requires_grad=True)
    memory = measure_memory(Operation(lambda x: x.exp().sum(), (x,), torch.tensor(1.0)), torch.device("cpu"))
    assert memory.before_backward_mib is None
    assert memory.reserved_mib is None
    assert memory.peak_mib is None or memory.peak_mib >= 0


@pytest.mark.gpu
def test_on_a_gpu_memory_is_the_operations_own() -> None:
    device = torch.device("cuda")
    _others = torch.empty(64 << 20, device=device)
    x = torch.randn(4 << 20, device=device, requires_grad=True)  # 16 MiB
    operation = Operation(lambda x: x.exp(), (x,), torch.ones_like(x))
    memory = measure_memory(operation, device)
    # Input, its gradient's seed, and the output, which exp keeps; then the gradient.
    assert memory.before_backward_mib == pytest.approx(48, abs=1)
    assert memory.peak_mib == pytest.approx(64, abs=1)
    assert memory.reserved_mib is not None
    assert memory.peak_mib <= memory.reserved_mib <= memory.peak_mib + 64, "taken from the device in blocks"
