"""What full sharding gathers, reduces and frees together: parameters in two forms, and the units that have them."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .collectives import StartedTogether, start_all_gather, start_together, strides_of
from .data_parallel import dense_gradient
from .sharded_gradient import DIVIDED, ShardedPart

Owner = tuple[nn.Module, str]
"""A module that uses a parameter, and the parameter's name in the module."""

LATER = 2**63
"""A number above those of all autograd nodes."""


class UnitParameter:
    """A parameter in its two forms: `part`, which the optimizer updates, and `whole`, with which modules compute.

    Modules have `whole` as their parameter while they run, forward or backward, and otherwise `part`. `whole` has
    memory only from `take_memory` to `free`. Autograd may save it for the backward pass, before which the memory is
    filled again with the same values.
    """

    def __init__(
        self,
        name: str,
        original: nn.Parameter,
        owners: list[Owner],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name, self.owners, self.group = name, owners, group
        self.is_sharded = original.dim() >= 2 and group.size() > 1
        self.numel, self.shape = original.numel(), original.shape
        self._strides = strides_of(original)
        self._held: Tensor | None = None
        """A gradient that `hold_gradient` has kept."""
        ranks = group.size() if self.is_sharded else 1
        self.part_numel = -(-self.numel // ranks)
        values = self._values_of(original, device) if self.is_sharded else original.detach()
        self.part = ShardedPart(values, original.requires_grad)
        self.part.group = group if self.is_sharded else None
        self.part.filled = min(max(0, self.numel - group.rank() * self.part_numel), self.part_numel)
        DIVIDED[original] = weakref.ref(self.part)
        if original.requires_grad:
            original.register_post_accumulate_grad_hook(functools.partial(_refuse_former, name))  # type: ignore[no-untyped-call]
        with torch.no_grad():
            memory = torch.empty(self.part_numel * ranks, dtype=dtype, device=device)
            self.whole = nn.Parameter(memory[: self.numel].view(self.shape), original.requires_grad)
        self.part.whole = self.whole
        # `data` has its own version counter, so that autograd does not take refilling the memory for a modification.
        self.memory = memory.data
        self.storage = memory.untyped_storage()._cdata
        self._bytes = memory.untyped_storage().nbytes()
        self.filled_version = 0
        """The full parameter's version when its memory was filled last."""
        self.free()
        change_versions([self], 1)
        self.show(self.part)

    def _values_of(self, original: nn.Parameter, device: torch.device) -> Tensor:
        """Return this rank's elements of the parameter, in one dimension, filled up with zeros; all zeros for a
        parameter on the meta device."""
        values = original.new_zeros(self.part_numel, device=device)
        if not original.is_meta:
            self.copy_part(values, original.detach())
        return values

    @property
    def part_version(self) -> int:
        with torch._C.DisableTorchFunction():  # in the forward pass parts stand for full parameters
            return self.part._version

    def take_memory(self) -> None:
        self.memory.untyped_storage().resize_(self._bytes)

    def free(self) -> None:
        self.memory.untyped_storage().resize_(0)

    def show(self, parameter: nn.Parameter) -> None:
        """Set `whole` or `part` as the modules' parameter."""
        for module, name in self.owners:
            # Not by setattr: that would unregister and register, and so change the order of parameters.
            module._parameters[name] = parameter

    def refuse_another(self) -> None:
        """Raise RuntimeError if a module has another parameter than these two forms."""
        for module, name in self.owners:
            shown = module._parameters.get(name)
            if shown is not self.part and shown is not self.whole:
                raise RuntimeError(
                    f"{self.name} is another parameter than when FullyShardedDataParallel wrapped the model, and would "
                    "not be used: neither assign parameters after that, nor call the model by "
                    "torch.func.functional_call, which works with the data-parallel wrappers"
                )

    def gathered(self, part: Tensor) -> Tensor:
        """Return the full tensor of which every rank has a part, with the parameter's strides: the parameter itself, or
        of the optimizer's state, which fused optimizers read in the order of the parameter's memory."""
        flat = part.new_empty(self.memory.shape)
        start_all_gather(flat, part.detach(), self.group).wait()
        whole = flat[: self.numel].view(self.shape)
        return whole if whole.stride() == self._strides else self.empty(whole.dtype, whole.device).copy_(whole)

    def empty(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of the parameter's shape and strides, with any values."""
        return torch.empty_strided(self.shape, self._strides, dtype=dtype, device=device)

    def copy_part(self, part: Tensor, whole: Tensor) -> None:
        """Fill a part with this rank's elements of a full tensor."""
        start = self.group.rank() * self.part_numel
        mine = whole.reshape(-1)[start : start + self.part_numel]
        part[: mine.numel()] = mine

    def hold_gradient(self, dtype: torch.dtype) -> None:
        """Keep the full gradient in the dtype in which it will be reduced, so that it accumulates in it."""
        if self.whole.grad is not None and self.whole.grad.dtype != dtype:
            self._held = self.take_gradient(dtype)

    def take_gradient(self, dtype: torch.dtype) -> Tensor | None:
        """Return the full gradient of this rank since the last reduction, in this dtype, and forget it. Raises
        RuntimeError: it is sparse."""
        gradient = dense_gradient(self.name, self.whole)
        held, self.whole.grad, self._held = self._held, None, None
        if gradient is None or held is None:
            return held if gradient is None else gradient.to(dtype)
        return held.add_(gradient)

    def drop_gradient(self) -> None:
        self.whole.grad = self._held = None

    def add_gradient(self, gradient: Tensor) -> None:
        """Add an averaged gradient to the part's gradient."""
        gradient = gradient.to(self.part.dtype).view(self.part.shape)
        if self.part.grad is not None:
            self.part.grad.add_(gradient)
        else:
            self.part.grad = gradient


def _refuse_former(name: str, original: Tensor) -> None:
    """Raise RuntimeError: a parameter from before it was divided gets a gradient, which no optimizer would see."""
    raise RuntimeError(
        f"{name} is still used as it was before FullyShardedDataParallel divided it, as from a list, a closure or a "
        "criterion, and would not be trained there: let modules read it as their attribute, in the wrapped model"
    )


class ShardedUnit:
    """Parameters that are gathered, reduced and freed together, and the state of these operations."""

    def __init__(
        self, name: str, module: nn.Module, held: list[UnitParameter], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.name, self.module, self._group, self._device = name, module, group, device
        self.held: list[UnitParameter] = []
        self.sharded: list[UnitParameter] = []
        for parameter in held:
            self.take(parameter)
        self.stays_whole = False
        """Whether it stays whole from its forward pass to the end of its backward pass."""
        self._gathering: StartedTogether | None = None
        self._gathered: dict[UnitParameter, int] = {}
        """The versions of the parts that were gathered last."""
        self.is_whole = False
        self.running: list[Use] = []
        """Calls of its module that have begun and not ended, each inside the one before."""
        self.backward = BackwardState()
        self.reduced = False
        """Whether its gradients have been reduced since the last synchronization."""

    def __str__(self) -> str:
        return f"the unit {self.name!r} ({type(self.module).__name__})"

    def has_gradients(self) -> bool:
        """Return True if autograd has accumulated gradients that are to be sent."""
        return any(parameter.whole.grad is not None for parameter in self.sharded)

    def has_all_gradients(self) -> bool:
        """Return False if the running pass of autograd's engine will yet accumulate a gradient that is to be sent, the
        first one since the last was sent."""
        return not any(one.whole.grad is None and accumulates(one.whole) for one in self.sharded)

    def take(self, parameter: UnitParameter) -> None:
        """Gather a parameter with this unit from now on."""
        self.held.append(parameter)
        if parameter.is_sharded:
            self.sharded.append(parameter)

    def give(self, parameter: UnitParameter, other: ShardedUnit) -> None:
        """Let another unit gather a parameter; both are whole."""
        self.held.remove(parameter)
        if parameter.is_sharded:
            self.sharded.remove(parameter)
        other.take(parameter)

    def show_whole(self) -> None:
        """Set the full parameters as the modules'. Raises RuntimeError: a module has another parameter in its place."""
        for parameter in self.held:
            parameter.refuse_another()
            parameter.show(parameter.whole)

    def show_parts(self) -> None:
        for parameter in self.held:
            parameter.show(parameter.part)

    def start_gathering(self) -> None:
        if self.is_whole or self._gathering is not None:
            return
        starts: list[Callable[[], Any]] = []
        parts = []
        self._gathered = {parameter: parameter.part_version for parameter in self.held}
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for parameter in self.held:
                parameter.take_memory()
                if parameter.is_sharded:
                    part = parameter.part.detach().to(parameter.memory.dtype)
                    parts.append(part)
                    starts.append(functools.partial(start_all_gather, parameter.memory, part, self._group))
                else:
                    parameter.memory.copy_(parameter.part.detach().reshape(-1))
        self._gathering = start_together(starts, self._group, self._device, keep=parts)

    def free_old(self, versions: Mapping[UnitParameter, int]) -> None:
        """Free full parameters of other versions of the parts than these, such as of before the optimizer's step."""
        is_old = any(self._gathered.get(parameter, version) != version for parameter, version in versions.items())
        if is_old and (self.is_whole or self._gathering is not None):
            self.free()

    def make_whole(self) -> None:
        self.start_gathering()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            self.is_whole = True
            change_versions(self.held, -1)
            for parameter in self.held:
                parameter.filled_version = parameter.whole._version

    def free(self) -> None:
        """Free the full parameters' memory; modules have the parts. Raises RuntimeError: a module has changed its
        parameter, and the change is lost."""
        if self._gathering is not None:
            self.make_whole()
        self.show_parts()
        self.backward.since = LATER
        if self.is_whole:
            self.is_whole = False
            changed = [one.name for one in self.held if one.whole._version != one.filled_version]
            change_versions(self.held, 1)
            for parameter in self.held:
                parameter.free()
            if changed:
                raise RuntimeError(
                    f"{self} has changed its parameter {changed[0]} in place in its forward pass, which full sharding "
                    "would lose: change parameters between steps, where they are parts"
                )

    def parameters_in(self, tensors: list[Tensor]) -> list[UnitParameter]:
        """Return the parameters in whose memory the tensors are."""
        found = []
        for tensor in tensors:
            with contextlib.suppress(NotImplementedError):  # sparse tensors, and those of torch.func, have no storage
                storage = tensor.untyped_storage()._cdata
                found += [parameter for parameter in self.held if parameter.storage == storage]
        return list(dict.fromkeys(found))


@dataclass(frozen=True, eq=False)
class Use:
    """A call of a unit's module. Numbers are those that autograd gives its nodes in the order of the forward pass."""

    unit: ShardedUnit
    start: int
    """The next node's number at its beginning."""
    first: int
    """The same of the unit's first call in this forward pass."""
    versions: Mapping[UnitParameter, int]
    """The versions of the unit's parts at its beginning."""

    def refuse_changes(self) -> None:
        """Raise RuntimeError if a part was changed since: the backward pass would gather other values."""
        for parameter in self.unit.held:
            if self.versions.get(parameter, parameter.part_version) != parameter.part_version:
                raise RuntimeError(
                    f"{parameter.name} was changed in place, as by an optimizer's step, between the forward and the "
                    "backward pass of the model"
                )


class ForwardPass:
    """The calls of units in a forward pass, in their order."""

    def __init__(self) -> None:
        self.order: list[Use] = []
        self.has_gradients = torch.is_grad_enabled()
        """False: its units' order counts for nothing, since replicas may run different numbers of such passes."""
        self._first: dict[ShardedUnit, int] = {}

    def use(self, unit: ShardedUnit, *, again: bool) -> Use:
        """Note that a unit's module is called, or in the backward pass called again, for what it had not kept."""
        start = torch._C._autograd._get_sequence_nr()
        versions = {parameter: parameter.part_version for parameter in unit.held}
        if again:
            return Use(unit, start, start, versions)
        self.order.append(Use(unit, start, self._first.setdefault(unit, start), versions))
        return self.order[-1]

    def before(self, use: Use, number: int) -> list[ShardedUnit]:
        """Return so many units that ran before this use, the last one first: their backward passes come after it."""
        places = [place for place, one in enumerate(self.order) if one is use]
        places = places or [place for place, one in enumerate(self.order) if one.unit is use.unit]
        last = places[-1] if places else 0
        return [one.unit for one in reversed(self.order[max(0, last - number) : last])]


class BackwardState:
    """What a unit's backward pass has to do yet; numbers as in Use."""

    def __init__(self) -> None:
        self.task: int | None = None
        """The pass of autograd's engine in which it began; None: it owes no gradients."""
        self.first = LATER
        """Where the first of its uses in the forward pass begins."""
        self.since = LATER
        """Where the first of the uses begins for which it is whole now."""


def change_versions(parameters: Sequence[UnitParameter], change: int) -> None:
    """Change the versions of full parameters: while they are freed, autograd refuses what it has saved of them, as if
    they were modified."""
    wholes = tuple(parameter.whole for parameter in parameters)
    versions = tuple(whole._version + change for whole in wholes)
    torch._C._autograd._unsafe_set_version_counter(wholes, versions)


def accumulates(parameter: nn.Parameter) -> bool:
    """Return True if the running pass of autograd's engine accumulates a gradient in a parameter, now or later."""
    if not parameter.requires_grad:
        return False
    with torch.enable_grad():
        view: Any = parameter.view_as(parameter)
    try:
        return bool(torch._C._will_engine_execute_node(view.grad_fn.next_functions[0][0]))
    except RuntimeError:  # torch.autograd.grad returns its gradient
        return False


def tensors_in(outputs: object) -> list[Tensor]:
    """Return all tensors in a module's outputs: in containers and in objects' attributes, at any depth."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    rest = [outputs]
    while rest:
        one = rest.pop()
        if isinstance(one, Tensor):
            found[id(one)] = one
        elif not isinstance(one, _OPAQUE) and id(one) not in seen:
            seen.add(id(one))
            rest += gc.get_referents(one)
    return list(found.values())


_OPAQUE = (type(None), bool, int, float, str, bytes, type, nn.Module, ModuleType, FunctionType)
"""Types of objects that have no outputs in them; of the others, the garbage collector tells what they refer to."""


def nodes_of(tensors: list[Tensor], start: int) -> Iterator[Any]:
    """Yield the autograd nodes from a number on that made the tensors, each once.

    A view's base is followed, too: when one of both is modified, the view's own node leaves the graph.
    """
    seen = set()
    for tensor in tensors:
        for one in (tensor, tensor._base if tensor._is_view() else None):
            node = None if one is None else one.grad_fn
            if node is not None and node._sequence_nr() >= start and node not in seen:
                seen.add(node)
                yield node
