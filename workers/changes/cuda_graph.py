"""The step as a CUDA graph, which the host launches at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from workers.changes._base import Change, Elsewhere, Look
from workers.measure.own_step import OwnStep
from workers.outcome import Unsupported
from workers.uploaded import place_of

EAGER = 2
"""Steps before the capture, on a stream of their own: they make what is made once, such as an optimizer's state."""


def _why_not(look: Look) -> str | None:
    if not look.on_gpu:
        return Elsewhere("a CPU has no CUDA graphs")
    if look.names["cudaGraphLaunch"]:
        return "it is a CUDA graph already, at least in part"
    if look.own is not None:
        if look.uneven:
            return "some steps update parameters that others do not, and a graph repeats one step"
        return "a graph would repeat one batch of its loader" if look.loaders else None
    if look.spec.mode == "generate":
        return "generation's cache grows with each token, and a graph repeats one step"
    return "it is a CUDA graph already" if look.spec.cuda_graph else None


class _Graphed:
    """The user's step, captured after its first runs.

    Raises, from the step that is captured, Unsupported: no graph can hold it.
    """

    def __init__(self, plain: Callable[[], object]) -> None:
        self._plain, self._runs = plain, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._returned: object = None

    def __call__(self) -> object:
        self._runs += 1
        if self._runs <= EAGER:
            side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            now = torch.cuda.current_stream()
            side.wait_stream(now)
            with torch.cuda.stream(side):
                returned = self._plain()
            now.wait_stream(side)
            return returned
        if self._graph is None:
            self._graph = graph = torch.cuda.CUDAGraph()
            with capturing(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._returned = self._plain()
        self._graph.replay()
        return self._returned


@contextmanager
def capturing() -> Iterator[None]:
    """Say why what is captured inside cannot be. Raises Unsupported: it cannot, with the error and the user's line."""
    try:
        yield
    except Exception as error:
        # Torch raises another one when it ends the capture that the first has ended.
        first = error
        while first.__context__ is not None and isinstance(first.__context__, Exception):
            first = first.__context__
        text = (str(first).strip() or type(first).__name__).splitlines()[0]
        raise Unsupported(f"it cannot be captured: {text}{place_of(first)}") from error


@contextmanager
def _graphed(step: OwnStep) -> Iterator[None]:
    for optimizer in step.optimizers:
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
    with step.replaced(_Graphed):
        yield


CHANGE = Change(
    causes=("launches", "host", "synchronisation"),
    how="the step by torch.cuda.graph, with inputs at fixed addresses; capturable=True for the optimizer",
    why_not=_why_not,
    fields=lambda _: {"cuda_graph": True},
    after=_graphed,
)
