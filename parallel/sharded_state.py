"""Saving and loading what full sharding divides, independent of the number of ranks.

Tensors travel one by one: beyond the parts, each rank's device has one full tensor at a time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from .sharded_unit import UnitParameter


class Travelling:
    """Stands for a tensor, sent after the description of the state that it belongs to."""

    def __init__(self, value: Tensor, *, divided: bool) -> None:
        self.shape, self.dtype, self.divided = value.shape, value.dtype, divided


def is_first(groups: Sequence[dist.ProcessGroup]) -> bool:
    """Return True on the rank that is the first of all groups."""
    return all(group.rank() == 0 for group in groups)


def broadcast_objects(values: list[Any], groups: Sequence[dist.ProcessGroup], device: torch.device) -> list[Any]:
    """Return the first rank's objects on every rank."""
    for group in groups:
        dist.broadcast_object_list(values, dist.get_global_rank(group, 0), group=group, device=device)
    return values


def broadcast_whole(
    value: Tensor | None,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    groups: Sequence[dist.ProcessGroup],
) -> Tensor:
    """Return the first rank's tensor, contiguous, of this dtype and on this device, on every rank; the other ranks pass
    None."""
    whole = torch.empty(shape, dtype=dtype, device=device)
    if value is not None:
        whole.copy_(value)
    for group in groups:
        # As bytes, so that every dtype works.
        dist.broadcast(whole.view(-1).view(torch.uint8), dist.get_global_rank(group, 0), group=group)
    return whole


@torch.no_grad()
def full_optimizer_state(
    optimizer: Optimizer, divided: Mapping[int, UnitParameter], groups: Sequence[dist.ProcessGroup], *, rank0_only: bool
) -> dict[str, Any]:
    """Return an optimizer's state with full tensors.

    Args:
        optimizer: It treats parameters element by element.
        divided: The divided parameters, by their part's identity.
        groups: A broadcast over one after the other reaches every rank.
        rank0_only: Only the first rank gets the state, in its host's memory.
    """
    keeps = not rank0_only or is_first(groups)
    parameters = _parameters(optimizer)
    packed = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for number, values in packed["state"].items():
        one = divided.get(id(parameters[number]))
        state[number] = {}
        for name, value in values.items():
            whole = one.gathered(value) if one is not None and _is_part(value, one) else value
            if keeps:
                state[number][name] = _copy(whole, on_host=rank0_only)
    return {"state": state, "param_groups": packed["param_groups"]} if keeps else {}


@torch.no_grad()
def load_full_optimizer_state(
    optimizer: Optimizer,
    state: Mapping[str, Any] | None,
    divided: Mapping[int, UnitParameter],
    names: Mapping[int, str],
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> None:
    """Load the first rank's state with full tensors: each rank takes its parts.

    Args:
        state: As `full_optimizer_state` returns it; the first rank's counts.
        names: All parameters' names, by their, or their part's, identity.
        device: Where tensors travel.

    Raises:
        ValueError: the state has other parameter groups than the optimizer, or tensors of other shapes than the
            parameters; raised on every rank.
    """
    parameters = _parameters(optimizer)
    ones = [divided.get(id(parameter)) for parameter in parameters]
    first = is_first(groups)
    theirs: Mapping[str, Any] = (state or {}) if first else {}
    error = None
    described: dict[int, dict[str, Any]] = {}
    if first:
        error = _why_not_loaded(theirs, optimizer, divided, names)
        if error is None:
            for n, values in theirs.get("state", {}).items():
                described[n] = {k: _described(v, ones[n]) for k, v in values.items()}
    error, described, settings = broadcast_objects([error, described, theirs.get("param_groups")], groups, device)
    if error is not None:
        raise ValueError(error)
    for number, values in described.items():
        for name, value in values.items():
            if isinstance(value, Travelling):
                sent = theirs["state"][number][name] if first else None
                whole = broadcast_whole(sent, value.shape, value.dtype, device, groups)
                one = ones[number]
                if value.divided and one is not None:
                    part = torch.zeros(one.part.shape, dtype=value.dtype, device=device)
                    one.copy_part(part, whole)
                    whole = part
                elif whole.shape == parameters[number].shape:
                    # Fused optimizers read it in the order of its parameter's memory.
                    whole = torch.empty_like(parameters[number], dtype=whole.dtype).copy_(whole)
                values[name] = whole
    optimizer.load_state_dict({"state": described, "param_groups": settings})


def _why_not_loaded(
    state: Mapping[str, Any], optimizer: Optimizer, divided: Mapping[int, UnitParameter], names: Mapping[int, str]
) -> str | None:
    """Return why a state with full tensors does not fit an optimizer; None if it fits."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if [len(group["params"]) for group in state.get("param_groups", [])] != sizes:
        return "the loaded state has other parameter groups than this optimizer"
    parameters = _parameters(optimizer)
    for number, values in state.get("state", {}).items():
        if number not in range(len(parameters)):
            return f"the loaded state has a parameter {number}; this optimizer has {len(parameters)} parameters, from 0"
        key = id(parameters[number])
        shape = divided[key].shape if key in divided else parameters[number].shape
        whose = names.get(key, f"parameter {number}")
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape != shape:
                return (
                    f"{name} of {whose} has the shape {tuple(value.shape)} in the state "
                    f"and the parameter {tuple(shape)}: load the state of the same model's optimizer"
                )
    return None


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters in the order in which the optimizer's state numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_part(value: object, one: UnitParameter) -> bool:
    return isinstance(value, Tensor) and value.shape == one.part.shape


def _copy(value: Any, *, on_host: bool) -> Any:
    return value.detach().to("cpu" if on_host else value.device, copy=True) if isinstance(value, Tensor) else value


def _described(value: Any, one: UnitParameter | None) -> Any:
    """Return a tensor's description, or what is small enough to be sent with the descriptions."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        return value.cpu()
    return Travelling(value, divided=one is not None and value.shape == one.shape)
