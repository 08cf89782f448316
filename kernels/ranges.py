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

_listeners = int(OUTSIDE in os.environ)
"""Number of those who listen. An outside profiler does so from the start."""


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
    return _listeners > 0


def named(name: str) -> AbstractContextManager[None]:
    """Return a context that names the work inside; one that does nothing if nobody listens, or inside a compiler.

    A compiler would break its graph at a range, and fuses the parts anyway. It is asked first: were it to see whether
    somebody listens, it would compile anew for every listener.
    """
    if torch.compiler.is_compiling() or _listeners == 0:
        return nullcontext()
    return _both(name)


@contextmanager
def _both(name: str) -> Iterator[None]:
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if on_gpu:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if on_gpu:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
