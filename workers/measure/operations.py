"""Single operations: the time of their passes, and the memory that they take."""

import gc
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.device_clock import Workload, nothing
from workers.measure.memory import MIB, memory_meter, translate_oom
from workers.measure.stopwatch import Stopwatch, Timing


@dataclass(frozen=True)
class Operation:
    """A function at fixed inputs, forward and backward.

    Inputs that require gradients get them. `grad_out` is the output's gradient, or None to run forward only.
    """

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    grad_out: Tensor | None

    def forward(self) -> Tensor:
        return self.function(*self.inputs)

    def backward(self, out: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the inputs' gradients; None for an input on which the output does not depend."""
        return torch.autograd.grad(out, self.inputs, self.grad_out, allow_unused=True)

    @property
    def input_bytes(self) -> int:
        tensors = [*self.inputs, *([] if self.grad_out is None else [self.grad_out])]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


EXAMINED = 2
"""Measured calls of each pass whose results are examined."""
Examine = Callable[[Tensor | None, Sequence[Tensor | None]], None]
"""(output, gradients of the inputs) of a call, as far as its pass computes them."""
Holding = Callable[[], AbstractContextManager[None]]
"""Gives the inputs other values inside the context."""


@dataclass
class _Calls:
    """The calls of one pass. Results stay until the next call is prepared, so that their memory is used again, and are
    examined then, outside of any call's time. Which calls are examined is drawn: an operation cannot know it."""

    operation: Operation
    examine: Examine
    holding: Holding
    """The values of the inputs in a call whose results are examined: what was kept of other calls is wrong there."""
    drawn: frozenset[int]
    others: ExitStack = field(default_factory=ExitStack)
    out: Tensor | None = None
    gradients: Sequence[Tensor | None] = ()
    measured: int | None = None
    """Number of measured calls, those among them that are taken again; None: measuring has not begun."""

    def finish(self) -> None:
        """Examine the last call's results, if it was drawn, and free them."""
        if self.measured is not None:
            if self.measured in self.drawn:
                with torch.no_grad():
                    self.examine(self.out, self.gradients)
                self.others.close()
            self.measured += 1
            if self.measured in self.drawn:
                self.others.enter_context(self.holding())
        self.out, self.gradients = None, ()

    def forward(self) -> None:
        self.out = self.operation.forward()

    def finish_and_forward(self) -> None:
        self.finish()
        self.forward()

    def backward(self) -> None:
        out, self.out = self.out, None
        assert out is not None
        self.gradients = self.operation.backward(out)

    def forward_backward(self) -> None:
        out = self.operation.forward()
        self.gradients = self.operation.backward(out)
        self.out = out


def time_passes(
    operation: Operation,
    watch: Stopwatch,
    passes: Sequence[str],
    *,
    measuring: Workload = nothing,
    examine: Examine = lambda _out, _gradients: None,
    holding: Holding = nullcontext,
    warmup: int | None,
    calls: int,
) -> dict[str, Timing]:
    """Time the given passes: "forward", "backward" (after an untimed forward pass), "forward_backward". Raises
    OutOfMemory: the memory did not suffice; the error names the pass.

    Args:
        passes: The passes to time, in this order.
        measuring: Called in each pass when the warm-up is over and samples begin.
        examine: Called with the results of some measured calls of each pass, outside of their times.
        holding: What these calls run in.
        warmup: Calls of each pass that leave no sample; None: until times are steady.
        calls: Samples of each pass.
    """
    times: dict[str, Timing] = {}
    for name in passes:
        # Not seeded, and not the generator that an operation could seed.
        drawn = random.SystemRandom().sample(range(1, calls + 1), min(EXAMINED, calls))
        made = _Calls(operation, examine, holding, frozenset(drawn))
        works: dict[str, tuple[Workload, Workload]] = {
            "forward": (made.finish, made.forward),
            "backward": (made.finish_and_forward, made.backward),
            "forward_backward": (made.finish, made.forward_backward),
        }
        prepare, work = works[name]

        def begin(made: _Calls = made) -> None:
            made.measured = 0
            measuring()

        with translate_oom(name), torch.set_grad_enabled(operation.grad_out is not None), made.others:
            times[name] = watch.time(work, prepare=prepare, measuring=begin, warmup=warmup, calls=calls)
            made.finish()
    return times


@dataclass(frozen=True)
class OperationMemory:
    """Memory of one forward pass and, if it has one, its backward pass, inputs included; None where unknown."""

    before_backward_mib: float | None
    peak_mib: float | None
    reserved_mib: float | None
    """MiB that torch's allocator reserved on the device for it: in blocks, so more than `peak_mib`. None on a CPU."""
    how: str
    """The method by which the peak was measured, or the reason why it is unknown."""


def measure_memory(operation: Operation, device: torch.device) -> OperationMemory:
    """Run the operation once and measure the memory that it holds between the passes and at its peak. Raises
    OutOfMemory: the memory did not suffice."""
    gc.collect()
    meter = memory_meter(device)
    on_gpu = device.type == "cuda"
    others = others_reserved = 0
    if on_gpu:
        torch.cuda.empty_cache()
        # The flush buffer and the oracle's results are allocated, too, but do not belong to the operation.
        others = torch.cuda.memory_allocated(device) - operation.input_bytes
        others_reserved = torch.cuda.memory_reserved(device) - operation.input_bytes
    before_backward = None
    meter.reset()
    with translate_oom("the memory's measurement"), torch.set_grad_enabled(operation.grad_out is not None):
        out = operation.forward()
        if on_gpu:
            before_backward = (torch.cuda.memory_allocated(device) - others) / MIB
        if operation.grad_out is not None:
            operation.backward(out)
    peak, how = meter.peak_mib()
    reserved = meter.reserved_mib()
    if on_gpu:
        peak = None if peak is None else peak - others / MIB
        if reserved is not None:
            # Some of the operation's tensors may lie in gaps between other tensors, in memory reserved before.
            reserved = max(reserved - others_reserved / MIB, peak or 0.0)
    return OperationMemory(before_backward, peak, reserved, how)
