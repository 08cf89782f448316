"""Attention by cuDNN, or else by the flash kernel, where they take the problem."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from workers.changes._attention import why_not
from workers.changes._base import Change, replaced
from workers.measure.own_step import OwnStep


def _preferred(step: OwnStep) -> AbstractContextManager[None]:
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return step.inside(lambda: sdpa_kernel(order, set_priority=True))


@contextmanager
def _not_chosen(*_backends: Any, **_options: Any) -> Iterator[None]:
    yield


def _choices_left_out(_device: torch.device) -> AbstractContextManager[None]:
    return replaced(attention, "sdpa_kernel", _not_chosen)


CHANGE = Change(
    causes=("attention",),
    how="with torch.nn.attention.sdpa_kernel([SDPBackend.CUDNN_ATTENTION, …], set_priority=True):",
    why_not=why_not,
    before=_choices_left_out,  # the step may choose otherwise
    after=_preferred,
)
