"""Runs `benchmark`: one model at one batch size and context length, its step timed whole and by phases."""

from __future__ import annotations

import csv
import gzip
from typing import TYPE_CHECKING, Any

from app.specs.benchmark import BenchmarkSpec
from workers.jobs import _reference
from workers.jobs._base import Unit
from workers.jobs._training import building, measuring, metrics
from workers.jobs._values import Values
from workers.measure.errors import NotMeasured
from workers.measure.table import Column, Scalar
from workers.reporter import Reporter

if TYPE_CHECKING:
    import torch

    from workers.jobs._training.building import Training
    from workers.measure.validity import Monitor

SAMPLES = "samples.csv.gz"
MAX_SEQUENCES, MAX_TOKENS = 100, 1000
"""The first sequences, and of each the first tokens, that the table `generated` has."""


class BenchmarkRunner:
    kind = "benchmark"

    def plan(self, spec: BenchmarkSpec) -> list[Unit]:
        """Plan one unit per replicate. A single unit is forked; several are exec'd, so that they are independent."""
        return [
            Unit(
                title=spec.title(f"context {spec.context_length}")
                + (f", replicate {replicate + 1} of {spec.replicates}" if spec.replicates > 1 else ""),
                start="exec" if spec.replicates > 1 else "fork",
            )
            for replicate in range(spec.replicates)
        ]

    def run(self, spec: BenchmarkSpec, unit: Unit, report: Reporter) -> None:
        """Measure one replicate and report it. Running out of memory is a result."""
        from workers.measure import environment
        from workers.measure.validity import Monitor

        case = spec.case()
        device, build_model = building.prepare(spec)
        report.environment(environment.fingerprint(device))
        monitor = Monitor(device)
        with building.known_errors():
            values, verdict = measure(spec, device, build_model, monitor, report)
        report.validity(verdict, case.key, unit.title)
        values.report(case, environment.device_key(device), report)
        save_samples(values, report)


RUNNER = BenchmarkRunner()


def measure(
    spec: BenchmarkSpec, device: torch.device, build_model: building.Maker, monitor: Monitor, report: Reporter
) -> tuple[Values, dict[str, Any]]:
    """Return the values of each metric and the verdict. Without samples, the verdict still reports other processes on
    the device."""
    report.progress(0, spec.measure_steps or building.STEPS, "making the model")
    try:
        parts = _reference.check_parts(spec, device)
        training = building.build(spec, device, build_model)
        values, checks = measuring.measure(training, monitor, report, pacing=spec.pacing)
        report_generated(spec, training, report)
    except NotMeasured as error:
        monitor.watch(last=True)
        values, checks = _reference.not_measured(metrics.metrics_of(spec, spec.pacing), error)
        return values, monitor.conclude(checks)
    checks += metrics.check_precision(training)
    checks += parts + metrics.add_rates(values, training, report.ceilings)
    return values, monitor.conclude(checks)


def report_generated(spec: BenchmarkSpec, training: Training, report: Reporter) -> None:
    """Report the table `generated`: what the first step made of its prompts, generated again."""
    from workers.model.steps import GenerateStep

    step = training.step
    if not isinstance(step, GenerateStep):
        return
    note = f"the weights are random, of seed {spec.seed}: the tokens mean nothing"
    if spec.code is not None:
        note = f"the weights are those that {spec.code.label()} makes"
    prompts, made = (tokens[:MAX_SEQUENCES].tolist() for tokens in step.first_again())
    rows: list[list[Scalar]] = [
        [number, *(" ".join(map(str, tokens[:MAX_TOKENS])) for tokens in both), note]
        for number, both in enumerate(zip(prompts, made, strict=True))
    ]
    report.table("generated", Column.parse("sequence: integer, prompt_ids, token_ids, note"), rows)


def save_samples(values: Values, report: Reporter) -> None:
    """Save the raw samples for spreadsheets: one row per step, one column per metric that each step measures."""
    steps = values.samples("step_ms", "step")
    if steps is None:
        return
    # Of a step of the user's own, the phases that it has named, too.
    own = {f"{metric.phase}_ms" for metric in values.metrics if metric.phase != "first_step"}
    each = [metric for metric in values.metrics if metric.name in EACH_STEP | own]
    columns = {metric.name: samples for metric in each if (samples := values.samples(metric.name, metric.phase))}
    path = report.scratch / SAMPLES
    with gzip.open(path, "wt", compresslevel=1, newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *columns])
        writer.writerows([step, *row] for step, row in enumerate(zip(*columns.values(), strict=True), start=1))
    report.artifact(path, name=SAMPLES, kind="samples", media_type="application/gzip")


EACH_STEP = {*metrics.PHASE_METRICS.values(), "step_ms", "isolated_step_ms", "host_us"}
"""Metrics with a sample for each measured step."""
