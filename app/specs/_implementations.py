"""What the server knows of our own implementations, which it cannot load: the devices that they run on.

Of an installed one it knows nothing but the name; the worker that claims the job decides about that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from app.specs._base import field_error

ONLY_ON: Mapping[str, Literal["cpu", "cuda"]] = {
    **dict.fromkeys(("cpu_blocked", "cpu_flash", "cpu_fused", "cpu_naive"), "cpu"),
    **dict.fromkeys(("flex", "hopper", "sdpa_cudnn", "sdpa_efficient", "triton"), "cuda"),
}
"""Our implementations of attention that run on one type of device only; nobody can install another one under such a
name. Kernels of kind `kernel` have the same names."""
WORDS = {"cpu": "a CPU", "cuda": "a GPU"}
BY_DEVICE: Mapping[str, str] = {"cpu": "device cpu", "cuda": "device cuda"}
"""How a job asks for a type of device."""


def check_runs_on(implementation: str, device_type: str, field: str, asks: Mapping[str, str] = BY_DEVICE) -> None:
    """Check that an implementation may run on the type of device that a job needs; `auto` may be any.

    Args:
        implementation: its name.
        device_type: as in the job's resources.
        field: the field to blame.
        asks: how a job of this kind asks for each type of device.

    Raises:
        PydanticCustomError: it never runs there; for a model validator to raise.
    """
    only = ONLY_ON.get(implementation)
    if only is not None and device_type in WORDS and device_type != only:
        raise field_error(
            field,
            f"{implementation} runs on {WORDS[only]} only, and this job on {WORDS[device_type]}: choose another "
            f"implementation, or {asks[only]}",
        )
