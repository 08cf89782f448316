"""Runs `script`: a training script of the user's own, whose `flopwatch.measure(step)` measures the step as `benchmark`
measures one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from app.specs._code import CodeSpec
from app.specs.benchmark import BenchmarkSpec
from app.specs.script import ScriptSpec
from flopwatch import steps
from workers import uploaded
from workers.jobs._base import Unit
from workers.jobs._grid import check_measured
from workers.jobs._training import building, measuring, metrics
from workers.jobs._values import Values
from workers.jobs.benchmark import save_samples
from workers.outcome import RunnerError
from workers.reporter import Reporter
from workers.torch_host import choose_device, seed_everything, set_precision

if TYPE_CHECKING:
    import torch

    from workers.measure.check import Check
    from workers.measure.validity import Monitor

EXAMPLE = b"""import torch, flopwatch

x = torch.randn(256, 256, device="cuda" if torch.cuda.is_available() else "cpu")
flopwatch.work(flops=2 * 256**3)
flopwatch.measure(lambda: x @ x)
"""
ANY_CODE = CodeSpec(sha256=hashlib.sha256(EXAMPLE).hexdigest(), function="measure")
"""Says to the functions of training kinds that the step is the user's own; none of them loads it."""
SEED = 0
"""What the script draws with, so that two versions of it draw the same."""
NOT_MEASURED = "the script has ended and has not measured: it must call flopwatch.measure(step) in its own process"
TWICE = "a script measures one step: it has called flopwatch.measure a second time"


class ScriptRunner:
    kind = "script"

    def plan(self, spec: ScriptSpec) -> list[Unit]:
        return [Unit(title=" ".join([spec.label(), *spec.words()]))]

    def run(self, spec: ScriptSpec, unit: Unit, report: Reporter) -> None:
        """Run the script, and report what it has measured. Running out of memory is a result. Raises RunnerError: the
        script did not measure a step, or two."""
        from workers.measure import environment
        from workers.measure.validity import Monitor

        device = choose_device(spec.device, spec.precision)
        set_precision(spec.precision)
        report.environment(environment.fingerprint(device))
        measuring = Measuring(spec, device, Monitor(device), report)
        with building.known_errors():
            measuring.run_script()
        verdict = measuring.monitor.conclude(measuring.checks)
        case = spec.case()
        report.validity(verdict, case.key, unit.title)
        assert measuring.values is not None
        measuring.values.report(case, environment.device_key(device), report)
        save_samples(measuring.values, report)


RUNNER = ScriptRunner()


class Measuring:
    """Receives the script's calls of `flopwatch`, and keeps what they measured."""

    def __init__(self, spec: ScriptSpec, device: torch.device, monitor: Monitor, report: Reporter) -> None:
        from workers.measure.memory import memory_meter
        from workers.measure.own_step import OwnStep

        self._spec, self._device, self._report = spec, device, report
        self._step = OwnStep(why_not_run=steps.why_not_run)
        self._meter = memory_meter(device)
        self.monitor = monitor
        self.phase, self.work = self._step.phase, self._step.work
        self.values: Values | None = None
        self.checks: list[Check] = []

    def run_script(self) -> None:
        """Run the script to its end. Raises RunnerError: it did not measure a step."""
        from workers.measure.memory import OutOfMemory, translate_oom

        seed_everything(SEED)
        steps.listen(self)
        code, content, file = self._spec.script_code, EXAMPLE, None
        if code is not None:
            content, file = uploaded.content(code), uploaded.path(code)
            uploaded.settle(code)
        try:
            with translate_oom("the script"):
                uploaded.run_as_main(content, self._spec.label(), self._spec.words(), file)
        except OutOfMemory as error:
            self._out_of_memory(error)
        if self.values is None:
            raise RunnerError(NOT_MEASURED)

    def measure(self, step: Callable[[], object], *, warmup_steps: int | None, measure_steps: int | None) -> None:
        """Measure the step; the first time only. Raises RunnerError: the script has measured a step before; SystemExit:
        memory ran out, which is the result: the script ends."""
        from workers.measure.memory import OutOfMemory
        from workers.measure.own_step import NoStep

        if self.values is not None:
            raise RunnerError(TWICE)
        if self._spec.script_code is not None:
            uploaded.check_installed(self._spec.script_code)
        as_benchmark = BenchmarkSpec(
            step_code=ANY_CODE,
            precision=self._spec.precision,
            device=self._spec.device,
            warmup_steps=warmup_steps,
            measure_steps=measure_steps,
        )
        try:
            self._step.make(lambda: step)
        except NoStep as error:
            raise RunnerError(f"flopwatch.measure(step) takes a function that does one step: {error}") from error
        training = building.Training(
            as_benchmark, self._device, self._step.model, self._step, self._meter, own=self._step
        )
        try:
            self.values, self.checks = measuring.measure(training, self.monitor, self._report)
        except OutOfMemory as error:
            self._out_of_memory(error)
            raise SystemExit(0) from error
        self.checks += metrics.add_rates(self.values, training, self._report.ceilings)

    def _out_of_memory(self, error: Exception) -> None:
        self.monitor.watch(last=True)
        self.values = Values(metrics.metrics_of(BenchmarkSpec(step_code=ANY_CODE)))
        self.values.set_missing("oom", str(error))
        self.checks = [check_measured(self.values, alone=True)]
