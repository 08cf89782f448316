"""One process of a diagnosis: the step as it is, or with changes, timed as `benchmark` times it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from app.specs.diagnosis import DiagnosisSpec
from workers.changes import CHANGES
from workers.changes._base import Change
from workers.jobs import ddp
from workers.jobs._base import Unit
from workers.jobs._training import building, measuring
from workers.measure.table import Column, Scalar
from workers.outcome import RunnerError, describe_error
from workers.reporter import Reporter

if TYPE_CHECKING:
    import torch

    from app.specs.benchmark import BenchmarkSpec

TURNS = "turns"
COLUMNS = Column.parse("stage, changes, step_ms: number ms, samples: integer, device, device_key, outcome, reason")
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
    report.cursor(0)  # a crash of this process is a result, too
    changes = [CHANGES.load(name) for name in names]
    try:
        step = changed(spec.step, unit.params)
        if step.kind == "ddp":
            samples, devices = ddp.times(step, report)
            row = row_of(stage, names, samples, devices[0], len(devices) * step.nodes)
        else:
            row = row_of(stage, names, *_samples(step, changes, report))
    except Exception as error:
        if not names:
            raise
        row = _refused(stage, names, str(error) if isinstance(error, RunnerError) else describe_error(error))
    report.table(TURNS, COLUMNS, [row])


def _refused(stage: str, names: Sequence[str], reason: str) -> list[Scalar]:
    return [stage, JOINED.join(names), None, 0, None, None, "refused", reason]


def row_of(
    stage: str, names: Sequence[str], samples: Sequence[float], device: torch.device, devices: int = 1
) -> list[Scalar]:
    """Return the row of a process that has measured these times of a step in ms."""
    from workers.measure.environment import device_key

    on = [device.type, device_key(device, devices)]
    return [stage, JOINED.join(names), statistics.fmean(samples), len(samples), *on, "ok", None]


def changed(step: Any, params: Mapping[str, Any]) -> Any:
    """Return the spec of a changed step, with the numbers of steps that the plan gives. Raises ValidationError if the
    changed fields contradict the others."""
    numbers = {name: params[name] for name in ("warmup_steps", "measure_steps")}
    return type(step).model_validate({**step.model_dump(), **params["fields"], **numbers})


def _samples(step: BenchmarkSpec, changes: Sequence[Change], report: Reporter) -> tuple[Sequence[float], torch.device]:
    from workers.jobs import _reference
    from workers.measure.validity import Monitor

    device, build_model = building.prepare(step)
    own = step.step_code is not None
    with ExitStack() as stack, building.known_errors():
        for change in changes if own else ():
            stack.enter_context(change.before(device))
        _reference.check_parts(step, device)
        training = building.build(step, device, build_model)
        if training.own is not None:
            for change in changes:
                stack.enter_context(change.after(training.own))
        values, _ = measuring.measure(training, Monitor(device), report, pacing=step.pacing)
    return values.samples("step_ms", "step") or (), device
