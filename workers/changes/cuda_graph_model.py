"""The model's forward and backward pass as CUDA graphs, or those of its blocks, where the whole cannot be captured."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from workers.changes._base import Change, Look, own_gpu_only
from workers.changes.compile_blocks import blocks
from workers.changes.cuda_graph import capturing
from workers.measure.own_step import OwnStep
from workers.outcome import Unsupported


def _why_not(look: Look) -> str | None:
    if reason := own_gpu_only(look):
        return reason
    assert look.own is not None
    if look.names["cudaGraphLaunch"]:
        return "parts of it are a CUDA graph already"
    if look.compiled:
        return 'it is compiled: mode="reduce-overhead" of torch.compile makes CUDA graphs'
    return None if look.own.roots else "the code makes no model with parameters"


Call = tuple[tuple[Any, ...], dict[str, Any], torch.dtype | None]
"""The arguments of a call, and the data type of the autocast that it is under; None: it is under none."""


class _Calls:
    """How modules are called in the first step, after which they are captured under the autocast of their calls: a
    graph has the data types of its capture."""

    def __init__(self, step: OwnStep) -> None:
        self._step, self._steps = step, 0
        self._calls: dict[nn.Module, list[Call]] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        self._steps += 1
        parts = [*self._step.roots, *blocks(self._step.model)]
        if self._steps == 2:
            self._capture()
        with ExitStack() as undo:
            for part in dict.fromkeys(parts) if self._steps == 1 else ():
                undo.callback(part.register_forward_pre_hook(self._note, with_kwargs=True).remove)
            yield

    def _note(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        copies = [
            one.detach().clone().requires_grad_(one.requires_grad) if isinstance(one, torch.Tensor) else one
            for one in arguments
        ]
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        self._calls.setdefault(module, []).append((tuple(copies), options, dtype))

    def _capture(self) -> None:
        """Capture the models or, where one cannot be, all blocks. Raises Unsupported: not even its blocks can be
        captured."""
        try:
            self._capture_all(self._step.roots)
        except Unsupported as error:
            parts = blocks(self._step.model)
            if not parts:
                raise
            try:
                self._capture_all(parts)
            except Unsupported as inner:
                raise Unsupported(f"the model: {error}; its blocks: {inner}") from inner
        finally:
            self._calls.clear()

    def _capture_all(self, parts: list[nn.Module]) -> None:
        called = {part: calls for part in parts if (calls := self._calls.get(part))}
        if not called or any(len(calls) > 1 for calls in called.values()):
            raise Unsupported("a module is called several times in a step, and a graph keeps the numbers of one call")
        if any(options or not all(map(torch.is_tensor, given)) for ((given, options, _),) in called.values()):
            raise Unsupported("a module takes arguments that are no tensors, or by name")
        dtype, *others = {dtype for ((*_, dtype),) in called.values()}
        if others:
            raise Unsupported("modules are called under different autocasts")
        with capturing(), torch.autocast("cuda", dtype, dtype is not None, cache_enabled=False):
            torch.cuda.make_graphed_callables(tuple(called), tuple(calls[0][0] for calls in called.values()))


@contextmanager
def _graphed(step: OwnStep) -> Iterator[None]:
    with step.inside(_Calls(step).step):
        yield


CHANGE = Change(
    causes=("launches", "host"),
    how="torch.cuda.make_graphed_callables(model, inputs), or for its blocks, under the step's autocast with "
    "cache_enabled=False",
    why_not=_why_not,
    after=_graphed,
)
