"""Names parts of the work for profilers: `scores`, `softmax` and `values` of an attention, a layer, a phase, a step.

A named part is an NVTX range, which outside profilers record, and a `record_function`, which torch's profiler records.
Both cost the host microseconds, so parts are named only while ranges are being recorded.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch.cuda.nvtx import range_pop as _pop
from torch.cuda.nvtx import range_push as _push

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
        _push(name)  # type: ignore[no-untyped-call]
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if on_gpu:
            _pop()  # type: ignore[no-untyped-call]


def follow_nvtx() -> None:
    """Make this process's ranges of `torch.cuda.nvtx` known to torch's profiler, too, which does not see them itself.

    A torch without NVTX, which is for CPUs alone, then takes them instead of raising. `torch.cuda.nvtx.range` calls
    what is replaced here; code that has imported `range_push` by name before is not followed.
    """
    opened = threading.local()

    def range_push(message: str) -> int:
        stack: list[ExitStack] = opened.__dict__.setdefault("stack", [])
        stack.append(one := ExitStack())
        if _recorders and not torch.compiler.is_compiling():
            one.enter_context(torch.profiler.record_function(str(message)))
        try:
            return int(_push(message))  # type: ignore[no-untyped-call]
        except RuntimeError:
            return len(stack) - 1

    def range_pop() -> int:
        stack: list[ExitStack] = opened.__dict__.setdefault("stack", [])
        if stack:
            stack.pop().close()
        try:
            return int(_pop())  # type: ignore[no-untyped-call]
        except RuntimeError:
            return len(stack)

    torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = range_push, range_pop
