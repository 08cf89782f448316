"""Refuses what would train wrongly in silence: a step with gradients that are not averaged yet or that are forgotten
while they are averaged, parameters that nobody averages, optimizers that do not fit, and wrapping twice."""

import functools
import weakref
from collections.abc import Container, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .sharded_gradient import DIVIDED, ShardedPart


class Wrapper(Protocol):
    """A wrapper whose gradients are averages only after `finish_gradient_synchronization`."""

    def has_unfinished_gradients(self) -> bool:
        """Return True if gradients have come outside `no_sync` since the last synchronization."""

    def has_sent_gradients(self) -> bool:
        """Return True if there are gradients that `zero_grad` would not reach."""

    def trained_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters that an optimizer would step."""


WHOLE_ONLY = ("adafactor", "dadapt", "galore", "lamb", "lars", "lbfgs", "muon", "prodigy", "shampoo", "soap")
"""In names of optimizers that need a parameter's shape, or norms or products over all of it, or of all of them."""

_wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
_fitting: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers whose parameters have been looked at since the last model was wrapped."""


def check_steps_of(wrapper: Wrapper) -> None:
    """From now on, raise RuntimeError at the beginning of a step of any torch optimizer that has parameters of this
    wrapper, while its gradients are unfinished."""
    _register()
    _wrappers.add(wrapper)
    _fitting.clear()


def refuse_wrapped(module: nn.Module) -> None:
    """Check a module that is to be wrapped. Raises TypeError: there is a wrapper in it, of ours or torch's; or it has
    parts of parameters, which ranks would take for the same values."""
    for name, child in module.named_modules():
        if child in _wrappers or isinstance(child, nn.parallel.DistributedDataParallel):
            raise TypeError(
                f"{name or 'the module'} is a {type(child).__name__} already: wrap the whole model once; the blocks in "
                "its ModuleLists are full sharding's units"
            )
    refuse_parts(module.named_parameters())


def refuse_parts(named: Iterable[tuple[str, Any]]) -> None:
    """Raise TypeError if any of the parameters is a rank's part of one."""
    for name, parameter in named:
        if hasattr(parameter, "device_mesh"):
            raise TypeError(f"{name} is a DTensor: torch has divided it (fully_shard, tensor parallelism) already")
        if isinstance(parameter, ShardedPart):
            raise TypeError(
                f"{name} is this rank's part of a parameter of a FullyShardedDataParallel, not the same on every rank: "
                "full sharding divides the optimizer's state as well; to wrap the model otherwise, build another one, "
                "and load what full_state_dict() returns"
            )


def refuse_shared_memory(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise TypeError if two of the parameters are one memory, which would be updated in two places when divided."""
    names: dict[int, str] = {}
    for name, parameter in named:
        address = parameter.data_ptr()  # 0 of those without memory of their own, as of quantised ones
        other = names.setdefault(address, name) if address else name
        if other != name:
            raise TypeError(
                f"{other} and {name} are two parameters in one memory, as after weight.data = other.weight.data, "
                "and would be updated apart from each other: make them one, weight = other.weight"
            )


def refuse_strangers(module: nn.Module, known: Container[int]) -> None:
    """Raise RuntimeError if a module has a parameter that needs a gradient and that its wrapper does not average.
    `known`: identities of those that it does."""
    modules = [module]
    for one in modules:  # module.parameters() takes six times as long
        modules += [child for child in one._modules.values() if child is not None]
        for parameter in one._parameters.values():
            if id(parameter) not in known and parameter is not None and parameter.requires_grad:
                name = next(name for name, found in module.named_parameters() if found is parameter)
                raise RuntimeError(
                    f"{name} needs a gradient now, and was frozen or not there when the model was wrapped, so it would "
                    "not be averaged: unfreeze, add and replace parameters first, and then wrap the model"
                )


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_check)
    register_optimizer_step_post_hook(_check)  # a closure may have run a backward pass
    zero_grad = Optimizer.zero_grad

    @functools.wraps(zero_grad)
    def checked(self: Optimizer, set_to_none: bool = True) -> None:
        _refuse(
            self,
            (wrapper for wrapper in list(_wrappers) if wrapper.has_sent_gradients()),
            "the optimizer's zero_grad()",
        )
        zero_grad(self, set_to_none)

    Optimizer.zero_grad = checked  # type: ignore[method-assign]
    load_state_dict = Optimizer.load_state_dict

    @functools.wraps(load_state_dict)
    def loaded(self: Optimizer, state_dict: Any) -> None:
        load_state_dict(self, state_dict)
        _refuse_other_shapes(self)

    Optimizer.load_state_dict = loaded  # type: ignore[method-assign]


def _check(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or not _wrappers:
        return
    _refuse(
        optimizer,
        (wrapper for wrapper in list(_wrappers) if wrapper.has_unfinished_gradients()),
        "the optimizer's step()",
    )
    if optimizer in _fitting:
        return
    whole_only = any(name in type(optimizer).__name__.lower() for name in WHOLE_ONLY)
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if DIVIDED.get(parameter, lambda: None)() is not None:
            raise RuntimeError(
                "FullyShardedDataParallel has divided this optimizer's parameters, which the model has no longer: make "
                "the optimizer after it, of its parameters()"
            )
        if whole_only and isinstance(parameter, ShardedPart) and parameter.group is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__} needs whole parameters, and full sharding gives it parts: take an "
                "optimizer that updates each element by itself, such as AdamW, or BucketedDataParallel"
            )
    _fitting.add(optimizer)


def _refuse_other_shapes(optimizer: Optimizer) -> None:
    """Raise RuntimeError if an optimizer has state of other shapes than its parts, which a fused one reads anyway."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            is_tensor = isinstance(value, torch.Tensor) and value.dim() > 0 and value.is_floating_point()
            if isinstance(parameter, ShardedPart) and is_tensor and value.shape != parameter.shape:
                raise RuntimeError(
                    f"the loaded {name} has the shape {tuple(value.shape)}, and this rank's part of its parameter "
                    f"{tuple(parameter.shape)}: save what full_optimizer_state_dict() of FullyShardedDataParallel "
                    "returns, and load it by its load_full_optimizer_state_dict()"
                )


def refuse_forgetting(wrapper: Wrapper) -> None:
    """Raise RuntimeError if there are gradients that the `zero_grad` of a wrapper would not reach."""
    if wrapper.has_sent_gradients():
        raise RuntimeError(_UNFINISHED.format(before="zero_grad()"))


_UNFINISHED = (
    "gradients are not averaged yet: call finish_gradient_synchronization() after backward() and before {before}, also "
    "in a closure, and if the step is left out"
)


def _refuse(optimizer: Optimizer, unfinished: Iterable[Any], before: str) -> None:
    for wrapper in unfinished:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not stepped.isdisjoint(map(id, wrapper.trained_parameters())):
            raise RuntimeError(_UNFINISHED.format(before=before))
