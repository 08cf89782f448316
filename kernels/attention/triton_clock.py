"""Times of single kernel calls, for the search of tilings."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from kernels.attention.triton_tiles import Tiling

Work = Callable[[], None]
Timer = Callable[[str, tuple[Tiling, ...], Work], float]
"""(what is timed, with which tilings, the call) -> ms of one call."""

FLUSHED_CACHE_SIZES = 4
"""Size of the buffer that is overwritten before a call, in L2 caches: caches do not replace their lines in order."""
FLUSHED_BYTES = 512 << 20
"""At least so much: a tenth of a millisecond even of the fastest memory, in which the host issues the call."""


def default_timer(device: torch.device) -> Timer:
    """CUDA events with a flushed L2 cache; the host's clock where the interpreter runs."""
    return CudaTimer(device) if device.type == "cuda" else host_time_ms


def host_time_ms(what: str, tilings: tuple[Tiling, ...], work: Work) -> float:
    """By the host's clock."""
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


class CudaTimer:
    """For a GPU, on the current stream. Holds the buffer that is overwritten."""

    def __init__(self, device: torch.device) -> None:
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        size = max(FLUSHED_BYTES, FLUSHED_CACHE_SIZES * cache_bytes)
        self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self._start, self._end = (
            torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
            torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        )

    def __call__(self, what: str, tilings: tuple[Tiling, ...], work: Work) -> float:
        self._buffer.zero_()
        self._start.record()
        work()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end))
