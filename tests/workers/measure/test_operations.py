import pytest
import torch
from torch import Tensor

from workers.measure.memory import OutOfMemory
from workers.measure.operations import Operation, measure_memory, time_passes
from workers.measure.stopwatch import HostStopwatch


def test_running_out_of_memory_names_the_pass() -> None:
    def fail(_x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    operation = Operation(fail, (torch.ones(3),), None)
    with pytest.raises(OutOfMemory, match="out of memory in forward: CUDA out of memory"):
        time_passes(operation, HostStopwatch(), ["forward"], warmup=0, calls=1)
    with pytest.raises(OutOfMemory, match="out of memory in the memory's measurement"):
        measure_memory(operation, torch.device("cpu"))


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
    assert memory.peak_mib <= memory.reserved_mib <= memory.peak_mib + 64, "taken from the device in blocks"
