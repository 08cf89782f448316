"""Timing single operations: on a GPU by events, with a cold L2 cache.

A training step finds its inputs where the step before left them; a kernel called in a loop finds them in the cache. So
before each call a buffer several times the cache's size is overwritten. Meanwhile the host issues the call, so that,
unless the host is the slower of the two, what is timed is the device's work.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workers.measure.memory import MIB, memory_meter, memory_needed_for

FLUSHED_CACHE_SIZES = 4
"""Size of the buffer that is overwritten, in L2 caches: caches do not replace their lines in order."""
CALLS_IN_FLIGHT = 50
"""Timed calls that are issued before the host waits for the device."""

Work = Callable[[], None]


class Stopwatch(Protocol):
    """Times calls of one operation."""

    def time(self, work: Work, *, prepare: Work, warmup: int, calls: int) -> array[float]:
        """Times in ms of `calls` calls of `work`, each after an untimed `prepare`; `warmup` calls leave no sample."""
        ...


class HostStopwatch:
    """For the CPU, where a call returns when its work is done."""

    def time(self, work: Work, *, prepare: Work, warmup: int, calls: int) -> array[float]:
        times = array("d")
        for index in range(warmup + calls):
            prepare()
            start = time.perf_counter()
            work()
            if index >= warmup:
                times.append(1e3 * (time.perf_counter() - start))
        return times


class CudaStopwatch:
    """For a GPU, on the current stream. Holds the buffer that is overwritten."""

    def __init__(self, device: torch.device) -> None:
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.empty(FLUSHED_CACHE_SIZES * cache_bytes, dtype=torch.uint8, device=device)
        self._events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            for _ in range(CALLS_IN_FLIGHT)
        ]

    def time(self, work: Work, *, prepare: Work, warmup: int, calls: int) -> array[float]:
        for _ in range(warmup):
            prepare()
            work()
        times = array("d")
        while len(times) < calls:
            events = self._events[: calls - len(times)]
            for start, end in events:
                prepare()
                self._buffer.zero_()
                start.record()
                work()
                end.record()
            torch.cuda.synchronize()
            times.extend(start.elapsed_time(end) for start, end in events)
        return times


def stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch of a device."""
    return CudaStopwatch(device) if device.type == "cuda" else HostStopwatch()


@dataclass(frozen=True)
class Operation:
    """A function at fixed inputs, forward and backward.

    Inputs that require gradients get them; `grad_out` is the output's gradient, None to run forward only.
    """

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    grad_out: Tensor | None

    def forward(self) -> Tensor:
        """The output."""
        return self.function(*self.inputs)

    def backward(self, out: Tensor) -> tuple[Tensor | None, ...]:
        """The inputs' gradients; None for an input on which the output does not depend."""
        return torch.autograd.grad(out, self.inputs, self.grad_out, allow_unused=True)

    @property
    def input_bytes(self) -> int:
        """Memory of the inputs and the output's gradient."""
        tensors = [*self.inputs, *([] if self.grad_out is None else [self.grad_out])]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def time_passes(
    operation: Operation, watch: Stopwatch, passes: Sequence[str], *, warmup: int, calls: int
) -> dict[str, array[float]]:
    """Times in ms of the passes named: "forward", "backward", "forward_backward".

    Raises:
        OutOfMemory: the memory did not suffice; says in which pass.
    """
    out: list[Tensor] = []

    def forward() -> None:
        out[:] = [operation.forward()]

    def backward() -> None:
        operation.backward(out.pop())

    def both() -> None:
        operation.backward(operation.forward())

    works: dict[str, tuple[Work, Work]] = {
        "forward": (out.clear, forward),
        "backward": (forward, backward),
        "forward_backward": (_nothing, both),
    }
    times = {}
    for name in passes:
        prepare, work = works[name]
        with memory_needed_for(name), torch.set_grad_enabled(operation.grad_out is not None):
            times[name] = watch.time(work, prepare=prepare, warmup=warmup, calls=calls)
            out.clear()
    return times


def _nothing() -> None:
    """Nothing to prepare."""


@dataclass(frozen=True)
class Memory:
    """Memory of one forward pass and, if it has one, its backward pass, inputs included; None and why, if unknown."""

    before_backward_mib: float | None
    peak_mib: float | None
    how: str


def measure_memory(operation: Operation, device: torch.device) -> Memory:
    """Run the operation once and see what it holds between the passes, and at its peak.

    Raises:
        OutOfMemory: the memory did not suffice.
    """
    gc.collect()
    meter = memory_meter(device)
    on_gpu = device.type == "cuda"
    # What else lives here (the flushed buffer, the oracle's results) is not the operation's.
    others = torch.cuda.memory_allocated() - operation.input_bytes if on_gpu else 0
    before_backward = None
    meter.reset()
    with memory_needed_for("the memory's measurement"), torch.set_grad_enabled(operation.grad_out is not None):
        out = operation.forward()
        if on_gpu:
            before_backward = (torch.cuda.memory_allocated() - others) / MIB
        if operation.grad_out is not None:
            operation.backward(out)
    peak, how = meter.peak_mib()
    if peak is not None and on_gpu:
        peak -= others / MIB
    return Memory(before_backward, peak, how)
