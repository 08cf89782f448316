"""What a change is: what it needs, how it is applied, against which cause, and what a person would write."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from workers.outcome import Unsupported

if TYPE_CHECKING:
    import torch

    from app.specs.benchmark import BenchmarkSpec
    from workers.measure.own_step import OwnStep

Cause = Literal[
    "input",
    "launches",
    "synchronisation",
    "copies",
    "communication",
    "optimizer",
    "attention",
    "precision",
    "kernels",
    "host",
    "unexplained",
]
"""What a step's time is lost to."""


class Elsewhere(str):
    """The reason why a change is not for such a step at all: only who asks for the change sees it."""

    __slots__ = ()


class Done(str):
    """The reason why a change would change nothing: the step does that."""

    __slots__ = ()


LOADER_ANEW = "steps make their DataLoader anew: make it once, before them"
OPTIMIZER_ANEW = "each step makes its optimizer anew, without its state: make it once, before the steps"
ONE_RANK = Elsewhere("the step has one rank, which shares no gradients")


@dataclass(frozen=True)
class Shared:
    """What is known of the gradients that ranks share."""

    gradients_mb: float
    """Their bytes, in MB of 2²⁰."""
    best_bucket_mb: float | None
    """The bucket that should leave the least communication exposed, if that was predicted."""


@dataclass(frozen=True)
class Look:
    """What is known of a step when changes are chosen for it, after its profile."""

    spec: BenchmarkSpec
    device: torch.device
    own: OwnStep | None
    """The step, if it is the user's own; None: our model's."""
    loaders: Sequence[int] = ()
    """The numbers of worker processes of the torch.utils.data.DataLoaders that the step reads."""
    products: Counter[str] = field(default_factory=Counter)
    """Matrix products of a step, by data type: "fp32"."""
    names: Counter[str] = field(default_factory=Counter)
    """Operators, calls of the driver, kernels and copies of a step, by name; the profiler's names."""
    compiled: bool = False
    """Whether torch.compile has compiled anything of it."""
    collections: int = 0
    """Garbage collections in a few steps."""
    uneven: bool = False
    """Whether some steps update parameters that others do not, as with accumulated gradients."""

    shared: Shared | None = None
    """For a step of several ranks."""
    doubles: bool = False
    """Whether an operator of a step has an input in float64 with dimensions."""
    checkpoints: bool = False
    """Whether a step calls torch.utils.checkpoint, as far as that is known."""
    detects_anomalies: bool = False
    """Whether a step turns torch's detection of anomalies on, or it is on."""
    makes_loader: bool = False
    """Whether a step, each or one at the end of an epoch, makes a torch.utils.data.DataLoader anew."""
    makes_optimizer: bool = False
    """Likewise, a torch.optim.Optimizer."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def nothing(*_arguments: Any) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Change:
    """A change of a step.

    A step of the user's own is changed by `before` and `after`, our model's step by `fields`. Both contexts are entered
    in the process that measures the changed step, and last as long as it.
    """

    causes: tuple[Cause, ...]
    how: str
    """What a person would write, in a line."""
    why_not: Callable[[Look], str | None]
    """Returns why a step cannot be changed so; None if it can."""
    fields: Callable[[Look], Mapping[str, Any]] | None = None
    """Returns the fields of our model's spec that change."""
    before: Callable[[torch.device], AbstractContextManager[Any]] = nothing
    """Entered before the user's code is loaded."""
    after: Callable[[OwnStep], AbstractContextManager[Any]] = nothing
    """Entered when the user's code has made its step."""
    removes: bool = False
    """True if it takes away a part of the work: no cure, but what it measures bounds what any cure can bring."""
    slow: bool = False
    """True if it takes many seconds to apply, so that the others are tried first."""
    way: str | None = None
    """What it does in another way than the changes with the same word. They are not joined, and if one takes too long,
    the others are not tried."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    plain = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, plain)


@contextmanager
def all_replaced(value_of: Callable[[Any], object], *places: tuple[Any, str]) -> Iterator[None]:
    """Replace several attributes, each (owner, name), by what `value_of` makes of the present value."""
    with ExitStack() as undo:
        for owner, name in places:
            undo.enter_context(replaced(owner, name, value_of(getattr(owner, name))))
        yield


@contextmanager
def used(why_not: str) -> Iterator[Callable[[], None]]:
    """Yield what a change calls where it changes something. Raises Unsupported, at the end: it did so nowhere."""
    calls: set[None] = set()
    yield lambda: calls.add(None)
    if not calls:
        raise Unsupported(why_not)


def own_gpu_only(look: Look) -> str | None:
    """Return why a change of the user's own steps on a GPU cannot change this one."""
    return own_only(look) or (None if look.on_gpu else Elsewhere("the step runs on a CPU"))


def own_only(look: Look) -> str | None:
    """Return why a change of the user's own steps cannot change this one."""
    return Elsewhere("our model's step has nothing of the kind") if look.own is None else None


def no_fp32(look: Look) -> str | None:
    """Return why a change of products in float32 has nothing to change; None if it has. The profiler sees no operators
    inside a CUDA graph: of our model its spec tells."""
    if look.own is None:
        return None if look.spec.precision == "fp32" else "none of its matrix products is in float32"
    if not look.products:
        graphed = look.names["cudaGraphLaunch"]
        return "its products are hidden inside a CUDA graph" if graphed else "a step multiplies no matrices"
    return None if "fp32" in look.products else "none of its matrix products is in float32"
