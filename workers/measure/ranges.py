"""Names steps, phases and layers for profilers: `step_1`, `forward`, `layers.0`. See `kernels.ranges`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from kernels.ranges import listening, named


class Ranges:
    """An observer that names each step (`warmup`, or `step_1`, `step_2`, … while `counting`) and each of its phases."""

    def __init__(self) -> None:
        self.counting = False
        """False during the warm-up."""
        self._steps = 0
        self._open: list[ExitStack] = []

    def step_begins(self) -> None:
        self._steps += self.counting
        self._enter(f"step_{self._steps}" if self.counting else "warmup")

    def phase_begins(self, name: str) -> None:
        self._enter(name)

    def phase_ends(self, name: str) -> None:
        self._open.pop().close()

    def step_ends(self) -> None:
        self._open.pop().close()

    def _enter(self, name: str) -> None:
        stack = ExitStack()
        stack.enter_context(named(name))
        self._open.append(stack)


@contextmanager
def named_layers(model: nn.Module, attribute: str = "layers") -> Iterator[None]:
    """Name the work of the context, and in it that of each of the model's layers: `layers.0`, `layers.1`, …"""
    open_ranges: list[ExitStack] = []

    def begin(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            stack = ExitStack()
            stack.enter_context(named(name))
            open_ranges.append(stack)

        return hook

    def end(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        open_ranges.pop().close()

    with ExitStack() as hooks:
        hooks.enter_context(listening())
        for index, layer in enumerate(getattr(model, attribute, ())):
            hooks.callback(layer.register_forward_pre_hook(begin(f"{attribute}.{index}")).remove)
            hooks.callback(layer.register_forward_hook(end, always_call=True).remove)
        yield
