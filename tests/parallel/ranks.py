"""Functions that launched ranks call in tests. Ranks import this module by name."""

import mmap
import os
import signal
import time
from pathlib import Path
from typing import Any

from parallel.process_group import Rank


def add_up(rank: Rank, number: int) -> dict[str, Any]:
    """Reduce over all ranks."""
    import torch
    import torch.distributed as dist

    total = torch.tensor([number + rank.index], device=rank.device)
    dist.all_reduce(total)
    rank.report({"rank": rank.index})
    rank.step_done()
    return {"total": int(total), "ranks": dist.get_world_size(), "pid": os.getpid()}


def tell(rank: Rank, variable: str) -> list[Any]:
    return [rank.index, rank.world_size, rank.backend, os.environ.get(variable), (1, 2), float("inf")]


def fail(rank: Rank, how: str, culprit: int, folder: str) -> None:
    """One rank fails after all have reported their process and made a step; the others wait without end."""
    rank.report(os.getpid())
    rank.step_done()
    Path(folder, f"stepped-{rank.index}").touch()
    if rank.index == culprit:
        while len(list(Path(folder).glob("stepped-*"))) < rank.world_size:
            time.sleep(0.01)
        print("the last words of the culprit", "  what():  of C++" if how == "crash" else "", sep="\n", flush=True)
        if how == "raise":
            raise ArithmeticError("made to fail")
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "crash": signal.SIGSEGV}[how])
    time.sleep(60)


def fail_of_anothers_failure(rank: Rank, heard: str) -> None:
    """Rank 1 dies; rank 0 notices and raises, and its message is there first, as the file `heard` tells."""
    if rank.index == 0:
        rank.report(os.getpid())
        raise ConnectionError("rank 1 is gone")
    while not Path(heard).exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def hold_shared_memory(rank: Rank, path: str) -> None:
    """Map a file in shared memory, as NCCL does, and fail."""
    if rank.index == 0:
        unmapped = Path(f"{path}-unmapped")
        with unmapped.open("w+b") as file:
            file.truncate(4096)
            memory = mmap.mmap(file.fileno(), 4096)
            unmapped.rename(path)
            rank.report(len(memory))
            time.sleep(60)
    while not Path(path).exists():
        time.sleep(0.01)
    raise ArithmeticError("made to fail")


def wait(rank: Rank, seconds: float, steps: int) -> int:
    """Make steps, each after some time; rank 1 makes none."""
    rank.report(os.getpid())
    for _ in range(steps if rank.index == 0 else 0):
        time.sleep(seconds)
        rank.step_done()
    if rank.index == 1:
        time.sleep(60)
    return steps


def return_an_object(rank: Rank) -> Any:
    return object()
