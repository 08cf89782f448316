"""Times the steps of one rank. All ranks begin a step together, and continue when every rank has ended it."""

import gc
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flopwatch.steps import steps_of_a_second
from kernels.device_events import synchronize
from workers.jobs._training import measuring
from workers.jobs._training.building import STEPS
from workers.jobs.ddp.context import RankContext
from workers.jobs.ddp.strategies import EAGER, EAGER_SILENT, NO_COMMUNICATION, SILENT, Trained
from workers.measure.compilation import compilation
from workers.measure.memory import MemoryMeter, translate_oom
from workers.measure.returned import ReturnedNumbers
from workers.measure.timing import Observer, StepPosition, make_clock, run_step
from workers.measure.warmup import WarmUp

SECONDS = 3
"""What the steps of a side take by default on a CPU. Exposed communication is a difference of medians of few steps."""
LATER_WARMUP = 2
"""Steps before those that are measured, in turns after a side's first."""
NAMES = {
    SILENT: "without communication",
    NO_COMMUNICATION: "one process alone",
    EAGER: "without a CUDA graph",
    EAGER_SILENT: "without communication or a CUDA graph",
}
"""What progress calls the sides that take turns with the strategy."""


@dataclass
class Turn:
    """The measured steps of one turn on this rank."""

    strategy: str
    first_step_ms: float
    step_ms: list[float] = field(default_factory=list)
    phases_ms: dict[str, list[float]] = field(default_factory=dict)
    host_us: list[float] = field(default_factory=list)
    warmup: int = 0
    steady: bool | None = None
    too_slow: bool = False
    hidden: float | None = None
    peak_mib: float | None = None
    peak_how: str = ""
    reserved_mib: float | None = None
    graphs_before: dict[str, Any] = field(default_factory=dict)
    graphs_after: dict[str, Any] = field(default_factory=dict)
    returned: list[list[Any]] = field(default_factory=list)
    """The rows of what steps returned (workers.measure.returned)."""


class StepTimer:
    """Runs steps that begin on all ranks together."""

    def __init__(self, context: RankContext, trained: Trained, observers: Sequence[Observer] = ()) -> None:
        self._context, self._trained = context, trained
        self._clock = make_clock(context.device)
        self._where = StepPosition()
        self.numbers = ReturnedNumbers(lambda: trained.returned)
        self._observers: list[Observer] = [self._where, *observers, self._clock]

    def step(self, turn: Turn | None = None) -> list[float]:
        """Run a step, and keep its times in `turn`; return every rank's wall time in ms. Raises OutOfMemory: the memory
        did not suffice; DoesNotFit: the memory did not suffice for one process alone."""
        step, context, graphed = self._trained.repeated, self._context, self._trained.graphed
        self.take_returned()
        self._where.preparation_begins()
        with context.agree_on_memory(self._trained.strategy), translate_oom(self._where):
            step.prepare()
        if context.on_gpu:
            synchronize()
        context.exchange(0.0)
        with context.agree_on_memory(self._trained.strategy), translate_oom(self._where):
            run_step(step.phases, self._observers)
        last = self._clock.last
        if turn is not None:
            turn.step_ms.append(last.wall_ms)
            if last.host_us is not None:
                turn.host_us.append(last.host_us)
            inner = {} if graphed is None else graphed.inner_times_ms()
            for name, time_ms in {**last.phases_ms, **inner}.items():
                turn.phases_ms.setdefault(name, []).append(time_ms)
        walls = context.exchange(last.wall_ms)
        context.rank.step_done()
        return walls

    def take_returned(self, *, last: bool = False) -> None:
        """Read what the step before has returned, and then drop it."""
        self.numbers.take()
        if self._trained.own is not None:
            self._trained.own.returned, self._trained.own.keeps_returned = None, self.numbers.wants_next and not last


def measure_steps(
    context: RankContext, trained: Trained, meter: MemoryMeter, *, number: int = 0, rounds: int = 1
) -> Turn:
    """Warm up until times are steady or as often as the spec says, then measure the steps of round `number` of so many.

    Only a side's first turn is judged: in later ones the device has just worked, and only the model is new. Raises
    OutOfMemory: the memory did not suffice; DoesNotFit: the memory did not suffice for one process alone.
    """
    elapsed_s = 0.0
    later = LATER_WARMUP if number else None
    warming = WarmUp(
        later if context.spec.warmup_steps is None else context.spec.warmup_steps,
        window_s=measuring.WINDOW_S[context.device.type],
        clock=lambda: elapsed_s,  # the same on every rank
    )
    timer = StepTimer(context, trained)
    what = NAMES.get(trained.strategy, trained.strategy)
    first, quickest_ms = math.nan, math.inf
    while not warming.over:
        slowest_ms = max(timer.step())
        first = slowest_ms if math.isnan(first) else first
        quickest_ms = min(quickest_ms, slowest_ms)
        elapsed_s += 1e-3 * slowest_ms
        warming.add(slowest_ms)
        context.report_progress(f"{what}: warming up")
    gc.collect()
    turn = Turn(trained.strategy, first, warmup=warming.calls)
    turn.steady, turn.too_slow, turn.hidden = warming.steady, warming.too_slow, warming.hidden
    meter.reset()
    turn.graphs_before = asdict(compilation())
    if context.rank.index == 0:
        context.rank.report({"measuring": turn.warmup > 0})
    if context.steps is None:
        context.steps = STEPS if context.on_gpu else steps_of_a_second(quickest_ms / SECONDS)
    steps = context.steps // rounds + (number < context.steps % rounds)
    if trained.own is not None:
        trained.own.count_work(steps)
    for _ in range(steps):
        slowest_ms = max(timer.step(turn))
        turn.first_step_ms = slowest_ms if math.isnan(turn.first_step_ms) else turn.first_step_ms
        context.measured_steps += 1
        context.report_progress(f"{what}: measuring")
    timer.take_returned(last=True)
    turn.returned = timer.numbers.rows
    turn.graphs_after = asdict(compilation())
    turn.peak_mib, turn.peak_how = meter.peak_mib() if trained.graphed is None else (trained.graphed.peak_mib, "")
    turn.reserved_mib = meter.reserved_mib()
    return turn
