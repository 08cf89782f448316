"""One process of a diagnosis: the step as it is, or with changes, timed as `benchmark` times it."""

from __future__ import annotations

import gc
import signal
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from app.specs.diagnosis import DiagnosisSpec
from workers import uploaded
from workers.changes import CHANGES
from workers.changes._base import Change, replaced
from workers.jobs import ddp
from workers.jobs._base import Unit
from workers.jobs._profiled import profile_steps
from workers.jobs._training import building, measuring
from workers.measure.errors import NotMeasured
from workers.measure.table import Column, Scalar
from workers.outcome import RunnerError
from workers.reporter import Reporter

if TYPE_CHECKING:
    import torch

    from app.specs.benchmark import BenchmarkSpec
    from workers.measure.profiling.recording import Profile

TURNS = "turns"
COLUMNS = Column.parse(
    "stage, changes, step_ms: number ms, samples: integer, device, device_key, outcome, reason, "
    "kept_kernels: integer, busy_percent: number %, profiled_ms: number ms"
)
"""`step_ms` is the mean: a loader makes some steps fast and others slow, which a median or the fastest may hide.
`changes` are names, joined by a comma; "" for the step as it is."""
JOINED = ","


def run(spec: DiagnosisSpec, unit: Unit, report: Reporter) -> None:
    """Time the step with the unit's changes. Whatever goes wrong in a changed step is a result: it says that the change
    is refused, and nothing of the step as it is."""
    stage, names = unit.params["stage"], unit.params["changes"]
    if (reason := unit.params.get("crashed")) is not None:
        report.table(TURNS, COLUMNS, [_refused(stage, names, reason)])
        return
    if "rounds" in unit.params:
        _rounds(spec, unit, report)
        return
    report.cursor(0)  # a crash of this process is a result, too
    if names:
        # Without a handler the signal ends the process, whatever it is in.
        signal.setitimer(signal.ITIMER_REAL, unit.params["limit_s"])
    changes = [CHANGES.load(name) for name in names]
    try:
        step = changed(spec.step, unit.params)
        if step.kind == "ddp":
            (samples,), devices = ddp.times([step], report)
            row = row_of(stage, names, samples, devices[0], len(devices) * step.nodes)
        else:
            times, device, others = _samples(step, changes, unit.params.get("kept_kernels"), report)
            row = row_of(stage, names, times, device, others=others)
    except Exception as error:
        if not names:
            raise
        row = _refused(stage, names, str(error) if isinstance(error, RunnerError) else uploaded.describe(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    report.table(TURNS, COLUMNS, [row])


def _rounds(spec: DiagnosisSpec, unit: Unit, report: Reporter) -> None:
    """Time the sides one after the other in the same ranks."""
    sides = unit.params["rounds"]
    steps = [changed(spec.step, {**unit.params, **side}) for side in sides]
    try:
        samples, devices = ddp.times(steps, report)
    except (RunnerError, NotMeasured) as error:
        # Of several changes nobody knows which one failed: none is refused.
        outcome = "refused" if len({JOINED.join(side["changes"]) for side in sides} - {""}) == 1 else "failed"
        rows = [_refused("turn", side["changes"], str(error), outcome) for side in sides if side["changes"]]
    else:
        number = len(devices) * spec.step.nodes  # type: ignore[attr-defined]
        each = zip(sides, samples, strict=True)
        rows = [row_of("turn", side["changes"], times, devices[0], number) for side, times in each]
    report.table(TURNS, COLUMNS, rows)


def pacing(step: BenchmarkSpec, device: torch.device) -> Literal["step", "loop"]:
    """Return how steps follow each other: on a GPU as in training, where the host may run ahead."""
    return "loop" if device.type == "cuda" else step.pacing


def like_a_script(step: BenchmarkSpec) -> None:
    """Let the garbage collector see what was imported before this process was forked: in the user's own script it sees
    about as much, and a collection takes long."""
    if step.step_code is not None:
        gc.unfreeze()


@contextmanager
def as_it_is(training: building.Training) -> Iterator[None]:
    """Let the garbage collector look at all that the user's code has made, as it does in training: measuring spares it
    that otherwise."""
    with replaced(gc, "freeze", lambda: None) if training.own is not None else nullcontext():
        yield


def kept_kernels(profile: Profile) -> int:
    """Return the number of kernels that no counterfactual takes away: matrix products and attention, but for those of
    optimizers, such as Muon. Which ones they are may differ between processes, since cuBLAS and the compiler choose
    them."""
    from workers.measure.profiling import classes, idle

    host = profile.recording.host
    updates = idle.inside(idle.updating(host))
    of_updates = {one.id for one in host if one.kind == "launch" and updates(one.begin_ns)}
    kernels = [one for one in profile.recording.device if one.kind == "kernel" and one.launch not in of_updates]
    return sum(classes.class_of_kernel(one.name) in (classes.MATMUL, classes.ATTENTION) for one in kernels)


def _check_kernels(training: building.Training, before: int, report: Reporter) -> None:
    """Raises RunnerError if a step from which work was taken differs from the step as it is in another place."""
    with nullcontext() if training.own is None else training.own.updates_named():
        profile, _, _ = profile_steps(training, 1, report, warm=True, shapes=False)
    if (now := kept_kernels(profile)) != before:
        raise RunnerError(
            f"thrown away: its step has {now} matrix products and kernels of attention, and the step as it is {before}"
        )


def _refused(stage: str, names: Sequence[str], reason: str, outcome: str = "refused") -> list[Scalar]:
    return [stage, JOINED.join(names), None, 0, None, None, outcome, reason, None, None, None]


def row_of(
    stage: str,
    names: Sequence[str],
    samples: Sequence[float],
    device: torch.device,
    devices: int = 1,
    *,
    kept: int | None = None,
    busy_percent: float | None = None,
    profiled_ms: float | None = None,
    others: str | None = None,
) -> list[Scalar]:
    """Return the row of a process that has measured these times of a step in ms. `kept` is its `kept_kernels`,
    `profiled_ms` a step's time while it was sampled, `others` what other processes took of the host or, of the
    look, other threads of the code."""
    from workers.measure.environment import device_key

    on = [device.type, device_key(device, devices)]
    numbers = [kept, busy_percent, profiled_ms]
    return [stage, JOINED.join(names), statistics.fmean(samples), len(samples), *on, "ok", others, *numbers]


def changed(step: Any, params: Mapping[str, Any]) -> Any:
    """Return the spec of a changed step, with the numbers of steps that the plan gives. Raises ValidationError if the
    changed fields contradict the others."""
    numbers = {name: params[name] for name in ("warmup_steps", "measure_steps")}
    return type(step).model_validate({**step.model_dump(), **params["fields"], **numbers})


def _samples(
    step: BenchmarkSpec, changes: Sequence[Change], kept: int | None, report: Reporter
) -> tuple[Sequence[float], torch.device, str | None]:
    from workers.jobs import _reference
    from workers.measure.validity import Monitor

    device, build_model = building.prepare(step)
    own = step.step_code is not None
    like_a_script(step)
    with ExitStack() as stack, building.known_errors():
        for change in changes if own else ():
            stack.enter_context(change.before(device))
        _reference.check_parts(step, device)
        training = building.build(step, device, build_model)
        if training.own is not None:
            for change in changes:
                stack.enter_context(change.after(training.own))
        with as_it_is(training):
            monitor = Monitor(device)
            values, _ = measuring.measure(training, monitor, report, pacing=pacing(step, device))
            load = next(check for check in monitor.with_watched([]) if check.name == "host_load")
        if kept is not None and device.type == "cuda" and any(change.removes for change in changes):
            _check_kernels(training, kept, report)
    others = None if load.ok or load.severity == "note" else load.detail
    return values.samples("step_ms", "step") or (), device, others
