"""Counts of the kernel's own events, which every Linux host has, and the reasons for those that it has not."""

import mmap
import os
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from workers.measure import hardware_counters
from workers.measure.hardware_counters import EVENTS, HARDWARE, SOFTWARE, Event, counting

FAULTS = {"faults": (Event(SOFTWARE, 2),)}
PAGES = 2000
NO_SUCH_EVENT = Event(HARDWARE, 0xFFFF)


def touch() -> None:
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE) as memory:
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(PAGES):
            memory[page * mmap.PAGESIZE] = 1


def faults(work: Callable[[], object]) -> float:
    with counting(FAULTS) as counts:
        work()
    if counts.reasons:
        pytest.skip(counts.reasons["faults"])
    return counts.values["faults"]


def test_pages_are_counted_that_this_thread_touches() -> None:
    assert PAGES <= faults(touch) < PAGES + 1000
    assert faults(lambda: None) < 1000


def test_threads_count_that_were_there_before_or_start_meanwhile() -> None:
    """As those of OpenMP, which wait between two calls."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        assert faults(lambda: pool.submit(touch).result()) >= PAGES

    def start() -> None:
        thread = threading.Thread(target=touch)
        thread.start()
        thread.join()

    assert faults(start) >= PAGES


def test_what_a_host_does_not_count_has_a_reason_and_the_others_a_value() -> None:
    with counting({**FAULTS, "none": (NO_SUCH_EVENT,), **EVENTS}) as counts:
        touch()
    assert "perf_event_open: " in counts.reasons["none"]
    assert set(counts.values) | set(counts.reasons) == {"faults", "none", *EVENTS}
    assert all(value >= 0 for value in counts.values.values())
    if "instructions" in counts.values:  # on a processor that shows its counters
        assert counts.values["instructions"] > PAGES


@pytest.mark.parametrize(
    ("read", "count"), [((30, 100, 50), 60), ((30, 100, 100), 30), ((0, 100, 0), None), ((0, 0, 0), 0)]
)
def test_a_count_is_scaled_to_the_whole_time(read: tuple[int, ...], count: float | None) -> None:
    out, into = os.pipe()
    os.write(into, struct.pack("=QQQ", *read))
    os.close(into)
    assert hardware_counters._read(out) == count
    os.close(out)
