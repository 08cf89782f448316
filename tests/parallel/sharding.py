"""Functions of the pool's ranks: what full sharding can be asked for, beside one process and beside torch's FSDP2."""

import contextlib
import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import parallel
from parallel import collectives
from parallel.accounting import traffic_factor
from tests.parallel.models import VOCABULARY, WIDTH, Everything, Fork
from tests.parallel.training import (
    close,
    device,
    different_model,
    error_of,
    first_ranks_model,
    fully_sharded_parity,
    make_steps,
    part,
    same_gradients,
    same_state,
    whole_loss,
)


def not_resharded(checkpoint: str) -> None:
    """Train with units that stay whole between their passes."""
    fully_sharded_parity(checkpoint, reshard_after_forward=False)
    fully_sharded_parity(checkpoint, 3, no_sync="1", reshard_after_forward=False)


def bytes_of_a_step() -> dict[str, float]:
    """Bytes that a rank sends in a step, in rings, by the way of dividing the optimizer's state; and P·(n-1)/n."""
    torch.manual_seed(0)
    module = Plain().to(device())
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    ranks = dist.get_world_size()
    sent = {"P": sum(weight.nbytes for weight in weights) * (ranks - 1) / ranks}
    for way in ("sharded optimizer", "fully sharded", "gathered once"):
        mine = copy.deepcopy(module)
        if way == "sharded optimizer":
            model: Any = parallel.NaiveDataParallel(mine)
            trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
            held = trainable[-1].detach()  # then it stays where it is, and is sent by itself
            optimizer: Any = parallel.ShardedOptimizer(trainable, torch.optim.SGD, lr=0.1)
            del held
        else:
            model = parallel.FullyShardedDataParallel(mine, reshard_after_forward=way == "fully sharded")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with collectives.recorded(device()) as timeline:
            model(torch.ones(4, 12, device=device())).sum().backward()
            model.finish_gradient_synchronization()
            optimizer.step()
        sent[way] = sum(
            interval.size_bytes * traffic_factor(interval.operation, ranks) for interval in timeline.intervals()
        )
        # One byte per weight says which ranks used it, and eight the order of units.
        sent[way] -= (8 + len(weights)) * traffic_factor("all_reduce", ranks)
        if way != "sharded optimizer":  # in the first pass ranks compare each unit, and the end
            units = sum(bool(unit.sharded) for unit in model.units)
            sent[way] -= 8 * ranks * (units + 1) * traffic_factor("all_gather", ranks)
    return sent


def two_by_two() -> dict[str, dist.ProcessGroup]:
    """Groups of two replicas of two shards."""
    rank = dist.get_rank()
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return {"process_group": shards[rank // 2], "replicas": replicas[rank % 2]}


def hybrid() -> None:
    """Train, save and load with two replicas of two shards."""
    groups = two_by_two()
    fully_sharded_parity(**groups)
    fully_sharded_parity("inside non-reentrant", 3, no_sync="1 finished", **groups)
    model = parallel.FullyShardedDataParallel(different_model(), **groups)
    first = first_ranks_model().state_dict()
    close(model.full_state_dict()["head.weight"], first["head.weight"], "head.weight")
    assert bool(model.full_state_dict(rank0_only=True)) == (dist.get_rank() == 0)
    model.load_full_state_dict({name: value + 1 for name, value in first.items()} if dist.get_rank() == 0 else None)
    for name, value in model.full_state_dict().items():
        close(value, first[name] + 1, name)


def hybrid_branches() -> None:
    """Some branches are used by one rank only, of which all replicas learn; the last is used by none."""
    groups, rank = two_by_two(), dist.get_rank()
    torch.manual_seed(rank)
    model = parallel.FullyShardedDataParallel(Fork().to(device()), **groups)
    torch.manual_seed(0)
    alone = Fork().to(device())
    inputs = torch.randn(4, 4, device=device())
    chosen = [[0], [0, 1], [0], [0, 2]]
    if rank < 2:  # which then gather other units in the backward pass than the replica
        with torch.no_grad():
            model(inputs[rank], chosen[rank])
    model(inputs[rank], chosen[rank]).sum().backward()
    model.finish_gradient_synchronization()
    for other in range(4):
        (alone(inputs[other], chosen[other]).sum() / 4).backward()
    same_gradients(model, alone)


class Plain(nn.Module):
    """A model of one dtype, which both kinds of full sharding take."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)) for _ in range(2))
        self.head = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def torchs_fully_sharded(module: Plain, param_dtype: Any, reduce_dtype: Any) -> nn.Module:
    """The module under torch's FSDP2: each block, and the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for block in module.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(module, mesh=mesh, mp_policy=policy)


def beside_torchs(compute: str | None, reduce: str | None, clip: bool) -> dict[str, float]:
    """Train three steps under ours, under torch's FSDP2, and alone in float32; return the largest differences."""
    compute_dtype, reduce_dtype = (getattr(torch, name) if name else None for name in (compute, reduce))
    torch.manual_seed(0)
    alone = Plain().to(device())
    model = parallel.FullyShardedDataParallel(copy.deepcopy(alone), compute_dtype, reduce_dtype=reduce_dtype)
    torchs = torchs_fully_sharded(copy.deepcopy(alone), compute_dtype, reduce_dtype)
    every = {"ours": model, "torch's": torchs, "alone": alone}
    optimizers = {name: torch.optim.SGD(one.parameters(), lr=0.5) for name, one in every.items()}
    for step in range(3):
        inputs = torch.randn(12, 12, generator=torch.Generator().manual_seed(step))
        for name, one in every.items():
            mine = inputs.to(device()) if name == "alone" else part(inputs)
            one(mine).float().square().mean().backward()
            if name == "ours":
                model.finish_gradient_synchronization()
            if clip:
                nn.utils.clip_grad_norm_(one.parameters(), 0.05)
            optimizers[name].step()
            optimizers[name].zero_grad()
    theirs = {name: parameter.full_tensor().detach() for name, parameter in torchs.named_parameters()}
    states = {"ours": model.full_state_dict(), "torch's": theirs, "alone": alone.state_dict()}

    def difference(one: str, other: str) -> float:
        return max(float((states[one][name] - value).abs().max()) for name, value in states[other].items())

    return {
        name: difference(*name.split(" and ")) for name in ("ours and torch's", "ours and alone", "torch's and alone")
    }


def accumulated() -> dict[str, float]:
    """Largest errors of gradients that accumulate over many passes in bfloat16, and in float32."""
    errors = {}
    for name, reduce_dtype in (("bfloat16", None), ("float32", torch.float32)):
        torch.manual_seed(0)
        alone = nn.Linear(8, 8).to(device())
        model = parallel.FullyShardedDataParallel(copy.deepcopy(alone), torch.bfloat16, reduce_dtype=reduce_dtype)
        passes = 100
        for number in range(passes):
            # So few bits that bfloat16 has each pass's gradient exactly.
            whole = torch.randint(16, 48, (1, 8), generator=torch.Generator().manual_seed(number))
            inputs = whole.to(device()) / 32
            with model.no_sync() if number + 1 < passes else contextlib.nullcontext():
                (3 * model(inputs)).sum().backward()
            (3 * alone(inputs)).sum().backward()
        model.finish_gradient_synchronization()
        (weight,) = model.units[1].sharded
        gradients = {alone.weight: weight.gathered(weight.part.grad), alone.bias: model.module.bias.grad}
        for parameter, gradient in gradients.items():
            error = float((gradient - parameter.grad).norm() / parameter.grad.norm())
            errors[f"{name} {parameter.dim()}"] = error
    return errors


class Initialised(nn.Module):
    """All of its modules fill their parameters and buffers themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)) for _ in range(3)
        )
        self.norm = nn.BatchNorm1d(5, track_running_stats=True)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def from_meta(compute: str | None) -> dict[str, Any]:
    """Build on the meta device; the values are those of a module made with the first rank's seed.

    Returns:
        The most bytes of parameters that existed at a time, those of all, and the errors of wrong uses.
    """
    with torch.device("meta"):
        module = Initialised()
    existing: list[int] = []

    def initialise(one: nn.Module) -> None:
        storages = [
            t.untyped_storage() for t in (*module.parameters(), *one.parameters(recurse=False)) if not t.is_meta
        ]
        existing.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))
        one.reset_parameters()

    torch.manual_seed(dist.get_rank())
    dtype = getattr(torch, compute) if compute else None
    model = parallel.FullyShardedDataParallel(module, dtype, device=device(), initialise=initialise)
    torch.manual_seed(0)
    with device():  # a GPU has random numbers of its own
        alone = Initialised()
    for name, value in model.full_state_dict().items():
        assert torch.equal(value, alone.state_dict()[name]), name
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone))
    # torch's batch norm takes no bfloat16 input with its float32 statistics.
    steps = 2 if compute is None else 0
    for _ in range(steps):
        for one, optimizer in ((model, ours), (alone, theirs)):
            whole_loss(one, 0).backward()
            if one is model:
                model.finish_gradient_synchronization()
            make_steps(optimizer)
    same_state(model, alone)
    errors = [
        error_of(lambda: parallel.FullyShardedDataParallel(nn.Linear(2, 2, device="meta"))),
        error_of(lambda: parallel.FullyShardedDataParallel(Everything().to("meta"), device=device())),
    ]
    return {"existing": max(existing), "all": sum(p.nbytes for p in alone.parameters()), "errors": errors}


def partly_meta() -> None:
    """A module that is on the meta device in part keeps the values of its other parts."""
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, device="meta"))
    nn.init.constant_(module[0].weight, 7.0)
    module[1].running_mean.fill_(5.0)
    module[:2].to(device())
    state = parallel.FullyShardedDataParallel(module, device=device()).full_state_dict()
    assert state["0.weight"].eq(7).all()
    assert state["1.running_mean"].eq(5).all()
    assert 0 < state["2.weight"].abs().max() < 1


def kinds_of_numbers() -> None:
    """Frozen parameters in dtypes that backends do not send."""
    for dtype in (torch.bool, torch.int16, torch.float8_e4m3fn):
        module = nn.Linear(3, 3).to(device())
        kept = torch.arange(12.0).view(3, 4).to(dtype).to(device())
        module.kept = nn.Parameter(kept.clone(), requires_grad=False)
        module.forward = lambda x, one=module: x @ one.weight @ one.kept.float()
        model = parallel.FullyShardedDataParallel(module)
        state = model.full_state_dict()
        assert torch.equal(state["kept"].float(), kept.float()), dtype
        assert torch.equal(model(torch.eye(3, device=device())), state["weight"] @ kept.float()), dtype


def wrong_replicas() -> list[str]:
    """Groups of which one is both, and replicas that have different parts."""
    right = two_by_two()
    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])][dist.get_rank() in (1, 2)]
    layer, shards = nn.Linear(4, 4).to(device()), right["process_group"]
    return [
        error_of(functools.partial(parallel.FullyShardedDataParallel, layer, process_group=shards, replicas=replicas))
        for replicas in (shards, crossed)
    ]
