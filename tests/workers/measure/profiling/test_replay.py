"""What recorded steps would take with another host: times in µs."""

import pytest

from tests.workers.measure.profiling.test_idle import US, Made, recorded
from workers.jobs.diagnosis.look import _times
from workers.measure.profiling.attribution import Interval
from workers.measure.profiling.idle import host_reads, in_a_row, loading, sums, synchronisations, without_waiting_ms
from workers.measure.profiling.replay import Replay


def reading(steps: int, *, issue: float, works: float) -> tuple[Made, list[Interval]]:
    """Return steps in which the host issues one kernel for so long, and reads a number as soon as it is done."""
    made, at, found = Made(), 0.0, []
    for number in range(steps):
        begin = at
        made.launch(at + issue - 2, at + issue + 3, at + issue + 3 + works)
        at += issue
        made.on_host("aten::item", at, at + works + 15)
        copy = made.on_host("cudaMemcpyAsync", at + 1, at + works + 10, "launch")
        made.runs(copy, at + works + 5, at + works + 6, "Memcpy DtoH (Device -> Pageable)")
        made.on_host("cudaStreamSynchronize", at + works + 11, at + works + 12, "launch")
        at += works + 15
        found.append(Interval(f"step_{number}", number, round(begin * US), round(at * US)))
    return made, found[1:]


def replay(made: Made, steps: list[Interval]) -> Replay:
    calls = [(one.begin_ns, one.end_ns) for one in synchronisations(made.recording)]
    return Replay(made.recording, steps, calls, host_reads(made.recording))


@pytest.mark.parametrize(("issue", "works"), [(100, 200), (300, 200), (50, 500)])
def test_a_host_that_reads_nothing_runs_ahead_of_the_device(issue: float, works: float) -> None:
    made, steps = reading(6, issue=issue, works=works)
    again = replay(made, steps)
    assert again.length_ns(1.0) == pytest.approx((issue + works + 15) * US, rel=0.01)
    without = again.length_ns(1.0, whole=False) / US
    assert without == pytest.approx(max(issue, works), abs=0.3 * min(issue, works)), "the longer of the two is left"
    assert again.length_ns(0.5) == pytest.approx((issue / 2 + works + 15) * US, rel=0.02), "of a host twice as fast"


def test_the_scale_that_gives_the_time_of_an_unprofiled_step_is_found() -> None:
    made, steps = reading(4, issue=400, works=200)
    again = replay(made, steps)
    scale = again.scale_for(415 * US)
    assert scale == pytest.approx(0.5, abs=0.02)
    assert again.length_ns(scale) == pytest.approx(415 * US, rel=0.01)
    assert again.scale_for(9000 * US) == 1, "a profiler makes no host faster"
    assert without_waiting_ms(made.recording, steps, 0.415, cause="synchronisation") == pytest.approx(0.2, abs=0.04)


def test_real_steps_happen_again_as_they_were() -> None:
    recording, windows = recorded("item")
    length = sum(one.ns for step in in_a_row(recording, windows) for one in step) / len(windows)
    calls = [(one.begin_ns, one.end_ns) for one in synchronisations(recording)]
    again = Replay(recording, windows, sorted(calls), host_reads(recording))
    assert again.length_ns(1.0) == pytest.approx(length, rel=0.02)
    assert 0.5 * length < again.length_ns(1.0, whole=False) < 0.95 * length


def loading_steps(named: str, *, works: bool) -> tuple[Made, list[Interval]]:
    """Return steps in which the host loads for 500, and launches for 500; the device may work for 400 more of them."""
    made, found = Made(), []
    for number in range(6):
        at = 1000.0 * number
        made.on_host(f"step_{number}", at, at + 999, "range")
        made.on_host(named, at, at + 500, "range")
        for index in range(5):
            made.on_host("aten::add", at + 500 + 95 * index, at + 595 + 95 * index)
            made.launch(at + 590 + 95 * index, at + 595 + 95 * index, at + 635 + 95 * index)
        if works:
            made.launch(at + 985, at + 1010, at + 1410)
        found.append(Interval(f"step_{number}", number, round(at * US), round((at + 999) * US)))
    return made, found[1:]


@pytest.mark.parametrize("named", ["enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "data"])
def test_a_host_that_loads_while_the_device_works_loses_more_than_the_device_idles(named: str) -> None:
    """The device works for 600: the first 400 of them while the host loads."""
    made, steps = loading_steps(named, works=True)
    parts = in_a_row(made.recording, steps)
    assert loading(made.recording)[0] == (0, 500 * US)
    assert sums(parts[2])["input"] == pytest.approx(90 * US, rel=0.02), "the device idles for less"
    assert without_waiting_ms(made.recording, steps, 1.0, cause="input") == pytest.approx(0.6, abs=0.05)
    assert without_waiting_ms(made.recording, steps, 1.0, cause="synchronisation") == pytest.approx(1.0)
    times, _ = _times(made.recording, steps, parts, 1.0)
    assert times["input"] == pytest.approx(0.4, abs=0.05), "than a step without loading would save"
    assert sum(times.values()) == pytest.approx(1.0)


def test_a_profiler_lengthens_launches_and_not_the_loading() -> None:
    """The host launches for 500 under the profiler, for 250 without it."""
    made, steps = loading_steps("data", works=False)
    assert without_waiting_ms(made.recording, steps, 0.75, cause="input") == pytest.approx(0.25, abs=0.05)
