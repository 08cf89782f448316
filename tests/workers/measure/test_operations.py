import pytest
import torch

from workers.measure.operations import Operation, measure_memory


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
