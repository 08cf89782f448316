"""What ranks on several nodes do in tests."""

import os
from typing import Any

import torch
import torch.distributed as dist

from parallel.process_group import Rank


def add_up(rank: Rank, fail_at: int | None) -> dict[str, Any]:
    """Add up the ranks' numbers; one of them may die."""
    print(f"this is rank {rank.index}", flush=True)
    if rank.index == fail_at:
        os._exit(3)
    total = torch.tensor([float(rank.index)])
    dist.all_reduce(total)
    rank.step_done()
    return {"sum": total.item(), "local_rank": int(os.environ["LOCAL_RANK"]), "launcher": os.getppid()}
