"""Grids whose cells are operations at one size, timed and checked against an oracle.

They add the outcome "wrong" to those of all grids: the operation's results are not right, so its times are not shown.
"""

from __future__ import annotations

import abc
import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workers.jobs._grid import Context, GridRunner, Trial
from workers.jobs._limits import check_rate
from workers.jobs._values import GPU_ONLY, Metric, Values
from workers.measure.check import NOT_JUDGED, SEVERITIES, Check
from workers.measure.compilation import Compilation, compilation
from workers.measure.table import Scalar
from workers.reporter import Reporter

if TYPE_CHECKING:
    import torch

    from workers.measure.judging import Judgement, Reference
    from workers.measure.operations import Operation, OperationMemory
    from workers.measure.stopwatch import Stopwatch, Timing

PASSES = {"forward": ("forward",), "forward_backward": ("forward", "backward", "forward_backward")}
"""The passes that each mode times. The last one is the mode's whole work."""
NO_BACKWARD = "there is no backward pass"


@dataclass
class OperationContext(Context):
    """The objects that the cells of one process share."""

    watch: Stopwatch
    reference: tuple[Any, Reference] | None = None
    """(key, reference) of the last cell, the key from `reference_of`. Cells that share one follow each other."""
    profiles: list[list[Scalar]] = field(default_factory=list)
    """Rows of a table about what calls of the cells so far consist of."""
    accesses: list[list[Scalar]] = field(default_factory=list)
    """Rows of a table about single numbers of a tensor."""


class OperationRunner(GridRunner[OperationContext]):
    """The runner of a kind whose cells are operations.

    A subclass defines the operation of a cell and the rates that follow from its times.
    """

    rates: tuple[tuple[str, str], ...]
    """(metric, unit) of the rates that follow from times, for each pass and for the mode's whole work."""
    extras: tuple[Metric, ...] = ()
    """Further metrics of a cell, for its forward pass."""

    @abc.abstractmethod
    def reference_of(self, spec: Any, cell: Any) -> Any:
        """Return a key of everything that the cell's reference depends on. Cells with equal keys share a reference."""

    @abc.abstractmethod
    def make_reference(self, spec: Any, cell: Any, device: torch.device) -> Reference:
        """Make the inputs and the expected results."""

    @abc.abstractmethod
    def admit(self, spec: Any, cell: Any, device: torch.device) -> None:
        """Refuse a cell that cannot run here, before its reference is made: making it may take minutes. Raises
        Unsupported: this worker or device cannot do it; InvalidEnvironment: this host lacks something that it should
        have."""

    @abc.abstractmethod
    def operation(self, spec: Any, cell: Any, reference: Reference, device: torch.device) -> Operation:
        """Return the operation to time, with the reference's inputs, for a cell that was admitted."""

    @abc.abstractmethod
    def add_rates(
        self, spec: Any, cell: Any, milliseconds: Mapping[str | None, float], context: OperationContext, values: Values
    ) -> None:
        """Set the rates that follow from median times, and the extras. `milliseconds`: median times by phase:
        "forward", "backward" where it was timed, and None for the mode's whole work unless a pass of it is missing.
        `values`: takes the rates: one sample for each phase in `milliseconds`."""

    def open(self, spec: Any, devices: Sequence[torch.device], report: Reporter) -> OperationContext:
        from workers.measure.stopwatch import stopwatch

        return OperationContext(devices, report, stopwatch(devices[0]))

    def precision_of(self, cell: Any) -> str | None:
        precision: str = cell.dtype
        return precision

    def metrics(self, spec: Any, cell: Any) -> list[Metric]:
        passes = PASSES[spec.mode]
        backward = "backward" in passes
        phases = (None, *(name for name in passes if name != "forward_backward"))
        return [
            *(Metric(f"{name}_ms", name, "ms") for name in passes),
            *(Metric(name, phase, unit) for name, unit in (*self.rates, ("host_us", "µs")) for phase in phases),
            *([Metric("memory_before_backward_mib", None, "MiB")] if backward else []),
            Metric("peak_memory_mib", None, "MiB"),
            Metric("memory_reserved_mib", None, "MiB"),
            *self.extras,
            Metric("output_error", None, "fraction"),
            *([Metric("gradient_error", None, "fraction")] if backward else []),
        ]

    def measure(self, spec: Any, cell: Any, context: OperationContext, trial: Trial) -> None:
        from workers.measure.memory import is_out_of_memory, short_message
        from workers.measure.process_settings import set_back, settings

        self.admit(spec, cell, context.device)
        try:
            reference = self._reference(spec, cell, context)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            trial.values.set_missing(
                "unknown", f"no memory for the inputs and their float64 oracle: {short_message(error)}"
            )
            return
        changed, wrong, before = list[str](), None, settings()
        try:
            wrong = self._examine(spec, cell, reference, context, trial)
        finally:
            trial.checks += set_back(before)
            if changed := reference.changed():
                # The next cell gets fresh inputs, even if this one failed.
                context.reference = None
        if changed:
            detail = f"it changed {' and '.join(changed)} in place, and other calls get the same tensors"
            wrong = detail if wrong is None else f"{detail}; {wrong}"
        if wrong is not None:
            trial.values.overrule(wrong, but=("output_error", "gradient_error"))

    def _reference(self, spec: Any, cell: Any, context: OperationContext) -> Reference:
        key = self.reference_of(spec, cell)
        if context.reference is None or context.reference[0] != key:
            context.reference = None
            context.reference = key, self.make_reference(spec, cell, context.device)
        return context.reference[1]

    def _examine(
        self, spec: Any, cell: Any, reference: Reference, context: OperationContext, trial: Trial
    ) -> str | None:
        """Check the cell's operation, time it, and check it again. Returns the fault in its results, or None."""
        from workers.measure.judging import BACKWARD, OTHERS, judge
        from workers.measure.memory import OutOfMemory, translate_oom

        values = trial.values
        operation = self.operation(spec, cell, reference, context.device)
        passes: Sequence[str] = PASSES[spec.mode]
        if reference.grad_out is not None and operation.grad_out is None:
            passes = ("forward",)
            values.set_missing("unsupported", NO_BACKWARD, filter(self._needs_backward, self.metrics(spec, cell)))
        with translate_oom("the first call"):
            first = judge(operation, reference)
        set_errors(values, first)
        # Inputs are checked now as well: an input that was changed twice may look unchanged in the end.
        if first.wrong or reference.changed():
            return first.wrong
        for draw in reference.checked:
            with translate_oom(f"the call with {draw.name}"):
                found = judge(operation, reference, draw)
            if found.wrong:
                set_errors(values, first, found)
                return f"with {draw.name}: {found.wrong}"
        for how, options in (OTHERS if operation.grad_out is None else BACKWARD).items():
            # It needs more memory than calls that are timed.
            with contextlib.suppress(OutOfMemory), translate_oom(f"the call with {how}"):
                found = judge(operation, reference, reference.checked[0], **options)
                if found.wrong:
                    set_errors(values, first, found)
                    return f"with {how}: {found.wrong}"
        timings, timed = self._time(spec, operation, reference, passes, context, trial)
        set_errors(values, first, *timed)
        if wrong := next((judgement.wrong for judgement in timed if judgement.wrong), None):
            return f"right when it was checked, wrong in a call that was timed: {wrong}"
        draw = reference.checked[0]
        with translate_oom("the call after timing"):
            last = judge(operation, reference, draw)
        if last.wrong:
            set_errors(values, first, *timed, last)
            return f"right at first, wrong after timing, with {draw.name}: {last.wrong}"
        self._report(spec, cell, operation, timings, context, trial)
        return None

    def _report(
        self,
        spec: Any,
        cell: Any,
        operation: Operation,
        timings: Mapping[str, Timing],
        context: OperationContext,
        trial: Trial,
    ) -> None:
        """Set the values that follow from the times, measure the memory, and judge their validity."""
        from workers.measure.operations import measure_memory

        values = trial.values
        trial.checks += combined({name: check_timing(timing, context.device) for name, timing in timings.items()})
        set_times(values, timings)
        milliseconds: dict[str | None, float] = {
            name: statistics.median(timing.samples) for name, timing in timings.items() if name != "forward_backward"
        }
        if spec.mode in timings:
            milliseconds[None] = statistics.median(timings[spec.mode].samples)
            set_whole(values, timings[spec.mode], measure_memory(operation, context.device))
        self.add_rates(spec, cell, milliseconds, context, values)
        rates = [values.samples("tflops", phase) for phase in milliseconds]
        if fastest := max((rate[0] for rate in rates if rate), default=None):
            trial.checks.append(check_rate(fastest, cell.dtype, context.device, context.report.ceilings))

    def _needs_backward(self, metric: Metric) -> bool:
        """Return True if a metric is unknown without a backward pass, in a mode that has one."""
        if metric.phase is None:
            return metric.name != "output_error" and metric not in self.extras
        return metric.phase != "forward"

    def _time(
        self,
        spec: Any,
        operation: Operation,
        reference: Reference,
        passes: Sequence[str],
        context: OperationContext,
        trial: Trial,
    ) -> tuple[dict[str, Timing], list[Judgement]]:
        """Return the times of the passes, and the judgements on some of the calls that were timed."""
        from workers.measure.judging import judge_results
        from workers.measure.operations import time_passes

        others = reference.checked[0]
        timings: dict[str, Timing] = {}
        began: list[Compilation] = []
        ended: list[Compilation] = []
        judged: list[Judgement] = []
        trial.monitor.start(warm=False)
        for name in passes:
            timings |= time_passes(
                operation,
                context.watch,
                [name],
                measuring=lambda: began.append(compilation()),
                examine=lambda out, gradients: judged.append(judge_results(out, gradients, reference, others)),
                holding=lambda: reference.holding(others),
                warmup=spec.warmup_steps,
                calls=spec.measure_steps,
            )
            ended.append(compilation())
            trial.monitor.watch()
        trial.checks.append(check_recompiles(began, ended))
        return timings, judged


def set_errors(values: Values, *judgements: Judgement) -> None:
    """Set the metrics of the output's error and of the gradients' error, each to the largest of the judgements."""
    for name, is_output in (("output_error", True), ("gradient_error", False)):
        errors = [
            error.relative
            for judgement in judgements
            for index, error in judgement.errors.items()
            if (index == 0) is is_output
        ]
        if errors:
            finite = all(map(math.isfinite, errors))
            values.set(name, None, [max(errors)] if finite else None, "the results are not finite")


def set_times(values: Values, timings: Mapping[str, Timing]) -> None:
    for name, timing in timings.items():
        values.set(f"{name}_ms", name, timing.samples)
        if name != "forward_backward":
            values.set("host_us", name, timing.host_us, GPU_ONLY)


def set_whole(values: Values, timing: Timing, memory: OperationMemory) -> None:
    """Set the metrics of the mode's whole work: the host's time for it, and its memory."""
    values.set("host_us", None, timing.host_us, GPU_ONLY)
    before, peak, reserved = memory.before_backward_mib, memory.peak_mib, memory.reserved_mib
    values.set("memory_before_backward_mib", None, None if before is None else [before], GPU_ONLY)
    values.set("peak_memory_mib", None, None if peak is None else [peak], memory.how)
    values.set("memory_reserved_mib", None, None if reserved is None else [reserved], GPU_ONLY)


def check_timing(timing: Timing, device: torch.device) -> list[Check]:
    from workers.measure import validity

    return [
        *validity.check_stability(timing.samples, on_gpu=device.type == "cuda"),
        validity.check_steady(timing.steady, timing.warmup, too_slow=timing.too_slow, hidden=timing.hidden),
        validity.check_host_bound(timing),
    ]


def check_recompiles(began: Sequence[Compilation], ended: Sequence[Compilation]) -> Check:
    """Check that nothing was compiled, or fell back to eager, while samples were taken. Warm-up calls may compile.
    `began`: the counters when each pass's samples began. `ended`: the counters when each pass's samples were complete.
    """
    spans = list(zip(began, ended, strict=True))
    graphs = sum(after.graphs - before.graphs for before, after in spans)
    not_compiled = sum(after.frames_not_compiled - before.frames_not_compiled for before, after in spans)
    detail = f"{graphs} graphs compiled while it was timed, {not_compiled} functions left to eager"
    return Check("recompiles", graphs == not_compiled == 0, detail, "invalid")


def combined(checks_by_pass: Mapping[str, Sequence[Check]]) -> list[Check]:
    """Combine the passes' checks of each name into one: it is ok if all are; otherwise it names the passes of
    its severity, the worst."""
    by_name: dict[str, dict[str, Check]] = {}
    for pass_name, checks in checks_by_pass.items():
        for check in checks:
            by_name.setdefault(check.name, {})[pass_name] = check
    result = []
    for name, checks_of in by_name.items():
        failed = {pass_name: check for pass_name, check in checks_of.items() if not check.ok}
        severities = {check.severity for check in (failed or checks_of).values()}
        severity = next((worst for worst in SEVERITIES if worst in severities), NOT_JUDGED)
        shown = {pass_name: check for pass_name, check in failed.items() if check.severity == severity} or checks_of
        detail = "; ".join(f"{pass_name}: {check.detail}" for pass_name, check in shown.items())
        result.append(Check(name, not failed, detail, severity))
    return result
