"""Runs `ddp`: a data-parallel training step, timed in turns with the same step without communication.

The ranks are separate processes, which this job's process starts and watches; rank.py has their part. This process
combines their results (values.py, tables.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.specs.ddp import FULLY_SHARDED, DdpSpec
from parallel.process_group import START_TIMEOUT_S, RanksFailed
from workers.jobs import _reference
from workers.jobs._base import Unit
from workers.jobs._ranks import RankReports, devices_of_ranks, job_failure
from workers.jobs._training.metrics import precision_checks
from workers.jobs._values import Values
from workers.jobs.ddp.buckets import PREDICTED, predicts, report_buckets
from workers.jobs.ddp.stragglers import Lateness, work_of
from workers.jobs.ddp.tables import report_snapshots, report_tables, report_traces, values_rows
from workers.jobs.ddp.timelines import ranks_of
from workers.jobs.ddp.values import add_values, metrics, steps_of, turns_of
from workers.measure.check import Check
from workers.measure.errors import NotMeasured
from workers.measure.host_memory import bound_memory
from workers.outcome import InvalidEnvironment, RunnerError, Unsupported
from workers.reporter import Reporter
from workers.torch_host import MARK, set_precision, why_no_precision

if TYPE_CHECKING:
    import torch

    from app.specs import Case
    from workers.jobs.ddp.rank import Extent
    from workers.measure.validity import Monitor

LOOK_S = 0.5
"""Seconds between two looks at the devices while ranks measure."""
RUNNER_ERRORS: dict[str, type[RunnerError]] = {
    error.code: error for error in (RunnerError, Unsupported, InvalidEnvironment)
}


class DdpRunner:
    kind = "ddp"

    def plan(self, spec: DdpSpec) -> list[Unit]:
        """Plan one unit, whose process starts the ranks."""
        ranks = "1 rank" if spec.world_size == 1 else f"{spec.world_size} ranks"
        title = spec.title(spec.strategy, ranks)
        return [Unit(title=title if spec.step_code is None else f"{title}, {ranks}")]

    def run(self, spec: DdpSpec, unit: Unit, report: Reporter) -> None:
        """Start the ranks, and report their measurements. Running out of memory is a result. Raises Unsupported: too
        few GPUs, or ranks that do not support the spec's options; Crashed: a rank died, or made no step in time."""
        measure(spec, spec.case(), unit.title, report)


RUNNER = DdpRunner()


@dataclass(frozen=True)
class Measured:
    """What the ranks have found."""

    ranks: list[dict[str, Any]] | NotMeasured
    """Of each rank what it returned; or why there is nothing."""
    values: Values
    devices: Sequence[torch.device]
    best_bucket_mb: float | None = None
    """The size of a bucket that should leave the least communication exposed."""


def measure(spec: DdpSpec, case: Case, title: str, report: Reporter, *, extent: Extent = "all") -> Measured:
    """Run the ranks, and report all that they find as this case. `extent`: "all" or "look"."""
    from workers.measure import environment
    from workers.measure.returned import check_constant, check_finite
    from workers.measure.validity import Monitor

    devices, best = choose_devices(spec), None
    let_memory_grow(spec)
    set_precision(spec.precision)
    report.environment(environment.fingerprint(devices[0], *devices[1:]))
    monitor = Monitor(devices)
    every = run_ranks([spec], monitor, report, extent)
    found = every if isinstance(every, NotMeasured) else every[0]
    values = Values(metrics(spec, () if isinstance(found, NotMeasured) else found[0]["phases"]))
    if isinstance(found, NotMeasured):
        monitor.watch(last=True)
        values, checks = _reference.not_measured(values.metrics, found)
    else:
        values.set("device_memory_mib", None, *monitor.device_memory_mib())
        checks = add_values(values, spec, devices, found, report.ceilings)
        checks += [Check(**check) for check in found[0]["parts"]]
        checks += precision_checks(spec, found[0]["model_precision"])
        lateness = Lateness(ranks_of(found), work_of(found), monitor.clocks_mhz(), max(one["groups"] for one in found))
        if (note := lateness.check()) is not None:
            checks.append(note)
        if spec.trace:
            report_traces(spec, found, lateness.ranks, report)
        if spec.snapshot:
            report_snapshots(spec, found, report)
        report_tables(spec, found, lateness, report)
        returned = values_rows(spec, found)
        constant = check_constant(returned) if found[0]["may_train"] else []
        checks = [*check_finite(returned), *constant, *checks]
        if predicts(spec):
            best, doubt = report_buckets(spec, found, turns_of(found, "silent"), values, report)
            if doubt is not None:
                checks.append(Check(PREDICTED, False, doubt, "note"))
    report.validity(monitor.conclude(checks), case.key, title)
    values.report(case, environment.device_key(devices[0], len(devices) * spec.nodes), report)
    return Measured(found, values, devices, best)


def times(steps: Sequence[DdpSpec], report: Reporter) -> tuple[list[list[float]], Sequence[torch.device]]:
    """Run ranks with the steps of these specs alone, one spec after the other. Report what a single one returned;
    return the ms of the slowest rank in each step of each spec, and the devices. Raises NotMeasured: the memory did not
    suffice."""
    from workers.measure import returned
    from workers.measure.validity import Monitor

    devices = choose_devices(steps[0])
    let_memory_grow(steps[0])
    set_precision(steps[0].precision)
    each = run_ranks(steps, Monitor(devices), report, "times")
    if isinstance(each, NotMeasured):
        raise each
    if len(steps) == 1:
        report.table(returned.VALUES, returned.COLUMNS, values_rows(steps[0], each[0]))
    return [steps_of(turns_of(found, step.strategy))[0] for step, found in zip(steps, each, strict=True)], devices


def choose_devices(spec: DdpSpec) -> list[torch.device]:
    """Return the ranks' devices: a GPU for each, or the CPU. Raises Unsupported: this process sees too few GPUs, or
    they lack the precision."""
    devices = devices_of_ranks(spec)
    if spec.backend == "gloo":
        if MARK in os.environ:
            bound_memory(spec.world_size)
        return devices
    for device in devices:
        if reason := why_no_precision(device, spec.precision):
            raise Unsupported(reason)
    return devices


def let_memory_grow(spec: DdpSpec) -> None:
    """Let the allocator of fully sharded ranks extend its segments, unless the worker's environment configures it.

    Units are allocated and freed in turn, and segments of fixed sizes would leave gaps too small for the next unit.
    """
    chosen = any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if spec.backend == "nccl" and spec.strategy in FULLY_SHARDED and not chosen:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def run_ranks(
    specs: Sequence[DdpSpec], monitor: Monitor, report: Reporter, extent: Extent
) -> list[list[dict[str, Any]]] | NotMeasured:
    """Start the ranks, which measure each spec; return for each what the ranks found, or why there is nothing. Raises
    Crashed: a rank died or made no step in time; RunnerError: a rank raised an error, or could not start; a specific
    class if the error's meaning is known."""
    from workers.jobs.ddp.rank import run_rank

    spec = specs[0]
    compiles = any(one.compile for one in specs)
    ranks = RankReports(
        run_rank,
        [[one.model_dump(mode="json") for one in specs], str(report.scratch), extent],
        world_size=spec.world_size,
        backend=spec.backend,
        folder=report.scratch / "ranks",
        step_timeout_s=max(spec.step_timeout_s, START_TIMEOUT_S) if compiles else spec.step_timeout_s,
        nodes=spec.nodes,
    )
    found: dict[int, list[dict[str, Any]]] = {}
    failures: dict[int, dict[str, Any]] = {}
    measuring = False
    while len(found) < spec.world_size:
        monitor.watch()
        try:
            report_of_rank = ranks.next(LOOK_S)
        except Exception as error:
            if not_measured := why_not_measured(failures):
                ranks.report_logs(report, of=failures)
                return not_measured
            blamed = error.rank if isinstance(error, RanksFailed) else None
            failure = job_failure(error, started=ranks.reported)
            ranks.report_logs(report, failure, blamed)
            raise known_failure(failures, blamed) or failure from error
        if report_of_rank is None:
            continue
        rank, message = report_of_rank
        if "failed" in message:
            failures[rank] = message
        elif "found" in message:
            found[rank] = message["found"]
        elif "measuring" in message and not measuring:
            measuring = True
            monitor.start(warm=message["measuring"])
        elif "message" in message:
            report.progress(message["done"], message["total"], message["message"])
    ranks.join()
    monitor.watch(last=True)
    ranks.report_logs(report)
    ranks.report_nodes(report)
    return [[found[rank][at] for rank in range(spec.world_size)] for at in range(len(specs))]


def why_not_measured(failures: Mapping[int, Mapping[str, Any]]) -> NotMeasured | None:
    """Return what a rank says about its memory or about wrong results; errors of other ranks may be consequences. None
    if no rank does."""
    from workers.measure.judging import WrongResult
    from workers.measure.memory import OutOfMemory

    for error in (WrongResult, OutOfMemory):
        for rank, failure in failures.items():
            if failure["failed"] == error.outcome:
                return error(f"rank {rank}: {failure['detail']}")
    return None


def known_failure(failures: Mapping[int, Mapping[str, Any]], blamed: int | None) -> RunnerError | None:
    """Return the failure that the blamed rank has reported; None if it is unknown."""
    failure = None if blamed is None else failures.get(blamed)
    error_class = None if failure is None else RUNNER_ERRORS.get(failure["failed"])
    return None if failure is None or error_class is None else error_class(f"rank {blamed}: {failure['detail']}")
