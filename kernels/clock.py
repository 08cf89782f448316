"""The host's clock, for everything that measures or waits in a process of the user's code.

Code that is measured may replace `time.perf_counter`, as tests that freeze the time do (freezegun) and as kernels that
cheat do. So `now_s` holds what the function was when this module was imported, which is before any code of the user
runs; `kernels.device_events` does the same for a GPU. Nothing here may import torch, or other packages of this project.
"""

import functools
import time
from contextlib import suppress
from pathlib import Path

# A partial object is not the function itself: freezegun looks through all modules for the clock's own functions, and
# puts its own in their place.
now_s = functools.partial(time.perf_counter)
"""Return seconds of the monotonic clock, which all processes of a host share."""

sleep = functools.partial(time.sleep)
"""Wait for so many seconds."""

unix_ns = functools.partial(time.time_ns)
"""Return the Unix time in ns, which torch's profiler gives its events."""

_read_ns = functools.partial(time.clock_gettime_ns)
_clock_of = functools.partial(time.pthread_getcpuclockid) if hasattr(time, "pthread_getcpuclockid") else None
TELLS_PROCESSOR = _clock_of is not None
"""Whether `processor_ns` knows threads other than its own."""


def processor_ns(thread: int) -> int:
    """Return the processor's time in ns that a living thread of this process has used, by its identity
    (`threading.get_ident`); 0 where the system does not tell, and of one that has just ended."""
    with suppress(ProcessLookupError):
        return 0 if _clock_of is None else _read_ns(_clock_of(thread))
    return 0


_process_ns = functools.partial(time.process_time_ns)


def ended_ns() -> int:
    """Return the processor's time in ns that threads of this process have used which have ended; Linux only, else 0."""
    living = 0
    for path in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has just ended
            living += _read_ns((~int(path.name) << 3) | 6)  # the kernel's number of a thread's clock
    return _process_ns() - living if living else 0
