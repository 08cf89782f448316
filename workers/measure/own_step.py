"""A step that a user's function does, which names its phases while it runs (`flopwatch.phase`).

The step's observers see it as they see ours: phases follow each other and cover the whole step. What lies outside the
named ones is the phase REST; a step that names none is one phase, WHOLE.
"""

import gc
import inspect
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import compress
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from kernels.ranges import named
from workers.measure import position
from workers.measure.host_memory import trim_free_memory
from workers.measure.process_settings import settings
from workers.measure.returned import slim
from workers.measure.timing import Observer, begin_phase, end_phase

WHOLE, REST = "step", "rest"
PHASE = re.compile(r"[a-z][a-z0-9_]{0,49}")
RESERVED = frozenset(
    {WHOLE, REST, *("first_step", "isolated_step", "answer_step", "preparation", "initialisation", "oom", "warmup")}
    | {"graph", "device", "peak"}
)
"""Names with a meaning of their own in results."""
MAX_PHASES = 20
KINDS = ("flops", "tokens", "items")
MADE: tuple[type, ...] = (nn.Module, Optimizer, torch.amp.GradScaler)
OURS = frozenset(("torch", "workers", "kernels", "app", "flopwatch"))
"""Packages whose objects are no optimizers of the user's own."""


class WrongPhase(ValueError):
    """A phase has a name that results cannot hold, or does not end."""


class NoStep(TypeError):
    """The user's function has returned something that does no step. `code` is that of the function at fault."""

    def __init__(self, detail: str, code: CodeType | None = None) -> None:
        super().__init__(detail)
        self.code = code


class StepStopped(RuntimeError):
    """The user's step has raised StopIteration: an iterator in it, such as a loader, has ended."""


class ForkReturned(RuntimeError):
    """This process is a fork that the user's code has made, and that has come back from it."""


class OwnStep:
    """A user's step; also what `flopwatch.phase` and `flopwatch.work` in it talk to.

    `make` sets the function, and finds the modules and optimizers that came to be in it.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        why_not_run: Callable[[object], str | None] = lambda _returned: None,
    ) -> None:
        self._why_not_run = why_not_run
        self.settings = settings()
        """Those of torch before the user's code ran."""
        self.device = torch.device("cpu") if device is None else device
        self._step: Callable[[], object] | None = None
        self._observers: Sequence[Observer] | None = None
        """The observers of the running step; None between steps."""
        self._open: str | None = None
        """The named phase that is open."""
        self._left = False
        """True if an error has left it."""
        self._thread: int | None = None
        """That of the step."""
        self._names: dict[str, None] = {}
        self._of_every_step = dict.fromkeys(KINDS, 0.0)
        self._of_step = dict.fromkeys(KINDS, 0.0)
        self._runs = 0
        self.count_work(0)
        self._process = os.getpid()
        self.takes = ""
        """How many steps the job takes, in words, once it is known."""
        self.keeps_returned = False
        """Whether the numbers that a step returns are kept until the next one; all else is dropped in the step."""
        self.returned: object = None
        # In a unit's process hardly any exist before the user's code runs, and those live on.
        self._before = {id(one): weakref.ref(one) for found in _instances(*MADE) for one in found}
        self._made: dict[type, dict[int, Any]] = {kind: {} for kind in MADE}
        self._container = nn.Module()
        self.model = self._container
        """The modules with parameters or buffers that the code made; several are the children of one."""
        self.roots: list[nn.Module] = []
        """Those of these modules that are part of no other one."""
        self.optimizers: list[Optimizer] = []
        self.loaders: list[int] = []
        """The numbers of worker processes of the torch.utils.data.DataLoaders that are being read; if none is,
        those of all that there are."""
        self.scaler: torch.amp.GradScaler | None = None
        """The first that is enabled: only such a one skips steps."""
        self._versions: dict[int, int] = {}
        """Of each parameter of a plain optimizer, by its id, how often it had been written to at the first look."""
        self._replays = False
        """Whether the code has CUDA graphs, whose replays do not count as writing."""

    def make(self, make_step: Callable[[], object]) -> None:
        """Let the user's function make the step. Raises NoStep if it returns something that cannot be called."""
        step = make_step()
        self._check_process()
        if not callable(step):
            raise NoStep(f"it returned {type(step).__name__}, and not a function that does one step")
        _check_arguments(step)
        self._step = step
        self._look()

    @contextmanager
    def inside(self, make: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Run each step, within this context, inside of one that `make` makes."""

        def change(plain: Callable[[], object]) -> Callable[[], object]:
            def step() -> object:
                with make():
                    return plain()

            return step

        with self.replaced(change):
            yield

    @contextmanager
    def replaced(self, change: Callable[[Callable[[], object]], Callable[[], object]]) -> Iterator[None]:
        """Run, within this context, the step that `change` makes of the user's."""
        plain = self._step
        assert plain is not None
        self._step = change(plain)
        try:
            yield
        finally:
            self._step = plain

    @contextmanager
    def updates(self) -> Iterator[list[tuple[bool, ...]]]:
        """Yield a list that gets of each step which groups of parameters its optimizers have updated."""
        found: list[tuple[bool, ...]] = []

        def versions() -> list[int]:
            groups = [(one, group["params"]) for one in self.optimizers for group in one.param_groups]
            return [_written(one, _first_updated(one, parameters)) for one, parameters in groups if parameters]

        @contextmanager
        def noted() -> Iterator[None]:
            before = versions()
            yield
            found.append(tuple(map(int.__ne__, before, versions())))

        with self.inside(noted):
            yield found

    def plain_optimizers(self) -> list[Any]:
        """Return the objects that the code made which update parameters and are no torch.optim.Optimizer: those with a
        method `step`, and a method `zero_grad` or a list of parameters, whose class does no backward pass."""
        objects = gc.get_objects()
        kinds = dict(zip(map(id, map(type, objects)), map(type, objects), strict=True))
        found = _of_types({number for number, kind in kinds.items() if _is_optimizer(kind)}, objects)
        return [one for one in found if hasattr(type(one), "zero_grad") or _holds_parameters(one)]

    @contextmanager
    def updates_named(self) -> Iterator[None]:
        """Name the updates of optimizers that torch does not know, as it names those of its own."""
        with ExitStack() as undo:
            for one in self.plain_optimizers():
                name = f"Optimizer.step#{type(one).__name__}.step"
                vars(one)["step"] = torch.profiler.record_function(name)(one.step)
                undo.callback(vars(one).pop, "step", None)
            yield

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Those of the modules or, where these have none, of the optimizers, which may have copies of a model's."""
        groups = [group["params"] for one in self.optimizers for group in one.param_groups]
        known = [*self.model.parameters()] or [one for params in groups for one in params]
        return [*{id(one): one for one in known}.values()]

    def lost_gradients(self) -> tuple[list[str], int]:
        """Return the names and shapes of the trainable parameters that optimizers have not updated, since they had no
        gradient, and the number of all parameters of such optimizers: those that keep a state, which they make with the
        first gradient, and torch's SGD where it can be seen to write."""
        names = {id(one): name for name, one in self.model.named_parameters()}
        missing, count = [], 0
        for optimizer in self.optimizers if self.scaler is None else ():  # it may have skipped all steps
            state = optimizer.state
            plain = _is_plain(optimizer) and not self._replays
            keeps = state or (_is_torchs(optimizer) and "betas" in optimizer.defaults)  # as in Adam
            if not isinstance(state, Mapping) or not (keeps or plain) or _is_divided(optimizer):
                continue
            for one in (one for group in optimizer.param_groups for one in group["params"] if one.requires_grad):
                count += 1
                updated = plain and one._version != self._versions.get(id(one))
                kept = state.get(one)  # a dictionary, but some keep a tensor alone
                if one.grad is None and not (isinstance(kept, torch.Tensor) or kept) and not updated:
                    name = names.get(id(one), f"parameter {count} of {type(optimizer).__name__}")
                    missing.append(f"{name} {list(one.shape)}")
        return missing, count

    def idle_optimizers(self) -> list[str]:
        """Return the classes of torch's optimizers that keep a state and have made none so far, although their
        parameters have gradients, or a scaler may have skipped all steps. Others may keep it elsewhere."""
        torchs = filter(_is_torchs, self.optimizers)
        keeping = (one for one in torchs if "betas" in one.defaults or one.defaults.get("momentum"))
        idle = [one for one in keeping if not one.state]
        groups = [(one, parameter) for one in idle for group in one.param_groups for parameter in group["params"]]
        fed = {id(one) for one, parameter in groups if parameter.grad is not None or self.scaler is not None}
        return [type(one).__name__ for one in idle if id(one) in fed]

    @property
    def trainable(self) -> int | None:
        """The number of trainable parameters, whole ones where full sharding of ours has divided them; None if none at
        all are known."""
        wholes = [(one, getattr(one, "whole", None)) for one in self.trained]
        return sum((one if whole is None else whole).numel() for one, whole in wholes) if self.parameters else None

    @property
    def trained(self) -> list[torch.Tensor]:
        """The trainable parameters, without the running averages of others, which an AveragedModel leaves trainable."""
        averages = [one for one in self.model.modules() if isinstance(one, AveragedModel)]
        of_averages = {id(one) for average in averages for one in average.parameters()}
        known = [one for one in self.parameters if one.requires_grad]
        return [one for one in known if id(one) not in of_averages] or known

    @property
    def may_train(self) -> bool:
        """Whether it has trainable parameters, and not all of its modules are set to evaluate."""
        return bool(self.trainable) and (not self.roots or any(one.training for one in self.roots))

    @property
    def phase_names(self) -> tuple[str, ...]:
        """The phases so far, in the order in which they first came."""
        return (*self._names, REST) if self._names else (WHOLE,)

    def prepare(self) -> None:
        """Look, after the first step, for what it made: optimizers make their state there."""
        if self._runs == 1:
            self._look()
        position.step_begins(self._runs + 1)

    def phases(self, observers: Sequence[Observer]) -> None:
        """Do one step; the form in which `run_step` takes it."""
        assert self._step is not None
        self._of_step = dict.fromkeys(KINDS, 0.0)
        self._observers, self._open, self._left = observers, None, False
        self._thread = threading.get_ident()
        begin_phase(self._outside, observers)
        try:
            returned = self._step()
            if not self._runs and (why := self._why_not_run(returned)) is not None:
                codes = (getattr(returned, name, None) for name in ("gi_code", "cr_code", "ag_code"))
                raise NoStep(why, next(filter(None, codes), None))
            if self.keeps_returned:
                self.returned = slim(returned)
            del returned
            self._check_process()
            self._end_left()
            if self._open is not None:
                raise WrongPhase(f"phase {self._open!r} is open after the step, as where a generator yields inside it")
        except StopIteration as end:
            raise StepStopped(self._stopped()) from end
        finally:
            self._observers = None
        end_phase(self._outside, observers)
        position.step_ends()
        if self._runs in self._counted:
            for kind, amount in self._of_step.items():
                self._amounts[kind].add(worked := amount or self._of_every_step[kind])
                self._total[kind] += worked
        self._runs += 1

    def _stopped(self) -> str:
        takes = f", and the job takes {self.takes}" if self.takes else ""
        return (
            f"StopIteration: an iterator in the step, such as a loader, has ended{takes}. "
            "Let it begin again when it ends, or set fewer warmup_steps and measure_steps"
        )

    def _check_process(self) -> None:
        """Raises ForkReturned in a fork, which would measure beside this process, and fork again in its next step."""
        if os.getpid() != self._process:
            raise ForkReturned("a fork of the job's process must end in the step (os._exit), and not return from it")

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Name the part of the step inside the context: a phase; a range of the profile inside of one, or beside the
        step in a thread or process that the code has started; nothing in what torch compiles. Raises WrongPhase:
        results cannot hold such a name."""
        return nullcontext() if torch.compiler.is_compiling() else self._part(name)

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        thread = threading.current_thread()
        # Autograd's threads, for which the step waits, are not Python's.
        beside = thread.ident != self._thread and not isinstance(thread, threading._DummyThread)
        beside = beside or os.getpid() != self._process  # a worker of a loader
        if not beside:
            self._end_left()
        if beside or self._observers is None or self._open is not None:
            with named(name):
                yield
            return
        end_phase(self._outside, self._observers)
        self._know(name)
        self._open = name
        begin_phase(name, self._observers)
        try:
            yield
        except BaseException:
            # Observers still know the phase in which it was raised, until the step goes on.
            self._left = True
            raise
        self._end()

    def _end(self) -> None:
        assert self._observers is not None
        assert self._open is not None
        end_phase(self._open, self._observers)
        self._open, self._left = None, False
        begin_phase(REST, self._observers)

    def _end_left(self) -> None:
        """End the phase that an error has left, if the step went on after it."""
        if self._left:
            self._end()

    def work(self, *, flops: float | None, tokens: float | None, items: float | None) -> None:
        """Add to the work of the running step or, outside of steps, set that of every step."""
        for kind, amount in zip(KINDS, (flops, tokens, items), strict=True):
            if amount is None:
                continue
            if self._observers is None:
                self._of_every_step[kind] = amount
            else:
                self._of_step[kind] += amount

    def count_work(self, steps: int) -> None:
        """Count the work of so many steps from the next on, without a list, whose memory would seem to be theirs."""
        self._counted = range(self._runs, self._runs + steps)
        self._total = dict.fromkeys(KINDS, 0.0)
        self._amounts: dict[str, set[float]] = {kind: set() for kind in KINDS}

    def work_of_step(self, kind: str) -> float | None:
        """Return the FLOPs ("flops"), tokens or items of the last step; None if the code has not told them."""
        return self._of_step[kind] or self._of_every_step[kind] or None

    def mean_work(self, kind: str) -> float | None:
        """Return the mean work of the counted steps; None if the code has not told it."""
        return self._total[kind] / max(1, len(self._counted)) or None

    def varies(self, kind: str) -> bool:
        """Return True if not all counted steps did the same work."""
        return len(self._amounts[kind]) > 1

    @property
    def _outside(self) -> str:
        return REST if self._names else WHOLE

    def _know(self, name: str) -> None:
        if not isinstance(name, str) or not PHASE.fullmatch(name):
            raise WrongPhase(f"phase {name!r}: a name has lower-case letters, digits and underscores, at most 50")
        if name in self._names:
            return
        if name in RESERVED or re.fullmatch(r"step_\d+", name):
            raise WrongPhase(f"phase {name!r}: this name has a meaning of its own in results; choose another")
        if len(self._names) == MAX_PHASES:
            raise WrongPhase(f"phase {name!r}: a step has at most {MAX_PHASES} phases")
        self._names[name] = None

    def _was_before(self, one: object) -> bool:
        known = self._before.get(id(one))
        return known is not None and known() is one  # else that one is gone, and this one has its place in memory

    def _look(self) -> None:
        """Add what was made since the last look. Objects that `gc.freeze` hides were seen before it."""
        loading = sys.modules.get("torch.utils.data.dataloader")
        of_loading = [] if loading is None else [loading._BaseDataLoaderIter, loading.DataLoader]
        instances = _instances(*self._made, torch.cuda.CUDAGraph, *of_loading)
        for known, found in zip(self._made.values(), instances, strict=False):
            known |= {id(one): one for one in found if not self._was_before(one) and one is not self._container}
        roots = _roots([*self._made[nn.Module].values()])
        if len(roots) != 1:
            self._container = nn.ModuleDict(_named(roots))
        self.roots, self.model = roots, roots[0] if len(roots) == 1 else self._container
        # One without a state only passes on to another.
        self.optimizers = [one for one in self._made[Optimizer].values() if hasattr(one, "state")]
        groups = [group["params"] for one in filter(_is_plain, self.optimizers) for group in one.param_groups]
        self._versions = {id(one): one._version for params in groups for one in params} | self._versions
        self._replays = self._replays or bool(instances[len(self._made)])
        if of_loading:
            readers, loaders = instances[-2:]
            # A step that begins a loader anew has read it, and nothing is left of that.
            self.loaders = [one._num_workers for one in readers] or self.loaders or [one.num_workers for one in loaders]
        self.scaler = next((one for one in self._made[torch.amp.GradScaler].values() if one.is_enabled()), None)


def _first_updated(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the first of a group's parameters that has a state or, where none has, that is trained."""
    state = optimizer.state if isinstance(optimizer.state, Mapping) else {}
    known = (one for one in parameters if state and one in state)
    return next(known, next((one for one in parameters if one.requires_grad), parameters[0]))


def _written(optimizer: Optimizer, parameter: torch.Tensor) -> int:
    """Return how often a parameter or its state has been written to: of a fused update, only its count in the state
    tells."""
    state = optimizer.state.get(parameter) if isinstance(optimizer.state, Mapping) else None
    tensors = [parameter, *(state.values() if isinstance(state, Mapping) else ())]
    return sum(one._version for one in tensors if isinstance(one, torch.Tensor))


def _is_plain(optimizer: Optimizer) -> bool:
    """Return True of torch's SGD, which may keep no state, but for its fused form, which does not count as writing."""
    return type(optimizer) is torch.optim.SGD and not any(group.get("fused") for group in optimizer.param_groups)


def _is_torchs(optimizer: Optimizer) -> bool:
    """Return True of an optimizer of torch itself, and not of one that wraps another, whose state stays empty."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _is_divided(optimizer: Optimizer) -> bool:
    """Return True of our optimizer of several ranks, which has the state of this rank's parameters alone, as the
    optimizer inside of it."""
    return type(optimizer).__module__.startswith("parallel.")


def _instances(*kinds: type) -> list[list[Any]]:
    """Return all objects of each of these types."""
    numbers = {id(one) for kind in kinds for one in _with_subclasses(kind)}
    found = [*_of_types(numbers, gc.get_objects())]
    trim_free_memory()  # that of the list of all objects
    return [[one for one in found if issubclass(type(one), kind)] for kind in kinds]


def _of_types(numbers: set[int], objects: list[Any]) -> Iterator[Any]:
    """Yield the objects whose types have these ids."""
    # By type: `isinstance` would ask objects that stand for others, which may import modules or warn. Without a loop in
    # Python: there are hundreds of thousands of objects.
    return compress(objects, map(numbers.__contains__, map(id, map(type, objects))))


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    below: list[type] = type.__subclasses__(kind)
    for one in below:
        yield from _with_subclasses(one)


def _is_optimizer(kind: type) -> bool:
    """Return True if objects of this type have a method `step` that may update parameters."""
    if issubclass(kind, MADE) or str(kind.__module__).partition(".")[0] in OURS or not kind.__dictoffset__:
        return False
    step = next((vars(one)["step"] for one in kind.__mro__ if "step" in vars(one)), None)
    if not inspect.isfunction(step):
        return False
    methods = [inspect.unwrap(of) for one in kind.__mro__ for of in vars(one).values() if inspect.isfunction(of)]
    return not any("backward" in method.__code__.co_names for method in methods)


def _holds_parameters(one: object) -> bool:
    lists = [value for value in vars(one).values() if type(value) in (list, tuple)]
    return any(issubclass(type(part), nn.Parameter) for value in lists for part in value)


def _roots(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules with parameters or buffers that are part of no other one."""
    inside = {id(part) for module in modules for part in list(module.modules())[1:]}
    return [
        module
        for module in modules
        if id(module) not in inside and (any(True for _ in module.parameters()) or any(True for _ in module.buffers()))
    ]


def _named(modules: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Name modules by their classes: `Actor`, `Critic`, `Critic_2`."""
    by_name: dict[str, nn.Module] = {}
    for module in modules:
        name, number = type(module).__name__, 2
        key = name
        while key in by_name:
            key, number = f"{name}_{number}", number + 1
        by_name[key] = module
    return by_name


def _check_arguments(step: Callable[..., object]) -> None:
    """Raises NoStep if a step needs arguments, which nobody gives it."""
    try:
        parameters = inspect.signature(step, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):  # a function in another language has none
        return
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [one.name for one in parameters if one.default is one.empty and one.kind not in fixed]
    if needed:
        raise NoStep(
            f"a step takes no argument, and this one takes {', '.join(needed)}: let the function that makes the step "
            "make them, too, such as next(batches) in the step",
            getattr(inspect.unwrap(step), "__code__", None),
        )
