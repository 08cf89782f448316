"""Modules on the meta device, which have shapes and no values: how they get memory and values."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


def materialise(module: nn.Module, device: torch.device, chosen: Callable[[nn.Parameter], bool]) -> None:
    """Give the chosen parameters, and all buffers, memory on a device, with any values; tied ones once."""
    made: dict[int, nn.Parameter | Tensor] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and parameter.is_meta and chosen(parameter):
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(
                        torch.empty_like(parameter, device=device), parameter.requires_grad
                    )
                child._parameters[name] = made[id(parameter)]  # type: ignore[assignment]
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                child._buffers[name] = made.setdefault(id(buffer), torch.empty_like(buffer, device=device))


def children_first(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    """Yield a module's descendants in the order in which constructors fill them, and then the module."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from children_first(child, seen)
    yield module


def reset_parameters(module: nn.Module) -> None:
    """Let a module fill its own parameters and buffers. Raises TypeError: it cannot."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is None:
        names = [*module._parameters, *module._buffers]
        raise TypeError(
            f"{type(module).__name__} has no reset_parameters(), so {', '.join(names)} would have any values: pass "
            "initialise=, a function that fills the parameters and buffers of the module that it gets"
        )
    reset()
