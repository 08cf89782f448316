import statistics
import time

import pytest
import torch

from flopwatch.steps import steps_of_a_second
from tests.clock import Clock
from workers.measure import timing
from workers.measure.memory import OutOfMemory
from workers.measure.timing import HostClock, HostMarks, StepTime, make_clock, make_marks, time_loop, time_steps
from workers.measure.validity import check_streams


class CountingClock:
    """Step n takes 100·n ms, phase n takes 10·n ms, and the host needs 7 µs per step."""

    def __init__(self) -> None:
        self.steps = 0
        self.last = StepTime(0.0, None, {})

    def step_begins(self) -> None:
        self.steps += 1
        self.phases: list[str] = []

    def phase_begins(self, name: str) -> None:
        self.phases.append(name)

    def phase_ends(self, name: str) -> None:
        assert name == self.phases[-1]

    def step_ends(self) -> None:
        self.last = StepTime(100.0 * self.steps, 7.0, {name: 10.0 + 10 * i for i, name in enumerate(self.phases)})


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_warmup_leaves_no_samples(warmup: int) -> None:
    done: list[str] = []
    times = time_steps(
        {"forward": lambda: done.append("f"), "backward": lambda: done.append("b")},
        CountingClock(),
        prepare=lambda: done.append("p"),
        warmup_steps=warmup,
        measure_steps=4,
        measuring=lambda steps: done.append("|" * (steps == 4)),
    )
    assert "".join(done) == "pfb" * warmup + "|" + "pfb" * 4
    assert times.first_step == 100.0
    assert (times.warmup, times.steady) == (warmup, None)
    assert list(times.host_us) == [7.0] * 4
    assert list(times.step) == [100.0 * (warmup + step) for step in (1, 2, 3, 4)]
    assert {name: list(samples) for name, samples in times.phases.items()} == {
        "forward": [10.0] * 4,
        "backward": [20.0] * 4,
    }


def test_phases_inside_a_phase_are_samples_too() -> None:
    inner = iter([{"forward": 1.0}, {"forward": 2.0}, {"forward": 3.0}])
    times = time_steps(
        {"graph": lambda: None}, CountingClock(), inner_times_ms=lambda: next(inner), warmup_steps=2, measure_steps=2
    )
    assert {name: list(samples) for name, samples in times.phases.items()} == {
        "graph": [10.0, 10.0],
        "forward": [1.0, 2.0],
    }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The host's clock, which the test moves."""
    clock = Clock()
    monkeypatch.setattr(timing, "now_s", clock)
    return clock


def test_the_host_clock_leaves_out_the_time_between(clock: Clock) -> None:
    times = time_steps(
        {"short": lambda: clock.sleep(0.001), "long": lambda: clock.sleep(0.003)},
        HostClock(),
        prepare=lambda: clock.sleep(0.01),
        warmup_steps=0,
        measure_steps=4,
    )
    assert list(times.phases["short"]) == pytest.approx([1] * 4)
    assert list(times.phases["long"]) == pytest.approx([3] * 4)
    assert list(times.step) == pytest.approx([4] * 4)


def test_running_out_of_memory_names_phase_and_step() -> None:
    steps: list[None] = []

    def backward() -> None:
        steps.append(None)
        if len(steps) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    phases = {"forward": lambda: None, "backward": backward}
    with pytest.raises(OutOfMemory, match=r"in backward of step 3: CUDA out of memory. Tried to allocate 20"):
        time_steps(phases, HostClock(), warmup_steps=1, measure_steps=5)


class RecordingMarks(HostMarks):
    """Marks whose calls are recorded among those of the steps. Step n of each loop takes n ms."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls
        self.number = 0

    def mark(self) -> None:
        self.calls.append("|")
        self.number += 1

    def take_ms(self) -> list[float]:
        self.calls.append("s")
        number, self.number = self.number, 0
        return [float(n) for n in range(1, number)]


def test_a_loop_waits_for_the_device_only_at_its_end() -> None:
    calls: list[str] = []
    done: list[int] = []
    times = time_loop(
        {"forward": lambda: calls.append("f"), "backward": lambda: calls.append("b")},
        RecordingMarks(calls),
        prepare=lambda: calls.append("p"),
        measure_steps=5,
        loop_steps=3,
        on_progress=done.append,
    )
    assert "".join(calls) == "pfb|" * 4 + "s" + "pfb|" * 3 + "s"
    assert list(times) == [1.0, 2.0, 3.0, 1.0, 2.0]
    assert done == [3, 5]


def test_a_loops_times_hold_everything_between_the_steps(clock: Clock) -> None:
    work, prepare = (lambda: clock.sleep(0.002)), (lambda: clock.sleep(0.001))
    times = time_loop({"x": work}, HostMarks(), prepare=prepare, measure_steps=20, loop_steps=10)
    assert list(times) == pytest.approx([3] * 20)


@pytest.mark.gpu
def test_what_a_loop_leaves_on_other_streams_is_seen() -> None:
    stream, x = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")  # type: ignore[no-untyped-call]

    def aside() -> None:
        with torch.cuda.stream(stream):
            for _ in range(5):
                x @ x

    def joined() -> None:
        aside()
        torch.cuda.current_stream().wait_stream(stream)

    for step, fails in ((aside, True), (joined, False)):
        marks = make_marks(torch.device("cuda"))
        times = time_loop({"step": step}, marks, measure_steps=10)
        assert any(not check.ok for check in check_streams(marks.left_ms, statistics.median(times))) is fails


@pytest.mark.gpu
@pytest.mark.alone
def test_in_a_loop_the_host_runs_ahead_of_a_gpu() -> None:
    """The host issues for as long as the device works: alone a step takes the sum, in a loop the longer of the two."""
    x = torch.randn(4096, 4096, device="cuda")

    def host() -> None:
        end = time.perf_counter() + 0.004
        while time.perf_counter() < end:
            pass

    def device() -> None:
        for _ in range(10):
            x @ x

    phases = {"host": host, "device": device}
    isolated = time_steps(phases, make_clock(torch.device("cuda")), warmup_steps=3, measure_steps=20)
    loop = time_loop(phases, make_marks(torch.device("cuda")), measure_steps=20)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(60):
        host()
        device()
    torch.cuda.synchronize()
    plain_ms = 1e3 * (time.perf_counter() - begun) / 60
    assert statistics.median(loop) == pytest.approx(plain_ms, rel=0.05)
    assert statistics.median(loop) < statistics.median(isolated.step) - 2


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_events_time_the_work_and_not_the_call() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    issued: list[float] = []

    def work() -> None:
        start = time.perf_counter()
        for _ in range(20):
            x @ x
        issued.append(1e3 * (time.perf_counter() - start))

    clock = make_clock(torch.device("cuda"))
    times = time_steps({"a": work, "b": work}, clock, warmup_steps=2, measure_steps=5)
    for a, b, step in zip(times.phases["a"], times.phases["b"], times.step, strict=True):
        assert a + b == pytest.approx(step, rel=0.1)
        assert a == pytest.approx(b, rel=0.2)
    assert min(times.phases["a"]) > 2 * min(issued), "issuing the work takes less than the work"
    assert len(times.host_us) == 5
    assert max(times.host_us) < 1e3 * min(times.step)


def test_the_number_of_steps_may_follow_from_the_quickest_step_before() -> None:
    class Even(CountingClock):
        """Every step takes 20 ms, the first one 1 s."""

        def step_ends(self) -> None:
            self.last = StepTime(1e3 if self.steps == 1 else 20.0, 7.0, {})

    announced: list[int] = []
    times = time_steps(
        {"forward": lambda: None}, Even(), warmup_steps=3, measure_steps=steps_of_a_second, measuring=announced.append
    )
    assert announced == [len(times.step)] == [50]
