"""What ranks do over a group in which nothing travels."""

from __future__ import annotations

import torch
import torch.distributed as dist

from parallel.collectives import start_all_gather, start_all_reduce, start_reduce_scatter
from parallel.silent_group import SilentGroup, silent_group


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
    part = torch.empty(2)
    start_reduce_scatter(part, torch.arange(2.0 * size), dist.ReduceOp.SUM, group).wait()
    assert torch.equal(part, torch.arange(2.0 * rank, 2 * rank + 2))
    start_all_reduce(own, dist.ReduceOp.SUM, group).wait()
    assert torch.equal(own, torch.tensor([1.0 + rank, -2.0]))
    dist.broadcast(own, 0, group=group)
    assert torch.equal(own, torch.tensor([1.0 + rank, -2.0]))


def nobody_waits() -> None:
    """Only rank 0 gathers; over a real group it would wait for ever."""
    group = silent_group()
    if dist.get_rank() == 0:
        start_all_gather(torch.empty(2 * dist.get_world_size()), torch.ones(2), group).wait()
