"""Functions of the pool's ranks: what users do with the wrappers, and with the gradients, parameters and states of full
sharding, that is either right or refused."""

import contextlib
import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import parallel
from parallel.collectives import recorded
from tests.parallel.training import (
    WRAPPERS,
    close,
    device,
    different_model,
    error_of,
    first_ranks_model,
    make_steps,
    part_loss,
    same_gradients,
    same_state,
    whole_loss,
)


def penalty(model: nn.Module) -> Tensor:
    """The weights' squares: of parts, outside the wrapper's forward pass; also of those that nothing else uses."""
    return 1e-2 * sum((p.double().pow(2).sum() for p in model.parameters() if p.requires_grad), start=torch.zeros(()))


def clipped(how: str, norm_type: float, penalised: str = "") -> list[float]:
    """Train three steps, with every rank's part and alone, and clip the gradients; return the norms.

    Args:
        how: By which function gradients are clipped.
        penalised: Where the weights have a penalty: "in the loss", or "in a pass of its own" after the gradients'
            synchronization. Gradients are changed then, too.
    """
    model, alone = parallel.FullyShardedDataParallel(different_model()), first_ranks_model()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.9) for m in (model, alone))
    norms = []
    for step in range(3):
        loss = part_loss(model, step)
        (loss + penalty(model) if penalised == "in the loss" else loss).backward()
        model.finish_gradient_synchronization()
        if penalised == "in a pass of its own":
            penalty(model).backward()
        loss = whole_loss(alone, step)
        (loss + penalty(alone) if penalised else loss).backward()
        for one in (model, alone) if penalised else ():
            for parameter in one.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.detach() / 0.5
                    if step == 2:
                        parameter.grad = parameter.grad.as_subclass(Tensor)
        expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.1, norm_type)
        assert expected > 0.2, "nothing is clipped"
        if how == "ours":
            norm = model.clip_grad_norm_(0.1, norm_type)
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
        close(norm, expected, "norm")
        norms.append(float(norm))
        same_gradients(model, alone)
        make_steps(ours, theirs)
    same_state(model, alone)
    return norms


def scaled_with_penalty() -> list[Any]:
    """One rank's part of a gradient that only the penalty has becomes infinite; return the scale, and whether any
    parameter changed."""
    model = parallel.FullyShardedDataParallel(first_ranks_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device().type, init_scale=64.0)
    before = copy.deepcopy([parameter.detach() for parameter in model.parameters()])
    scaler.scale(penalty(model)).backward()
    model.finish_gradient_synchronization()
    if dist.get_rank() == 1:
        model.module.unused.weight.grad[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    same = all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    return [scaler.get_scale(), same]


def results_of_parts() -> None:
    """Results of a part's own shape have the norm of all parts, also among other gradients; copies are plain."""
    model = parallel.FullyShardedDataParallel(nn.Linear(4, 4).to(device()))
    model(torch.ones(2, 4, device=device())).sum().backward()
    model.finish_gradient_synchronization()
    sharded = model.module.weight.grad
    alike = torch.ones_like(sharded.as_subclass(Tensor))
    norm = sharded.norm()
    for same in (sharded.detach(), sharded.data, sharded.clone(), sharded / 1.0, sharded.float(), alike * sharded):
        close(same.norm(), norm, "norm")
    halves = torch._foreach_mul([alike, sharded], 0.5)
    close(halves[0].norm(), alike.norm() / 2, "norm of the plain one")
    close(halves[1].norm(), norm / 2, "norm of the part")
    assert type(alike.add_(sharded)) is Tensor
    saved = io.BytesIO()
    torch.save(sharded / 1.0, saved)
    saved.seek(0)
    assert type(copy.deepcopy(sharded / 1.0)) is type(torch.load(saved)) is Tensor
    copied = copy.deepcopy(model.module.weight)
    copied.grad = torch.ones_like(copied)
    assert type(copied.grad) is Tensor
    saved = io.BytesIO()
    torch.save(model.module.weight, saved)
    saved.seek(0)
    assert type(torch.load(saved)) is nn.Parameter


def unfinished(wrapper: str) -> list[str]:
    """Train in unusual, but right ways, then step without synchronization, by two optimizers, and with it; return the
    errors."""
    module = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device())
    model = WRAPPERS[wrapper](module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = torch.arange(8, device=device())

    def backward(called: nn.Module = model) -> None:
        called(tokens).square().sum().backward()

    def evaluate() -> None:
        with torch.no_grad():
            model(tokens)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        backward()
        evaluate()
        backward()
        model.finish_gradient_synchronization()
        model(tokens)
        step()
        evaluate()
        (model(tokens) + model(tokens)).square().sum().backward()
        model.finish_gradient_synchronization()
        step()
        for _ in range(3 * (wrapper != "fully sharded")):  # of which no optimizer would see a gradient
            with model.no_sync():
                backward()
            step()
            with model.no_sync():
                backward()
                step()
        backward()
        model.finish_gradient_synchronization()
        if wrapper == "fully sharded":  # which does not see it
            penalty(model).backward()
        step()
    fused = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    backward(model.module)
    errors = [error_of(optimizer.step), error_of(fused.step)]
    model.finish_gradient_synchronization()
    return [*errors, error_of(fused.step)]


def uneven_passes(wrapper: str) -> list[str]:
    """Let the first rank run two backward passes in a step, and the others one, in two steps; return the errors."""
    model = WRAPPERS[wrapper](nn.Linear(4, 4).to(device()))

    def step() -> None:
        for _ in range(2 if dist.get_rank() == 0 else 1):
            model(torch.ones(2, 4, device=device())).sum().backward()
        model.finish_gradient_synchronization()

    return [error_of(step)] if dist.get_rank() == 0 else [error_of(step), error_of(step)]


class MuonWithAuxAdam(torch.optim.SGD):
    """Has the name of an optimizer that needs whole parameters."""


def misused(wrapper: str, way: str) -> str:
    """Return the error of a step that would train wrongly."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device())
    module.forward = lambda x, order=(0, 1): functools.reduce(lambda x, place: module[place](x), order, x)
    if way == "another head":
        module.forward = lambda x, order: [module[0](x), module[1](x)][dist.get_rank()]
    if way == "order":  # of other sizes, at which gloo would end the process
        module[1].another = nn.Parameter(torch.ones(9, 9, device=device()))
    if way == "format":
        module[1].image = nn.Parameter(torch.ones(2, 2, 2, 2, device=device()))
    if way == "former":
        module.forward = lambda x, order, former=module[0].weight: nn.functional.linear(module[1](x), former)
    module[0].weight.requires_grad_(way != "unfreeze")
    early = torch.optim.SGD(module.parameters(), lr=0.1)
    # Units that stay whole are gathered in no backward pass, so that gradients alone would be mixed up.
    model = WRAPPERS[wrapper](module, **{"reshard_after_forward": False} if way == "another head" else {})
    optimizer = globals().get(way, getattr(torch.optim, way, torch.optim.SGD))(model.parameters(), lr=0.1)
    x = torch.ones(2, 4, device=device())
    if way == "change in the forward pass":
        module[0].register_forward_pre_hook(lambda layer, _: [layer.weight.detach().mul_(2)].clear())
    module.to(memory_format=torch.channels_last if way == "format" else torch.preserve_format)
    if way == "replace":
        module[1] = nn.Linear(4, 4).to(device())

    def backward(*order: int) -> float:
        loss = model(x, order or (0, 1)).square().sum()
        if way == "change between the passes":
            module[0].weight.detach().mul_(2)
        loss.backward()
        return loss.item()

    def run() -> object:
        if way in ("unfreeze", "freeze"):
            module[0].weight.requires_grad_(way == "unfreeze")
        if way == "closure":
            return optimizer.step(backward)
        with model.no_sync() if way.endswith("no_sync") else contextlib.nullcontext():
            backward(*((1, 0) if way == "order" and dist.get_rank() else (0, 1)))
        if way == "step after no_sync":
            return optimizer.step()
        if way.startswith("skip"):
            return optimizer.zero_grad()
        if way == "forget":
            return model.zero_grad()
        if way == "clip":
            return model.clip_grad_norm_(1.0)
        model.finish_gradient_synchronization()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if way == "gradients' sum":
            return sum(gradient.square().sum() for gradient in gradients)
        if way == "gradient's elements":
            return gradients[0].isnan().any()
        if way == "gradients as one":
            return nn.utils.parameters_to_vector(gradients)
        if way == "parameter's norm":
            return module[0].weight.norm()
        if way == "initialise":
            return nn.init.trunc_normal_(module[0].weight)
        return (early if way == "early" else optimizer).step()

    return error_of(run)


def groups_by_axes() -> list[int]:
    """Return how many parameters have each number of axes, as weight decay is chosen by."""
    module = different_model()
    originals = list(module.parameters())
    model = parallel.FullyShardedDataParallel(module)
    assert "Parameter containing" in repr(next(model.parameters()))
    torch.save(originals, io.BytesIO())
    return [sum(one.dim() == axes == one.ndim for one in model.parameters()) for axes in (1, 2)]


def wrong_arguments() -> list[str]:
    """The errors of wrong arguments, on the last rank."""
    groups = dist.new_group([0])
    fully_sharded = parallel.FullyShardedDataParallel
    module = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(module, backend="eager")
    itself = nn.Sequential(nn.Linear(2, 2))
    itself[0].compile(backend="eager")
    alike = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    alike[1].weight.data = alike[0].weight.data
    return [
        error_of(lambda: parallel.NaiveDataParallel(module, reduce_dtype=torch.int32)),
        error_of(lambda: parallel.BucketedDataParallel(module, reduce_dtype="bfloat16")),
        error_of(lambda: fully_sharded(module, reduce_dtype=torch.int32)),
        error_of(lambda: fully_sharded(module, "bfloat16")),
        error_of(lambda: fully_sharded(compiled)),
        error_of(lambda: fully_sharded(itself)),
        error_of(lambda: fully_sharded(nn.Sequential(fully_sharded(module)))),
        *(error_of(lambda one=one: one(module, process_group=groups)) for one in (fully_sharded, WRAPPERS["naive"])),
        error_of(lambda: fully_sharded(alike)),
        error_of(lambda: parallel.ShardedOptimizer(alike.parameters(), torch.optim.SGD, lr=0.1)),
    ]


def filled_up() -> list[bool]:
    """Norms and scaled steps where what fills up a part, as of a weight with fewer elements than ranks, is not 0."""
    layer = nn.Linear(2, 1, bias=False).to(device())
    nn.init.ones_(layer.weight)
    model = parallel.FullyShardedDataParallel(layer)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler(device().type, init_scale=4.0)
    loss = model(torch.ones(1, 2, device=device())).sum() + sum((p - 2).square().sum() for p in model.parameters())
    scaler.scale(loss).backward()
    model.finish_gradient_synchronization()
    gradient = layer.weight.grad
    norms = gradient.norm(), nn.utils.get_total_norm([gradient])
    gradient.add_(1 / layer.weight.detach())
    scaler.step(optimizer)
    return [
        *(bool((norm - 4 * 2**0.5).abs() < 1e-5) for norm in norms),
        bool(model.full_state_dict()["weight"].gt(1).all()),
    ]


def called_after_a_step() -> None:
    """A layer that the last forward pass has left whole, called without the model."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device())
    model = parallel.FullyShardedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4, device=device())
    model(x).sum().backward()
    model.finish_gradient_synchronization()
    model(x)
    optimizer.step()
    result = module[1](x)
    state = model.full_state_dict()
    close(result, nn.functional.linear(x, state["1.weight"], state["1.bias"]), "1")


def refused_hooks() -> list[str]:
    """The errors of hooks of parameters, which would see nothing, or gradients that are not averaged yet."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device())
    x = torch.ones(2, 4, device=device())
    errors = []
    for register in (nn.Parameter.register_hook, nn.Parameter.register_post_accumulate_grad_hook):
        hook = register(module[1].bias, lambda _: None)
        errors.append(error_of(lambda: parallel.FullyShardedDataParallel(module)))
        hook.remove()
    model = parallel.FullyShardedDataParallel(module)
    weight, bias = module[0].weight, module[0].bias
    hook = bias.register_post_accumulate_grad_hook(lambda _: None)
    errors.append(error_of(lambda: model(x)))
    hook.remove()
    errors.append(error_of(lambda: weight.register_hook(lambda _: None)))
    errors.append(error_of(lambda: weight.register_post_accumulate_grad_hook(lambda _: None)))
    errors.append(error_of(lambda: torch.autograd.graph.register_multi_grad_hook([weight, bias], lambda _: None)))
    return [*errors, error_of(lambda: model(x).sum().backward())]


def hooked_later(wrapper: str) -> tuple[list[float], bool]:
    """The gradients, 2 on average, that a hook has doubled which was registered after the model was wrapped; and
    whether the next step's are sent in the backward pass."""
    model = WRAPPERS[wrapper](nn.Linear(2, 2, bias=False).to(device()))
    weight = model.module.weight

    def double(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.mul_(2)

    weight.register_post_accumulate_grad_hook(double)
    sent = False
    for _ in range(2):
        model.zero_grad()
        model.module(torch.ones(2, 2, device=device())).sum().backward()
        sent = model.has_sent_gradients()
        model.finish_gradient_synchronization()
    return [float(one) for one in weight.grad.flatten()], sent


def compiled(wrapper: str) -> None:
    """Train a wrapper that torch.compile takes as a whole."""
    model = WRAPPERS[wrapper](different_model())
    alone = first_ranks_model()
    run = torch.compile(model, backend="eager", fullgraph=True)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, alone))
    for step in range(2):
        part_loss(run, step).backward()
        model.finish_gradient_synchronization()
        whole_loss(alone, step).backward()
        make_steps(ours, theirs)
    for (name, ours_now), theirs_now in zip(model.module.named_parameters(), alone.parameters(), strict=True):
        close(ours_now, theirs_now, name)


class Norms(nn.Module):
    """Two branches, each a unit of which all ranks have the whole, and which is one only by its other dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(2))

    def forward(self, x: Tensor, norm: int) -> Tensor:
        return self.norms[norm](self.first(x))


def branches_of_whole_units() -> None:
    """Use another one on each rank."""
    torch.manual_seed(0)
    alone = Norms().to(device())
    model = parallel.FullyShardedDataParallel(copy.deepcopy(alone), torch.float64)
    x = torch.randn(2, 4, device=device())
    model(x, dist.get_rank()).square().sum().backward()
    model.finish_gradient_synchronization()
    sum((alone(x, norm).square().sum() / 2 for norm in range(2)), start=torch.zeros(())).backward()
    same_gradients(model, alone)
    undivided = parallel.FullyShardedDataParallel(nn.LayerNorm(4).to(device()))
    with recorded(device()) as timeline:
        undivided(x)
    assert timeline.intervals() == [], "there is no order to compare"


def wrapped_twice() -> dict[str, list[str]]:
    """The errors of wrapping a model with a wrapper in it, of wrapping parts, and of others that take parts."""
    wrappers = list(WRAPPERS.values())
    errors: dict[str, list[str]] = {"wrapper within": [], "parts": []}
    for inner in (*wrappers, nn.parallel.DistributedDataParallel):
        wrapped = nn.Sequential(inner(nn.Linear(4, 4).to(device())))
        errors["wrapper within"] += [error_of(lambda one=one, wrapped=wrapped: one(wrapped)) for one in wrappers]
    module = nn.Linear(4, 4).to(device())
    model = parallel.FullyShardedDataParallel(module)
    errors["parts"] += [error_of(lambda one=one: one(module)) for one in wrappers]
    errors["parts"].append(error_of(lambda: parallel.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)))
    errors["torch's wrapper"] = [error_of(lambda: nn.parallel.DistributedDataParallel(model))]
    same = model.full_state_dict()["weight"]
    everywhere = [torch.empty_like(same) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, same)
    assert all(torch.equal(one, same) for one in everywhere)
    return errors


def states_of_parts() -> list[str]:
    """The errors of torch's own ways to save and load, of the wrapper, the module in it, one around it, and a block."""
    module = first_ranks_model()
    full = module.state_dict()
    model = parallel.FullyShardedDataParallel(module)
    around = nn.Sequential(model)
    calls: list[Callable[[], Any]] = []
    states = [{prefix + name: value for name, value in full.items()} for prefix in ("module.", "", "0.module.")]
    states.append({name[9:]: value for name, value in full.items() if name.startswith("blocks.0.")})
    for one, state in zip((model, module, around, module.blocks[0]), states, strict=True):
        calls.append(one.state_dict)
        calls.append(lambda one=one, state=state: one.load_state_dict(state))
    errors = [error_of(call) for call in calls]
    model.load_full_state_dict(full)
    same_state(model, first_ranks_model())
    # What has no parts of its own is still saved.
    assert list(module.norm.state_dict()) == ["weight", "bias"]
    return errors


def foreign_optimizer_states() -> list[str]:
    """The errors of states of another model's optimizer, on rank 0 alone, and of a whole one, loaded as parts."""
    module = nn.Linear(4, 3).to(device())
    model = parallel.FullyShardedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4, device=device())).sum().backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    errors = []
    for number, shape in ((0, (6, 2)), (1, (1,)), (7, (1,))):
        state = model.full_optimizer_state_dict(optimizer)
        state["state"].setdefault(number, {})["exp_avg"] = torch.ones(shape)
        loaded = state if dist.get_rank() == 0 else None
        errors.append(error_of(lambda loaded=loaded: model.load_full_optimizer_state_dict(optimizer, loaded)))
    whole = model.full_optimizer_state_dict(optimizer)
    return [*errors, error_of(lambda: optimizer.load_state_dict(whole))]
