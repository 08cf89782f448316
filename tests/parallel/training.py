"""Functions of the pool's ranks: train in parallel, and compare with one process on the whole batch."""

import copy
import functools
import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import parallel
import parallel.data_parallel
import parallel.fully_sharded
from parallel import collectives, sharded_optimizer
from tests.parallel.models import Branches, Everything, Fork, UsedOutside, batch, loss_of
from workers.measure.memory import memory_meter

WRAPPERS = {
    "naive": parallel.NaiveDataParallel,
    "flat": parallel.FlatDataParallel,
    "overlapped": parallel.OverlappedDataParallel,
    "bucketed, one": functools.partial(parallel.BucketedDataParallel, bucket_size_mb=None),
    "bucketed, tiny": functools.partial(parallel.BucketedDataParallel, bucket_size_mb=1e-6),
    "bucketed": functools.partial(parallel.BucketedDataParallel, bucket_size_mb=0.0005),
    "fully sharded": parallel.FullyShardedDataParallel,
}
STEPS = 3


def device() -> torch.device:
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


def part(tensor: Tensor) -> Tensor:
    """This rank's part of the batch."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()].to(device())


def part_loss(model: Any, number: int) -> Tensor:
    """The loss of this rank's part of a batch."""
    inputs, targets = batch(number)
    return loss_of(model(part(inputs)), part(targets))


def whole_loss(alone: Any, number: int) -> Tensor:
    """The loss of the whole batch."""
    inputs, targets = batch(number)
    return loss_of(alone(inputs.to(device())), targets.to(device()))


def one_pass(model: Any, number: int) -> None:
    """Forward, backward and synchronization with this rank's part of a batch."""
    part_loss(model, number).backward()
    model.finish_gradient_synchronization()


def both_passes(model: Any, alone: nn.Module, number: int) -> None:
    """The same in one process, too, with the whole batch."""
    one_pass(model, number)
    whole_loss(alone, number).backward()


def make_steps(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return "nothing was raised"


def different_model() -> Everything:
    """A model that differs on every rank, so that only a broadcast makes them equal."""
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


def parity(wrapper: str) -> None:
    """Train some steps with every rank's part, and alone with the whole batch: all gradients and parameters agree.
    Between them, gradients become None and zero in turns."""
    model = WRAPPERS[wrapper](different_model())
    alone = first_ranks_model()
    for name, value in alone.named_buffers():
        assert torch.equal(dict(model.module.named_buffers())[name], value), name
    # Momentum and decay would change a parameter whose gradient is zero instead of None.
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1) for m in (model, alone))
    for step in range(STEPS):
        ours.zero_grad(set_to_none=step % 2 == 0)
        theirs.zero_grad(set_to_none=step % 2 == 0)
        both_passes(model, alone, step)
        same_as(model.module, alone)
        ours.step()
        theirs.step()
    same_as(model.module, alone)


def accumulation(wrapper: str) -> None:
    """Two backward passes per step, with and without no_sync around the first, equal one over both batches."""
    model, alone = WRAPPERS[wrapper](different_model()), first_ranks_model()
    for step in range(2):
        for micro in range(2):
            number = 10 * step + micro
            if step == 0 and micro == 0:
                with model.no_sync():
                    one_pass(model, number)
                local = model.module.norm.weight.grad.clone()
                everywhere = [torch.empty_like(local) for _ in range(dist.get_world_size())]
                dist.all_gather(everywhere, local)
                assert not torch.allclose(everywhere[0], everywhere[1]), "no_sync has synchronized"
            else:
                part_loss(model, number).backward()
            whole_loss(alone, number).backward()
        model.finish_gradient_synchronization()
        same_as(model.module, alone)
        model.zero_grad()
        alone.zero_grad()


def branches(wrapper: str, chosen: dict[int, list[int]]) -> None:
    """Ranks use different parameters in different orders; averages count unused ones as zero, and no rank waits. Under
    full sharding they are those of one unit."""
    fully_sharded = wrapper == "fully sharded"
    make = Fork if fully_sharded else Branches
    torch.manual_seed(dist.get_rank())
    model = WRAPPERS[wrapper](make().to(device()))
    torch.manual_seed(0)
    alone = make().to(device())
    world = dist.get_world_size()
    inputs = torch.randn(world, 4, device=device())
    for _ in range(2):
        model.zero_grad()
        alone.zero_grad()
        model(inputs[dist.get_rank()], chosen[dist.get_rank()]).sum().backward()
        model.finish_gradient_synchronization()
        for rank in range(world):
            (alone(inputs[rank], chosen[rank]).sum() / world).backward()
        same_gradients(model, alone) if fully_sharded else same_as(model.module, alone)


def orders(wrapper, set_to_none, steps, alone_first=False) -> dict[str, list[int]]:
    """Train steps that use a model's branches in the orders given, each gradient compared with one process's.

    Args:
        alone_first: Let a pass without synchronization, through all branches, go before each one.

    Returns:
        Per step the buckets that were sent during the backward pass, and the operations of the whole step.
    """
    torch.manual_seed(dist.get_rank())
    model = WRAPPERS[wrapper](Branches().to(device()))
    torch.manual_seed(0)
    alone = Branches().to(device())
    world = dist.get_world_size()
    inputs = torch.randn(world, 4, device=device())
    counts: dict[str, list[int]] = {"sent": [], "operations": []}
    for chosen in steps:
        model.zero_grad(set_to_none=set_to_none)
        alone.zero_grad(set_to_none=set_to_none)
        with collectives.recorded(device()) as timeline:
            if alone_first:
                with model.no_sync():
                    model(inputs[dist.get_rank()], [0, 1, 2, 3]).sum().backward()
            model(inputs[dist.get_rank()], chosen).sum().backward()
            counts["sent"].append(model._sent)
            model.finish_gradient_synchronization()
        counts["operations"].append(len(timeline.intervals()))
        for rank in range(world):
            if alone_first:
                (alone(inputs[rank], [0, 1, 2, 3]).sum() / world).backward()
            (alone(inputs[rank], chosen).sum() / world).backward()
        same_as(model.module, alone)
    return counts


def no_gradient_at_all(wrapper: str) -> None:
    """The last rank has no backward pass."""
    model = WRAPPERS[wrapper](nn.Linear(3, 2).to(device()))
    if dist.get_rank() + 1 < dist.get_world_size():
        model(torch.ones(3, device=device())).sum().backward()
    model.finish_gradient_synchronization()
    share = (dist.get_world_size() - 1) / dist.get_world_size()
    close(model.module.bias.grad, torch.full((2,), share, device=device()), "bias")


def bucket_views() -> list[dict[torch.dtype, int]]:
    """Return the address of all gradients of a dtype, before and after zero_grad."""
    model = parallel.BucketedDataParallel(Everything(), None)
    addresses = []
    for to_none in (True, False):
        model.zero_grad(set_to_none=to_none)
        one_pass(model, 0)
        of = {(p.dtype, p.grad.untyped_storage().data_ptr()) for p in model.parameters() if p.grad is not None}
        assert len(of) == 2, "one bucket for each dtype"
        addresses.append(dict(of))
    assert all(bucket.memory is None for bucket in model.buckets)
    return addresses


def reduced_in_bfloat16(wrapper: str) -> dict[str, Any]:
    """Gradients that travel in bfloat16: their error, and the bytes that travel."""
    alone = first_ranks_model()
    whole_loss(alone, 0).backward()
    theirs = dict(alone.named_parameters())
    sent, errors = {}, {}
    for dtype in (None, torch.bfloat16):
        model = WRAPPERS[wrapper](different_model(), reduce_dtype=dtype)
        with collectives.recorded(device()) as timeline:
            one_pass(model, 0)
        sent[str(dtype)] = sum(interval.size_bytes for interval in timeline.intervals())
        pairs = [(p.grad, theirs[name].grad) for name, p in model.module.named_parameters() if p.grad is not None]
        assert all(ours.dtype == other.dtype for ours, other in pairs)
        errors[str(dtype)] = max(float((ours - other).norm() / other.norm()) for ours, other in pairs)
    return {"sent": sent, "errors": errors}


def complex_reduced_in_float64(wrapper: str) -> None:
    """Complex gradients keep their imaginary parts."""
    weight, ranks = torch.arange(8.0).view(4, 2) + 1j, dist.get_world_size()
    module = nn.Linear(2, 4, bias=False)
    module.weight = nn.Parameter(weight.to(device()))
    module.forward = lambda x: (module.weight * x).abs().square().sum()
    model = WRAPPERS[wrapper](module, reduce_dtype=torch.float64)
    model(dist.get_rank() + 1.0).backward()
    model.finish_gradient_synchronization()
    expected = 2 * weight * sum((rank + 1) ** 2 for rank in range(ranks)) / ranks
    if wrapper == "fully sharded":
        expected = torch.cat([expected.flatten(), torch.zeros(-8 % ranks)]).chunk(ranks)[dist.get_rank()]
    torch.testing.assert_close(module.weight.grad.as_subclass(Tensor).cpu(), expected)


def given_up(wrapper: str) -> None:
    """A backward pass ends in an error, its gradients are dropped, and the next pass computes the right ones."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device())
    torch.nn.init.ones_(module[0].weight), torch.nn.init.ones_(module[1].weight)
    alone, model = copy.deepcopy(module), WRAPPERS[wrapper](module)
    x = torch.ones(2, 4, device=device()) * (1 + dist.get_rank())

    def fail(*_: Any) -> None:
        raise ArithmeticError("made to fail")

    failing = module[1].register_full_backward_hook(fail)
    assert "made to fail" in error_of(lambda: model(x).sum().backward())
    failing.remove()
    if model.has_sent_gradients():
        assert "call finish_gradient_synchronization()" in error_of(model.zero_grad)
        model.finish_gradient_synchronization()
    model.zero_grad()
    both = torch.ones(2, 4, device=device()) * (1 + (dist.get_world_size() - 1) / 2)
    model(x).sum().backward()
    model.finish_gradient_synchronization()
    alone(both).sum().backward()
    same_as(module, alone)


def uneven(numbers: list[int]) -> list[Any]:
    """Take batches; return their number and the error."""
    steps = 0
    try:
        for _ in parallel.in_step(range(numbers[dist.get_rank()])):
            steps += 1
    except RuntimeError as error:
        return [steps, str(error)]
    return [steps, ""]


def raises(what: str) -> str:
    """The error's text of one wrong use."""
    model = parallel.BucketedDataParallel(nn.Embedding(3, 2, sparse=True), 1)
    uses: dict[str, Callable[[], Any]] = {
        "different": lambda: parallel.NaiveDataParallel(nn.Linear(2, 2 + dist.get_rank())),
        "size": lambda: parallel.BucketedDataParallel(nn.Linear(2, 2), 0),
        "sparse": lambda: model(torch.tensor([1])).sum().backward(),
    }
    return error_of(uses[what])


def rewrapped() -> None:
    """The hooks of a deleted wrapper do not change the next wrapper's gradients."""
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


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


def sharded(kind: str) -> Any:
    optimizer, options = OPTIMIZERS[kind]
    return functools.partial(parallel.ShardedOptimizer, optimizer_cls=optimizer, **options)


def plain(kind: str) -> Any:
    optimizer, options = OPTIMIZERS[kind]
    return functools.partial(optimizer, **options)


def step_all(model: nn.Module, alone: nn.Module, ours: Any, theirs: Any, steps: range) -> None:
    """Train both alike; gradients of `model` are set as data parallelism would leave them."""
    for step in steps:
        for one, optimizer in ((model, ours), (alone, theirs)):
            optimizer.zero_grad()
            whole_loss(one, step).backward()
            optimizer.step()
        same_as(model, alone)


def optimizer_parity(kind: str) -> None:
    """Train with a scheduler that changes momentum, too; after the second step the optimizer's state is replaced."""
    model, alone = first_ranks_model(), first_ranks_model()
    ours, theirs = sharded(kind)(model.parameters()), plain(kind)(alone.parameters())
    assert isinstance(ours, torch.optim.Optimizer)
    scheduled = [torch.optim.lr_scheduler.OneCycleLR(one, 0.1, total_steps=9) for one in (ours, theirs)]
    for step in range(STEPS):
        step_all(model, alone, ours, theirs, range(step, step + 1))
        for schedule in scheduled:
            schedule.step()
        if step == 1:
            ours.state, theirs.state = defaultdict(dict), defaultdict(dict)
    name = "momentum" if kind == "SGD" else "betas"
    assert ours.param_groups[0][name] == theirs.param_groups[0][name] != ours.defaults[name]


def optimizer_memory() -> dict[str, Any]:
    """Bytes of state here, and which parameters have state here."""
    model = first_ranks_model()
    optimizer = sharded("AdamW")(model.parameters())
    whole_loss(model, 0).backward()
    optimizer.step()
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        "bytes": sum(
            state[moment].nbytes for state in optimizer.state.values() for moment in ("exp_avg", "exp_avg_sq")
        ),
        "parameters": [names[parameter] for parameter in optimizer.state],
        "all": sum(p.nbytes for p in model.parameters() if p.grad is not None),
        "largest": max(p.nbytes for p in model.parameters()),
        "loose": [names[parameter] for parameter in optimizer._loose],
    }


class Counting(torch.optim.Optimizer):
    """Its rate falls with the steps that it counts in itself and in its groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / (self.steps + group["steps"]))


def optimizer_counters() -> None:
    """Train parameters of two dtypes, which are two chunks."""
    model = nn.Sequential(*(nn.Linear(4, 4, dtype=dtype) for dtype in (torch.float32, torch.float64) for _ in "abc"))
    alone = copy.deepcopy(model)
    ours, theirs = parallel.ShardedOptimizer(model.parameters(), Counting, lr=0.1), Counting(alone.parameters(), lr=0.1)
    for _ in range(3):
        for one, optimizer in ((model, ours), (alone, theirs)):
            for parameter in one.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        same_as(model, alone)


def optimizer_groups() -> None:
    """Parameter groups with hyper-parameters of their own, one of them added later, fewer parameters than ranks."""
    model, alone = first_ranks_model(), first_ranks_model()
    made = []
    for one in (model, alone):
        groups = [{"params": [one.norm.weight], "lr": 0.1, "weight_decay": 0.0}, {"params": one.blocks.parameters()}]
        if one is model:
            optimizer = parallel.ShardedOptimizer(groups, torch.optim.AdamW, lr=0.01)
        else:
            optimizer = torch.optim.AdamW(groups, lr=0.01)
        made.append(optimizer)
    step_all(model, alone, *made, range(2))
    for one, optimizer in zip((model, alone), made, strict=True):
        optimizer.param_groups[1]["lr"] = 0.02  # as by a scheduler
        optimizer.add_param_group({"params": [one.embedding.weight], "lr": 0.05})
    step_all(model, alone, *made, range(2, 4))
    assert [group["lr"] for group in made[0].param_groups] == [0.1, 0.02, 0.05]
    assert made[0].param_groups[0]["betas"] == (0.9, 0.999)


def optimizer_state(to: int) -> dict[str, Any]:
    """Consolidate, compare with one process's state, load into a new sharded and a plain optimizer, and go on."""
    model, alone = first_ranks_model(), first_ranks_model()
    ours, theirs = sharded("AdamW")(model.parameters()), plain("AdamW")(alone.parameters())
    step_all(model, alone, ours, theirs, range(2))
    part = ours.state_dict()
    ours.consolidate_state_dict(to)
    whole = [ours.state_dict() if dist.get_rank() == to else None]
    dist.broadcast_object_list(whole, to)
    expected = theirs.state_dict()
    assert whole[0]["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        for name, value in state.items():
            close(whole[0]["state"][number][name].to(value.device), value, f"{name} of {number}")
    theirs.load_state_dict(whole[0])  # the plain optimizer takes it
    again = sharded("AdamW")(model.parameters())
    again.load_state_dict(copy.deepcopy(whole[0]))
    step_all(model, alone, again, theirs, range(2, 4))
    again.load_state_dict(copy.deepcopy(part))  # its own part, too
    assert ours.state_dict()["param_groups"] == expected["param_groups"]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    other = parts[(dist.get_rank() + 1) % dist.get_world_size()]
    refused = error_of(lambda: again.load_state_dict(other))
    return {"refused": refused, "part": len(part["state"]), "whole": len(whole[0]["state"])}


def optimizer_alone_in_memory() -> None:
    """Parameters that share their memory with others are left where they are."""
    torch.manual_seed(0)
    memory = torch.randn(10, device=device())
    first, second = nn.Parameter(memory[:4]), nn.Parameter(memory[4:])
    turned = nn.Parameter(torch.randn(3, 2, 4, device=device()).permute(2, 0, 1)[:, :2])
    optimizer = parallel.ShardedOptimizer([first, second, turned], torch.optim.SGD, lr=1.0)
    before = [parameter.detach().clone() for parameter in (first, second, turned)]
    for parameter in (first, second, turned):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter, value in zip((first, second, turned), before, strict=True):
        close(parameter, value - 1, "parameter")
    assert torch.equal(memory, torch.cat([first, second]))


def optimizer_waits() -> list[int]:
    """A thread releases a parameter's memory a moment after the optimizer is made, as gloo's do; return how many
    parameters are left where they are, with waiting for that and without."""
    left = []
    for longest_s in (30.0, 0.0):
        parameter = nn.Parameter(torch.ones(4, device=device()))
        held = [parameter.detach()]
        thread = threading.Timer(0.05, held.clear)
        if longest_s:
            thread.start()
        with mock.patch.object(sharded_optimizer, "RELEASE_S", longest_s):
            left.append(len(parallel.ShardedOptimizer([parameter], torch.optim.SGD, lr=1.0)._loose))
    return left


def optimizer_refuses() -> list[str]:
    layer = nn.Linear(2, 2)
    optimizer = parallel.ShardedOptimizer(layer.parameters(), torch.optim.SGD, lr=0.1)
    wrong: list[Any] = [
        lambda: optimizer.step(lambda: 1.0),
        lambda: optimizer.consolidate_state_dict(9),
        lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
        lambda: parallel.ShardedOptimizer([], torch.optim.SGD, lr=0.1),
        lambda: parallel.ShardedOptimizer([torch.ones(2 + dist.get_rank(), requires_grad=True)], torch.optim.SGD),
        lambda: [layer.bfloat16(), layer.float(), optimizer.step()],
        lambda: copy.deepcopy(optimizer),
    ]
    return [error_of(use) for use in wrong]


def checkpointing(model: Everything, use_reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=use_reentrant)


def outer_checkpointing(model: Any, use_reentrant: bool) -> None:
    """Calls the block inside the checkpoint, as TransformerLM does."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.ModuleList):
        def __iter__(self) -> Any:
            return (lambda x, b=block: checkpoint(b, x, use_reentrant=use_reentrant) for block in super().__iter__())

    model.blocks.__class__ = Checkpointed


def fully_sharded_parity(checkpoint: str = "", accumulate: int = 1, no_sync: str = "", **options: Any) -> None:
    """Train some steps and compare gradients and weights with one process's. Between steps, gradients become None and
    zero in turns.

    Args:
        checkpoint: "outside" or "inside", and the kind of activation checkpointing.
        accumulate: Backward passes per step.
        no_sync: The numbers of passes inside `no_sync`, separated by blanks; with "finished", they are finished there.
        options: The wrapper's.
    """
    model, alone = different_model(), first_ranks_model()
    if checkpoint:
        where, how = checkpoint.split()
        (outer_checkpointing if where == "outside" else checkpointing)(model, how == "reentrant")
    model = parallel.FullyShardedDataParallel(model, **options)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1) for m in (model, alone))
    for step in range(STEPS):
        ours.zero_grad(set_to_none=step % 2 == 0)
        theirs.zero_grad(set_to_none=step % 2 == 0)
        for micro in range(accumulate):
            number = 10 * step + micro
            if str(micro) in no_sync:
                with model.no_sync(), collectives.recorded(device()) as timeline:
                    part_loss(model, number).backward()
                    if "finished" in no_sync:
                        model.finish_gradient_synchronization()
                sent = {interval.operation for interval in timeline.intervals()}
                assert sent == {"all_gather"}, "no_sync has synchronized"
            else:
                part_loss(model, number).backward()
            whole_loss(alone, number).backward()
        model.finish_gradient_synchronization()
        same_gradients(model, alone)
        ours.step()
        theirs.step()
        if step == 1 and checkpoint.split()[1:] != ["reentrant"]:
            with torch.no_grad():
                inputs, _ = batch(99)
                close(model(inputs.to(device())), alone(inputs.to(device())), "logits")
    same_state(model, alone)


def fully_sharded_used_outside(evaluate_first: bool, checkpoint: bool) -> dict[str, Any]:
    """Train a model that uses parameters outside their modules; return which are whole for entire passes."""
    from torch.utils.checkpoint import checkpoint as checkpointed

    torch.manual_seed(dist.get_rank())
    model = parallel.FullyShardedDataParallel(UsedOutside().to(device()))
    torch.manual_seed(0)
    alone = UsedOutside().to(device())
    if checkpoint:
        forward = model.module.forward
        model.module.forward = lambda tokens: checkpointed(forward, tokens, use_reentrant=False)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (model, alone))
    inputs, _ = batch(99)

    def evaluated() -> None:
        for one in (model, alone):
            one.eval()
        with torch.no_grad():
            close(model(inputs.to(device())), alone(inputs.to(device())), "logits")
        for one in (model, alone):
            one.train()

    if evaluate_first:
        evaluated()
    for step in range(STEPS):
        both_passes(model, alone, step)
        same_gradients(model, alone)
        make_steps(ours, theirs)
    evaluated()
    same_state(model, alone)
    return {
        "root": [one.name for one in model.units[0].held],
        "memory": sum(one.memory.untyped_storage().nbytes() for unit in model.units for one in unit.held),
    }


def same_gradients(model: Any, alone: nn.Module) -> None:
    """Compare each part's gradient with its place in the whole gradient."""
    rank, ranks = model.group.rank(), model.group.size()
    theirs = dict(alone.named_parameters())
    for name, parameter in model.module.named_parameters():
        gradient = theirs[name].grad
        assert (parameter.grad is None) == (gradient is None), f"gradient of {name}"
        if gradient is None:
            continue
        if gradient.dim() >= 2:
            assert len(parameter.shape) == 1
            assert parameter.numel() == -(-gradient.numel() // ranks), name
            gradient = gradient.reshape(-1)[rank * parameter.numel() : (rank + 1) * parameter.numel()]
            close(parameter.grad[: gradient.numel()], gradient, f"gradient of {name}")
            assert not parameter.grad[gradient.numel() :].any()
        else:
            close(parameter.grad, gradient, f"gradient of {name}")


def same_state(model: Any, alone: nn.Module) -> None:
    state, expected = model.full_state_dict(), alone.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert state[name].dtype == value.dtype
        assert state[name].shape == value.shape
        close(state[name], value, name)


def scaled(kind: str, optimizer_name: str) -> list[float]:
    """Train with scaled losses; in the second step one rank's gradient becomes infinite. Return the scales."""
    alone = first_ranks_model()
    model, ours = wrapped(kind, different_model(), optimizer_name)
    theirs = plain(optimizer_name)(alone.parameters())
    scalers = [torch.amp.GradScaler(device().type, init_scale=64.0, growth_interval=1000) for _ in range(2)]
    scales = []
    for step in range(4):
        scalers[0].scale(part_loss(model, step)).backward()
        if step == 1 and kind != "fully sharded" and dist.get_rank() == 1:
            model.module.norm.weight.grad = torch.full((8,), float("inf"), device=device())
        model.finish_gradient_synchronization()
        scalers[1].scale(whole_loss(alone, step)).backward()
        if step == 1:
            alone.norm.weight.grad[0] = float("inf")
            if kind == "fully sharded" and dist.get_rank() == 1:
                model.module.blocks[0].up.weight.grad[0] = float("inf")
        if step == 2:
            # Gradients are unscaled before they are clipped.
            for scaler, optimizer in zip(scalers, (ours, theirs), strict=True):
                scaler.unscale_(optimizer)
            norms = [nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in (model, alone)]
            close(norms[0], norms[1], "norm")
        for scaler, optimizer in zip(scalers, (ours, theirs), strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(scalers[0].get_scale())
        assert scales[-1] == scalers[1].get_scale()
    same_state(model, alone) if kind == "fully sharded" else same_as(model.module, alone, gradients=False)
    return scales


def fully_sharded_compute_dtype() -> dict[str, Any]:
    """Train in bfloat16 and in float32: the masters stay float32 and the losses stay together."""
    model = parallel.FullyShardedDataParallel(different_model(), compute_dtype=torch.bfloat16)
    alone = first_ranks_model()
    seen: set[torch.dtype] = set()
    model.module.blocks[0].up.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, alone))
    losses = []
    for step in range(8):
        loss, expected = part_loss(model, step % 2), whole_loss(alone, step % 2)
        loss.backward()
        model.finish_gradient_synchronization()
        expected.backward()
        gradient = str(model.module.blocks[0].up.weight.grad.dtype)
        make_steps(ours, theirs)
        dist.all_reduce(loss.detach())
        losses.append((float(loss.detach()) / dist.get_world_size(), float(expected.detach())))
    state = ours.state[model.module.blocks[0].up.weight]
    return {
        "losses": losses,
        "computed": [str(dtype) for dtype in seen],
        "masters": sorted({str(p.dtype) for p in model.parameters()}),
        "state": str(state["exp_avg"].dtype),
        "gradient": gradient,
    }


def fully_sharded_zeroed_between() -> None:
    """Gradients are set to None between forward and backward pass, and an error leaves a forward pass."""
    model = parallel.FullyShardedDataParallel(different_model())
    alone = first_ranks_model()
    at_rest = dict(model.named_parameters())
    for step in range(3):
        loss = part_loss(model, step)
        assert all(parameter is at_rest[name] for name, parameter in model.named_parameters())
        model.zero_grad()
        alone.zero_grad()
        loss.backward()
        model.finish_gradient_synchronization()
        whole_loss(alone, step).backward()
        same_gradients(model, alone)
        handle = model.module.blocks[1].up.register_forward_hook(lambda module, inputs, output: 1 / 0)
        try:
            part_loss(model, step)
        except ZeroDivisionError:
            assert all(parameter is at_rest[name] for name, parameter in model.named_parameters())
        handle.remove()
    same_state(model, alone)


def fully_sharded_called_inside() -> list[int]:
    """Call the wrapped module itself repeatedly, as its method `generate` would."""
    model = parallel.FullyShardedDataParallel(first_ranks_model())
    alone = first_ranks_model()
    inputs, _ = batch(0)
    lengths = []
    for _ in range(3):
        with torch.no_grad():
            close(model.module(inputs.to(device())), alone(inputs.to(device())), "logits")
        lengths.append(len(model._forward.order))
    return lengths


def wrapped(kind: str, module: nn.Module, optimizer_name: str) -> tuple[Any, Any]:
    if kind.startswith("fully sharded"):
        model: Any = parallel.FullyShardedDataParallel(module, reshard_after_forward="once" not in kind)
        return model, plain(optimizer_name)(model.parameters())
    model = WRAPPERS["bucketed" if kind == "sharded optimizer" else kind](module)
    return model, (sharded if kind == "sharded optimizer" else plain)(optimizer_name)(model.parameters())


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        one_pass(model, step)
        make_steps(optimizer)


def saved(kind: str, model: Any, optimizer: Any, path: str) -> None:
    """Save model and optimizer as one process would; only rank 0 has anything to save."""
    if kind.startswith("fully sharded"):
        weights = model.full_state_dict(rank0_only=True)
        state = model.full_optimizer_state_dict(optimizer, rank0_only=True)
        assert bool(weights) == bool(state) == (dist.get_rank() == 0)
        assert all(value.device.type == "cpu" for value in weights.values())
    else:
        weights = model.module.state_dict()
        if kind == "sharded optimizer":
            optimizer.consolidate_state_dict()
        state = optimizer.state_dict()
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": state}, path)
    dist.barrier()


def train_and_save(kind: str, optimizer_name: str, path: str) -> None:
    model, optimizer = wrapped(kind, different_model(), optimizer_name)
    train(model, optimizer, range(2))
    saved(kind, model, optimizer, path)


def load(kind: str, optimizer_name: str, path: str) -> tuple[Any, Any]:
    """A wrapper around a model with other weights, and its optimizer, as they were saved."""
    module = different_model()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    whole = torch.load(path, map_location="cpu")
    if not kind.startswith("fully sharded"):
        module.load_state_dict(whole["model"])
    model, optimizer = wrapped(kind, module, optimizer_name)
    if not kind.startswith("fully sharded"):
        optimizer.load_state_dict(whole["optimizer"])
        return model, optimizer
    if dist.get_rank() != 0:
        whole = {"model": None, "optimizer": None}
    model.load_full_state_dict(whole["model"])
    model.load_full_optimizer_state_dict(optimizer, whole["optimizer"])
    return model, optimizer


def load_and_go_on(kind: str, optimizer_name: str, path: str) -> None:
    """Go on from what any number of ranks saved: equal to one process that trained all steps, and that process could
    have gone on from the file, too."""
    model, optimizer = load(kind, optimizer_name, path)
    train(model, optimizer, range(2, 4))
    for resumes in (False, True):
        alone = first_ranks_model()
        theirs = plain(optimizer_name)(alone.parameters())
        if resumes:
            whole = torch.load(path, map_location="cpu")
            alone.load_state_dict(whole["model"])
            theirs.load_state_dict(whole["optimizer"])
        for step in range(2 if resumes else 0, 4):
            whole_loss(alone, step).backward()
            make_steps(theirs)
        same_state(model, alone) if kind.startswith("fully sharded") else same_as(model.module, alone, gradients=False)


def resumed_exactly(kind: str, optimizer_name: str, path: str) -> None:
    """Save, go on, and go on from the file: bit by bit the same."""
    model, optimizer = wrapped(kind, different_model(), optimizer_name)
    train(model, optimizer, range(2))
    saved(kind, model, optimizer, path)
    train(model, optimizer, range(2, 4))
    again, optimizer_again = load(kind, optimizer_name, path)
    train(again, optimizer_again, range(2, 4))
    ours, theirs = dict(model.module.named_parameters()), dict(again.module.named_parameters())
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name
        for key, value in optimizer.state.get(parameter, {}).items():
            assert torch.equal(value, optimizer_again.state[theirs[name]][key]), (name, key)


def wrong_states() -> list[str]:
    """The errors of states that do not fit, on rank 0 alone."""
    model = parallel.FullyShardedDataParallel(first_ranks_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = model.full_state_dict(rank0_only=True)
    first = dist.get_rank() == 0
    wrong = (
        lambda: model.load_full_state_dict({**state, "other": torch.ones(1)} if first else None),
        lambda: model.load_full_state_dict({**state, "norm.weight": torch.ones(3)} if first else None),
        lambda: model.load_full_optimizer_state_dict(optimizer, {"state": {}, "param_groups": []}),
    )
    return [error_of(use) for use in wrong]


def peak_of_saving(width: int) -> dict[str, float]:
    """Memory that saving takes at most on this rank, and what rank 0 keeps of it, in sizes of one of four parameters:
    on the GPU, or on a CPU, where rank 0 keeps it in the same memory."""
    module = nn.Sequential(*(nn.Linear(width, width, bias=False, device=device()) for _ in range(4)))
    model, optimizer = wrapped("fully sharded", module, "AdamW")
    model(torch.ones(2, width, device=device())).sum().backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    meter = memory_meter(device())
    meter.reset()
    before = meter.now_mib() or 0.0
    weights = model.full_state_dict(rank0_only=True)
    state = model.full_optimizer_state_dict(optimizer, rank0_only=True)
    kept = sum(value.nbytes for value in weights.values())
    kept += sum(value.nbytes for values in state.get("state", {}).values() for value in values.values())
    largest = 4 * width * width
    return {"peak": ((meter.peak_mib()[0] or 0.0) - before) * 2**20 / largest, "kept": kept / largest}


def few(what: str) -> None:
    """One parameter with two elements: fewer than there may be ranks."""
    torch.manual_seed(0)
    alone = nn.Linear(2, 1, bias=False).to(device())
    theirs = plain("AdamW")(alone.parameters())
    model, ours = wrapped(what, copy.deepcopy(alone), "AdamW")
    for step in range(3):
        inputs = torch.randn(6, 2, generator=torch.Generator().manual_seed(step))
        model(part(inputs)).square().mean().backward()
        model.finish_gradient_synchronization()
        alone(inputs.to(device())).square().mean().backward()
        for one in (ours, theirs):
            one.param_groups[0]["lr"] *= 0.5  # as some schedulers do
        make_steps(ours, theirs)
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"], "also on ranks without parameters"
    weight = model.full_state_dict()["weight"] if what == "fully sharded" else model.module.weight
    close(weight, alone.weight, "weight")


def gone(wrapper: str) -> int:
    """Train in a wrapper, drop it, and count the parameters that are left of it."""
    module = first_ranks_model()
    model = WRAPPERS[wrapper](module)
    for _ in range(2):
        one_pass(model, 0)
    left = weakref.WeakSet(model.parameters())
    assert left
    del module, model
    # Memory that the first pass frees may hold data of C++, which the second one finds.
    gc.collect()
    gc.collect()
    return len(left)


def freed_by_count() -> list[str]:
    """Train a fully sharded model, drop it with the garbage collector off, and name what is left of it."""
    gc.collect()
    gc.disable()
    try:
        model = parallel.FullyShardedDataParallel(first_ranks_model())
        for _ in range(2):
            one_pass(model, 0)
        refs = {"wrapper": weakref.ref(model), "module": weakref.ref(model.module), "unit": weakref.ref(model.units[1])}
        del model
        return [name for name, ref in refs.items() if ref() is not None]
    finally:
        gc.enable()
