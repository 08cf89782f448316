"""One thread of a CPU's operators for each core that this process may use."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workers.changes._base import Change, Elsewhere, Look, cores
from workers.measure.own_step import OwnStep


def _why_not(look: Look) -> str | None:
    if look.on_gpu:
        return Elsewhere("the step runs on a GPU")
    if look.own is None:
        return Elsewhere("our model's step has a thread for each core already")
    if torch.get_num_threads() == cores():
        return Elsewhere(f"it has {cores()} threads already, one for each core")
    return None


@contextmanager
def _all_cores(_step: OwnStep) -> Iterator[None]:
    torch.set_num_threads(cores())
    yield


CHANGE = Change(
    causes=("kernels", "attention", "optimizer"),
    how="leave out torch.set_num_threads(…), or OMP_NUM_THREADS",
    why_not=_why_not,
    after=_all_cores,
)
