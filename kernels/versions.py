"""Which kernels the attention `triton` runs on a device. Needs no Triton, so the environment of every result tells."""

import functools
import importlib.metadata
import os
from typing import Final, Literal

import torch

KNOWN_VERSIONS: Final = ("3.6.", "3.7.")
"""Prefixes of the versions of Triton that the kernels for Hopper, direct launches and held tiles were verified with."""
HOPPER: Final = (9, 0)
"""Compute capability of H100, H200 and GH200."""

Kernels = Literal["hopper", "triton", "interpreter"]


@functools.cache
def attention_kernels(device: torch.device) -> Kernels | None:
    """Return the kernels that `triton` begins with on a device; None where there is no Triton for it."""
    version = _triton_version()
    if version is None:
        return None
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes"):
        return "interpreter"
    if device.type != "cuda":
        return None
    is_hopper = torch.version.hip is None and torch.cuda.get_device_capability(device) == HOPPER
    return "hopper" if is_hopper and is_verified() else "triton"


def why_not_hopper(device: torch.device) -> str | None:
    """Return why `triton` does not run its kernels for Hopper on a GPU that is one; None if it does, or is none."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != HOPPER:
        return None
    if attention_kernels(device) != "triton":
        return None
    known = " and ".join(f"{prefix}x" for prefix in KNOWN_VERSIONS)
    return (
        f"Triton is {_triton_version()}, and the kernels for Hopper are verified with {known}: `triton` runs its older "
        "kernels, which take 1.2 to 1.4 times as long"
    )


@functools.cache
def is_verified() -> bool:
    """Return True with a Triton that the kernels for Hopper, direct launches and held tiles were verified with."""
    return (_triton_version() or "").startswith(KNOWN_VERSIONS)


def _triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
