"""Events, synchronisation and peaks of memory of a GPU, for everything that measures: torch's functions as they were at
this import.

Code that is measured may replace `torch.cuda.synchronize`, `torch.cuda.Event` or its methods; see `kernels.clock`.
Nothing here may import other packages of this project.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

synchronize = functools.partial(torch.cuda.synchronize)
"""Wait until a GPU, by default the current one, has done all its work."""
spin = functools.partial(torch.cuda._sleep)
"""Keep the current stream busy for so many cycles."""
_current_stream = functools.partial(torch.cuda.current_stream)
RESETS = {
    name: getattr(torch._C, name)
    for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
    if hasattr(torch._C, name)
}
"""What torch's functions call that let its peaks of a GPU's memory begin anew."""
_Base: Any = torch._C._CudaEventBase


class Event(_Base):  # type: ignore[misc]
    """A CUDA event that takes times. Its methods are those of torch's extension type, which nobody can replace.
    `external`: whether it is a node of its own in a CUDA graph that captures it (`cudaEventRecordExternal`)."""

    def __new__(cls, *, external: bool = False) -> Event:
        options = {"external": True} if external else {}
        event: Event = super().__new__(cls, enable_timing=True, **options)
        return event

    def record(self) -> None:
        super().record(_current_stream())

    def milliseconds_to(self, end: Event) -> float:
        """Return the milliseconds from this event to a later one; both have happened."""
        return float(self.elapsed_time(end))


def reset_peaks(device: int | None = None) -> None:
    """Let torch's peaks of a GPU's memory, by default the current one's, begin at the present memory."""
    RESETS["_cuda_resetPeakMemoryStats"](torch.cuda.current_device() if device is None else device)


def keep_peaks() -> None:
    """Let nobody else reset these peaks from now on: training loops that log the memory of each step would."""
    for name in RESETS:
        setattr(torch._C, name, lambda _device: None)
