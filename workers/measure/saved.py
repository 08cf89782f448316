"""Finds the tensors that autograd saves in a forward pass, and the module and line that each belongs to."""

import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from workers.measure.allocations.categories import parts_of
from workers.measure.allocations.stacks import site


@dataclass(frozen=True)
class SavedTensor:
    module: str | None
    """Path of the innermost module whose forward pass saves it; None outside of all."""
    site: str | None
    """The line of code outside torch that saves it."""
    made_by: str
    """The operation that made it, as autograd calls it; `input` of none."""
    dtype: str
    shape: tuple[int, ...]
    size: int
    """Bytes of its storage."""


def saved_tensors(model: nn.Module, forward: Callable[[], Any]) -> list[SavedTensor]:
    """Run a forward pass of a model, and return what autograd saves in it, but for parameters. What several operations
    save counts once, for the first; of a checkpoint, what it keeps to begin again. `forward`: the pass, which keeps
    what it returns or its graph, so that no storage comes twice."""
    names = {id(module): name for name, module in model.named_modules() if name}
    seen = {one.untyped_storage().data_ptr() for parameter in model.parameters() for one in parts_of(parameter)}
    found: list[SavedTensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storages = {one.data_ptr(): one.nbytes() for one in (part.untyped_storage() for part in parts_of(tensor))}
        if size := sum(storages[address] for address in storages.keys() - seen):
            seen.update(storages)
            made_by = "input" if tensor.grad_fn is None else tensor.grad_fn.name()
            where = _module_and_site(sys._getframe(1), names)
            dtype = str(tensor.dtype).removeprefix("torch.")
            found.append(SavedTensor(*where, made_by, dtype, tuple(tensor.shape), size))
        # An operation that saves its output would own itself by it, and the pass would never be released.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return found


def _module_and_site(frame: FrameType, names: Mapping[int, str]) -> tuple[str | None, str | None]:
    frames = [one for one, _ in traceback.walk_stack(frame)]
    inside = (names.get(id(one.f_locals.get("self"))) for one in frames)
    places = [{"filename": one.f_code.co_filename, "line": one.f_lineno, "name": one.f_code.co_name} for one in frames]
    return next((name for name in inside if name is not None), None), site(places)
