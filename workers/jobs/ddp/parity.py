"""Checks that a strategy trains as a single process does on the whole batch."""

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import parallel
from app.specs.ddp import FULLY_SHARDED
from kernels.device_events import reset_peaks
from workers.jobs.ddp import strategies
from workers.jobs.ddp.context import RankContext
from workers.jobs.ddp.memory import local_bytes, state_bytes
from workers.jobs.ddp.strategies import NO_COMMUNICATION, Trained
from workers.jobs.ddp.values import SYNCHRONIZATION
from workers.measure.host_memory import host_memory
from workers.measure.memory import MIB, OutOfMemory, is_out_of_memory, short_message
from workers.model.steps import TrainStep
from workers.torch_host import seed_everything

TRAINED_STEPS = 2
UNKNOWN = {"gradient_error": None, "parameter_error": None, "why_not": None}
SMALL_SHARE = 6e-3
"""Share of the norm of all gradients below which one is small, and judged as if it had this share: its rounding is that
of the larger ones from which it is computed. A bias that softmax takes away has no other gradient, in bf16 0.005 % of
all. In a transformer of 48 layers, queries' projections have 0.05 % of all in the last layers and 0.1 % in half of
them, and may round by 1.7 % in bf16; values' and feed-forward weights have 0.8 % and more."""
KEPT_SHARE = 0.85
"""The share of a GPU's memory up to which compared tensors stay there; the rest is for fragmentation."""


class ParityCheck:
    """The check of one rank; `run` must be called on all of them."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._keeper = torch.device("cpu")
        """The device on which rank 0 keeps gradients and parameters until it compares them."""
        # Every rank must take part in making a group.
        self._own_group = dist.new_group([0]) if context.spec.casts else None
        """The group of rank 0 alone, over which its single process casts parameters; None if nothing is cast."""
        self._peak = 0
        """Bytes of a GPU that a step of the strategy takes."""
        self.too_large: str | None = None
        """The reason why a single process surely does not fit into rank 0's memory; None if it may. Other ranks have
        other texts."""

    def run(self) -> dict[str, Any] | None:
        """Train two steps with the strategy and, on rank 0, in a single process on the whole batch; compare the
        parameters. Then compare the gradients of a third step, which the single process computes from the strategy's
        parameters, so that only the communication differs.

        The single process runs the ranks' batches one after the other, and averages their gradients after the backward
        passes, as the ranks do: another loss before them would round every number otherwise. Where the strategy casts
        parameters, the single process has the same wrapper to itself.

        Returns:
            On rank 0, JSON-ready: "gradient_error", the largest of `gradient_errors` in the third step,
            "parameter_error", the largest relative error of a parameter's change since the beginning, where the
            gradient is not small, the names of both ("gradient", "parameter"), and "why_not".
        """
        self._context.report_progress("checking parity")
        shared = self._trained_by_strategy()
        self._context.free_memory()
        if isinstance(shared, str):
            return {**UNKNOWN, "why_not": shared}
        found = self._compared_to_one_process(shared)
        self._context.free_memory()
        return found if self._context.rank.index == 0 else None

    def _trained_by_strategy(self) -> dict[str, dict[str, Tensor]] | str:
        """Train with the strategy; return gradients and parameters, kept by rank 0, or the reason why they do not
        fit."""
        if self._context.on_gpu:
            reset_peaks()
        trained = strategies.build(
            self._context.spec,
            self._context.spec.strategy,
            self._context.device,
            strategies.rank_batches(self._context.spec, self._context.rank.index, self._context.device),
        )
        for number in range(TRAINED_STEPS):
            trained.repeated.prepare()
            if number == 0:
                capture_untrained(trained)
            self._run(trained, number)
            if number == 0 and self._context.on_gpu:
                # From the second step on, the optimizer's state always exists.
                reset_peaks()
        if reason := self._why_not_compared(trained):
            return reason
        parameters = self._kept(full_parameters(trained))
        trained.step.phases.pop("optimizer", None)
        if trained.graphed is not None:
            trained.graphed.forget()
        trained.repeated.prepare()
        self._run(trained, TRAINED_STEPS)
        return {"gradients": self._kept(full_gradients(trained)), "parameters": parameters}

    def _run(self, trained: Trained, number: int) -> None:
        seed_everything(self._context.spec.seed + number)
        for work in trained.repeated.phases.values():
            work()
        self._context.rank.step_done()

    def _why_not_compared(self, trained: Trained) -> str | None:
        """Return why the comparison does not fit into rank 0's memory, which is known after two steps; the same on all
        ranks.

        If it fits, choose the device on which rank 0 keeps the compared tensors.
        """
        no_process = no_room = None
        if self._context.on_gpu:
            self._peak = torch.cuda.max_memory_allocated()
            if trained.graphed is not None:  # replays allocate nothing
                self._peak = max(self._peak, round(trained.graphed.peak_mib * MIB))
        if self._context.rank.index == 0:
            no_process = self._why_one_process_is_too_large(trained)
            if no_process is None:
                no_room = self._choose_keeper(sum(size.numel * size.item_bytes for size in trained.sizes))
        elsewhere = "rank 0's memory does not suffice"
        if self._context.exchange(float(no_process is not None))[0]:
            self.too_large = no_process or elsewhere
        elif self._context.exchange(float(no_room is not None))[0]:
            return no_room or elsewhere
        return self.too_large

    def _why_one_process_is_too_large(self, trained: Trained) -> str | None:
        """Return why a single process surely does not fit into this rank's GPU, so that it need not be tried; None if
        it may fit.

        It takes this rank's peak, minus the units that are gathered at a time (at most two of parameters and two of
        gradients), plus the other ranks' parts of parameters and state. Gradients appear while activations are freed.
        """
        if not (self._context.on_gpu and isinstance(trained.wrapped, parallel.FullyShardedDataParallel)):
            return None
        mine = sum(map(local_bytes, trained.wrapped.parameters()))
        mine += state_bytes(trained.optimizers)
        units = [sum(one.memory.numel() * one.memory.itemsize for one in unit.held) for unit in trained.wrapped.units]
        whole = max(units, default=0)
        least = self._peak - 4 * whole + (self._context.rank.world_size - 1) * mine
        available = torch.cuda.mem_get_info()[1]
        if least <= available:
            return None
        return f"one process takes {least / MIB:.0f} MiB at least, and rank 0's GPU has {available / MIB:.0f} MiB"

    def _choose_keeper(self, model_bytes: int) -> str | None:
        """Choose the device on which rank 0 keeps the compared tensors: its GPU if all fit there, since copying takes
        many seconds.

        The single process takes no more than this rank's peak and what the other ranks have of the model: parameters,
        gradients and two optimizer states if all is sharded, or the states alone; where parameters have 2 bytes per
        element, at most three states of 4 bytes. Returns why neither the GPU nor the host has room; None if one has.
        """
        # Both results, and the parameters as they were in the beginning.
        kept = 3 * model_bytes
        if self._context.on_gpu:
            spec, ranks = self._context.spec, self._context.rank.world_size
            whole = 4 if spec.strategy in FULLY_SHARDED else 3 if spec.sharded_optimizer else 0
            missing = whole * model_bytes * (2 if spec.parameter_dtype == "bf16" else 1) * (ranks - 1) // ranks
            needed = self._peak + missing + kept
            # Memory of other processes is not available.
            available = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
            if needed < KEPT_SHARE * available:
                self._keeper = self._context.device
                return None
        self._keeper = torch.device("cpu")
        free = host_memory("MemAvailable")
        if free is not None and kept > free:
            return f"comparing takes {kept / MIB:.0f} MiB of the host's memory, and less is free"
        return None

    def _kept(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._context.rank.index != 0:
            return {}
        return {name: tensor.detach().to(self._keeper, copy=True) for name, tensor in tensors.items()}

    def _compared_to_one_process(self, shared: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
        """Train on rank 0 alone. The other ranks follow step by step, so that they do not count as hanging."""
        found: dict[str, Any] = dict(UNKNOWN)
        work = None
        if self._context.rank.index == 0:
            work = one_process(self._context, self._keeper, self._own_group, shared, found)
        unfinished = True
        while unfinished:
            if work is not None:
                try:
                    unfinished = next(work, None) is not None
                except (OutOfMemory, RuntimeError, MemoryError) as error:
                    if not (isinstance(error, OutOfMemory) or is_out_of_memory(error)):
                        raise
                    found["why_not"] = f"one process does not fit into rank 0's memory: {short_message(error)}"
                    unfinished = False
            unfinished = bool(self._context.exchange(float(unfinished))[0])
            self._context.rank.step_done()
        return found


@torch.no_grad()
def capture_untrained(trained: Trained) -> None:
    """Capture the prepared step, if it is a CUDA graph, and leave the model as it was: at a learning rate of zero the
    steps before the capture change no parameter; the optimizer's state and the loss's scale are set back."""
    if trained.graphed is None:
        return
    groups = [] if trained.optimizer is None else trained.optimizer.param_groups
    rates = [group["lr"].clone() for group in groups]
    for group in groups:
        group["lr"].zero_()
    scaler = trained.step.scaler
    scale = None if scaler is None else scaler.state_dict()
    with torch.enable_grad():
        trained.graphed.capture()
    if scaler is not None and scale is not None:
        scaler.load_state_dict(scale)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"].copy_(rate)
    state = {} if trained.optimizer is None else getattr(trained.optimizer, "optim", trained.optimizer).state
    for values in state.values():
        for name, value in values.items():
            if name != "master_param":
                value.zero_()


def one_process(
    context: RankContext,
    keeper: torch.device,
    group: dist.ProcessGroup | None,
    shared: dict[str, dict[str, Tensor]],
    found: dict[str, Any],
) -> Iterator[bool]:
    """Train a single process on the batches of all ranks, and set the errors; yields after each micro-batch.

    Args:
        keeper: The device of compared tensors.
        group: This rank alone, where the strategy casts parameters; None: the process has no wrapper.
        shared: "parameters" of the strategy after `TRAINED_STEPS`, and "gradients" of the next step.
        found: Takes the errors.
    """
    spec, ranks = context.spec, context.rank.world_size
    batches = [strategies.rank_batches(spec, index, context.device) for index in range(ranks)]
    strategy = NO_COMMUNICATION if group is None else spec.strategy
    trained = strategies.build(spec, strategy, context.device, batches[0], group)
    step, finish = trained.step, trained.step.phases.get(SYNCHRONIZATION)
    start = {name: one.detach().to(keeper, copy=True) for name, one in full_parameters(trained).items()}
    changes: dict[str, float] = {}
    modules = [*trained.model.modules()]
    states = [copy.deepcopy([state_of(module) for module in modules]) for _ in range(ranks)]
    for number in range(TRAINED_STEPS + 1):
        step.prepare()
        for rank in range(ranks):
            if rank > 0:
                step.inputs, step.targets = batches[rank].next()
            # Each rank draws anew in each step, such as for dropout, and has a state of its own.
            seed_everything(spec.seed + number)
            for module, own in zip(modules, states[rank], strict=True):
                for name in state_of(module):
                    del vars(module)[name]
                vars(module).update(own)
            for index in range(step.micro_batches):
                step.forward_micro_batch(index)
                step.backward()
                if finish is not None:
                    finish()
                yield True
            states[rank] = [state_of(module) for module in modules]
        divide_gradients(trained.wrapped, ranks)
        if number < TRAINED_STEPS and isinstance(step, TrainStep):
            step.optimize()
        if number == TRAINED_STEPS - 1:
            if trained.optimizer is not None:
                changes = {
                    name: relative_error(shared["parameters"].get(name), one, start[name])
                    for name, one in full_parameters(trained).items()
                }
            set_parameters(trained, shared["parameters"])
    gradients = full_gradients(trained)
    found["gradient_error"], found["gradient"] = largest_error(gradient_errors(shared["gradients"], gradients))
    small = small_gradients(gradients)
    if judged := {name: error for name, error in changes.items() if name not in small}:
        found["parameter_error"], found["parameter"] = largest_error(judged)


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return what a module may change in its forward pass: buffers, and attributes that are numbers or generators."""
    kept = (int, float, str, type(None), torch.Generator)
    return {name: value for name, value in vars(module).items() if name == "_buffers" or isinstance(value, kept)}


@torch.no_grad()
def divide_gradients(module: nn.Module, divisor: int) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(divisor)


def largest_error(errors: Mapping[str, float]) -> tuple[float, str]:
    """Return the largest error and its parameter; nan if the single process has a value that is not finite."""
    name = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    return errors[name], name


def gradient_errors(shared: Mapping[str, Tensor], alone: Mapping[str, Tensor]) -> dict[str, float]:
    """Return |shared - alone| / max(|alone|, SMALL_SHARE · |all of alone as one vector|) of each gradient."""
    least = smallest_judged(alone)
    return {name: relative_error(shared.get(name), one, least=least) for name, one in alone.items()}


def small_gradients(gradients: Mapping[str, Tensor]) -> set[str]:
    """Return the names of gradients that are below SMALL_SHARE of all. Adam divides them by their own size, so that
    their rounding changes their parameters as much as a right gradient does."""
    least = smallest_judged(gradients)
    return {name for name, one in gradients.items() if norm(one) < least}


def smallest_judged(gradients: Mapping[str, Tensor]) -> float:
    return SMALL_SHARE * math.hypot(*map(norm, gradients.values()))


def norm(tensor: Tensor) -> float:
    """Return the L2 norm, summed in float64."""
    return float(torch.linalg.vector_norm(in_real(tensor.detach()), dtype=torch.float64))


def in_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as one of real numbers."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def relative_error(shared: Tensor | None, alone: Tensor, start: Tensor | None = None, *, least: float = 0.0) -> float:
    """Return |shared - alone| / |alone - start| in the L2 norm, where the divisor is at least `least`.

    Infinite if `shared` is missing or not finite, nan if `alone` is not finite.
    """
    expected = in_real(alone.detach()).double()
    if shared is None:
        return math.inf
    difference = norm(in_real(shared.to(alone.device)).double() - expected)
    if start is not None:
        expected = expected - in_real(start.to(alone.device)).double()
    size = norm(expected)
    if not math.isfinite(size):
        return math.nan
    if not math.isfinite(difference):
        return math.inf
    size = max(size, least)
    if size == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / size


def full_gradients(trained: Trained) -> dict[str, Tensor]:
    """Return the full gradients of all parameters, by the names of the model's parameters. Every rank must call it."""
    if isinstance(trained.wrapped, parallel.FullyShardedDataParallel):
        # They are gathered like parameters: a gradient takes the parameter's place meanwhile.
        places = [(parameter, parameter.data) for parameter in trained.wrapped.parameters()]
        for parameter, _ in places:
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        try:
            return full_parameters(trained)
        finally:
            for parameter, data in places:
                parameter.data = data
    return {name: whole(p.grad) for name, p in trained.model.named_parameters() if p.grad is not None}


def full_parameters(trained: Trained) -> dict[str, Tensor]:
    """Return the full parameters, by the names of the model's parameters. Every rank must call it."""
    if isinstance(trained.wrapped, parallel.FullyShardedDataParallel):
        return trained.wrapped.full_state_dict()
    return {name: whole(parameter.detach()) for name, parameter in trained.model.named_parameters()}


@torch.no_grad()
def set_parameters(trained: Trained, values: Mapping[str, Tensor]) -> None:
    """Give a single process's model these parameters; those that are missing stay."""
    for name, parameter in trained.model.named_parameters():
        if name in values:
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.copy_(values[name])


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor, gathered from all ranks if it is one of torch's distributed tensors."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()
