"""What ranks do over a group in which nothing travels."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist

from parallel import ShardedOptimizer, collectives
from parallel.collectives import (
    start_all_gather,
    start_all_reduce,
    start_all_reduces,
    start_reduce_scatter,
    start_together,
)
from parallel.silent_group import SilentGroup, silent_group


@contextmanager
def together() -> Iterator[None]:
    """Start operations together, as on a GPU."""
    own = collectives.runs_together
    collectives.runs_together = lambda group, device: True
    try:
        yield
    finally:
        collectives.runs_together = own


def operations() -> None:
    """A gather brings a rank's own part in every place, a reduction leaves a rank's own values."""
    group = silent_group()
    assert isinstance(group, SilentGroup)
    rank, size = dist.get_rank(), dist.get_world_size()
    assert (group.rank(), group.size()) == (rank, size)
    # Torch asks this of a new group where the default one is bound to a GPU.
    assert group._get_backend(torch.device("cuda", 0)).supports_splitting is False
    own = torch.tensor([1.0 + rank, -2.0])
    whole = torch.empty(2 * size)
    start_all_gather(whole, own, group).wait()
    assert torch.equal(whole, own.repeat(size))
    in_place = torch.arange(2.0 * size)
    start_all_gather(in_place, in_place[2 * rank : 2 * rank + 2], group).wait()
    assert torch.equal(in_place, torch.arange(2.0 * rank, 2 * rank + 2).repeat(size))
    kept = torch.arange(2.0 * size)
    group.keep(kept)
    start_all_gather(kept, kept[2 * rank : 2 * rank + 2], group).wait()
    assert torch.equal(kept, torch.arange(2.0 * size))
    part = torch.empty(2)
    start_reduce_scatter(part, torch.arange(2.0 * size), dist.ReduceOp.SUM, group).wait()
    assert torch.equal(part, torch.arange(2.0 * rank, 2 * rank + 2))
    wholes, parts = [torch.empty(2 * size), torch.empty(size)], [own, own[:1]]
    with together():
        starts = [partial(start_all_gather, *pair, group) for pair in zip(wholes, parts, strict=True)]
        start_together(starts, group, own.device).wait()
        for whole, one in zip(wholes, parts, strict=True):
            assert torch.equal(whole, one.repeat(size))
        scattered = [torch.empty(2), torch.empty(1)]
        starts = [
            partial(start_reduce_scatter, one, whole, dist.ReduceOp.SUM, group)
            for one, whole in zip(scattered, wholes, strict=True)
        ]
        start_together(starts, group, own.device).wait()
        assert torch.equal(torch.cat(scattered), torch.cat(parts))
        start_all_reduces(parts, dist.ReduceOp.SUM, group).wait()
    start_all_reduce(own, dist.ReduceOp.SUM, group).wait()
    assert torch.equal(own, torch.tensor([1.0 + rank, -2.0]))
    dist.broadcast(own, 0, group=group)
    assert torch.equal(own, torch.tensor([1.0 + rank, -2.0]))


def sizes_stay() -> None:
    """Parameters of very different sizes keep theirs, whichever rank updates them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64, bias=False))
    with torch.no_grad():
        model[1].weight.mul_(0.01)
    before = [float(parameter.detach().std()) for parameter in model.parameters()]
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, process_group=silent_group(), lr=1e-5)
    for _ in range(3):
        logits = model(torch.arange(64))
        torch.nn.functional.cross_entropy(logits, torch.arange(64)).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = [float(parameter.detach().std()) for parameter in model.parameters()]
    assert after == pytest.approx(before, rel=0.05)
