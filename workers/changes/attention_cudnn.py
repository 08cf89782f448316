"""Attention by cuDNN, or else by the flash kernel, where they take the problem."""

from contextlib import AbstractContextManager

from torch.nn.attention import SDPBackend, sdpa_kernel

from workers.changes._attention import why_not
from workers.changes._base import Change
from workers.measure.own_step import OwnStep


def _preferred(step: OwnStep) -> AbstractContextManager[None]:
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return step.inside(lambda: sdpa_kernel(order, set_priority=True))


CHANGE = Change(
    causes=("attention",),
    how="with torch.nn.attention.sdpa_kernel([SDPBackend.CUDNN_ATTENTION, …], set_priority=True):",
    why_not=why_not,
    after=_preferred,
)
