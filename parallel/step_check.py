"""Refuses an optimizer's step with gradients that are not averaged yet: each rank would train by itself, in silence."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook


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
