"""Settings of torch that code of a user may change for all that runs after it in this process."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

from workers.measure.check import Check, Severity


def float32_products() -> str:
    """Return the precision of float32 products: "highest", "high" or "medium"; or that of GPUs, "tf32", "ieee" or
    "none", once a backend has its own: torch tells none of all then."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return str(torch.backends.cuda.matmul.fp32_precision)


SETTINGS: Final[Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "default data type": (torch.get_default_dtype, torch.set_default_dtype),
    # None removes what any device, also the CPU, puts around each call.
    "default device": (torch.get_default_device, lambda _device: torch.set_default_device(None)),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "detection of anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "float32 products": (float32_products, torch.set_float32_matmul_precision),
    "autocast on the CPU": (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    "autocast on GPUs": (partial(torch.is_autocast_enabled, "cuda"), partial(torch.set_autocast_enabled, "cuda")),
}
"""How to read and to set each one, by its name in messages."""


def settings() -> dict[str, Any]:
    return {name: read() for name, (read, _) in SETTINGS.items()}


def set_back(before: Mapping[str, Any]) -> list[Check]:
    """Set what differs from `before` back. Returns a failed check that names it, or none if nothing differs."""
    changed = _changed(before)
    for name in changed:
        SETTINGS[name][1](before[name])
    return _named(before, changed, "while it was measured, and they were set back", "suspect")


def check_settings(before: Mapping[str, Any]) -> list[Check]:
    """Note what differs from `before`, of which the environment tells; no check if nothing does."""
    return _named(before, _changed(before), "after its environment was recorded", "note")


def _changed(before: Mapping[str, Any]) -> dict[str, Any]:
    after = settings()
    return {name: after[name] for name, value in before.items() if after[name] != value}


def _named(before: Mapping[str, Any], changed: Mapping[str, Any], when: str, severity: Severity) -> list[Check]:
    each = ", ".join(f"{name} from {before[name]} to {now}" for name, now in changed.items())
    return [Check("settings", False, f"its code changed torch's {each} {when}", severity)] if changed else []
