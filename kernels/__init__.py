"""Attention and other kernels, each with its plain PyTorch reference.

Nothing here may import the service (app), workers or parallel. Importing this package or its registry imports
neither torch nor Triton: the names below are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import attention, chunked_cross_entropy, derivatives, operations, registry  # noqa: F401 - of _PLAIN
    from .adamw_triton import adamw
    from .attention.flash_triton import flash_attention
    from .linear_cross_entropy_triton import linear_cross_entropy
    from .rms_norm_triton import rms_norm
    from .rope_triton import rope
    from .weighted_sum_triton import weighted_sum

_TRITON = ("adamw", "linear_cross_entropy", "rms_norm", "rope", "weighted_sum")
_HOMES = {"flash_attention": ".attention.flash_triton", **{name: f".{name}_triton" for name in _TRITON}}
_PLAIN = ("chunked_cross_entropy", "derivatives", "operations")
"""Modules that errors and pages name: what computes the same as a kernel, on every device."""

__all__ = [
    "adamw",
    "attention",
    "flash_attention",
    "linear_cross_entropy",
    "registry",
    "rms_norm",
    "rope",
    "weighted_sum",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    if name in __all__ or name in _PLAIN:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
