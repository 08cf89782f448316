"""No waiting for the device's numbers: what the first steps asked for is returned again, without asking."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from workers.changes._base import Change, Look, own_gpu_only, replaced
from workers.measure.own_step import OwnStep

ASKING = ("item", "tolist", "cpu", "to", "__bool__", "__float__", "__int__", "__index__", "__repr__", "__format__")
"""Methods of a tensor that wait for its numbers; `to` if it copies to the CPU."""
FIRST = 2
"""Steps that ask; a first one may differ from all later ones."""


def _why_not(look: Look) -> str | None:
    if (reason := own_gpu_only(look)) is not None:
        return reason
    if look.own is not None and look.own.scaler is not None:
        return "its GradScaler asks whether to update: the first steps' answer, no, would leave the optimizer out"
    return None


class _Answers:
    """The answers of one step, in order; those of the last one that asked are given again."""

    def __init__(self) -> None:
        self._given: list[tuple[str, object]] = []
        self._steps = self._at = 0
        self._inside = False

    @contextmanager
    def step(self) -> Iterator[None]:
        self._steps += 1
        self._at, self._inside = 0, True
        if self._steps <= FIRST:
            self._given.clear()
        try:
            yield
        finally:
            self._inside = False

    def instead(self, plain: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return the method that gives an answer again."""

        def ask(tensor: Any, *arguments: Any, **options: Any) -> Any:
            if not self._inside or not tensor.is_cuda or (name == "to" and not _to_host(*arguments, **options)):
                return plain(tensor, *arguments, **options)
            if self._steps > FIRST:
                at, self._at = self._at, self._at + 1
                if at < len(self._given) and self._given[at][0] == name:
                    return self._given[at][1]
                return plain(tensor, *arguments, **options)
            self._inside = False  # what asks may ask others in turn
            try:
                answer = plain(tensor, *arguments, **options)
            finally:
                self._inside = True
            self._given.append((name, answer))
            return answer

        return ask

    def waiting(self, plain: Callable[..., None]) -> Callable[..., None]:
        """Return the function that waits for the device no more."""

        def wait(*arguments: Any, **options: Any) -> None:
            if not self._inside or self._steps <= FIRST:
                plain(*arguments, **options)

        return wait


def _to_host(device: Any = None, *_others: Any, **_options: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cpu"


@contextmanager
def _answered(step: OwnStep) -> Iterator[None]:
    answers = _Answers()
    with ExitStack() as undo:
        for name in ASKING:
            undo.enter_context(replaced(torch.Tensor, name, answers.instead(getattr(torch.Tensor, name), name)))
        undo.enter_context(replaced(torch.cuda, "synchronize", answers.waiting(torch.cuda.synchronize)))
        undo.enter_context(step.inside(answers.step))
        yield


CHANGE = Change(
    causes=("synchronisation",),
    how="no .item(), .cpu(), .tolist(), print or if of a tensor on the GPU, no torch.cuda.synchronize(): what leaving "
    "them out can bring",
    why_not=_why_not,
    after=_answered,
    removes=True,
)
