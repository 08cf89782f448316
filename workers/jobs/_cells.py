"""Jobs that are grids of cells, each an operation at one size, timed and checked against an oracle.

All cells of a job run in one process as long as none takes the process down; after a crash the rest goes on in a fresh
one, and the cell that crashed says so. Whatever else becomes of a cell is an outcome of it too: "oom", "unsupported",
"wrong" (its results are not what they should be, so its times are not shown), "failed".
"""

from __future__ import annotations

import abc
import functools
import gc
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from workers.jobs._base import Reporter, Unit
from workers.jobs._judging import compare
from workers.outcome import Failed, RunnerError
from workers.torch_host import check_device_answers, choose_device, translated

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from workers.measure.compilation import Compilation
    from workers.measure.operations import Operation, Stopwatch
    from workers.measure.validity import Check

PASSES = {"forward": ("forward",), "forward_backward": ("forward", "backward", "forward_backward")}
"""What each mode times."""


FAULTS = ("crashed", "failed", "invalid_environment", "wrong")
"""Outcomes that are no result but somebody's fault: of the implementation or of this host. What is "unsupported" here,
or takes more memory than there is, was measured as well as it can be.
"""


class Cell(Protocol):
    """One case of a job."""

    @property
    def title(self) -> str:
        """For progress lines and checks."""
        ...

    def coordinates(self) -> dict[str, Any]:
        """What tells it from the job's other cells."""
        ...


class GridSpec(Protocol):
    """What a spec of cells has."""

    @property
    def mode(self) -> Literal["forward", "forward_backward"]: ...
    @property
    def device(self) -> str: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def measure_steps(self) -> int: ...

    def cells(self) -> Sequence[Any]:
        """Its cells, in the order they run."""
        ...

    def common(self) -> dict[str, Any]:
        """Coordinates that all cells share."""
        ...


@dataclass(frozen=True)
class Metric:
    """A metric's name, the pass it belongs to, and its unit."""

    name: str
    phase: str | None
    unit: str


class Values:
    """What was found for each metric of a cell: samples, or an outcome and the reason why there are none."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.metrics = metrics
        self._found: dict[tuple[str, str | None], tuple[str, str | None, Sequence[float] | None]] = {}

    def set(self, name: str, phase: str | None, samples: Sequence[float] | None, reason: str) -> None:
        """Samples; or None, and why they are unknown."""
        self._found[name, phase] = ("unknown", reason, None) if samples is None else ("ok", None, samples)

    def rest(self, outcome: str, reason: str, of: Sequence[str] | None = None) -> None:
        """Every metric for which nothing was found yet has this outcome; `of`: only those names or phases."""
        for metric in self.metrics:
            if of is None or metric.name in of or metric.phase in of:
                self._found.setdefault((metric.name, metric.phase), (outcome, reason, None))

    @property
    def outcome(self) -> str:
        """The cell's as a whole: of what went wrong in any part of it; else of its first metric, the forward pass."""
        outcomes = [self._found[metric.name, metric.phase][0] for metric in self.metrics]
        return next((outcome for outcome in outcomes if outcome in FAULTS), outcomes[0])

    def report(self, case: Mapping[str, Any], report: Reporter) -> None:
        """One measurement per metric."""
        from workers.measure.measurement import Measurement

        for metric in self.metrics:
            outcome, reason, samples = self._found[metric.name, metric.phase]
            report.measure(Measurement(case, metric.phase, metric.name, metric.unit, outcome, reason, samples))


@dataclass(frozen=True)
class Problem:
    """Random inputs of one size, and what an operation should make of them."""

    inputs: tuple[Tensor, ...]
    grad_out: Tensor | None
    expected: tuple[Tensor, ...]
    """In float64: the output and, unless `grad_out` is None, the inputs' gradients."""
    tolerance: float


@dataclass
class Bench:
    """One process at work on a job's cells."""

    device: torch.device
    watch: Stopwatch
    tell: Callable[[str], None] = print
    """Takes what is being done for the current cell, for the job's progress."""
    times: dict[str, Sequence[float]] = field(default_factory=dict)
    """Of every pass of every cell, by title."""
    recompiled: list[str] = field(default_factory=list)
    """Cells in which something was compiled while they were timed, or fell back to eager."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Of the cells so far, crashed ones included."""
    problem: tuple[Any, Problem] | None = None
    """The last one, by what it depends on: cells that share it follow each other."""


class CellsRunner(abc.ABC):
    """The runner of a kind whose jobs are cells. A subclass says what a cell computes, and what its times mean."""

    kind: str
    rates: tuple[tuple[str, str], ...]
    """(metric, unit) of what follows from each pass's time."""
    extras: tuple[Metric, ...] = ()
    """Further metrics of a cell."""

    @abc.abstractmethod
    def problem_of(self, spec: Any, cell: Any) -> Any:
        """What the cell's problem depends on; equal for cells that share it."""

    @abc.abstractmethod
    def make_problem(self, spec: Any, cell: Any, device: torch.device) -> Problem:
        """Inputs and expected results."""

    @abc.abstractmethod
    def admit(self, spec: Any, cell: Any, device: torch.device) -> None:
        """Make the process ready for the cell, or refuse it. Comes before its problem, which may take minutes to make.

        Raises:
            Unsupported: this worker or device cannot do it.
            InvalidEnvironment: it could, if this host were in order.
        """

    @abc.abstractmethod
    def operation(self, spec: Any, cell: Any, problem: Problem, device: torch.device) -> Operation:
        """What is timed, with these inputs, of a cell that was admitted."""

    @abc.abstractmethod
    def add_rates(
        self, spec: Any, cell: Any, times: Mapping[str, Sequence[float]], bench: Bench, values: Values
    ) -> None:
        """Set what follows from the times in ms, and the extras."""

    def prepare(self, spec: Any, cell: Any, problem: Problem, bench: Bench) -> None:  # noqa: B027 - most have nothing
        """What the cell wants done once, untimed, before its operation is called."""

    def check(self, spec: Any) -> None:  # noqa: B027 - most have nothing to check
        """Refuse, with Unsupported, a job none of whose cells can run here."""

    def metrics(self, spec: GridSpec) -> list[Metric]:
        """The metrics of each cell, in the order they are reported."""
        passes = PASSES[spec.mode]
        backward = "backward" in passes
        return [
            *(Metric(f"{name}_ms", name, "ms") for name in passes),
            *(Metric(name, phase, unit) for name, unit in self.rates for phase in passes),
            *([Metric("memory_before_backward_mib", "backward", "MiB")] if backward else []),
            Metric("peak_memory_mib", None, "MiB"),
            *self.extras,
            Metric("output_error", "forward", "fraction"),
            *([Metric("gradient_error", "backward", "fraction")] if backward else []),
        ]

    def plan(self, spec: GridSpec) -> list[Unit]:
        """One unit for all cells."""
        return [Unit(title=f"{len(spec.cells())} cells", params={"first": 0})]

    def resume(self, spec: GridSpec, unit: Unit, done: int, failure: Failed) -> Unit:
        """The cells from the one that crashed, which is reported as such and not tried again."""
        return Unit(
            title=f"{unit.title.partition(',')[0]}, after {done + 1}", params={"first": done, "crashed": failure.detail}
        )

    def run(self, spec: GridSpec, unit: Unit, report: Reporter) -> None:
        """Measure the cells from the unit's first one on, and report each when it is finished.

        Raises:
            Unsupported: there is no such device, or nothing that this worker has was asked for.
            Crashed: a cell took this process's device context with it.
        """
        from workers.measure import environment
        from workers.measure.operations import stopwatch
        from workers.measure.validity import Monitor

        device = choose_device(spec.device)
        self.check(spec)
        report.environment(environment.fingerprint(device))
        monitor = Monitor(device)
        bench = Bench(device, stopwatch(device))
        common = {**spec.common(), "device": environment.device_name(device)}
        cells = spec.cells()
        first, crashed = unit.params.get("first", 0), unit.params.get("crashed")
        for index in range(first, len(cells)):
            report.progress(index, len(cells), cells[index].title)
            bench.tell = functools.partial(_tell, report, index, len(cells), cells[index].title)
            values = Values(self.metrics(spec))
            if index == first and crashed is not None:
                values.rest("crashed", crashed)
            else:
                self._measure(spec, cells[index], bench, values)
                monitor.watch()
            bench.outcomes[values.outcome] += 1
            values.report({**cells[index].coordinates(), **common}, report)
        monitor.watch(last=True)
        report.validity(monitor.conclude(checks(bench)))
        report.progress(len(cells), len(cells), "done")

    def _measure(self, spec: GridSpec, cell: Cell, bench: Bench, values: Values) -> None:
        from workers.measure.memory import OutOfMemory, gist, is_out_of_memory

        start_afresh(bench.device)
        try:
            self._try(spec, cell, bench, values)
        except OutOfMemory as error:
            values.rest("oom", str(error))
        except RunnerError as error:
            values.rest(error.code, str(error))
        except Exception as error:  # noqa: BLE001 - somebody's own kernel may raise anything
            if is_out_of_memory(error):
                values.rest("oom", f"out of memory in the first call: {gist(error)}")
            elif meaning := translated(error):
                values.rest(meaning.code, str(meaning))
            else:
                traceback.print_exc()
                values.rest("failed", f"{type(error).__name__}: {gist(error)}")
        check_device_answers(bench.device)

    def _try(self, spec: GridSpec, cell: Cell, bench: Bench, values: Values) -> None:
        from workers.measure.compilation import compilation
        from workers.measure.memory import gist, is_out_of_memory
        from workers.measure.operations import measure_memory, time_passes

        self.admit(spec, cell, bench.device)
        key = self.problem_of(spec, cell)
        if bench.problem is None or bench.problem[0] != key:
            bench.problem = None
            try:
                bench.problem = key, self.make_problem(spec, cell, bench.device)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                values.rest("unknown", f"no memory for the inputs and their float64 oracle: {gist(error)}")
                return
        problem = bench.problem[1]
        operation = self.operation(spec, cell, problem, bench.device)
        self.prepare(spec, cell, problem, bench)
        passes: Sequence[str] = PASSES[spec.mode]
        if problem.grad_out is not None and operation.grad_out is None:
            passes = ["forward"]
            values.rest("unsupported", "there is no backward pass", ("backward", "forward_backward"))
        if reason := compare(operation, problem, values):
            values.rest("wrong", reason)
            return
        compiled = compilation()
        times = time_passes(operation, bench.watch, passes, warmup=spec.warmup_steps, calls=spec.measure_steps)
        if recompiled(compiled, compilation()):
            bench.recompiled.append(cell.title)
        for name, samples in times.items():
            values.set(f"{name}_ms", name, samples, "")
            bench.times[f"{name} of {cell.title}"] = samples
        self.add_rates(spec, cell, times, bench, values)
        memory = measure_memory(operation, bench.device)
        before, peak = memory.before_backward_mib, memory.peak_mib
        if "backward" in passes:
            reason = "known on GPUs only"
            values.set("memory_before_backward_mib", "backward", None if before is None else [before], reason)
        values.set("peak_memory_mib", None, None if peak is None else [peak], memory.how)


def _tell(report: Reporter, done: int, total: int, title: str, line: str) -> None:
    report.progress(done, total, f"{title}: {line}")


def start_afresh(device: torch.device) -> None:
    """Let nothing of the last cell reach the next: no cached memory, and no compiled code with its guards, of which
    the compiler keeps a few only before it gives up or turns to dynamic shapes.
    """
    import torch

    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def recompiled(before: Compilation, after: Compilation) -> bool:
    """Whether something was compiled, or given up, between the two."""
    return after.graphs > before.graphs or after.frames_not_compiled > before.frames_not_compiled


def checks(bench: Bench) -> list[Check]:
    """What the times themselves tell of their validity."""
    from workers.measure.validity import Check, check_many

    cells = ", ".join(bench.recompiled) or "in no cell"
    return [
        check_measured(bench.outcomes),
        check_many(bench.times),
        Check("recompiles", not bench.recompiled, cells, "invalid"),
    ]


def check_measured(outcomes: Mapping[str, int]) -> Check:
    """How many of this process's cells there are times of. No times at all, or a cell with a fault, make it suspect.

    After a crash that is the cells from the crashed one on: what it says of those before is lost with the process,
    but the crashed cell alone makes the job suspect.
    """
    from workers.measure.validity import Check

    others = [f"{count} {outcome}" for outcome, count in sorted(outcomes.items()) if outcome != "ok"]
    detail = f"{outcomes.get('ok', 0)} of {sum(outcomes.values())} cells measured"
    ok = outcomes.get("ok", 0) > 0 and not set(FAULTS) & set(outcomes)
    return Check("measured", ok, ": ".join([detail, *([", ".join(others)] if others else [])]))
