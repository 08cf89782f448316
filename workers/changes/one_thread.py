"""One thread for a CPU's operators: small ones take less time than threads take to meet."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workers.changes._base import Change, Elsewhere, Look, own_only
from workers.measure.own_step import OwnStep


def _why_not(look: Look) -> str | None:
    if look.on_gpu:
        return Elsewhere("the step runs on a GPU")
    return own_only(look) or (Elsewhere("it has one thread already") if torch.get_num_threads() == 1 else None)


@contextmanager
def _one(_step: OwnStep) -> Iterator[None]:
    torch.set_num_threads(1)
    yield


CHANGE = Change(
    causes=("kernels", "attention", "optimizer"),
    how="torch.set_num_threads(1), or OMP_NUM_THREADS=1",
    why_not=_why_not,
    after=_one,
)
