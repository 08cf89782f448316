"""Functions of the pool's ranks: units that return all kinds of things, and derivatives of all kinds, under full
sharding and in one process."""

import copy
import dataclasses
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad

import parallel
from tests.parallel.passes import WIDTH, differences
from tests.parallel.training import device, error_of


class Unit(nn.Module):
    """Returns what `pack` makes of its result."""

    def __init__(self, pack: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.pack = pack
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False)
        self.aside: Any = None

    def forward(self, x: Tensor) -> Any:
        return self.pack(self, x, self.down(torch.tanh(self.up(x))))


class Model(nn.Module):
    """Blocks whose returned objects `unpack` turns into the next one's input."""

    def __init__(self, pack=lambda unit, x, y: y, unpack=lambda returned: returned) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Unit(pack) for _ in range(3))
        self.unpack = unpack

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.unpack(block(x))
        return x


@dataclasses.dataclass(frozen=True)
class Result:
    hidden: Any
    number: int = 3


@dataclasses.dataclass(slots=True)
class Slots:
    hidden: Any


class Circle:
    def __init__(self, hidden: Any) -> None:
        self.around = {"self": self, "rest": [(self, hidden)]}


RETURNED: dict[str, tuple[Callable[[Any, Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "slots": (lambda unit, x, y: Result([{"a": Slots(y)}]), lambda returned: returned.hidden[0]["a"].hidden),
    "object with its module": (lambda unit, x, y: types.SimpleNamespace(y=y, unit=unit), lambda returned: returned.y),
    "circle": (lambda unit, x, y: Circle(y), lambda returned: returned.around["rest"][0][1]),
    "generator": (lambda unit, x, y: (one for one in [y]), next),
    "view, changed": (lambda unit, x, y: y[:], lambda returned: returned.add_(1)),
    "transposed, changed": (lambda unit, x, y: y.t(), lambda returned: returned.mul_(2).t()),
    "base, its view changed": (lambda unit, x, y: (y, y[1:]), lambda returned: (returned[1].mul_(2), returned[0])[1]),
    "changed by a view": (lambda unit, x, y: y, lambda returned: (returned.view(-1).mul_(2), returned)[1]),
    "its input, changed": (
        lambda unit, x, y: (x[1:].add_(unit.down(unit.up(x[1:].clone()))), x)[1],
        lambda returned: returned,
    ),
    "its input, too": (lambda unit, x, y: (y, x), lambda returned: returned[0] + returned[1]),
    "its input only": (lambda unit, x, y: x, lambda returned: returned),
    "a parameter": (lambda unit, x, y: (y, unit.up.weight), lambda returned: returned[0] + returned[1].mean()),
    "a parameter's view": (lambda unit, x, y: [y, unit.down.weight[1:].T], lambda r: r[0] * r[1].sum()),
    "a parameter, detached": (lambda unit, x, y: [y, unit.down.weight.detach()], lambda r: r[0] * r[1].mean()),
}


def inputs_of(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).to(device())


def train(model: Any, alone: nn.Module, loss_of: Callable[[nn.Module, Tensor], Tensor]) -> list[str]:
    """Make two steps; return the names of the parameters whose gradients differ from one process's."""
    ranks, wrong = dist.get_world_size(), []
    for step in range(2):
        for rank in range(ranks):
            (loss_of(alone, inputs_of(step, rank)) / ranks).backward()
        loss_of(model, inputs_of(step, dist.get_rank())).backward()
        model.finish_gradient_synchronization()
        expected = {name: one.grad for name, one in alone.named_parameters() if one.grad is not None}
        wrong += list(differences(model, expected, 1e-5))
        wrong += [f"{unit} is whole" for unit in model.units if unit.is_whole]
        for one in (model, alone):
            one.zero_grad()
    return wrong


def both(*arguments: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    alone = Model(*arguments).to(device())
    return parallel.FullyShardedDataParallel(copy.deepcopy(alone)), alone


def returned() -> dict[str, list[str]]:
    """The gradients that differ, by what units return."""
    return {
        name: wrong
        for name, functions in RETURNED.items()
        if (wrong := train(*both(*functions), lambda model, x: model(x).square().mean()))
    }


def sidelong(when: str) -> list[str]:
    """Blocks keep a part of the loss as an attribute, computed by their weights before or after what they return.

    Args:
        when: "read" is after, by an operation that would read freed memory.
    """

    def pack(unit: Any, x: Tensor, y: Tensor) -> Tensor:
        unit.aside = (unit.up.weight.sin() if when == "read" else unit.down(unit.up(y))).square().mean()
        return unit.down(unit.up(x)) if when == "before" else y

    def loss_of(model: Any, x: Tensor) -> Tensor:
        out: Tensor = model(x).square().mean()
        return out + sum(block.aside for block in getattr(model, "module", model).blocks)

    return train(*both(pack), loss_of)


def within_itself() -> list[str]:
    """A unit calls itself."""

    def pack(unit: Any, x: Tensor, y: Tensor) -> Tensor:
        return y if len(x) < 3 else torch.cat([unit(x[:2]), unit.down(unit.up(x[2:]))])

    return train(*both(pack), lambda model, x: model(x).square().mean())


def unseen() -> dict[str, str]:
    """The errors of units in whose outputs nothing is found; of one that returns nothing, and keeps its result; of one
    that raises; and of a model that returns a parameter."""
    x = torch.ones(2, WIDTH, device=device())
    errors = {}
    packs: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
        "function": lambda unit, x, y: lambda: y,
        "number": lambda unit, x, y: 3,
        "raises": lambda unit, x, y: 1 / 0,
    }
    for name, pack in packs.items():
        model, _ = both(pack)
        at_rest = dict(model.named_parameters())
        errors[name] = error_of(lambda model=model: model(x))
        assert all(parameter is at_rest[name] for name, parameter in model.named_parameters())
        if name != "raises":
            with torch.no_grad():
                model.module.unpack = lambda _: x
                model(x)
    # Nothing goes unseen where no parameter is trained.
    frozen = parallel.FullyShardedDataParallel(Model(packs["number"], lambda _: x).requires_grad_(False).to(device()))
    assert frozen(x) is x
    model, _ = both(lambda unit, x, y: setattr(unit, "aside", y), lambda _: x)
    model(x)
    errors["nothing"] = error_of(sum(block.aside.sum() for block in model.module.blocks).backward)
    model, _ = both(lambda unit, x, y: (y, unit.up.weight), lambda returned: returned[0])
    forward = model.module.forward
    model.module.forward = lambda x: (forward(x), model.module.blocks[1].up.weight.T)
    errors["a parameter"] = error_of(lambda: (model(x), model(x)))
    return errors


def derivatives() -> dict[str, str]:
    """Differences or errors of derivatives by the inputs; empty where they equal one process's."""
    x = inputs_of(0, dist.get_rank())

    def by_input(model: Any, **options: Any) -> Tensor:
        at = x.clone().requires_grad_()
        return torch.autograd.grad(model(at).square().sum(), at, **options)[0]

    def tangent(model: Any) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(model(forward_ad.make_dual(x, x))).tangent

    def batched(model: Any) -> Tensor:
        at = x.clone().requires_grad_()
        ones = torch.stack([torch.ones_like(x), torch.zeros_like(x)])
        return torch.autograd.grad(model(at), at, ones, is_grads_batched=True)[0]

    def parameters(model: Any) -> Any:
        others = {name: torch.zeros(6, 6) for name, _ in model.named_parameters() if name.endswith("stem.weight")}
        return torch.func.functional_call(model, others, (x,))

    found = {}
    calls: dict[str, Callable[[Any], Any]] = {
        "autograd.grad": by_input,
        "batched": batched,
        "jacobian": lambda model: torch.autograd.functional.jacobian(model, x),
        "forward mode": tangent,
        "jvp": lambda model: torch.func.jvp(model, (x,), (x,))[1],
        "vmap": lambda model: torch.vmap(model)(x),
        "jacfwd": lambda model: torch.func.jacfwd(model)(x),
        "create_graph": lambda model: by_input(model, create_graph=True),
        "func.grad": lambda model: torch.func.grad(lambda x: model(x).sum())(x),
        "functional_call": parameters,
        "parts": lambda model: torch.autograd.grad(model(x).sum(), list(model.parameters())),
    }
    for name, call in calls.items():
        model, alone = both()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, at the first forward mode
            found[name] = error_of(lambda model=model, call=call: setattr(model, "result", call(model)))
        if found[name] == "nothing was raised":
            expected = call(alone)
            found[name] = "" if torch.allclose(model.result, expected, rtol=1e-4, atol=1e-6) else "differs"
            # It leaves nothing behind.
            assert not model.has_unfinished_gradients()
            assert train(model, alone, lambda model, x: model(x).square().mean()) == []
    return found


def copies() -> list[str]:
    """The errors of copies of a sharded model, and of one of its modules."""
    model, _ = both()
    x = torch.ones(2, WIDTH, device=device())
    return [error_of(lambda: copy.deepcopy(model)), error_of(lambda: copy.deepcopy(model.module.blocks[1])(x))]


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise ZeroDivisionError("made to fail")


def after_an_error() -> list[str]:
    """An error leaves a backward pass; the next step has nothing of it."""
    model, alone = both()
    block = model.module.blocks[1]
    pack = block.pack
    block.pack = lambda unit, x, y: Raises.apply(y)
    error = error_of(lambda: model(inputs_of(5, dist.get_rank())).sum().backward())
    block.pack = pack
    model.zero_grad()
    assert error == "made to fail"
    return train(model, alone, lambda model, x: model(x).square().mean())


class UsesLater(Model):
    """From the second step on, it and one of its blocks use parameters of another block."""

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        lender = self.blocks[2]
        x = self.stem(x)
        if self.steps >= 1:
            x = x * lender.up.weight.norm() + lender.up.bias.mean()
            self.blocks[1].pack = lambda unit, x, y: y + lender.up.weight.sum() * x
        for block in self.blocks:
            x = block(x)
        if self.steps >= 2:
            x = x @ lender.down.weight @ lender.up.weight + lender.up.bias.sum()
        return x


def used_later(compute: str | None) -> list[str]:
    """Use parameters outside their units for the first time after steps; return what differs from one process.
    `compute`: the dtype of computation, or None."""
    torch.manual_seed(0)
    alone = UsesLater().to(device())
    dtype = getattr(torch, compute) if compute else None
    model = parallel.FullyShardedDataParallel(copy.deepcopy(alone), dtype)
    tolerance = 1e-4 if compute is None else 0.1
    part = model.module.blocks[2].up.weight
    wrong = []
    for step in range(3):
        for one in (model.module, alone):
            one.steps = step
        for training in (False, True):
            for one in (model, alone):
                one.train(training)
            x = inputs_of(7, 0)
            with torch.no_grad():
                ours, theirs = model(x.to(dtype or x.dtype)).float(), alone(x)
            if not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance):
                wrong.append(f"outputs of step {step}")
        if compute is None:
            wrong += train(model, alone, lambda model, x: model(x).square().mean())
        # Optimizers use parts as plain parameters.
        assert not torch.overrides.has_torch_function((part,))
    return wrong
