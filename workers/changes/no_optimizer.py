"""No update of the parameters: what the fastest optimizer can bring."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from workers.changes._base import OPTIMIZER_ANEW, Change, Look, used
from workers.measure.own_step import OwnStep


def _why_not(look: Look) -> str | None:
    if look.own is None:
        return None if look.spec.mode == "train_step" else f"mode {look.spec.mode} has no optimizer"
    if look.makes_optimizer:
        return OPTIMIZER_ANEW
    if any(isinstance(one, torch.optim.LBFGS) for one in look.own.optimizers):
        return "LBFGS runs the forward and backward passes of its closure several times, which it would take along"
    made = look.own.optimizers or look.own.plain_optimizers()
    return None if made else "the code makes no torch.optim.Optimizer, and no object with step() that holds parameters"


@contextmanager
def _without(step: OwnStep) -> Iterator[None]:
    with used("the step calls no optimizer.step, but for instance torch.compile(optimizer.step)") as called:

        def instead(closure: Any = None, *_others: Any, **_options: Any) -> Any:
            called()
            return closure() if callable(closure) else None

        for optimizer in (*step.optimizers, *step.plain_optimizers()):
            vars(optimizer)["step"] = instead
        yield


CHANGE = Change(
    causes=("optimizer",),
    how="no optimizer: what the fastest one can bring",
    why_not=_why_not,
    fields=lambda _: {"mode": "forward_backward"},
    after=_without,
    removes=True,
)
