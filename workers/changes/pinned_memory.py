"""Copies to the GPU from pinned memory, for which the host does not wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
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
            # Gradients do not pass through a pinned copy.
            if tensor.device.type != "cpu" or not to_gpu or tensor.requires_grad or isinstance(tensor, nn.Parameter):
                return plain(tensor, *given, **options)
            if len(given) < 3:  # the third, or second, is non_blocking
                options = {**options, "non_blocking": True}
                given = tuple(one for one in given if not isinstance(one, bool))
            return plain(self.of(tensor), *given, **options)

        _plain_cuda = torch.Tensor.cuda
        return copy


@contextmanager
def _pinned(device: torch.device) -> Iterator[None]:
    to_pin = {"pin_memory": device.type == "cuda"}
    copies = all_replaced(_Pinned().instead, (torch.Tensor, "to"), (torch.Tensor, "cuda"))
    with loaders_made(lambda options: options.update(to_pin)), copies:
        yield


CHANGE = Change(
    causes=("copies", "synchronisation", "input", "launches"),
    how="DataLoader(…, pin_memory=True), or tensor.pin_memory() once; and tensor.to(device, non_blocking=True)",
    why_not=_why_not,
    before=_pinned,
)
