"""What the pool's ranks time."""

from __future__ import annotations

import time
from array import array
from typing import Any

import torch
import torch.distributed as dist

from parallel.collectives import default_group, make_operation, over_ranks, time_operation
from tests.parallel.training import device


def operation(name: str, size_bytes: int) -> dict[str, Any]:
    """Time an operation, and say what tensors it took."""
    group = default_group()
    made = make_operation(name, size_bytes, device(), group=group)
    calls: list[None] = []
    times = time_operation(made, device(), group=group, warmup=2, steps=3, stepped=lambda: calls.append(None))
    return {"bytes": made.size_bytes, "times": list(times), "calls": len(calls)}


def uneven_ranks() -> dict[str, Any]:
    """Times that are known, brought together."""
    rank = dist.get_rank()
    both = over_ranks(array("d", [1.0 + rank, 5.0 - rank]), device(), default_group())
    return {"slowest": list(both.slowest), "skew": list(both.skew), "ranks": [list(one) for one in both.per_rank]}


def late_rank() -> float:
    """The last rank comes late: the barrier, not the operation, waits for it."""
    if dist.get_rank() + 1 == dist.get_world_size():
        time.sleep(0.5)
    group = default_group()
    made = make_operation("all_reduce", 64, device(), group=group)
    return max(time_operation(made, device(), group=group, warmup=0, steps=1))


def results(name: str) -> list[float]:
    """What an operation computes: the first and the last element, from ranks that have other numbers."""
    group = default_group()
    made = make_operation(name, 4 * 6, torch.device("cpu"), group=group)
    tensor = next(one for one in made.run.args if isinstance(one, torch.Tensor))  # type: ignore[attr-defined]
    for one in made.run.args:  # type: ignore[attr-defined]
        if isinstance(one, torch.Tensor):
            one.fill_(dist.get_rank() + 1)
    made.run()
    return [float(tensor[0]), float(tensor[-1])]
