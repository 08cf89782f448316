"""Jobs that are grids of cells. Each cell is one case, with values, an outcome and a verdict of its own.

All cells of a job run in one process as long as no cell crashes it. After a crash a fresh process continues with the
next cell, and the cell that crashed has the outcome "crashed". Other faults of a cell are outcomes too: "oom",
"unsupported", "invalid_environment", "failed". None of them affects another cell.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from kernels.clock import now_s
from workers.jobs._base import Unit
from workers.jobs._values import FAULTS, Metric, Values
from workers.measure.check import Check
from workers.measure.errors import NotMeasured
from workers.outcome import Failed, RunnerError, Unsupported
from workers.reporter import Reporter
from workers.torch_host import (
    as_runner_error,
    check_device_answers,
    choose_device,
    frozen_objects,
    reset_process,
    set_precision,
    why_no_precision,
)
from workers.uploaded import describe

if TYPE_CHECKING:
    import torch

    from app.specs._base import Cell, SpecBase
    from workers.measure.validity import Monitor


@dataclass
class Context:
    """The objects that all cells of one process share. Runners add their own."""

    devices: Sequence[torch.device]
    report: Reporter

    @property
    def device(self) -> torch.device:
        """Return the first device, which is the only one for most kinds."""
        return self.devices[0]


@dataclass
class Trial:
    """One cell while it is measured."""

    values: Values
    monitor: Monitor
    """Watches the cell's devices; a runner starts it again when its samples begin."""
    tell: Callable[[str], None]
    """Shows people the present step of work on the cell."""
    checks: list[Check] = field(default_factory=list)
    """The runner's checks of the validity of the cell's values."""


ContextT = TypeVar("ContextT", bound=Context)


class GridRunner(abc.ABC, Generic[ContextT]):
    """The runner of a kind whose jobs are grids. A subclass says how one cell is measured."""

    kind: str
    timed: ClassVar[bool] = True
    """False if no value depends on the load of host and devices; verdicts then ignore it."""

    @abc.abstractmethod
    def open(self, spec: Any, devices: Sequence[torch.device], report: Reporter) -> ContextT:
        """Return the context that all cells share. Called once in each process."""

    @abc.abstractmethod
    def metrics(self, spec: Any, cell: Any) -> list[Metric]:
        """Return the metrics of a cell in the order of the report. The first one decides the cell's outcome."""

    @abc.abstractmethod
    def measure(self, spec: Any, cell: Any, context: ContextT, trial: Trial) -> None:
        """Set the cell's values. This process already computes in the cell's precision. Raises Exception: any error.
        Values that are not set yet get the error's outcome: "oom" for a lack of memory, the code of a RunnerError, or
        "failed"."""

    def close(self, spec: Any, context: ContextT) -> None:
        """Report results about several cells. Called in each process after its last cell."""

    def devices(self, spec: Any) -> list[torch.device]:
        """Return the devices that the cells run on. Raises Unsupported: this process does not see them."""
        return [choose_device(spec.device)]

    def check(self, spec: Any) -> None:
        """Raise Unsupported if no cell of the job can run here."""

    def precision_of(self, cell: Any) -> str | None:
        """Return the precision in which this process computes the cell ("fp32", "tf32", …); None: any."""
        return None

    def check_devices_answer(self, context: ContextT) -> None:
        """Check that every device still answers. Called after each cell. Raises Crashed: a device has lost its context,
        so this process is useless."""
        for device in context.devices:
            check_device_answers(device)

    def plan(self, spec: SpecBase) -> list[Unit]:
        return [Unit(title=f"{len(spec.cells())} cells", params={"first": 0})]

    def resume(self, spec: SpecBase, unit: Unit, position: int, failure: Failed) -> Unit:
        """Return a unit that reports the cell at `position` as crashed, without trying it again, and measures the
        rest."""
        title = f"{len(spec.cells())} cells, going on after cell {position + 1}"
        return Unit(title=title, params={"first": position, "crashed": failure.detail})

    def run(self, spec: SpecBase, unit: Unit, report: Reporter) -> None:
        """Measure the cells from the unit's first one on, and report each one when it is finished. Raises Unsupported:
        there is no such device, or no cell of the job can run here; Crashed: a cell destroyed this process's device
        context."""
        from workers.measure.environment import device_key
        from workers.measure.validity import verdict

        devices, cells = self.devices(spec), spec.cells()
        self.check(spec)
        report.environment(self._fingerprint(cells, devices))
        context = self.open(spec, devices, report)
        key = device_key(devices[0], len(devices) * spec.resources().nodes)
        first, crashed = unit.params.get("first", 0), unit.params.get("crashed")
        outcomes = Counter[str]()
        with frozen_objects():  # hundreds of modules, and the collector runs with each cell
            for index, cell in enumerate(cells[first:], start=first):
                report.progress(index, len(cells), cell.title)
                began = now_s()
                values = Values(self.metrics(spec, cell))
                if index == first and crashed is not None:
                    values.set_missing("crashed", crashed)
                    judged = verdict([check_measured(values)])
                else:
                    # The crashed cell reports no cursor: a unit that makes no progress must not resume there again.
                    report.cursor(index)
                    tell = functools.partial(_tell, report, index, len(cells), cell.title)
                    judged = self._try(spec, cell, context, values, tell)
                case = spec.case(cell)
                values.report(case, key, report)
                if values.outcome != "unsupported":  # without a measurement there is nothing to judge
                    report.validity(judged, case_key=case.key, title=cell.title)
                outcomes[values.outcome] += 1
                report.finished(
                    index + 1,
                    len(cells),
                    title=cell.title,
                    outcome=values.outcome,
                    headline=values.headline(),
                    seconds=now_s() - began,
                )
        self.close(spec, context)
        if crashed is None and not outcomes["ok"]:
            each = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
            detail = f"0 of {outcomes.total()} cells measured: {each}"
            report.validity(verdict([Check("measured", False, detail)]))
        report.progress(len(cells), len(cells), "done")

    def _try(
        self, spec: SpecBase, cell: Cell, context: ContextT, values: Values, tell: Callable[[str], None]
    ) -> dict[str, Any]:
        """Measure one cell, turn any error into its outcome, and return its verdict."""
        from workers.measure.memory import is_out_of_memory, short_message
        from workers.measure.validity import Monitor, verdict

        reset_process()
        trial = Trial(values, Monitor(context.devices), tell)
        try:
            self._set_precision(cell, context.devices)
            self.measure(spec, cell, context, trial)
        except NotMeasured as error:
            values.set_missing(error.outcome, str(error))
        except RunnerError as error:
            values.set_missing(error.code, str(error))
        except Exception as error:  # noqa: BLE001 - a user's own kernel may raise anything
            if is_out_of_memory(error):
                values.set_missing("oom", f"out of memory: {short_message(error)}")
            elif meaning := as_runner_error(error):
                values.set_missing(meaning.code, str(meaning))
            else:
                traceback.print_exception(error)
                values.set_missing("failed", describe(error, short_message(error)))
        self.check_devices_answer(context)
        checks = [check_measured(values), *trial.checks]
        if not self.timed:
            return verdict(checks)
        trial.monitor.watch(last=True)
        return trial.monitor.conclude(checks)

    def _set_precision(self, cell: Cell, devices: Sequence[torch.device]) -> None:
        precision = self.precision_of(cell)
        if precision is None:
            return
        for device in devices:
            if reason := why_no_precision(device, precision):
                raise Unsupported(reason)
        set_precision(precision)

    def _fingerprint(self, cells: Iterable[Cell], devices: Sequence[torch.device]) -> dict[str, Any]:
        """Return the cells' environment, with the setting of float32 products for each of their precisions."""
        import torch

        from workers.measure import environment

        settings = dict[str, str]()
        for precision, cell in {self.precision_of(cell): cell for cell in cells}.items():
            # If a precision cannot be set, its cells report that as their outcome.
            with contextlib.suppress(RunnerError):
                self._set_precision(cell, devices)
                if precision is not None:
                    settings[precision] = torch.get_float32_matmul_precision()
        fingerprint = environment.fingerprint(devices[0], *devices[1:])
        if len(set(settings.values())) > 1:
            each = ", ".join(f"{setting} for {precision}" for precision, setting in settings.items())
            fingerprint["settings"]["float32_matmul_precision"] = each
        return fingerprint


def _tell(report: Reporter, done: int, total: int, title: str, line: str) -> None:
    report.progress(done, total, f"{title}: {line}")


def check_measured(values: Values, *, alone: bool = False) -> Check:
    """Check that the cell was measured; a fault makes it suspect, a wrong result wrong, and a lack of memory suspect if
    it is the job's only cell, since then there is nothing to trust."""
    outcome = values.outcome
    detail = outcome if values.reason is None else f"{outcome}: {values.reason}"
    lacking = alone and outcome == "oom"
    cure = "; take a smaller model, batch or context" if lacking else ""
    ok = outcome not in FAULTS and not lacking
    return Check("measured", ok, f"{detail}{cure}", "wrong" if outcome == "wrong" else "suspect")
