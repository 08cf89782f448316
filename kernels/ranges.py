"""Names parts of the work for profilers: `scores`, `softmax` and `values` of an attention, a layer, a phase, a step.

A named part is an NVTX range, which outside profilers see, and a `record_function`, which torch's profiler sees. Both
cost the host microseconds, so parts are named only while somebody listens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

OUTSIDE = "NVTX_INJECTION64_PATH"
"""Environment variable that outside profilers (nsys, ncu) set for the programs that they start."""

_listeners = 0


@contextmanager
def listening() -> Iterator[None]:
    """Name parts of the work inside the context."""
    global _listeners
    _listeners += 1
    try:
        yield
    finally:
        _listeners -= 1


def heard() -> bool:
    """True if somebody listens: a context of `listening`, or an outside profiler."""
    return _listeners > 0 or OUTSIDE in os.environ


def named(name: str) -> AbstractContextManager[None]:
    """Return a context that names the work inside; one that does nothing if nobody listens, or inside a compiler.

    A compiler would break its graph at a range, and fuses the parts anyway.
    """
    if torch.compiler.is_compiling() or not heard():
        return nullcontext()
    return _both(name)


@contextmanager
def _both(name: str) -> Iterator[None]:
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    if on_gpu:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if on_gpu:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
