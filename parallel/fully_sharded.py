"""Fully sharded data parallelism: each rank keeps a part of every parameter, its gradient and its optimizer state.

    model = FullyShardedDataParallel(model, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model(inputs)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

The model is cut into units. Before a unit runs, forward or backward, its parameters are gathered from all ranks; after
it, they are freed. When autograd has accumulated a unit's gradients, they are reduced to the ranks that own them. While
one unit computes, the next unit's parameters and the last unit's gradients are being communicated.

Hooks on the autograd nodes that made a unit's outputs tell when its backward pass begins, and when those of later units
are over (docs/decisions/0021-when-sharded-gradients-are-sent.md).

Tensors are gathered directly into the parameters' memory, and gradients are reduced directly from autograd's tensors:
NCCL takes all tensors of a unit in one launch, so nothing is copied into or out of buffers.

This is ZeRO stage 3 (Rajbhandari et al., 2020, section 5.3) with the units and the prefetching of PyTorch FSDP (Zhao et
al., 2023, sections 3.2 and 3.3). All ranks start operations in the same order: that in which units run.
"""

import functools
import math
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from .collectives import (
    Averaging,
    GradientUsage,
    StartedTogether,
    averaging,
    broadcast_module,
    check_dtype,
    check_same_everywhere,
    group_of,
    owns_its_memory,
    start_all_reduce,
    start_all_reduces,
    start_reduce_scatter,
    start_together,
)
from .meta import children_first, materialise, reset_parameters
from .sharded_gradient import NO_HOOKS, ShardedPart, parts_replaced
from .sharded_state import broadcast_objects, broadcast_whole, full_optimizer_state, is_first, load_full_optimizer_state
from .sharded_unit import (
    BackwardState,
    ForwardPass,
    Owner,
    ShardedUnit,
    UnitParameter,
    Use,
    accumulates,
    nodes_of,
    tensors_in,
)
from .step_check import (
    check_steps_of,
    refuse_forgetting,
    refuse_shared_memory,
    refuse_strangers,
    refuse_wrapped,
)


class FullyShardedDataParallel(nn.Module):
    """Shards parameters, gradients and optimizer state over the ranks, unit by unit.

    A unit is a child of a ModuleList, or else a module without children; a parameter that several units use, or that
    belongs to a module with children outside a ModuleList, is gathered for the whole forward and backward pass. So is
    one that the forward pass uses outside its unit, such as `F.linear(x, self.embedding.weight)`, from its first such
    use on. Outside the forward pass, parameters are parts.

    A parameter with two axes or more is sharded, whatever module it belongs to: each rank's part is one-dimensional and
    of the same length, the last ones filled up with zeros. Others are kept by every rank, and their gradients are
    averaged.

    `parameters()` yields parts: construct the optimizer after this. An optimizer that needs a parameter's shape, or
    norms over all of it, does not work on parts. Gradients are ShardedGradient, whose norms are those of all parts.
    All ranks must run the same units in the same order, forward and backward, in equally many passes; within a unit
    they may use different parameters. Freeze parameters before they are wrapped: a forward pass after one was frozen or
    unfrozen raises an error, and so does a step of a torch optimizer with gradients that are not averaged yet.
    torch.compile may be applied to a unit's `forward`, inside its hooks, but neither to the unit nor to the model.

    With P bytes of parameters in the dtype of computation and n ranks, each rank sends and receives 3·P·(n-1)/n per
    step: two gathers and one reduction, against 2·P·(n-1)/n for data parallelism.

    Args:
        module: The model, on its device, the same on every rank. All ranks get the first rank's values.
        compute_dtype: Floating-point parameters are cast to it before they travel, and so are the inputs of modules
            that have parameters; gradients travel in it. Parts, their gradients and the optimizer's state keep the
            module's dtype. None: everything is in the module's dtype.
        process_group: The ranks that share the parameters; by default all of them.
        reduce_dtype: The dtype in which gradients accumulate in `no_sync`, travel, and are averaged; None, and for
            complex ones: that of computation.
        reshard_after_forward: False: a unit stays whole from its forward to its backward pass. Then each rank sends
            2·P·(n-1)/n, as much as for data parallelism, and keeps P of parameters from one to the other; gradients and
            the optimizer's state stay divided (ZeRO stage 2).
        prefetch: Units that are gathered ahead of the one that computes, each with its memory; 0: each is gathered when
            it is needed, and computing waits for it.
        replicas: The ranks that have the same parts as this one, for hybrid sharding: gradients are averaged over
            `process_group`, and then over these. Every process group must have as many ranks, and the first ranks of
            all groups of replicas must be one process group.
        device: Where to make the parts of a module that is on the meta device. No full model exists at any time, only
            one module's own parameters.
        initialise: Fills a meta module's own parameters and buffers; called for each module that has any on the meta
            device, children first, when these are on `device`. None: its `reset_parameters` does.

    Raises:
        RuntimeError: no process group is initialised, or the ranks' modules differ.
        TypeError: a recurrent module of torch, which keeps its parameters in a second place; a compiled module, or one
            that is wrapped already, in whole or in part; a parameter with a hook; two parameters in one memory; a
            module on the meta device that has no `reset_parameters`; or a `compute_dtype` or `reduce_dtype` that is no
            floating-point dtype.
        ValueError: the module is on the meta device, and `device` is missing; `prefetch` is negative; this rank is not
            in the process group; or `replicas` are ranks that have other parts.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        replicas: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        initialise: Callable[[nn.Module], None] | None = None,
    ) -> None:
        super().__init__()
        self.group = group_of(process_group)
        self.replicas = None if replicas is None else group_of(replicas)
        self._groups = [self.group] if replicas is None else [replicas, self.group]
        """Groups over which a broadcast, one after the other, reaches every rank from the first."""
        self.compute_dtype, self.reduce_dtype = compute_dtype, reduce_dtype
        self.reshard_after_forward, self.prefetch = reshard_after_forward, prefetch
        _refuse_unsuited(module, prefetch, device, compute_dtype, reduce_dtype)
        meta = {child for child in module.modules() if any(tensor.is_meta for tensor in _own_tensors(child))}
        is_meta = any(parameter.is_meta for parameter in module.parameters())
        self.module, self._device = module, next((p.device for p in module.parameters()), torch.device("cpu"))
        if is_meta:
            self._device = torch.empty(0, device=device).device
            materialise(module, self._device, lambda parameter: not self._is_sharded(parameter))
        _check_replicas(self.replicas, self.group, self._device)
        for group in self._groups:
            broadcast_module(module, group, self._device)
        self.units = self._make_units()
        if is_meta:
            self._initialise(initialise or reset_parameters, meta)
        held = {id(parameter.part) for unit in self.units for parameter in unit.held}
        self._replicated = {n: p for n, p in module.named_parameters() if p.requires_grad and id(p) not in held}
        """Parameters that every rank keeps whole and computes with directly."""
        self._trained = [(name, p, p.requires_grad) for name, p in module.named_parameters()]
        """Whether each parameter needed a gradient when the model was wrapped."""
        self._known = {id(parameter) for _, parameter, _ in self._trained}
        self._forward = ForwardPass()
        self._previous_order: list[ShardedUnit] = []
        """The units in the order in which they ran in the forward pass before."""
        self._passes: dict[int, bool] = {}
        """The passes of autograd's engine that run, and whether they accumulate gradients of parameters."""
        self._begun: list[ShardedUnit] = []
        """Units whose gradients have begun to come, and are not sent yet."""
        self._reducing: list[tuple[StartedTogether, list[tuple[UnitParameter, Tensor]]]] = []
        self.synchronizes, self._unfinished, self._unsent, self.reads_parts = True, False, False, False
        """`_unsent`: `no_sync` has left full gradients. `reads_parts`: `state_dict` gives parts, as to us."""
        self._replicating: list[tuple[StartedTogether, list[tuple[UnitParameter, Tensor]]]] = []
        """Reduced gradients that are being averaged over replicas."""
        self._unused_here: list[tuple[UnitParameter, Tensor]] = []
        """Reduced gradients of parameters that this rank did not use, but that another rank may have used."""
        self._used: set[str] = set()
        self._order, self._checked_order = 0, -1
        """Checksums of the units' order since the last synchronization, and when the ranks' were last compared."""
        self._attach()
        check_steps_of(self)
        # torch's DistributedDataParallel, which would overwrite parts with the first rank's, finds nothing to train.
        self._ddp_params_and_buffers_to_ignore = [name for name, _ in self.named_parameters()]

    def __getstate__(self) -> Any:
        raise TypeError(
            "a FullyShardedDataParallel can be neither copied nor pickled: build another model, and load what "
            "full_state_dict() returns"
        )

    def has_unfinished_gradients(self) -> bool:
        """Return True if gradients have come since the last synchronization."""
        return self._unsent or (self.synchronizes and self._unfinished)

    def has_sent_gradients(self) -> bool:
        """Return True if there are gradients that `zero_grad` would not reach. Those of a backward pass in which an
        error was raised do not count: the next forward pass forgets them."""
        return (self._unsent or self._unfinished) and not self._passes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of a module. Raises RuntimeError: gradients are being averaged, so that it would not reach them."""
        refuse_forgetting(self)
        super().zero_grad(set_to_none)

    def trained_parameters(self) -> Iterable[nn.Parameter]:
        return (parameter for _, parameter, trained in self._trained if trained)

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        with parts_replaced(self._whole_of):
            outputs = self.module(*inputs, **named_inputs)
        self._check_first_order("the end")
        return outputs

    def _whole_of(self, part: ShardedPart) -> nn.Parameter:
        """Return the full parameter of a part that is used outside its unit, and keep it whole for entire passes."""
        for unit in self.units:
            for parameter in unit.held:
                if parameter.part is part:
                    if unit is not self.units[0]:
                        self.keep_whole(unit, parameter)
                    return parameter.whole
        return part

    def keep_whole(self, unit: ShardedUnit, parameter: UnitParameter) -> None:
        """Move a parameter that is used outside its unit to the root, which is whole for the entire pass."""
        root = self.units[0]
        unit.make_whole()
        root.make_whole()
        unit.give(parameter, root)
        root.show_whole()
        if all(use.unit is not root for use in self._forward.order):
            self._forward.order.insert(0, Use(root, 0, 0, {}))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only: inside, backward passes and `finish_gradient_synchronization` send no
        gradients. The first backward pass outside, or else `finish_gradient_synchronization` there, averages what has
        accumulated.

        Meanwhile each rank keeps full gradients; parameters are gathered and freed as ever.
        """
        before, self.synchronizes = self.synchronizes, False
        for unit in self.units:
            # What accumulates from now on must be reduced, too.
            unit.reduced = False
        try:
            yield
        finally:
            self.synchronizes = before

    def begin_forward(self) -> None:
        """Forget the previous forward pass. Raises RuntimeError: a parameter has been frozen, unfrozen, added or
        replaced since the model was wrapped; TypeError: a parameter has a hook that would see a gradient before it is
        averaged."""
        if _in_backward():
            return
        with torch._C.DisableTorchFunction():
            changed = next((one for one in self._trained if one[1].requires_grad != one[2]), None)
            _refuse_hooks((name, parameter) for name, parameter, _ in self._trained)
        if changed is not None:
            name, _, trained = changed
            raise RuntimeError(
                f"requires_grad of {name} was {trained} when the model was wrapped and is {not trained} now: "
                "freeze and unfreeze before FullyShardedDataParallel wraps the model; to train others, wrap a new "
                "model with the weights of full_state_dict()"
            )
        if self._passes:
            self._discard_gradients()
        # A forward pass without a backward pass leaves units whole, with values from before the optimizer's step.
        for unit in self.units:
            for one in unit.held:
                one.refuse_another()
            unit.free()
            unit.running.clear()
            self._hold(unit)
        refuse_strangers(self.module, self._known)
        self._previous_order = [use.unit for use in self._forward.order] or self._previous_order
        self._forward = ForwardPass()

    # Construction

    def _make_units(self) -> list[ShardedUnit]:
        modules = dict(_unit_modules(self.module, ""))
        owners: dict[int, list[Owner]] = {}
        users: dict[int, set[str]] = {}
        for unit_name, unit_module in [*modules.items(), ("", None)]:
            inside = unit_module.modules() if unit_module is not None else self._outside(modules.values())
            for child in inside:
                for name, parameter in child._parameters.items():
                    if parameter is not None:
                        owners.setdefault(id(parameter), []).append((child, name))
                        users.setdefault(id(parameter), set()).add(unit_name if unit_module is not None else "\0root")
        held: dict[str, list[UnitParameter]] = {}
        for name, parameter in list(self.module.named_parameters()):
            dtype = self._dtype_of(parameter)
            if dtype != parameter.dtype or self._is_sharded(parameter):
                uses = users[id(parameter)]
                unit_name = next(iter(uses)) if len(uses) == 1 else "\0root"
                held_parameter = UnitParameter(name, parameter, owners[id(parameter)], self.group, dtype, self._device)
                held.setdefault(unit_name, []).append(held_parameter)
        modules = {"\0root": self.module} | {name: modules[name] for name in modules if name in held}
        units = [
            ShardedUnit(name.removeprefix("\0root"), module, held.get(name, []), self.group, self._device)
            for name, module in modules.items()
        ]
        units[0].stays_whole = True
        return units

    def _is_sharded(self, parameter: Tensor) -> bool:
        return parameter.dim() >= 2 and self.group.size() > 1

    @torch.no_grad()
    def _initialise(self, initialise: Callable[[nn.Module], None], meta: set[nn.Module]) -> None:
        """Fill parts and buffers of modules that were on the meta device, one by one; every rank gets the first rank's
        values."""
        filled: set[int] = set()
        for child in filter(meta.__contains__, children_first(self.module)):
            parts = {n: p for n, p in child._parameters.items() if p is not None and id(p) in self._sharded}
            for name, part in parts.items():
                whole = self._sharded[id(part)].empty(part.dtype, self._device)
                child._parameters[name] = nn.Parameter(whole, part.requires_grad)
            initialise(child)
            for group in self._groups:
                broadcast_module(child, group, self._device, recurse=False)
            for name, part in parts.items():
                if id(part) not in filled:
                    self._sharded[id(part)].copy_part(part.detach(), child.get_parameter(name))
                child._parameters[name] = part
                filled.add(id(part))

    def _outside(self, unit_modules: Any) -> list[nn.Module]:
        inside = {id(child) for module in unit_modules for child in module.modules()}
        return [child for child in self.module.modules() if id(child) not in inside]

    def _dtype_of(self, parameter: Tensor) -> torch.dtype:
        if self.compute_dtype is None or not parameter.is_floating_point():
            return parameter.dtype
        return self.compute_dtype

    def _attach(self) -> None:
        """Register the hooks on modules; they do nothing once this wrapper is gone."""
        this = weakref.ref(self)
        for unit in self.units:
            before, after = _forward_hooks(this, unit)
            unit.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            unit.module.register_forward_hook(after, always_call=True)
        if self.compute_dtype is not None:
            cast = functools.partial(_cast_inputs, self.compute_dtype)
            for child in self.module.modules():
                if any(p is not None and p.is_floating_point() for p in child._parameters.values()):
                    child.register_forward_pre_hook(cast, with_kwargs=True)

        def begin(module: nn.Module, inputs: Any) -> None:
            wrapper = this()
            if wrapper is not None:
                _refuse_copy(module, wrapper.module)
                wrapper.begin_forward()

        # Before the hooks of a unit that is the whole module.
        self.module.register_forward_pre_hook(begin, prepend=True)

        def refuse(*arguments: Any) -> None:
            wrapper = this()
            if wrapper is not None and not wrapper.reads_parts:
                raise RuntimeError(_PARTS_ONLY)

        # Not by methods of the wrapper: state_dict() of the module in it, of one around it, or of one of its blocks
        # gives parts, too.
        owners = {owner for parameter in self._sharded.values() for owner, _ in parameter.owners}
        for owner in owners | {self.module}:
            owner.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
            owner.register_load_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]

    # Forward and backward passes of units

    def before_forward(self, unit: ShardedUnit) -> None:
        """Make a unit whole, and start gathering those that ran after it last time."""
        use = self._forward.use(unit, again=_in_backward())
        if unit.sharded:
            self._check_first_order(unit.name)
        unit.running.append(use)
        if not _in_backward():
            # A module in the model may be called without the model.
            unit.free_old(use.versions)
        if self._forward.has_gradients and unit.sharded and not _in_backward():
            self._note(unit.name)
        unit.make_whole()
        unit.show_whole()
        ran = len(self._forward.order)
        if not _in_backward() and self._previous_order[ran - 1 : ran] == [unit]:
            for following in self._previous_order[ran : ran + self.prefetch]:
                following.start_gathering()

    def _check_first_order(self, name: str) -> None:
        """Raise RuntimeError if in the first forward pass this rank runs another unit than the others: gloo would end
        the process where their sizes differ."""
        if not self._previous_order and not _in_backward() and any(unit.sharded for unit in self.units):
            try:
                check_same_everywhere("order", name, self._device, self.group)
            except RuntimeError as error:
                raise RuntimeError(_OTHER_ORDER) from error

    def after_forward(self, unit: ShardedUnit, outputs: Any) -> None:
        """Watch for a unit's backward pass, and free the unit, unless that comes next. Raises RuntimeError: no tensors
        are found in what the unit returns, so that its backward pass would not be seen; or the model returns its own
        parameter, which will be freed."""
        # The root may have got its first parameter during this pass.
        use = unit.running.pop() if unit.running else Use(unit, 0, 0, {})
        tensors = tensors_in(outputs)
        is_trained = any(parameter.whole.requires_grad for parameter in unit.held)
        # None: also of a call that raised. What a unit keeps elsewhere, autograd refuses once the unit is freed.
        if not tensors and outputs is not None and is_trained and torch.is_grad_enabled():
            unit.free()
            raise RuntimeError(_NO_OUTPUTS.format(unit=unit, kind=type(outputs).__name__))
        for parameter in unit.parameters_in(tensors):
            if unit.stays_whole:
                unit.free()
                raise RuntimeError(_RETURNED.format(unit=unit, name=parameter.name))
            self.keep_whole(unit, parameter)
        nodes = list(nodes_of(tensors, use.start)) if torch.is_grad_enabled() else []
        for node in nodes:
            node.register_prehook(_backward_hook(weakref.ref(self), use, self._forward, node._sequence_nr()))
        if unit.running or _in_backward():
            return
        unit.show_parts()
        order, previous = self._forward.order, self._previous_order
        is_last = len(order) == len(previous) and previous[-1:] == [unit]
        if not (nodes and (unit.stays_whole or is_last or not self.reshard_after_forward)):
            unit.free()

    def before_backward(self, use: Use, forward: ForwardPass, number: int) -> None:
        """Make a unit whole, start gathering those that ran before it, and end the backward passes of those that ran
        after it.

        Autograd's engine runs the node of the highest number that is ready. So when a node runs, all higher ones have
        run; all uses that began at a higher number are over. Raises RuntimeError: the backward pass is itself
        differentiated, or a part was changed since the forward pass.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(_DIFFERENTIATED)
        unit, state = use.unit, use.unit.backward
        if not unit.is_whole:
            use.refuse_changes()
        self._begin(unit)
        state.since, state.first = min(state.since, use.start), min(state.first, use.first)
        task = torch._C._current_graph_task_id()
        over = [
            one for one in self._begun if one is not unit and one.backward.task == task and one.backward.since > number
        ]
        for one in over:
            if self.reshard_after_forward or one.backward.first > number:
                one.free()
        unit.make_whole()
        # Activation checkpointing may run a part of the unit again.
        unit.show_whole()
        for following in forward.before(use, self.prefetch):
            following.start_gathering()
        for one in over:
            if one.backward.first > number and one.has_all_gradients():
                self._settle(one)

    def _note(self, operation: str) -> None:
        """Add an operation to those whose order must be the same on all ranks: not what the backward pass gathers,
        since replicas may have other units whole, from a forward pass of their own."""
        self._order = zlib.crc32(operation.encode(), self._order) & 0x7FFF_FFFF

    def _begin(self, unit: ShardedUnit) -> None:
        if unit.backward.task is not None:
            return
        unit.backward.task = task = torch._C._current_graph_task_id()
        self._begun.append(unit)
        if task in self._passes:
            return
        this = weakref.ref(self)

        def end() -> None:
            wrapper = this()
            if wrapper is not None:
                wrapper._end_pass(task)

        torch.autograd.Variable._execution_engine.queue_callback(end)
        wholes = [parameter.whole for one in reversed(self.units) for parameter in one.held]
        self._passes[task] = any(map(accumulates, [*wholes, *self._replicated.values()]))
        self._unfinished = self._unfinished or (self._passes[task] and self.synchronizes)

    def _end_pass(self, task: int) -> None:
        """Send what a pass of autograd's engine has left, such as the gradients of the first unit, and free its units.

        Checkpoints with use_reentrant=True run passes inside others.
        """
        for unit in [unit for unit in self._begun if unit.backward.task == task]:
            unit.free()
            self._settle(unit)
        self._passes.pop(task, None)

    @torch.no_grad()
    def _settle(self, unit: ShardedUnit) -> None:
        """Send the gradients that a unit has, or in `no_sync` keep them."""
        assert unit.backward.task is not None
        # A pass inside this one may bring what this one does not.
        brought = self._passes[unit.backward.task] or unit.has_gradients()
        unit.backward = BackwardState()
        self._begun.remove(unit)
        if not brought:
            return
        self._unfinished = self._unfinished or self.synchronizes
        if self.synchronizes:
            self._reduce(unit)
        else:
            self._unsent = True
            self._hold(unit)

    def _discard_gradients(self) -> None:
        """Forget the gradients of a step in whose backward pass an error was raised: they are of a part of it."""
        self._forget_passes()
        for started, _ in (*self._reducing, *self._replicating):
            started.wait()
        self._reducing.clear()
        self._replicating.clear()
        self._unused_here.clear()
        self._used.clear()
        self._unfinished = self._unsent = False
        for unit in self.units:
            unit.reduced = False
            for parameter in unit.held:
                parameter.drop_gradient()

    def _forget_passes(self) -> None:
        self._passes.clear()
        self._begun.clear()
        for unit in self.units:
            unit.backward = BackwardState()

    # Gradients

    @functools.cached_property
    def _averaging(self) -> Averaging:
        each = [averaging(group, self._device) for group in self._groups]
        return Averaging(each[0].operation, math.prod(one.factor for one in each))

    @torch.no_grad()
    def _hold(self, unit: ShardedUnit) -> None:
        """Keep a unit's gradients, to which further passes will add, in the dtype of the reduction."""
        for parameter in unit.held:
            parameter.hold_gradient(self._reduced_in(parameter))

    def _reduced_in(self, parameter: UnitParameter) -> torch.dtype:
        own = parameter.memory.dtype
        return self.reduce_dtype if self.reduce_dtype is not None and own.is_floating_point else own

    def _reduce(self, unit: ShardedUnit) -> None:
        """Start reducing a unit's gradients to the ranks' parts, with zeros for gradients that this rank lacks."""
        unit.reduced = True
        starts: list[Callable[[], Any]] = []
        results, keep = [], []
        for parameter in unit.sharded:
            if not parameter.part.requires_grad:
                continue
            source = self._source(parameter)
            result = torch.empty(parameter.part_numel, dtype=source.dtype, device=source.device)
            operation = self._averaging.operation
            starts.append(functools.partial(start_reduce_scatter, result, source, operation, self.group))
            results.append((parameter, result))
            keep.append(source)
        if starts:
            self._note(f"{unit.name} reduced")
            self._reducing.append((start_together(starts, self.group, self._device, keep=keep), results))
        # One unit's gradients are communicated while the next unit computes; more units would need more memory.
        while len(self._reducing) > 1:
            self._take_reduced()

    def _source(self, parameter: UnitParameter) -> Tensor:
        """Take a parameter's gradient; return it as the ranks' parts side by side, scaled for the average."""
        factor = self._averaging.factor
        numel = parameter.memory.numel()
        dtype = self._reduced_in(parameter)
        gradient = parameter.take_gradient(dtype)
        if gradient is None:
            return torch.zeros(numel, dtype=dtype, device=parameter.memory.device)
        self._used.add(parameter.name)
        flat = gradient.detach().reshape(-1)
        del gradient
        if flat.numel() == numel and (factor == 1.0 or owns_its_memory(flat)):
            return flat if factor == 1.0 else flat.mul_(factor)
        source = flat.new_zeros(numel)
        torch.mul(flat, factor, out=source[: flat.numel()])
        return source

    def _take_reduced(self) -> None:
        started, results = self._reducing.pop(0)
        started.wait()
        if self.replicas is None:
            self._add_up(results)
            return
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for _, result in results:
            kinds.setdefault(result.dtype, []).append(result)
        works = [start_all_reduces(kind, self._averaging.operation, self.replicas) for kind in kinds.values()]
        self._replicating.append((StartedTogether(works), results))
        while len(self._replicating) > 1:
            self._take_replicated()

    def _take_replicated(self) -> None:
        started, results = self._replicating.pop(0)
        started.wait()
        self._add_up(results)

    def _add_up(self, results: list[tuple[UnitParameter, Tensor]]) -> None:
        for parameter, result in results:
            if parameter.name in self._used:
                parameter.add_gradient(result)
            else:
                self._unused_here.append((parameter, result))

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Complete the gradients' reduction; call it on every rank after `backward()` and before the optimizer's step.

        All parameters are sharded again afterwards. On a GPU the current stream waits, not the host.

        Raises:
            RuntimeError: a gradient is sparse, or the ranks ran other units, or in another order.
        """
        if self.synchronizes:
            self._complete_reduction()
            self._unfinished = self._unsent = False
        else:
            for unit in self.units:
                self._hold(unit)
        self._forget_passes()
        for unit in self.units:
            unit.free()
            unit.reduced = False

    def _complete_reduction(self) -> None:
        for unit in self.units:
            # Autograd may have gone to parameters by other ways than through what their unit has returned.
            if not unit.reduced or unit.has_gradients():
                self._reduce(unit)
        kept = dict(self._replicated)
        for unit in self.units:
            for parameter in unit.held:
                if not parameter.is_sharded and parameter.part.requires_grad:
                    kept[parameter.name] = parameter.part
                    gradient = parameter.take_gradient(parameter.part.dtype)
                    if gradient is not None:
                        parameter.add_gradient(gradient)
        self._used |= {name for name, parameter in kept.items() if parameter.grad is not None}
        sharded = [parameter for unit in self.units for parameter in unit.sharded if parameter.part.requires_grad]
        names = [*(parameter.name for parameter in sharded), *kept]
        if names:
            usage = GradientUsage(
                (name in self._used for name in names), self._device, *self._groups, order=self._order
            )
            if self._order != self._checked_order and not usage.is_one_order():
                raise RuntimeError(_OTHER_ORDER)
            self._checked_order, self._order = self._order, 0
            self._average_kept(kept, usage, offset=len(sharded))
            while self._reducing:
                self._take_reduced()
            while self._replicating:
                self._take_replicated()
            numbers = {name: number for number, name in enumerate(names)}
            for parameter, result in self._unused_here:
                if usage.used_on_any_rank(numbers[parameter.name]):
                    parameter.add_gradient(result)
            usage.wait()
        self._unused_here.clear()
        self._used.clear()

    def _average_kept(self, kept: dict[str, nn.Parameter], usage: GradientUsage, offset: int) -> None:
        """Average the gradients of parameters that every rank keeps: one all-reduce per dtype."""
        kinds: dict[torch.dtype, list[tuple[int, nn.Parameter]]] = {}
        for number, parameter in enumerate(kept.values()):
            kinds.setdefault(parameter.dtype, []).append((offset + number, parameter))
        for kind in kinds.values():
            gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for _, p in kind]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            if not self._averaging.in_operation:
                flat.mul_(self._averaging.factor)
            for group in self._groups:
                start_all_reduce(flat, self._averaging.operation, group).wait()
            pieces = flat.split([parameter.numel() for _, parameter in kind])  # type: ignore[no-untyped-call]
            averages = [piece.view(parameter.shape) for (_, parameter), piece in zip(kind, pieces, strict=True)]
            here = [place for place, (_, parameter) in enumerate(kind) if parameter.grad is not None]
            if here:
                mine = [gradients[place] for place in here]
                torch._foreach_copy_(mine, [averages[place] for place in here])
            for (number, parameter), average in zip(kind, averages, strict=True):
                if parameter.grad is None and usage.used_on_any_rank(number):
                    parameter.grad = average.clone()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients such that their norm, over all ranks' parts together, is at most `max_norm`.

        Call it on every rank. `torch.nn.utils.clip_grad_norm_` does the same, without this check.

        Returns:
            The norm before scaling, the same on every rank.

        Raises:
            RuntimeError: `finish_gradient_synchronization` has not been called since the last backward pass.
            ValueError: the norm's order is not positive.
        """
        if self.has_unfinished_gradients():
            raise RuntimeError("call finish_gradient_synchronization() after backward() and before clip_grad_norm_()")
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    # State

    def _state_of_parts(self) -> dict[str, Tensor]:
        """Return the module's own state, which has this rank's parts: what `state_dict` refuses to others."""
        self.reads_parts = True
        try:
            return self.module.state_dict(keep_vars=True)
        finally:
            self.reads_parts = False

    @torch.no_grad()
    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """Return all full parameters and persistent buffers, under the wrapped module's names. Call it on every rank.

        Parameters have the dtype that the module had; tensors are copies.

        Args:
            rank0_only: Only rank 0 gets them, in its host's memory; the other ranks' dictionaries are empty. On each
                device one full parameter exists at a time. False: every rank gets them, on their devices.
        """
        self._free_all()
        keeps = not rank0_only or is_first(self._groups)
        named = self._state_of_parts()
        copies: dict[int, Tensor] = {}
        # Tied parameters are gathered once.
        for key, value in {id(value): value for value in named.values()}.items():
            sharded = self._sharded.get(key)
            whole = value.detach() if sharded is None else sharded.gathered(value)
            if keeps:
                copies[key] = whole.to("cpu" if rank0_only else whole.device, copy=True)
        return {name: copies[id(value)] for name, value in named.items()} if keeps else {}

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor] | None) -> None:
        """Load full parameters and buffers, as `full_state_dict` returns them. Call it on every rank.

        Args:
            state: Full tensors under the wrapped module's names, on any device. Rank 0's are loaded, whatever the other
                ranks pass. One full parameter at a time is on each device.

        Raises:
            ValueError: names or shapes differ from the module's; raised on every rank.
        """
        self._free_all()
        places = self._state_of_parts()
        error = None
        if is_first(self._groups):
            shapes = {n: self._sharded[id(v)].shape if id(v) in self._sharded else v.shape for n, v in places.items()}
            error = _why_not_loaded(state or {}, shapes)
        (error,) = broadcast_objects([error], self._groups, self._device)
        if error is not None:
            raise ValueError(error)
        for name, place in {id(value): (name, value) for name, value in places.items()}.values():
            sharded = self._sharded.get(id(place))
            shape = place.shape if sharded is None else sharded.shape
            value = state[name] if state is not None and is_first(self._groups) else None
            whole = broadcast_whole(value, shape, place.dtype, place.device, self._groups)
            if sharded is None:
                place.detach().copy_(whole)
            else:
                sharded.copy_part(place.detach(), whole)

    def full_optimizer_state_dict(self, optimizer: Optimizer, *, rank0_only: bool = False) -> dict[str, Any]:
        """Return the optimizer's state with full tensors, as the same optimizer of the unwrapped module would have it,
        and could load it. Call it on every rank.

        Args:
            optimizer: An elementwise optimizer of this wrapper's parameters.
            rank0_only: As in `full_state_dict`; the other ranks' dictionaries are empty.
        """
        return full_optimizer_state(optimizer, self._sharded, self._groups, rank0_only=rank0_only)

    def load_full_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any] | None) -> None:
        """Load a state with full tensors, from any number of ranks or from one process. Call it on every rank.

        Args:
            optimizer: An elementwise optimizer of this wrapper's parameters.
            state: As `full_optimizer_state_dict` returns it. Rank 0's is loaded, whatever the other ranks pass.

        Raises:
            ValueError: the state has other parameter groups than the optimizer, or tensors of other shapes than the
                parameters; raised on every rank.
        """
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        load_full_optimizer_state(optimizer, state, self._sharded, names, self._groups, self._device)

    @property
    def _sharded(self) -> dict[int, UnitParameter]:
        """The sharded parameters, by their part's identity."""
        return {id(parameter.part): parameter for unit in self.units for parameter in unit.sharded}

    def _free_all(self) -> None:
        for unit in self.units:
            unit.free()


def _why_not_loaded(state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> str | None:
    """Return why a state does not fit a module; None if it fits."""
    missing, unknown = sorted(shapes.keys() - state.keys()), sorted(state.keys() - shapes.keys())
    if missing or unknown:
        return f"the state does not fit the module: missing are {missing}, unknown are {unknown}"
    for name, shape in shapes.items():
        if state[name].shape != shape:
            return f"{name} has the shape {tuple(state[name].shape)} in the state and {tuple(shape)} in the module"
    return None


def _refuse_unsuited(
    module: nn.Module, prefetch: int, device: torch.device | str | None, *dtypes: torch.dtype | None
) -> None:
    if prefetch < 0:
        raise ValueError(f"prefetch must be 0 or more, not {prefetch}")
    if device is None and any(parameter.is_meta for parameter in module.parameters()):
        raise ValueError("the module is on the meta device: pass device=, where its parts are to be made")
    for option, dtype in zip(("compute_dtype", "reduce_dtype"), dtypes, strict=True):
        check_dtype(option, dtype)
    refuse_wrapped(module)
    refuse_shared_memory(module.named_parameters())
    _refuse_hooks(module.named_parameters())
    for name, child in module.named_modules():
        if hasattr(child, "_orig_mod") or child._compiled_call_impl is not None:
            raise TypeError(
                f"{name or 'the module'} is compiled, and units' hooks swap parameters: wrap the module itself, and "
                "compile what its blocks call, block.forward = torch.compile(block.forward)"
            )
        if isinstance(child, nn.RNNBase):
            raise TypeError(f"{name or 'the module'} ({type(child).__name__}) cannot be sharded: it hides its weights")


def _check_replicas(replicas: dist.ProcessGroup | None, group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that ranks have the same parts. Raises ValueError on each of them: they have not."""
    if replicas is None:
        return
    try:
        check_same_everywhere("place", (group.rank(), group.size()), device, replicas)
    except RuntimeError as error:
        raise ValueError(
            "replicas must be the ranks with the same place in process groups of the same size, since they have the "
            f"same parts: this one is rank {group.rank()} of {group.size()}"
        ) from error


def _refuse_hooks(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    for name, parameter in named:
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise TypeError(NO_HOOKS.format(name=name))


def _unit_modules(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are units of their own, with their names."""
    children = list(module.named_children())
    if not children:
        yield prefix.removesuffix("."), module
        return
    for name, child in children:
        # A list is never called itself, nor is one inside a list.
        if isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield f"{prefix}{name}", child
        else:
            yield from _unit_modules(child, f"{prefix}{name}.")


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _refuse_copy(module: nn.Module, original: nn.Module | None) -> None:
    if module is not original:
        raise RuntimeError(_COPY)


def _forward_hooks(
    this: weakref.ReferenceType[FullyShardedDataParallel], unit: ShardedUnit
) -> tuple[Callable[..., None], Callable[..., None]]:
    # Hooks that held the unit would hold its module, which holds them: a cycle that outlives the process group.
    unit_of, module_of = weakref.ref(unit), weakref.ref(unit.module)

    def before(module: nn.Module, inputs: Any, named_inputs: Any) -> None:
        wrapper, unit = this(), unit_of()
        _refuse_copy(module, module_of())
        if wrapper is not None and unit is not None and unit.held:
            wrapper.before_forward(unit)

    def after(module: nn.Module, inputs: Any, outputs: Any) -> None:
        wrapper, unit = this(), unit_of()
        if wrapper is not None and unit is not None and unit.held and module is unit.module:
            wrapper.after_forward(unit, outputs)

    return before, after


_PARTS_ONLY = (
    "state_dict() and load_state_dict() would save and load this rank's parts only: call full_state_dict() and "
    "load_full_state_dict() of FullyShardedDataParallel, on every rank"
)
_COPY = (
    "this is a copy of a module in a FullyShardedDataParallel, and has parts of its parameters: build another model, "
    "and load what full_state_dict() returns"
)
_OTHER_ORDER = (
    "the ranks ran the model's units in different orders, or other units, so that they exchanged parts of different "
    "parameters: all ranks must call the same blocks in the same order, and differentiate them, in equally many "
    "passes; BucketedDataParallel takes any, and full sharding takes experts inside a block that is in a ModuleList"
)
_NO_OUTPUTS = (
    "{unit} returns {kind}, in which no tensor is found, so that its backward pass would go unseen: return tensors, "
    "also in containers or in the attributes of objects"
)
_RETURNED = (
    "{unit} returns its parameter {name}, or a view of it, whose memory is freed after the forward pass: return a copy "
    "(.clone())"
)
_DIFFERENTIATED = (
    "full sharding has no second derivatives (create_graph=True, torch.func.grad and its like): it frees parameters "
    "that they need. The data-parallel wrappers have them, such as BucketedDataParallel"
)


def _backward_hook(
    this: weakref.ReferenceType[FullyShardedDataParallel], use: Use, forward: ForwardPass, number: int
) -> Callable[[Any], None]:
    def hook(gradients: Any) -> None:
        wrapper = this()
        if wrapper is not None:
            wrapper.before_backward(use, forward, number)

    return hook


def _cast_inputs(dtype: torch.dtype, module: nn.Module, inputs: Any, named_inputs: Any) -> tuple[Any, Any]:
    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(dtype)
        return value

    return tree_map(cast, (inputs, named_inputs))  # type: ignore[no-any-return]
