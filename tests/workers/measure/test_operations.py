from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from workers.measure import operations
from workers.measure.memory import OutOfMemory
from workers.measure.operations import HostStopwatch, Operation, measure_memory, stopwatch, time_passes


def wait(seconds: float) -> Callable[[], None]:
    def busy() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return busy


def test_the_host_times_the_work_and_not_its_preparation() -> None:
    times = HostStopwatch().time(wait(0.001), prepare=wait(0.005), warmup=2, calls=40)
    assert len(times) == 40
    assert 1 <= min(times) < 2  # other processes only ever add to a time


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
    assert {name: len(samples) for name, samples in times.items()} == {
        "forward": 4,
        "backward": 4,
        "forward_backward": 4,
    }
    assert calls.forward == 15 * [True]
    assert calls.backward == 10
    assert x.grad is None, "gradients do not accumulate"


def test_without_a_gradient_of_the_output_nothing_is_kept_for_backward() -> None:
    calls = Calls()
    x = torch.ones(3, requires_grad=True)
    time_passes(Operation(calls, (x,), None), HostStopwatch(), ["forward"], warmup=0, calls=2)
    assert calls.forward == [False, False]


def test_running_out_of_memory_names_the_pass() -> None:
    def fail(_x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    operation = Operation(fail, (torch.ones(3),), None)
    with pytest.raises(OutOfMemory, match="out of memory in forward: CUDA out of memory"):
        time_passes(operation, HostStopwatch(), ["forward"], warmup=0, calls=1)
    with pytest.raises(OutOfMemory, match="out of memory in the memory's measurement"):
        measure_memory(operation, torch.device("cpu"))


def test_a_processor_does_not_tell_what_is_held_between_the_passes() -> None:
    x = torch.ones(8 << 20, requires_grad=True)
    memory = measure_memory(Operation(lambda x: x.exp().sum(), (x,), torch.tensor(1.0)), torch.device("cpu"))
    assert memory.before_backward_mib is None
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


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_the_work_is_timed_and_its_preparation_is_not() -> None:
    device = torch.device("cuda")
    watch = stopwatch(device)
    x = torch.randn(4096, 4096, device=device)
    calls = 2 * operations.CALLS_IN_FLIGHT + 3
    once = watch.time(lambda: _ignore(x @ x), prepare=lambda: None, warmup=3, calls=calls)
    again = watch.time(lambda: _ignore(x @ x), prepare=lambda: _ignore(x @ x @ x), warmup=3, calls=calls)
    assert len(once) == len(again) == calls
    assert sorted(again)[calls // 2] == pytest.approx(sorted(once)[calls // 2], rel=0.2)


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_the_cache_is_cold() -> None:
    device = torch.device("cuda")
    x = torch.randn(4 << 20, device=device)  # 16 MiB: fits into the cache of every data-centre GPU
    large = torch.empty(1 << 30, dtype=torch.uint8, device=device)

    def prepare() -> None:
        large.zero_()  # long enough for the host to be ahead in both cases
        x.sum()

    watch = operations.CudaStopwatch(device)
    cold = watch.time(lambda: _ignore(x.sum()), prepare=prepare, warmup=3, calls=50)
    watch._buffer = watch._buffer[:1]
    warm = watch.time(lambda: _ignore(x.sum()), prepare=prepare, warmup=3, calls=50)
    assert sorted(cold)[25] > 1.1 * sorted(warm)[25]


def _ignore(_result: Tensor) -> None:
    """Only the work counts."""
