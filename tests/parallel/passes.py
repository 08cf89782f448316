"""Functions of the pool's ranks: every way in which full sharding's units can be used, beside one process."""

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import parallel
from parallel import fully_sharded, sharded_unit
from tests.parallel.training import device, same_state

WIDTH = 6
INPUTS = ("leaf", "plain", "frozen embedding", "embedding")
ORDERS = ([0, 1, 2], [0, 1, 2, 0, 1, 2], [0, 1, 1], [2, 0])
CHECKPOINTS = ("", "outside non-reentrant", "outside reentrant", "inside non-reentrant", "inside reentrant")
LOSSES = ("one pass", "two passes", "accumulation", "no_sync", "two forward passes", "evaluation between")


class Block(nn.Module):
    """Its gradient for the input is complete before those of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.checkpoint = ""
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoint and (x.requires_grad or self.checkpoint == "non-reentrant"):
            return checkpoint(self._run, x, use_reentrant=self.checkpoint == "reentrant")  # type: ignore[no-any-return]
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Repeated(nn.Module):
    """Runs its blocks in any order, repeatedly."""

    def __init__(self, inputs: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH).requires_grad_(inputs == "embedding")
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        self.order: list[int] = []
        self.checkpoint = ""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x) if x.is_floating_point() else self.embedding(x)
        middle = x
        where, _, how = self.checkpoint.partition(" ")
        for place, number in enumerate(self.order):
            block = self.blocks[number]
            block.checkpoint = how if where == "inside" else ""
            if where == "outside" and (x.requires_grad or how == "non-reentrant"):
                x = x + checkpoint(block, x, use_reentrant=how == "reentrant")
            else:
                x = x + block(x)
            if place == 0:
                middle = x
        return self.head(x), middle


def losses(model: nn.Module, how: str, inputs: list[Tensor], dtype: torch.dtype) -> Iterator[tuple[Tensor, bool]]:
    """Yield the losses of a step, and whether the graph is kept for the next one."""

    def outputs(x: Tensor) -> list[Tensor]:
        return [out.float() for out in model(x.to(dtype) if x.is_floating_point() else x)]

    first, middle = outputs(inputs[0])
    if how == "two passes":
        yield middle.square().mean(), True
        yield first.sin().mean(), False
    elif how == "two forward passes":
        yield first.sin().mean() + outputs(inputs[1])[0].square().mean(), False
    else:
        if how == "evaluation between":
            with torch.no_grad():
                model(inputs[1].to(dtype) if inputs[1].is_floating_point() else inputs[1])
        yield first.sin().mean(), False
        if how in ("accumulation", "no_sync"):
            yield outputs(inputs[1])[0].square().mean(), False


def inputs_of(kind: str, step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    if "embedding" in kind:
        return [torch.randint(9, (3,), generator=generator).to(device()) for _ in range(2)]
    made = [torch.randn(3, WIDTH, generator=generator).to(device()) for _ in range(2)]
    return [x.requires_grad_(kind == "leaf") for x in made]


def gradients_alone(alone, kind, step, how, dtype) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    """The average over all ranks' inputs of one process's gradients, in float32; and those of this rank's inputs."""
    ranks = dist.get_world_size()
    total: dict[str, Tensor] = {}
    mine: list[Tensor | None] = []
    for rank in range(ranks):
        inputs = inputs_of(kind, step, rank)
        for loss, kept in losses(alone, how, inputs, dtype):
            loss.backward(retain_graph=kept)
            for name, parameter in alone.named_parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad.float() / ranks
                    total[name] = total[name] + gradient if name in total else gradient
                    parameter.grad = None
        if rank == dist.get_rank():
            mine = [x.grad for x in inputs]
    return total, mine


def compare(kind: str, steps: list[tuple[list[int], str, str]], compute: str | None, **options: Any) -> list[str]:
    """Train one step of each kind; return those whose gradients differ from one process's."""
    dtype = getattr(torch, compute) if compute else torch.float32
    torch.manual_seed(0)
    alone = Repeated(kind).to(device())
    model = parallel.FullyShardedDataParallel(
        copy.deepcopy(alone), dtype if compute else None, reduce_dtype=torch.float32, **options
    )
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, alone))
    failed = []
    for step, (order, checkpointing, how) in enumerate(steps):
        twin = copy.deepcopy(alone).to(dtype)
        for one in (model.module, twin):
            one.order, one.checkpoint = order, checkpointing
        expected, expected_inputs = gradients_alone(twin, kind, step, how, dtype)
        inputs = inputs_of(kind, step, dist.get_rank())
        for number, (loss, kept) in enumerate(losses(model, how, inputs, dtype)):
            with model.no_sync() if how == "no_sync" and number == 0 else contextlib.nullcontext():
                loss.backward(retain_graph=kept)
        model.finish_gradient_synchronization()
        tolerance = 1e-5 if compute is None else 0.03
        wrong = list(differences(model, expected, tolerance))
        for place, (x, right) in enumerate(zip(inputs, expected_inputs, strict=True)):
            if (x.grad is None) != (right is None) or not (x.grad is None or near(x.grad, right, tolerance)):
                wrong.append(f"input {place}")
        wrong += [f"{one.name} left" for unit in model.units for one in unit.held if one.whole.grad is not None]
        wrong += [f"{unit} is whole" for unit in model.units if unit.is_whole]
        if wrong:
            failed.append(f"{order} {checkpointing} {how}: {wrong}")
        for name, parameter in alone.named_parameters():
            parameter.grad = expected.get(name)
        if compute is None:
            theirs.step()
        ours.step()
        ours.zero_grad()
        if compute is not None:
            alone.load_state_dict(model.full_state_dict())
    same_state(model, alone)
    return failed


def near(ours: Tensor, theirs: Any, tolerance: float) -> bool:
    return bool((ours - theirs).norm() <= tolerance * theirs.norm() + 1e-7)


def differences(model: Any, expected: dict[str, Tensor], tolerance: float) -> Iterator[str]:
    """Name the parameters whose gradient is not this rank's part of the expected one."""
    for name, parameter in model.module.named_parameters():
        gradient = parameter.grad
        if gradient is None or name not in expected:
            if gradient is not None or name in expected:
                yield f"{name} is {'missing' if gradient is None else 'not None'}"
            continue
        gradient, right = gradient.as_subclass(Tensor), expected[name]
        if right.dim() > 1:
            right = right.flatten()[dist.get_rank() * gradient.numel() :][: gradient.numel()]
            gradient = gradient[: right.numel()]
        if not near(gradient, right, tolerance):
            yield name


def some(compute: str | None) -> list[str]:
    """Compare a part of the table."""
    steps = list(itertools.product(ORDERS, CHECKPOINTS, LOSSES))
    return [f"{kind} {one}" for n, kind in enumerate(INPUTS) for one in compare(kind, steps[n::17], compute)]


def table(kind: str, compute: str | None, reshard: bool = True) -> list[str]:
    """Compare one kind of input with every order, checkpoint and loss."""
    steps = list(itertools.product(ORDERS, CHECKPOINTS, LOSSES))
    return compare(kind, steps, compute, reshard_after_forward=reshard)


class Language(nn.Module):
    """A plain model: an embedding, blocks, a norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 20 + 2 * n)) for n in range(4))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)[..., :8]
        return self.head(self.norm(x))


def operations(reshard: bool) -> list[str]:
    """What a step starts and waits for, in order: gathers ("+" the unit), reductions ("-"), the computation of a unit's
    backward pass, and waits for reductions."""
    model = parallel.FullyShardedDataParallel(Language().to(device()), reshard_after_forward=reshard)
    names = {id(unit.sharded[0].memory): unit.name for unit in model.units if unit.sharded}
    parts = {unit.sharded[0].part_numel: unit.name for unit in model.units if unit.sharded}
    found: list[str] = []
    gather, reduce = sharded_unit.start_all_gather, fully_sharded.start_reduce_scatter
    take = fully_sharded.FullyShardedDataParallel._take_reduced

    def gathering(whole: Tensor, *others: Any) -> Any:
        found.append(f"+{names[id(whole)]}")
        return gather(whole, *others)

    def reducing(part: Tensor, *others: Any) -> Any:
        found.append(f"-{parts[part.numel()]}")
        return reduce(part, *others)

    def taking(wrapper: Any) -> None:
        found.append("wait")
        take(wrapper)

    tokens = torch.arange(10, device=device()).view(2, 5)
    for _ in range(2):
        found.clear()
        with (
            mock.patch.object(sharded_unit, "start_all_gather", gathering),
            mock.patch.object(fully_sharded, "start_reduce_scatter", reducing),
            mock.patch.object(fully_sharded.FullyShardedDataParallel, "_take_reduced", taking),
        ):
            loss = model(tokens).square().mean()
            found.append("backward")
            loss.backward()
            found.append("finish")
            model.finish_gradient_synchronization()
    return found


class Experts(nn.Module):
    """Two runs through blocks of experts, of which each rank uses others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ExpertBlock() for _ in range(2))

    def forward(self, x: Tensor, chosen: list[list[int]]) -> Tensor:
        for place, experts in enumerate(chosen):
            x = self.blocks[place % 2](x, experts)
        return x


class ExpertBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor, experts: list[int]) -> Tensor:
        return x + sum((torch.sin(self.experts[number](x)) for number in experts), torch.zeros_like(x))


def experts() -> list[str]:
    """Ranks are done with a repeated block at different times; return the parameters with wrong gradients."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    chosen = [[[0], [1], [0, 1], []], [[], [], [2], [2]], [[], [0], [], []]]
    torch.manual_seed(0)
    alone = Experts().to(device())
    model = parallel.FullyShardedDataParallel(copy.deepcopy(alone))
    x = torch.ones(2, WIDTH, device=device(), requires_grad=True)
    wrong = []
    for _ in range(2):
        for other in range(ranks):
            (alone(x, chosen[other % 3]).square().mean() / ranks).backward()
        model(x, chosen[rank % 3]).square().mean().backward()
        model.finish_gradient_synchronization()
        expected = {name: one.grad for name, one in alone.named_parameters() if one.grad is not None}
        wrong += list(differences(model, expected, 1e-5))
        for one in (model, alone):
            one.zero_grad()
    return wrong
