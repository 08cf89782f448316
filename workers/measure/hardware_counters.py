"""Counts of the processor while work runs on this process's threads, by Linux's perf_event_open.

Source: the manual page perf_event_open(2), whose structure and numbers these are. Each event is counted on every thread
that exists when counting begins, and on those that they start. Where the processor has fewer counters than there are
events, the kernel takes turns, and a count is scaled by the share of the time in which it counted.
"""

import ctypes
import fcntl
import os
import platform
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

SYSCALLS: Final[Mapping[str, int]] = {"x86_64": 298, "aarch64": 241}
"""The number of perf_event_open, by machine."""
ATTRIBUTE_BYTES = 128
DISABLED, INHERIT, EXCLUDE_KERNEL, EXCLUDE_HYPERVISOR = 1 << 0, 1 << 1, 1 << 5, 1 << 6
TIMES = 1 << 0 | 1 << 1
"""The time in which an event was enabled, and that in which it was counted, are read beside the count."""
CLOSE_ON_EXEC = 8
ENABLE, DISABLE = 0x2400, 0x2401
NEEDS = (
    "it needs kernel.perf_event_paranoid of 2 at most, in a container also the capability PERFMON or a seccomp profile "
    "that allows the call, and a processor or virtual machine that shows its counters"
)
THREADS = Path("/proc/self/task")


@dataclass(frozen=True)
class Event:
    """One thing that is counted: perf's type of event, and its number."""

    type: int
    config: int


HARDWARE, SOFTWARE, CACHE = 0, 1, 3
L1D, LAST_LEVEL, READ, WRITE, MISS = 0, 2, 0, 1, 1
EVENTS: Final[Mapping[str, tuple[Event, ...]]] = {
    "instructions": (Event(HARDWARE, 1),),
    "l1_load_misses": (Event(CACHE, L1D | READ << 8 | MISS << 16),),
    "cache_misses": (Event(HARDWARE, 3),),
    "dram_lines": (
        Event(CACHE, LAST_LEVEL | READ << 8 | MISS << 16),
        Event(CACHE, LAST_LEVEL | WRITE << 8 | MISS << 16),
    ),
}
"""Events by the name of their sum: instructions, loads that miss the first cache, accesses that miss the last one, and
loads and stores that do, each of which fetches a line of 64 bytes from DRAM."""


class CannotCount(Exception):
    """The host does not count this event; the message says why, and what would."""


@dataclass
class Counts:
    """The counts of the work in a `counting` context, once it has ended."""

    values: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    """Why the others are unknown."""


@contextmanager
def counting(events: Mapping[str, tuple[Event, ...]] = EVENTS) -> Iterator[Counts]:
    """Count events of this process's threads inside the context. An event that the host does not count has a reason."""
    counts = Counts()
    opened: dict[str, list[int]] = {}
    with ExitStack() as stack:
        for name, each in events.items():
            try:
                opened[name] = [_open(event, int(thread.name), stack) for event in each for thread in THREADS.iterdir()]
            except CannotCount as error:
                counts.reasons[name] = str(error)
            except OSError as error:
                counts.reasons[name] = f"{THREADS}: {error.strerror}: this is no Linux host"
        for request in (ENABLE, DISABLE):
            for file in (file for files in opened.values() for file in files):
                fcntl.ioctl(file, request, 0)
            if request == ENABLE:
                yield counts
        for name, files in opened.items():
            found = [_read(file) for file in files]
            if None in found:
                counts.reasons[name] = "the processor had no counter free for it"
            else:
                counts.values[name] = sum(value for value in found if value is not None)


def _open(event: Event, thread: int, stack: ExitStack) -> int:
    """Open the counter of an event on a thread; the stack closes it. Raises CannotCount: the host does not count it, or
    the thread has ended."""
    number = SYSCALLS.get(platform.machine())
    if number is None:
        raise CannotCount(f"perf_event_open: unknown on {platform.machine()}")
    attribute = bytearray(ATTRIBUTE_BYTES)
    flags = DISABLED | INHERIT | EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR
    struct.pack_into("=IIQQQQQ", attribute, 0, event.type, ATTRIBUTE_BYTES, event.config, 0, 0, TIMES, flags)
    libc = ctypes.CDLL(None, use_errno=True)
    given = (ctypes.c_char * ATTRIBUTE_BYTES).from_buffer(attribute)
    file: int = libc.syscall(number, given, thread, -1, -1, CLOSE_ON_EXEC)
    if file < 0:
        raise CannotCount(f"perf_event_open: {os.strerror(ctypes.get_errno())}: {NEEDS}")
    stack.callback(os.close, file)
    return file


def _read(file: int) -> float | None:
    """Return a count, scaled to the whole time; None if it never ran while it was enabled."""
    value: int
    enabled: int
    running: int
    value, enabled, running = struct.unpack("=QQQ", os.read(file, 24))
    if not running:
        return None if enabled else 0.0
    return value * enabled / running
