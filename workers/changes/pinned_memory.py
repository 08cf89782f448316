"""Copies to the GPU from pinned memory, for which the host does not wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from workers.changes._base import Change, Look, all_replaced, own_gpu_only
from workers.changes._loaders import loaders_made

COPY = "Memcpy HtoD (Pageable -> Device)"
"""The profiler's name of a copy from memory that is not pinned."""


def _why_not(look: Look) -> str | None:
    if reason := own_gpu_only(look):
        return reason
    return None if look.names[COPY] else "the step copies nothing from memory that is not pinned"


class _Pinned:
    """Pinned copies of the host's tensors: of one that stays as it is, one copy."""

    def __init__(self) -> None:
        self._kept: Any = WeakIdKeyDictionary()

    def of(self, tensor: Any) -> Any:
        if tensor.is_pinned():
            return tensor
        if tensor.is_inference():  # it has no version
            return tensor.pin_memory()
        version, pinned = self._kept.get(tensor, (None, None))
        # Memory that others may write to, such as NumPy's, changes without a new version.
        if version != tensor._version or not tensor.untyped_storage().resizable():
            pinned = tensor.pin_memory()
            self._kept[tensor] = tensor._version, pinned
        return pinned

    def instead(self, plain: Any) -> Any:
        """Return the method `to` or `cuda` that copies from pinned memory."""

        def copy(tensor: Any, *given: Any, **options: Any) -> Any:
            target = given[0] if given else options.get("device")
            to_gpu = plain is _plain_cuda or (
                isinstance(target, str | torch.device | int) and torch.device(target).type == "cuda"
            )
            if not to_gpu or not _may_be_pinned(tensor):
                return plain(tensor, *given, **options)
            if len(given) < 3:  # the third, or second, is non_blocking
                options = {**options, "non_blocking": True}
                given = tuple(one for one in given if not isinstance(one, bool))
            return plain(self.of(tensor), *given, **options)

        _plain_cuda = torch.Tensor.cuda
        return copy

    def into(self, plain: Any) -> Any:
        """Return the method `copy_` that copies from pinned memory."""

        def copy_(tensor: Any, other: Any, non_blocking: bool = False) -> Any:
            if not tensor.is_cuda or not _may_be_pinned(other):
                return plain(tensor, other, non_blocking)
            return plain(tensor, self.of(other), True)

        return copy_


def _unless_on_gpu(plain: Any) -> Any:
    return lambda tensor, *given, **options: tensor if tensor.is_cuda else plain(tensor, *given, **options)


def _may_be_pinned(tensor: Any) -> bool:
    """Return True of a tensor on the host with elements of its own; a gradient does not pass through a pinned copy."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad
    return is_plain and tensor.device.type == "cpu"


@contextmanager
def _pinned(device: torch.device) -> Iterator[None]:
    to_pin = {"pin_memory": device.type == "cuda"}
    pinned = _Pinned()
    copies = all_replaced(pinned.instead, (torch.Tensor, "to"), (torch.Tensor, "cuda"))
    into = all_replaced(pinned.into, (torch.Tensor, "copy_"))
    # A loader whose batches are on the GPU already would fail.
    pins = all_replaced(_unless_on_gpu, (torch.Tensor, "pin_memory"))
    with loaders_made(lambda options: options.update(to_pin)), copies, into, pins:
        yield


CHANGE = Change(
    causes=("copies", "synchronisation", "input", "launches"),
    how="DataLoader(…, pin_memory=True), or tensor.pin_memory() once; and tensor.to(device, non_blocking=True)",
    why_not=_why_not,
    before=_pinned,
)
