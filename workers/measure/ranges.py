"""Names steps, phases, layers and norms for profilers: `step_1`, `forward`, `layers.0`, `norm` (see kernels.ranges).

A step is also called `ProfilerStep#1`, as torch's own profiler calls it: other programs know steps by that name.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from kernels.ranges import has_recorder, named, record_ranges
from workers.measure.timing import Observer

NORM = "norm"
"""Name of a norm module's work: its kernels have the names of ordinary elementwise ones."""


class Ranges(Observer):
    """An observer that names each step (`warmup`, or `step_1`, `step_2`, … while `counting`) and each of its phases."""

    def __init__(self) -> None:
        self.counting = False
        """False during the warm-up."""
        self._steps = 0
        self._open: list[ExitStack] = []

    def step_begins(self) -> None:
        self._steps += self.counting
        self._open.append(stack := ExitStack())
        if self.counting and has_recorder():
            stack.enter_context(torch.profiler.record_function(f"ProfilerStep#{self._steps}"))
        stack.enter_context(named(f"step_{self._steps}" if self.counting else "warmup"))

    def phase_begins(self, name: str) -> None:
        self._open.append(stack := ExitStack())
        stack.enter_context(named(name))

    def phase_ends(self, name: str) -> None:
        self._open.pop().close()

    def step_ends(self) -> None:
        self._open.pop().close()


@contextmanager
def named_layers(model: nn.Module, *, compiled: bool = False) -> Iterator[None]:
    """Name the work of the context, and in it that of each of the model's layers (`layers.0`, …) and norms (`norm`).

    A layer that is compiled by itself, with its hooks or only its `forward`, is named from outside, and its norms are
    not named: a hook inside would make the compiler compile it again.

    Nothing inside is named if the model is `compiled` as a whole.
    """
    with ExitStack() as undo:
        undo.enter_context(record_ranges())
        layers = {} if compiled else dict(enumerate(getattr(model, "layers", ())))
        inside_compiled: set[nn.Module] = set(model.modules()) if compiled else set()
        for index, layer in layers.items():
            compiled_with_hooks = getattr(layer, "_compiled_call_impl", None) is not None
            (_wrap_compiled if compiled_with_hooks else _hook)(layer, f"layers.{index}", undo)
            if compiled_with_hooks or "forward" in vars(layer):  # set by `compile_blocks` inside sharding's hooks
                inside_compiled |= set(layer.modules())
        for module in model.modules():
            if type(module).__name__.endswith("Norm") and module not in inside_compiled:
                _hook(module, NORM, undo)
        yield


@contextmanager
def named_modules(model: nn.Module) -> Iterator[None]:
    """Name the work of the context, and in it that of each module of a model, by the module's place in its parent:
    `attention`, `layers.0`. No module may be compiled: a hook inside would make the compiler compile it again."""
    with ExitStack() as undo:
        undo.enter_context(record_ranges())
        for name, module in modules_by_name(model):
            if not isinstance(module, torch.jit.ScriptModule):
                _hook(module, name, undo)
        yield


def modules_by_name(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in a model with the names of their ranges."""
    for path, module in model.named_modules():
        *before, name = path.split(".")
        if name.isdigit():
            name = f"{before[-1] if before else type(module).__name__}.{name}"
        if name:
            yield name, module


def _hook(module: nn.Module, name: str, undo: ExitStack) -> None:
    """Name the calls of a module by hooks, which `undo` removes."""
    open_ranges: list[ExitStack] = []

    def begin(_module: nn.Module, _inputs: Any) -> None:
        open_ranges.append(stack := ExitStack())
        stack.enter_context(named(name))

    def end(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        open_ranges.pop().close()

    undo.callback(module.register_forward_pre_hook(begin).remove)
    undo.callback(module.register_forward_hook(end, always_call=True).remove)


def _wrap_compiled(module: nn.Module, name: str, undo: ExitStack) -> None:
    """Name the calls of a module that `Module.compile` compiled, until `undo`."""
    call = module._compiled_call_impl
    assert call is not None

    def named_call(*args: Any, **kwargs: Any) -> Any:
        with named(name):
            return call(*args, **kwargs)

    module._compiled_call_impl = named_call
    undo.callback(setattr, module, "_compiled_call_impl", call)
