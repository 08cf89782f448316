"""What ranks do in tests. Ranks import it by name."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from parallel.process_group import Rank


def add_up(rank: Rank, number: int) -> dict[str, Any]:
    """Reduce over all ranks, reporting each step."""
    total = torch.tensor([number + rank.index], device=rank.device)
    dist.all_reduce(total)
    rank.report({"rank": rank.index})
    rank.step_done()
    return {
        "total": int(total),
        "ranks": dist.get_world_size(),
        "nvls": os.environ.get("NCCL_NVLS_ENABLE"),
        "pid": os.getpid(),
        "ports": [os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]],
    }


def fail_beside_waiting(rank: Rank, how: str, culprit: int) -> None:
    """One rank fails while the others wait for it in an all-reduce."""
    rank.report(os.getpid())
    dist.all_reduce(torch.ones(1))
    rank.step_done()
    if rank.index == culprit:
        print("the last words of the culprit", flush=True)
        if how == "raise":
            raise ArithmeticError("made to fail")
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "crash": signal.SIGSEGV}[how])
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


def return_a_tensor(rank: Rank) -> Any:
    return torch.ones(1)


def never_step(rank: Rank) -> None:
    time.sleep(60)
