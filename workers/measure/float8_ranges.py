"""What 8 bits would do to the factors of a model's linear layers: their largest numbers, scales, and what is lost."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

FORMATS = {"input": torch.float8_e4m3fn, "weight": torch.float8_e4m3fn, "grad_output": torch.float8_e5m2}
"""The format of each factor, as torchao's recipe `tensorwise` has it (Micikevicius et al., 2022, section 3)."""


@dataclass(frozen=True)
class Range:
    """One factor of a linear layer."""

    layer: str
    tensor: str
    format: str
    largest: float
    """Its largest magnitude, "amax"."""
    scale: float | None
    """The factor that brings the largest magnitude to the format's; None if all numbers are 0, or one is not finite."""
    underflow_percent: float | None
    """Share of the numbers that are not 0, and round to 0 after scaling."""
    underflow_unscaled_percent: float | None
    """The same with a scale of 1."""
    overflow_unscaled_percent: float | None
    """Share of the numbers beyond the format's largest, with a scale of 1."""


def range_of(layer: str, name: str, tensor: Tensor) -> Range:
    """Return what 8 bits do to a tensor."""
    dtype = FORMATS[name]
    numbers = tensor.detach().float()
    most, largest = torch.finfo(dtype).max, float(numbers.abs().max())
    known = 0 < largest < float("inf")
    present = int(numbers.count_nonzero())

    def lost(scale: float) -> float:
        rounded = (numbers * scale).clamp(-most, most).to(dtype).float()
        return 100 * (present - int(rounded.count_nonzero())) / present

    scale = most / largest if known else None
    return Range(
        layer,
        name,
        str(dtype).removeprefix("torch.float8_"),
        largest,
        scale,
        None if scale is None else lost(scale),
        lost(1.0) if known else None,
        100 * float((numbers.abs() > most).float().mean()) if known else None,
    )


@contextmanager
def watched(model: nn.Module) -> Iterator[list[Range]]:
    """Yield a list that gets the ranges of each linear layer's first call in the step that runs inside."""
    found: list[Range] = []
    seen: set[str] = set()

    def hook_for(name: str) -> object:
        def hook(module: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if name in seen:
                return
            seen.add(name)
            found.extend((range_of(name, "input", inputs[0]), range_of(name, "weight", module.weight)))
            if output.requires_grad:
                output.register_hook(lambda grad: found.append(range_of(name, "grad_output", grad)))  # type: ignore[no-untyped-call]

        return hook

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                hooks.callback(module.register_forward_hook(hook_for(name)).remove)  # type: ignore[arg-type]
        yield found
