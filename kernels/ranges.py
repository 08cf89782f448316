"""Names parts of the work for profilers: `scores`, `softmax` and `values` of an attention, a layer, a phase, a step.

A named part is an NVTX range, which outside profilers record, and a `record_function`, which torch's profiler records.
Both cost the host microseconds, so parts are named only while ranges are being recorded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

OUTSIDE_PROFILER_VARIABLE = "NVTX_INJECTION64_PATH"
"""Environment variable that outside profilers (nsys, ncu) set for the programs that they start."""

_recorders = int(OUTSIDE_PROFILER_VARIABLE in os.environ)
"""Number of profilers that record ranges. An outside profiler does from the start."""


@contextmanager
def record_ranges() -> Iterator[None]:
    """Make `named` name parts of the work inside the context."""
    global _recorders
    _recorders += 1
    try:
        yield
    finally:
        _recorders -= 1


def has_recorder() -> bool:
    """Return True inside `record_ranges` and under an outside profiler."""
    return _recorders > 0


def named(name: str) -> AbstractContextManager[None]:
    """Return a context that names the work inside. It does nothing if no ranges are recorded, or inside a compiler.

    A compiler would break its graph at a range, and fuses the parts anyway. `is_compiling` is checked first: if the
    compiler read the number of recorders, it would recompile whenever that changes.
    """
    if torch.compiler.is_compiling() or _recorders == 0:
        return nullcontext()
    return _named_range(name)


@contextmanager
def _named_range(name: str) -> Iterator[None]:
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if on_gpu:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if on_gpu:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
