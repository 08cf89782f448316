"""Plain PyTorch through torch.compile, as implementations named `compiled` are."""

import functools
from typing import Any

import torch


@functools.cache
def compiled(function: Any) -> Any:
    """Return the function's compiled form, the same one each time.

    It is compiled for exactly the sizes of its inputs: kernels for sizes that may vary are slower. `fullgraph` raises
    an error instead of returning to eager silently.
    """
    return torch.compile(function, dynamic=False, fullgraph=True)


def each_size_compiled() -> Any:
    """Return the context in which each new size is compiled: by default torch does so for only a few."""
    many = 1 << 16
    return torch._dynamo.config.patch(recompile_limit=many, accumulated_recompile_limit=many)
