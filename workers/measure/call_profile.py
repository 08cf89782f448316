"""One call under torch's profiler: the operators and named ranges in it, with the profiler's own sums."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from kernels.device_events import synchronize
from kernels.ranges import record_ranges
from workers.measure.profiling.recording import MEMORY, refused_to_others
from workers.measure.table import Column, Scalar

MIB = 2**20
COLUMNS = Column.parse(
    "name, self_ms: number ms, total_ms: number ms, share_percent: number %, device_self_ms: number ms, "
    "device_total_ms: number ms, calls: integer calls, memory_mib: number MiB, self_memory_mib: number MiB"
)
"""Time on the host without and with what an operator calls, the share of the former, the same on a GPU (null without
one), calls, and memory of the device: allocated less freed, with and without what it calls."""


def profile_call(call: Callable[[], object], device: torch.device) -> list[list[Scalar]]:
    """Return a row for each operator and range of a call, those with the most time of their own first. Raises
    AnotherProfiler: the call opens torch's profiler itself."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler, refused_to_others():
        with record_ranges():
            result = call()  # it holds its memory until the recording's end
        if on_gpu:
            synchronize()
    del result
    events: list[Any] = [event for event in profiler.key_averages() if event.key != MEMORY]
    self_us = [event.self_device_time_total if on_gpu else event.self_cpu_time_total for event in events]
    whole = sum(self_us)
    memory = "device" if on_gpu else "cpu"
    return [
        [
            event.key,
            1e-3 * event.self_cpu_time_total,
            1e-3 * event.cpu_time_total,
            100 * own / whole if whole else None,
            1e-3 * event.self_device_time_total if on_gpu else None,
            1e-3 * event.device_time_total if on_gpu else None,
            event.count,
            getattr(event, f"{memory}_memory_usage") / MIB,
            getattr(event, f"self_{memory}_memory_usage") / MIB,
        ]
        for event, own in sorted(zip(events, self_us, strict=True), key=lambda pair: -pair[1])
    ]
