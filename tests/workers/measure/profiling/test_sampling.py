"""The sampler: what it says of threads beside the step's."""

import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from workers.measure.profiling import sampling, stacks
from workers.measure.profiling.sampling import Sample, Sampler, Samples
from workers.measure.timing import run_step


def spin_until(done: threading.Event) -> None:
    while not done.is_set():
        pass


def wait_until(done: threading.Event) -> None:
    done.wait()


@pytest.fixture
def threads() -> Iterator[None]:
    """A thread that works and one that waits."""
    done = threading.Event()
    running = [threading.Thread(target=work, args=(done,), name=work.__name__) for work in (spin_until, wait_until)]
    for thread in running:
        thread.start()
    yield
    done.set()
    for thread in running:
        thread.join()


def spin_for(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def sampled(*phases: float) -> Samples:
    """Samples of a step with phases of so many seconds."""
    sampler = Sampler()
    with sampler.running():
        work = {f"phase_{number}": lambda seconds=seconds: spin_for(seconds) for number, seconds in enumerate(phases)}
        run_step(work, [sampler])
    return sampler.samples


def test_other_threads_count_by_the_processors_time(threads: None) -> None:
    samples = sampled(0.2)
    assert {name for name, _ in samples.others_ns} == {"spin_until"}
    folded = stacks.sampled(samples, 200.0)
    assert {frames[:2] for frames in folded if frames[0] == stacks.OTHERS} == {(stacks.OTHERS, "spin_until")}
    assert not any("wait_until" in frame for frames in folded for frame in frames)
    mine = {frames: ns for frames, ns in folded.items() if frames[0] != stacks.OTHERS}
    assert sum(mine.values()) == pytest.approx(200e6, rel=1e-3)
    title = stacks.title_of(folded, "sampled", on_gpu=False)
    assert "200 ms of one step; beside it, other threads took" in title


def test_samples_belong_to_their_phase_and_to_the_step_alone() -> None:
    samples = sampled(0.05, 0.15)
    times = Counter[str]()
    for (phase, frames), sample in samples.stacks.items():
        # A sample may come in the microsecond between two phases, where a busy host may let the step's thread wait.
        times[phase] += sample.wall_ns * bool(frames)
        assert not frames or frames[0][1].endswith("<lambda>") or sample.wall_ns < 1e7, "what drives it is left out"
    assert times["phase_1"] > times["phase_0"] > 0  # three times as long, but where others keep the sampler waiting
    assert samples.steps == 1


def test_the_margin_is_of_the_samples_that_there_were() -> None:
    """Half of Wilson's interval: of 10 among 100 it is known to be 5.52 to 17.44 %."""
    samples = Samples(count=100, squares=100)
    samples.stacks["step", ()] = Sample(wall_ns=100)
    assert samples.margin(0.1) == pytest.approx((0.1744 - 0.0552) / 2, abs=1e-4)
    few = Samples(count=100, squares=50**2 + 50)  # one of them stands for half of the time
    few.stacks["step", ()] = Sample(wall_ns=100)
    margin = few.margin(0.1)
    assert margin > 0.2
    assert Samples().margin(0.1) is None


def test_a_thread_that_has_ended_has_no_stack() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert sampling._stack(thread.ident or 0) == []
