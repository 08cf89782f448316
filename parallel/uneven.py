"""Batches of which ranks may have different numbers."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from .collectives import group_of, start_all_gather

Batch = TypeVar("Batch")


def in_step(batches: Iterable[Batch], process_group: dist.ProcessGroup | None = None) -> Iterator[Batch]:
    """Yield this rank's batches as long as every rank has one, so that no rank waits for another's gradients for ever.

    Ranks compare before each batch. Over NCCL, the host then waits for the GPU; pass a gloo group to avoid that.

    Raises:
        RuntimeError: some ranks have no more batches and others have; raised on every rank.
    """
    group = group_of(process_group)
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    iterator = iter(batches)
    number = 0
    while True:
        batch = next(iterator, _END)
        here = torch.tensor([batch is not _END], dtype=torch.uint8, device=device)
        everywhere = torch.empty(group.size(), dtype=torch.uint8, device=device)
        start_all_gather(everywhere, here, group).wait()
        have = everywhere.tolist()
        if not any(have):
            return
        if not all(have):
            raise RuntimeError(
                f"rank {have.index(0)} has no more batches after {number} steps, and rank {have.index(1)} has: give "
                "every rank equally many, for example with drop_last=True or a DistributedSampler"
            )
        yield batch  # type: ignore[misc]
        number += 1


_END = object()
