import statistics
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import device_clock
from kernels.device_clock import DeviceClock, Lap
from kernels.device_events import reset_peaks
from tests.clock import Clock
from workers.measure.busy import device_work
from workers.measure.spans import total_ms
from workers.measure.stopwatch import CudaStopwatch, HostStopwatch, Timing, stopwatch

CUDA = torch.device("cuda")


def wait(seconds: float) -> Callable[[], None]:
    def busy() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return busy


def ignore(_result: Tensor) -> None:
    """Only the work counts."""


def test_the_host_times_the_work_and_not_its_preparation() -> None:
    clock = Clock()
    work, prepare = (lambda: clock.sleep(0.001)), (lambda: clock.sleep(0.005))
    timing = HostStopwatch(clock).time(work, prepare=prepare, warmup=2, calls=40)
    assert list(timing.samples) == pytest.approx([1] * 40)
    assert (timing.host_us, timing.host_bound, timing.exposed) == (None, False, False)


def test_slow_work_is_judged() -> None:
    clock = Clock()
    for seconds, steady, too_slow in ((0.6, True, False), (8.0, None, True)):

        def work(seconds: float = seconds) -> None:
            clock.sleep(seconds)

        timing = HostStopwatch(clock).time(work, warmup=None, calls=2)
        assert (timing.steady, timing.too_slow) == (steady, too_slow)


class Simulated(DeviceClock):
    """A simulated host and device: the test sets how long calls take each of them."""

    def __init__(self, host_s: list[float], device_ms: float) -> None:
        self._device, self._buffer, self.overhead_ms = torch.device("cpu"), torch.empty(1), 0.0
        self._host_s, self._device_ms = iter(host_s), device_ms
        self._delay_s = 0.0
        self.calls = 0
        self.forget()

    def _delay(self, seconds: float) -> None:
        self._delay_s = seconds

    def _between_events(self, work: Callable[[], None]) -> Lap:
        host_s, delay_s = next(self._host_s), self._delay_s
        self._delay_s = 0.0
        self.calls += 1
        waited_ms = 1e3 * max(0.0, host_s - delay_s)
        return Lap(max(waited_ms, self._device_ms), 1e6 * host_s, hidden=waited_ms == 0)


def simulated(host_s: list[float], monkeypatch: pytest.MonkeyPatch, *, calls: int) -> tuple[Timing, Simulated]:
    """The GPU stopwatch's timing without any warm-up, where the device takes 5 µs."""
    monkeypatch.setattr(device_clock, "synchronize", lambda device: None)
    watch = CudaStopwatch.__new__(CudaStopwatch)
    clock = Simulated(host_s, device_ms=0.005)
    watch._clock = clock
    return watch.time(device_clock.nothing, warmup=0, calls=calls), clock


def test_the_very_first_call_is_hidden_from_the_host_too(monkeypatch: pytest.MonkeyPatch) -> None:
    timing, clock = simulated([0.001] * 10, monkeypatch, calls=10)
    assert list(timing.samples) == [0.005] * 10
    assert clock.calls == 10, "none was repeated, and none made to warm up"
    assert timing.host_bound
    assert not timing.exposed


def test_one_long_first_call_does_not_speak_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles for 3 s. Without a warm-up it is the first sample, and only it is exposed."""
    timing, _ = simulated([3.0] + [0.001] * 9, monkeypatch, calls=10)
    assert timing.samples[0] > 2000
    assert list(timing.samples[1:]) == [0.005] * 9
    assert not timing.exposed


def test_calls_that_mostly_wait_inside_are_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    timing, _ = simulated([0.5] * 30, monkeypatch, calls=10)
    assert timing.exposed
    assert statistics.median(timing.samples) >= 400


def test_a_call_of_several_processes_is_never_repeated() -> None:
    """Even if the host was late: the other processes would wait for a repetition that they do not make."""
    clock = Simulated([0.001, 0.001, 0.5, 0.001, 0.001], device_ms=0.005)
    events: list[str] = []
    laps = [
        clock.lap_together(device_clock.nothing, lambda: events.append("prepare"), lambda: events.append("align"))
        for _ in range(5)
    ]
    assert [lap.hidden for lap in laps] == [True, True, False, True, True]
    assert clock.calls == 5
    assert events == ["prepare", "align"] * 5


def test_the_delay_covers_the_meeting_of_processes() -> None:
    clock = Simulated([0.001] * 4, device_ms=0.005)
    for _ in range(3):
        clock.lap_together(device_clock.nothing, device_clock.nothing, wait(0.005))
    assert min(clock._issued_s) >= 0.006


@pytest.fixture
def clock() -> DeviceClock:
    return DeviceClock(CUDA)


@pytest.fixture
def small() -> Tensor:
    return torch.zeros(1024, device="cuda")


def slowly(work: Callable[[], object], host_s: float = 0.002) -> Callable[[], None]:
    """The same work, for which the host takes long."""

    def both() -> None:
        wait(host_s / 2)()
        work()
        wait(host_s / 2)()
        work()

    return both


@pytest.mark.gpu
def test_a_slow_host_is_kept_out_of_the_time(small: Tensor) -> None:
    timing = stopwatch(CUDA).time(slowly(lambda: small.add_(1)), warmup=5, calls=20)
    assert 2000 <= min(timing.host_us) < 4000
    assert statistics.median(timing.samples) < 0.05, "two kernels of a few µs"
    assert timing.host_bound
    assert not timing.exposed


@pytest.mark.gpu
def test_a_slow_host_is_kept_out_of_calls_of_several(clock: DeviceClock, small: Tensor) -> None:
    meet = slowly(lambda: small.add_(1))
    laps = [clock.lap_together(slowly(lambda: small.add_(1)), device_clock.nothing, meet) for _ in range(20)][5:]
    assert sum(lap.hidden for lap in laps) >= 12
    assert 2000 <= min(lap.host_us for lap in laps) < 4000
    assert statistics.median(lap.device_ms for lap in laps) < 0.05, "two kernels of a few µs"


@pytest.mark.gpu
@pytest.mark.alone
def test_without_the_delay_the_time_would_be_the_hosts(clock, small, monkeypatch) -> None:
    """The control: without the delay, the device's time cannot be separated from the host's."""
    monkeypatch.setattr(DeviceClock, "_delay", lambda self, seconds: None)
    monkeypatch.setattr(clock, "_buffer", clock._buffer[:1])
    laps = [clock.lap(slowly(lambda: small.add_(1))) for _ in range(10)]
    assert not any(lap.hidden for lap in laps)
    assert statistics.median(lap.device_ms for lap in laps) > 0.9


@pytest.mark.gpu
def test_a_call_that_waits_inside_is_exposed_and_said_to_be(small: Tensor) -> None:
    def waits() -> None:
        wait(0.001)()
        small.sum().item()
        wait(0.001)()
        small.add_(1)

    timing = stopwatch(CUDA).time(waits, warmup=3, calls=10)
    assert timing.exposed
    assert len(timing.samples) == 10
    assert statistics.median(timing.samples) > 1.0, "the device waited for the host"


@pytest.mark.gpu
def test_a_device_slower_than_the_host_is_not_host_bound() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    timing = stopwatch(CUDA).time(lambda: ignore(x @ x), warmup=3, calls=20)
    assert max(timing.host_us) < 1e3 * min(timing.samples)
    assert not timing.host_bound


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_the_preparation_is_not_timed() -> None:
    watch = stopwatch(CUDA)
    x = torch.randn(4096, 4096, device="cuda")
    once = watch.time(lambda: ignore(x @ x), warmup=10, calls=30)
    again = watch.time(lambda: ignore(x @ x), prepare=lambda: ignore(x @ x @ x), warmup=10, calls=30)
    assert len(once.samples) == len(again.samples) == 30
    assert statistics.median(again.samples) == pytest.approx(statistics.median(once.samples), rel=0.2)


@pytest.mark.gpu
def test_on_a_gpu_the_cache_is_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4 << 20, device="cuda")  # 16 MiB: fits into the cache of every data-centre GPU
    watch = CudaStopwatch(CUDA)
    cold = watch.time(lambda: ignore(x.sum()), prepare=lambda: ignore(x.sum()), warmup=5, calls=50)
    monkeypatch.setattr(watch._clock, "_buffer", watch._clock._buffer[:1])
    warm = watch.time(lambda: ignore(x.sum()), prepare=lambda: ignore(x.sum()), warmup=5, calls=50)
    assert statistics.median(cold.samples) > 1.1 * statistics.median(warm.samples)


@pytest.mark.gpu
def test_many_calls_that_allocate_run_in_the_memory_of_one() -> None:
    x = torch.randn(64 << 20, device="cuda")  # 256 MiB
    stopwatch(CUDA).time(lambda: ignore(x + 1), warmup=2, calls=2)
    reset_peaks()
    before = torch.cuda.memory_allocated()
    stopwatch(CUDA).time(lambda: ignore(x + 1), warmup=2, calls=100)
    assert torch.cuda.max_memory_allocated() - before < 2 * (256 << 20)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("cycles", [20_000, 200_000])
def test_device_time_agrees_with_the_profilers(clock: DeviceClock, cycles: int) -> None:
    """A single kernel's time agrees with CUPTI's, within 5 % from 10 µs on."""

    def work() -> None:
        torch.cuda._sleep(cycles)

    work()
    alone = [clock.lap(work).device_ms for _ in range(40)][10:]
    spans = device_work(work)
    assert len(spans) == 1
    cupti_ms = statistics.median(total_ms(device_work(work)) for _ in range(5))
    assert statistics.median(alone) == pytest.approx(cupti_ms, rel=0.05)


@pytest.mark.gpu
def test_an_empty_call_takes_next_to_nothing(clock: DeviceClock) -> None:
    assert 0 < clock.overhead_ms < 0.02
    laps = [clock.lap(device_clock.nothing) for _ in range(20)]
    assert 0 < statistics.median(lap.device_ms for lap in laps) < 0.002
