"""A process group in which nothing travels: the baseline that shows what communication costs.

The same wrapper and the same optimizer run over it as over the real group, with the same memory, the same kernels and
the same order, but no rank waits for another one.

What is computed with must be of the size of what would have come: zeros would lower a GPU's power and raise its clock,
weights that are too large saturate a softmax, and the denormal gradients behind it take a CPU ten times as long. So a
reduction leaves a rank's own values, a broadcast leaves what is there, and a gather fills every rank's place with this
rank's own part, a piece of the same tensor. Where the parts are of different tensors, the places keep what they hold
(`keep`), and are copied onto themselves.

On a GPU it copies on a stream of its own, as NCCL does, and what is started together is one call of it, as it is of
NCCL: else the host would take longer here than where something travels.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "silent"


class Done(dist.Work):
    """An operation of a silent group, which has ended on the host, and on a GPU after the copies of its stream."""

    def __init__(self, tensors: Sequence[Tensor], copied: torch.cuda.Event | None = None) -> None:
        super().__init__()
        self._copied = copied
        devices: list[Any] = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
        self._future = torch.futures.Future[Any](devices=devices or None)
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait for the copies."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
        return True

    def get_future(self) -> Any:
        """Return the future with the results, for torch's DistributedDataParallel."""
        return self._future


_ProcessGroup: Any = dist.ProcessGroup  # its methods have other signatures in each version of torch


class SilentGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group whose operations end at once and move nothing to other ranks."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name = BACKEND
        self._stream: Any = None
        self._kept: list[weakref.ref[Tensor]] = []

    def keep(self, memory: Tensor) -> None:
        """Let gathers into `memory` leave what it holds: the ranks' parts are of different tensors."""
        self._kept = [one for one in self._kept if one() is not None] + [weakref.ref(memory)]

    # Torch asks for these names.
    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    # If the default group is bound to a GPU, torch asks whether a new group's backend connects at once.
    supports_splitting = False

    def _get_backend(self, _device: torch.device) -> SilentGroup:
        return self

    def allreduce(self, tensors: Sequence[Tensor], _options: Any = None) -> Done:
        return Done(list(tensors))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], _options: Any = None) -> Done:
        return Done(list(tensors))

    def broadcast(self, tensors: Sequence[Tensor], _options: Any = None) -> Done:
        return Done(list(tensors))

    def barrier(self, _options: Any = None) -> Done:
        return Done([])

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], _options: Any = None) -> Done:
        pairs = [(out, own) for outs, own in zip(outputs, inputs, strict=True) for out in outs]
        return self._copy([out for outs in outputs for out in outs], pairs)

    def _allgather_base(self, output: Tensor, own: Tensor, _options: Any = None) -> Done:
        return self.allgather_into_tensor_coalesced([output], [own])

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], _options: Any = None
    ) -> Done:
        kept = {id(output) for output in outputs if any(one() is output for one in self._kept)}
        places = [
            (place, place if id(output) in kept else own.view(-1))
            for output, own in zip(outputs, inputs, strict=True)
            for place in output.view(-1).chunk(self.size())
            if place.data_ptr() != own.data_ptr()
        ]
        return self._copy(outputs, places)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], _options: Any = None
    ) -> Done:
        return self._copy(outputs, [(out, parts[self.rank()]) for out, parts in zip(outputs, inputs, strict=True)])

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, _options: Any = None) -> Done:
        return self.reduce_scatter_tensor_coalesced([output], [whole])

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], _options: Any = None
    ) -> Done:
        pairs = zip(outputs, inputs, strict=True)
        return self._copy(outputs, [(out.view(-1), whole.view(self.size(), -1)[self.rank()]) for out, whole in pairs])

    # Their names in torch 2.13.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def _copy(self, results: Sequence[Tensor], pairs: Sequence[tuple[Tensor, Tensor]]) -> Done:
        """Copy each pair's second tensor to the first, all by one kernel."""
        if not pairs:
            return Done(results)
        targets, sources = ([pair[side] for pair in pairs] for side in (0, 1))
        if not results[0].is_cuda:
            torch._foreach_copy_(targets, sources)
            return Done(results)
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(targets, sources)
            copied = self._stream.record_event()
        return Done(results, copied)


def silent_group() -> dist.ProcessGroup:
    """Return a silent group of all ranks; every rank calls it."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND, lambda _store, rank, size, _timeout: SilentGroup(rank, size), devices=["cpu", "cuda"]
        )
    group = dist.new_group(backend=BACKEND)
    assert isinstance(group, SilentGroup)
    return group
