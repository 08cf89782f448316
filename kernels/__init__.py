"""Attention and other kernels, each with its plain PyTorch reference.

Nothing here may import the service (app), workers or parallel, or know of jobs and specs. Importing this package or its
registry imports neither torch nor Triton: the registry loads an implementation on request.
"""

from typing import Any

__all__ = ["weighted_sum"]


def __getattr__(name: str) -> Any:
    if name == "weighted_sum":
        from kernels.weighted_sum_triton import weighted_sum

        return weighted_sum
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
