"""Refuses what would train wrongly in silence: a step with gradients that are not averaged yet, and wrapping twice."""

import functools
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .sharded_gradient import ShardedPart


class Wrapper(Protocol):
    """A wrapper whose gradients are averages only after `finish_gradient_synchronization`."""

    def has_unfinished_gradients(self) -> bool:
        """Return True if gradients have come outside `no_sync` since the last synchronization."""

    def trained_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters that an optimizer would step."""


_wrappers: weakref.WeakSet[Any] = weakref.WeakSet()


def check_steps_of(wrapper: Wrapper) -> None:
    """From now on, raise RuntimeError at the beginning of a step of any torch optimizer that has parameters of this
    wrapper, while its gradients are unfinished."""
    _register()
    _wrappers.add(wrapper)


def refuse_wrapped(module: nn.Module) -> None:
    """Check a module that is to be wrapped.

    Raises:
        TypeError: there is a wrapper in it, of ours or torch's; or it has parts of parameters, which ranks would take
            for the same values.
    """
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


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for wrapper in list(_wrappers):
        if wrapper.has_unfinished_gradients():
            stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if not stepped.isdisjoint(map(id, wrapper.trained_parameters())):
                raise RuntimeError(
                    "gradients are not averaged yet: call finish_gradient_synchronization() after backward() and "
                    "before the optimizer's step"
                )
