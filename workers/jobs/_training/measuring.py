"""Times the steps of a model, and checks that the samples are valid."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.specs._training import TrainingSpec
from flopwatch.steps import MOST_STEPS, steps_of_a_second
from workers.jobs._training.building import STEPS, Training
from workers.jobs._training.fp8 import report_layers
from workers.jobs._training.metrics import ISOLATED, Pacing, add_memory, add_times, metrics_of, work_of_step
from workers.jobs._values import GPU_ONLY, Values
from workers.measure.check import Check, check_cores
from workers.measure.compilation import Compilation, compilation
from workers.measure.warmup import MIN_CALLS, min_calls
from workers.reporter import Reporter

if TYPE_CHECKING:
    import torch

    from workers.measure.busy import Busy
    from workers.measure.returned import ReturnedNumbers
    from workers.measure.timing import Marks, StepTimes
    from workers.measure.validity import Monitor

LOOP_S = 2.0
"""Seconds that a loop of slow steps lasts, and it has at least MIN_LOOP_STEPS. The monitor reads the device between
loops."""
MIN_LOOP_STEPS = 10
FEWEST_STEPS = 3
WINDOW_S = {"cpu": 0.2, "cuda": 0.5}
"""Shortest window in seconds of a warm-up that lasts until times are steady. A GPU that multiplies large matrices takes
seconds to settle at its power limit."""


def measure(
    training: Training, monitor: Monitor, report: Reporter, pacing: Pacing = "step", *, most_s: float = math.inf
) -> tuple[Values, list[Check]]:
    """Time the steps. Returns the values, and the checks of the samples' validity. Raises OutOfMemory: the memory did
    not suffice in some phase.

    Args:
        pacing: `step`: phases and the whole step are timed in isolated steps. `loop`: phases are timed in isolated
            steps, and the whole step in a loop of as many steps that follows.
        most_s: Fewer steps are measured by default if they would take longer, but FEWEST_STEPS.
    """
    from workers.measure.busy import measure_busy
    from workers.measure.own_step import KINDS
    from workers.measure.returned import COLUMNS, VALUES, ReturnedNumbers, work_rows
    from workers.measure.timing import make_marks, run_step
    from workers.measure.validity import check_streams

    step, numbers = training.step, ReturnedNumbers(training.returned)
    times = time_isolated(training, monitor, report, numbers, loops=pacing == "loop", most_s=most_s)
    work = work_rows({kind: work_of_step(training, kind) for kind in KINDS})
    report.table(VALUES, COLUMNS, [*numbers.rows, *work])
    report_layers(training.linear_layers, report)
    marks = make_marks(training.device)
    step_ms = times.step if pacing == "step" else time_loops(training, times, marks, monitor, report)
    values = Values(metrics_of(training.spec, pacing, training.phases))
    add_memory(values, training, monitor, 8 * len(step_ms) * (1 + len(times.phases) + (pacing == "loop")))
    busy: Busy | str = GPU_ONLY
    if training.device.type == "cuda":
        busy = measure_busy(lambda: run_step(step.phases, ()), step.prepare)
    add_times(values, training, times, step_ms, busy)
    if pacing == "loop":
        values.set("isolated_step_ms", ISOLATED, times.step)
    left = check_streams(marks.left_ms, statistics.median(step_ms))
    told = numbers.checks(may_train=training.own is not None and training.own.may_train)
    return values, [*told, *left, *check_times(training, times, step_ms, busy, monitor)]


def time_isolated(
    training: Training,
    monitor: Monitor,
    report: Reporter,
    numbers: ReturnedNumbers,
    *,
    loops: bool,
    most_s: float = math.inf,
) -> StepTimes:
    """Warm up, and time steps that each begin on an idle device.

    `numbers` takes what steps return; `loops` says that loops of as many steps follow; `most_s` is that of `measure`.
    Raises OutOfMemory: the memory did not suffice in some phase.
    """
    from workers.measure.timing import make_clock, time_steps

    spec, step, graphed = training.spec, training.step, training.graphed
    least = min_calls(spec.warmup_steps)
    if training.own is not None:
        training.own.takes = _number_of_steps(spec, training.device, loops=loops)

    planned = spec.measure_steps or STEPS

    def measuring(steps: int) -> None:
        nonlocal planned
        planned = steps
        if training.own is not None:
            training.own.count_work(steps)
        training.meter.reset()
        monitor.start(warm=least > 0)

    def prepare() -> None:
        training.take_returned(numbers)
        step.prepare()

    def on_progress(warmed_up: int, measured: int) -> None:
        if measured:
            monitor.watch(last=measured == planned and not loops)
        total = max(least, warmed_up) + (1 + loops) * planned
        report.progress(warmed_up + measured, total, "measuring" if measured else "warming up")

    report.progress(0, least + (1 + loops) * planned, "warming up" if least else "measuring")
    times = time_steps(
        step.phases,
        make_clock(training.device),
        prepare=prepare,
        inner_times_ms=dict if graphed is None else graphed.inner_times_ms,
        warmup_steps=spec.warmup_steps,
        window_s=WINDOW_S[training.device.type],
        measure_steps=spec.measure_steps or functools.partial(_steps_by_default, training.device.type, most_s),
        measuring=measuring,
        on_progress=on_progress,
    )
    training.take_returned(numbers, last=True)
    return times


def _steps_by_default(device_type: str, most_s: float, quickest_ms: float) -> int:
    steps = steps_of_a_second(quickest_ms) if device_type == "cpu" else STEPS
    if steps * quickest_ms <= 1e3 * most_s:
        return steps
    return min(steps, max(FEWEST_STEPS, int(1e3 * most_s / quickest_ms)))


def _number_of_steps(spec: TrainingSpec, device: torch.device, *, loops: bool) -> str:
    """Return how many steps a job takes, in words."""
    warm = f"at least {MIN_CALLS}" if spec.warmup_steps is None else str(spec.warmup_steps)
    measured = str(spec.measure_steps or STEPS)
    if spec.measure_steps is None and device.type == "cpu":
        measured = f"{STEPS} to {MOST_STEPS}"
    return f"{warm} steps to warm up, {measured} measured ones{', as many in a loop' if loops else ''} and a few more"


def time_loops(
    training: Training, isolated: StepTimes, marks: Marks, monitor: Monitor, report: Reporter
) -> Sequence[float]:
    """Return the times in ms of steps that follow each other. `isolated`: the times of the isolated steps before.
    Raises OutOfMemory: the memory did not suffice in some phase."""
    from workers.measure.timing import LOOP_STEPS, time_loop

    steps, step = len(isolated.step), training.step
    done = isolated.warmup + steps
    if training.own is not None:
        training.own.count_work(steps)

    def on_progress(measured: int) -> None:
        monitor.watch(last=measured == steps)
        report.progress(done + measured, done + steps, "measuring in a loop")

    fitting = int(1e3 * LOOP_S / max(statistics.median(isolated.step[:MOST_STEPS]), 1e-3))
    return time_loop(
        step.phases,
        marks,
        prepare=step.prepare,
        measure_steps=steps,
        loop_steps=min(LOOP_STEPS, max(MIN_LOOP_STEPS, fitting)),
        on_progress=on_progress,
    )


def check_times(
    training: Training, times: StepTimes, step_ms: Sequence[float], busy: Busy | str, monitor: Monitor
) -> list[Check]:
    """Return the checks of the validity of the steps' times, of which `step_ms` are the samples."""
    import torch

    from workers.measure.process_settings import check_settings
    from workers.measure.validity import (
        check_gradients,
        check_kernels,
        check_lost_gradients,
        check_phases,
        check_stability,
        check_steady,
        check_waiting,
    )

    spec, device = training.spec, training.device
    checks = [
        check_steady(times.steady, times.warmup, too_slow=times.too_slow, hidden=times.hidden),
        *check_stability(step_ms, on_gpu=device.type == "cuda", metric="step_ms"),
    ]
    if training.own is not None:
        checks += check_settings(training.own.settings)
        checks += check_lost_gradients(*training.own.lost_gradients())
        cores = check_cores(torch.get_num_threads())
        if device.type == "cpu" and not cores.ok:
            checks.append(cores)
    inner = training.step if training.graphed is None else training.graphed.step
    checks += check_gradients(getattr(inner, "without_gradient", None))
    if spec.compile or (spec.step_code is not None and compilation() != Compilation()):
        checks += monitor.compilation_checks(warmup_steps=times.warmup, own=training.own is not None)
    if device.type == "cuda":
        checks += check_phases(statistics.median(times.step), statistics.median(times.left))
    host_us = statistics.median(times.host_us) if times.host_us else None
    checks.append(check_waiting(statistics.median(step_ms), host_us, busy))
    return checks + check_kernels(device) if spec.attention == "triton" else checks
