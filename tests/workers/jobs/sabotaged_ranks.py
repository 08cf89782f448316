"""Ranks with faults in their small cells. Ranks import it by name."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parallel.process_group import Rank
from workers.measure import collective_timing
from workers.measure.collective_timing import OPERATIONS, AllGather, AllReduce, Broadcast, size_bytes
from workers.measure.collective_timing import time_cells as time_faultless_cells

SMALL, LARGE = 0.01, 0.02
"""Sizes in MB. A small all-gather does not fit on rank 1, a small all-reduce does nothing after its first call, and to
the first measured small broadcast rank 1 comes late."""
LATE_S = 0.5


class Greedy(AllGather):
    def make(self) -> None:
        super().make()
        if self._rank.index == 1 and self._whole.nbytes == size_bytes(SMALL, 2):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


class Lazy(AllReduce):
    calls = 0

    def call(self) -> None:
        self.calls += 1
        if self.calls == 1 or self._tensor.nbytes != size_bytes(SMALL, 2):
            super().call()


class Late(Broadcast):
    preparations = 0

    def prepare(self) -> None:
        super().prepare()
        self.preparations += 1
        if self.preparations == 4 and self._rank.index == 1 and self._tensor.nbytes == size_bytes(SMALL, 2):
            time.sleep(LATE_S)


def time_cells(rank: Rank, cells: Sequence[Mapping[str, Any]], warmup: int | None, steps: int, seed: int) -> None:
    """Do what real ranks do, with faulty operations."""
    print(f"rank {rank.index} speaks", flush=True)
    collective_timing.OPERATIONS = {**OPERATIONS, "all_gather": Greedy, "all_reduce": Lazy, "broadcast": Late}  # type: ignore[misc]
    time_faultless_cells(rank, cells, warmup, steps, seed)
