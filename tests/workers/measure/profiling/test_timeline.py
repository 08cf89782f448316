import pytest

from workers.measure.profiling.attribution import Interval, RecordedWork
from workers.measure.profiling.timeline import step_uses


def work(begin: int, end: int, step: int = 1) -> RecordedWork:
    return RecordedWork("k", "kernel", begin, end, end - begin, step, "forward")


def test_overlapping_streams_count_once() -> None:
    items = [work(1_000_000, 3_000_000), work(2_000_000, 4_000_000), work(7_000_000, 8_000_000), work(0, 1, step=2)]
    steps = [Interval("step_1", 1, 0, 9_000_000), Interval("step_2", 2, 0, 10)]
    first, second = step_uses(items, steps)
    assert first.launches == 3
    assert first.busy_ms == pytest.approx(4)
    assert first.idle_ms == pytest.approx(5)
    assert first.largest_gap_ms == pytest.approx(3)
    assert second.launches == 1


def test_a_step_ends_when_the_device_has_finished() -> None:
    (use,) = step_uses([work(5, 2_000_000)], [Interval("step_1", 1, 0, 10)])
    assert use.idle_ms == pytest.approx(5e-6)
