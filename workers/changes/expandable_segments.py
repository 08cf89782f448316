"""Memory that torch's allocator extends, where a step asks the driver for memory again and again."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workers.changes._base import Change, Elsewhere, Look, own_gpu_only

OPTION = "expandable_segments"


def _why_not(look: Look) -> str | None:
    asks = look.names["cudaMalloc"] + look.names["cudaFree"]
    return own_gpu_only(look) or (None if asks else Elsewhere("the step asks the driver for no memory"))


@contextmanager
def _expandable(_device: torch.device) -> Iterator[None]:
    torch.cuda.memory._set_allocator_settings(f"{OPTION}:True")
    yield  # the process ends with it


CHANGE = Change(
    causes=("launches", "host", "synchronisation", "unexplained"),
    how=f"PYTORCH_CUDA_ALLOC_CONF={OPTION}:True",
    why_not=_why_not,
    before=_expandable,
)
