"""What the pool's ranks time."""

from __future__ import annotations

import time
from array import array
from typing import Any

import torch
import torch.distributed as dist

from parallel import FullyShardedDataParallel
from parallel.collectives import default_group, make_operation, over_ranks, recorded, time_operation
from tests.parallel.models import batch, loss_of
from tests.parallel.training import WRAPPERS, device, first_ranks_model, part


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


def timeline(wrapper: str) -> dict[str, Any]:
    """Record one step of a wrapper, and another one without recording."""
    model = wrap(wrapper)
    inputs, targets = batch(0)
    with recorded(device()) as both:
        began = time.perf_counter()
        loss_of(model(part(inputs)), part(targets)).backward()
        model.finish_gradient_synchronization()
        took_ms = 1e3 * (time.perf_counter() - began)
    found = both.intervals()
    loss_of(model(part(inputs)), part(targets)).backward()
    model.finish_gradient_synchronization()
    return {
        "intervals": [(one.operation, one.size_bytes, one.start_ms, one.end_ms) for one in found],
        "after": len(both.intervals()),
        "took_ms": took_ms,
        "gradients": sum(p.nbytes for p in model.parameters() if p.requires_grad),
        "parameters": len([p for p in model.parameters() if p.requires_grad]),
    }


def wrap(wrapper: str) -> Any:
    """A model in one of the wrappers."""
    model = first_ranks_model()
    return FullyShardedDataParallel(model) if wrapper == "fully sharded" else WRAPPERS[wrapper](model)


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
