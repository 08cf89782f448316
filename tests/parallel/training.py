"""What the pool's ranks do: train in parallel, and compare with one process on the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import parallel
from tests.parallel.models import Branches, Everything, batch, loss_of

WRAPPERS = {
    "naive": parallel.NaiveDataParallel,
    "flat": parallel.FlatDataParallel,
    "overlapped": parallel.OverlappedDataParallel,
    "bucketed, one": lambda module: parallel.BucketedDataParallel(module, None),
    "bucketed, tiny": lambda module: parallel.BucketedDataParallel(module, 1e-6),
    "bucketed": lambda module: parallel.BucketedDataParallel(module, 0.0005),
    "bucketed, growing": lambda module: parallel.BucketedDataParallel(module, 0.01, first_bucket_size_mb=0.0002),
}
STEPS = 4


def device() -> torch.device:
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


def part(tensor: Tensor) -> Tensor:
    """This rank's part of the batch."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()].to(device())


def different_model() -> Everything:
    """A model that is another one on every rank: only a broadcast makes them equal."""
    torch.manual_seed(dist.get_rank())
    model = Everything()
    model.count += dist.get_rank()
    return model.to(device())


def first_ranks_model() -> Everything:
    torch.manual_seed(0)
    return Everything().to(device())


def close(ours: Tensor, theirs: Tensor, name: str) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")


def same_as(module: nn.Module, reference: nn.Module, *, gradients: bool = True) -> None:
    theirs = dict(reference.named_parameters())
    assert {name for name, _ in module.named_parameters()} == set(theirs)
    for name, parameter in module.named_parameters():
        close(parameter, theirs[name], name)
        if gradients:
            gradient = theirs[name].grad
            assert (parameter.grad is None) == (gradient is None), f"gradient of {name}"
            if gradient is not None:
                close(parameter.grad, gradient, f"gradient of {name}")


def parity(wrapper: str, set_to_none: bool) -> None:
    """Train some steps with every rank's part, and alone with the whole batch: all gradients and parameters agree."""
    model = WRAPPERS[wrapper](different_model())
    alone = first_ranks_model()
    for name, value in alone.named_buffers():
        assert torch.equal(dict(model.module.named_buffers())[name], value), name
    # Momentum and decay would change a parameter whose gradient is zero instead of None.
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1) for m in (model, alone))
    for step in range(STEPS):
        inputs, targets = batch(step)
        ours.zero_grad(set_to_none=set_to_none)
        theirs.zero_grad(set_to_none=set_to_none)
        loss_of(model(part(inputs)), part(targets)).backward()
        model.finish_gradient_synchronization()
        loss_of(alone(inputs.to(device())), targets.to(device())).backward()
        same_as(model.module, alone)
        ours.step()
        theirs.step()
    same_as(model.module, alone)


def accumulation(wrapper: str, no_sync: bool) -> None:
    """Two backward passes per step, with and without no_sync around the first, equal one over both batches."""
    model, alone = WRAPPERS[wrapper](different_model()), first_ranks_model()
    for step in range(2):
        for micro in range(2):
            inputs, targets = batch(10 * step + micro)
            if no_sync and micro == 0:
                with model.no_sync():
                    loss_of(model(part(inputs)), part(targets)).backward()
                    model.finish_gradient_synchronization()
                local = model.module.norm.weight.grad.clone()
                everywhere = [torch.empty_like(local) for _ in range(dist.get_world_size())]
                dist.all_gather(everywhere, local)
                assert not torch.allclose(everywhere[0], everywhere[1]), "no_sync has synchronized"
            else:
                loss_of(model(part(inputs)), part(targets)).backward()
            loss_of(alone(inputs.to(device())), targets.to(device())).backward()
        model.finish_gradient_synchronization()
        same_as(model.module, alone)
        model.zero_grad()
        alone.zero_grad()


def branches(wrapper: str, chosen: dict[int, list[int]]) -> None:
    """Ranks use different parameters, in different orders: averages count the others as zero, and nobody waits."""
    torch.manual_seed(dist.get_rank())
    model = WRAPPERS[wrapper](Branches().to(device()))
    torch.manual_seed(0)
    alone = Branches().to(device())
    world = dist.get_world_size()
    inputs = torch.randn(world, 4, device=device())
    for _ in range(2):
        model.zero_grad()
        alone.zero_grad()
        model(inputs[dist.get_rank()], chosen[dist.get_rank()]).sum().backward()
        model.finish_gradient_synchronization()
        for rank in range(world):
            (alone(inputs[rank], chosen[rank]).sum() / world).backward()
        same_as(model.module, alone)


def no_gradient_at_all(wrapper: str) -> None:
    """The last rank has no backward pass."""
    model = WRAPPERS[wrapper](nn.Linear(3, 2).to(device()))
    if dist.get_rank() + 1 < dist.get_world_size():
        model(torch.ones(3, device=device())).sum().backward()
    model.finish_gradient_synchronization()
    share = (dist.get_world_size() - 1) / dist.get_world_size()
    close(model.module.bias.grad, torch.full((2,), share, device=device()), "bias")


def bucket_views() -> dict[str, Any]:
    """Which gradients share memory, before and after zero_grad, and whether anything but they keeps it."""
    model = parallel.BucketedDataParallel(Everything(), None)
    found: dict[str, Any] = {}
    for mode in (True, False):
        model.zero_grad(set_to_none=mode)
        inputs, targets = batch(0)
        loss_of(model(part(inputs)), part(targets)).backward()
        model.finish_gradient_synchronization()
        found[f"memories after {mode}"] = {
            str(dtype): len(
                {
                    parameter.grad.untyped_storage().data_ptr()
                    for parameter in model.parameters()
                    if parameter.grad is not None and parameter.dtype == dtype
                }
            )
            for dtype in (torch.float32, torch.float64)
        }
        found[f"address after {mode}"] = model.module.norm.weight.grad.untyped_storage().data_ptr()
    found["kept"] = [bucket.memory is not None for bucket in model.buckets]
    return found


def raises(what: str) -> str:
    """The error's text of one wrong use."""
    try:
        if what == "different":
            parallel.NaiveDataParallel(nn.Linear(2, 2 + dist.get_rank()))
        elif what == "size":
            parallel.BucketedDataParallel(nn.Linear(2, 2), 0)
        elif what == "first":
            parallel.BucketedDataParallel(nn.Linear(2, 2), 1, first_bucket_size_mb=2)
        elif what == "sparse":
            model = parallel.BucketedDataParallel(nn.Embedding(3, 2, sparse=True), 1)
            model(torch.tensor([1])).sum().backward()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing was raised"


def rewrapped() -> None:
    """The hooks of a wrapper that is gone leave the next one's gradients alone."""
    module = nn.Linear(3, 2)
    parallel.OverlappedDataParallel(module)
    model = parallel.BucketedDataParallel(module)
    model(torch.ones(3)).sum().backward()
    model.finish_gradient_synchronization()
    close(module.bias.grad, torch.ones(2), "bias")


def aliased() -> None:
    """Two parameters whose gradients autograd may leave in one memory."""
    torch.manual_seed(0)
    module = nn.ParameterDict({"a": torch.randn(2, 3), "b": torch.randn(6)})
    model = parallel.OverlappedDataParallel(module)
    alone = copy.deepcopy(module)
    weight = torch.arange(6.0) + dist.get_rank()
    ((module["a"].view(-1) + module["b"]) * weight).sum().backward()
    model.finish_gradient_synchronization()
    mean = torch.arange(6.0) + (dist.get_world_size() - 1) / 2
    ((alone["a"].view(-1) + alone["b"]) * mean).sum().backward()
    same_as(module, alone)
