"""Runs `collective`: the ranks are started once for all cells, and report each cell when they have measured it.

A cell whose tensors do not fit is `oom`, and one whose results are wrong has no times. If a rank raises an error in a
cell, that cell has the error's outcome, and new ranks continue with the next one. A rank that dies, or makes no step in
time, fails the job as `crashed`; the cells that were finished are kept.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from app.specs.collective import CollectiveCell, CollectiveSpec
from parallel.accounting import algorithm_bandwidth, bus_bandwidth
from parallel.process_group import RanksFailed
from workers.jobs._base import Unit
from workers.jobs._grid import Context, GridRunner, Trial
from workers.jobs._latency_fits import FIT_COLUMNS, Times, fit_rows
from workers.jobs._ranks import RankReports, devices_of_ranks, job_failure
from workers.jobs._values import GPU_ONLY, Metric
from workers.measure.check import Check, check_cores
from workers.measure.table import Column, Scalar
from workers.outcome import Failed, RunnerError, Unsupported
from workers.reporter import Reporter

if TYPE_CHECKING:
    import torch

LOOK_S = 0.5
"""Seconds between two looks at the devices while ranks measure."""
STEP_TIMEOUT_S = 60.0
SLOWEST_BYTES_PER_S = 1e8
"""Ranks that make, send or check their tensors more slowly than this count as hanging."""
RANKS_COLUMNS = Column.parse(
    "operation, dtype, size_mb: number MB, rank: integer, device, threads: integer, "
    "warmup_steps: integer steps, median_ms: number ms, min_ms: number ms, max_ms: number ms, "
    "slowest_steps: integer steps"
)
"""Columns of the table `ranks`; `slowest_steps` counts the steps in which this rank was the slowest."""


NODE_COLUMN = Column("node", "integer")
"""The last one for jobs on several nodes."""


class RankRaised(Exception):
    """A rank has reported that it raises an error in a cell."""

    def __init__(self, rank: int, outcome: str, reason: str) -> None:
        self.outcome = outcome
        super().__init__(f"rank {rank}: {reason}")


@dataclass
class CollectiveContext(Context):
    """The objects that all cells share."""

    ranks: RankReports | None = None
    """The ranks that measure the next cells; None if none are running."""
    waiting: dict[int, deque[tuple[int, Mapping[str, Any]]]] = field(default_factory=dict)
    """Reports about cells that this process has not reached yet, with their ranks, by the cells' positions."""
    launches: int = 0
    failure: RunnerError | None = None
    """The failure that keeps further cells from being measured."""
    rows: list[list[Scalar]] = field(default_factory=list)
    """Rows of the table `ranks`."""
    times: Times = field(default_factory=dict)
    """Seconds of the calls of each operation, data type and size."""


class CollectiveRunner(GridRunner[CollectiveContext]):
    kind = "collective"

    def devices(self, spec: CollectiveSpec) -> list[torch.device]:
        return devices_of_ranks(spec)

    def check(self, spec: CollectiveSpec) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_backend_available(spec.backend):
            raise Unsupported(f"backend {spec.backend}: this worker's torch was built without it")

    def open(self, spec: CollectiveSpec, devices: Sequence[torch.device], report: Reporter) -> CollectiveContext:
        return CollectiveContext(devices, report)

    def metrics(self, spec: CollectiveSpec, cell: CollectiveCell) -> list[Metric]:
        return [
            Metric("latency_ms", None, "ms"),
            Metric("skew_ms", None, "ms"),
            Metric("algorithm_gb_per_s", None, "GB/s"),
            Metric("bus_gb_per_s", None, "GB/s"),
            Metric("host_us", None, "µs"),
            Metric("tensor_mib", None, "MiB"),
        ]

    def resume(self, spec: Any, unit: Unit, position: int, failure: Failed) -> None:  # type: ignore[override]
        """Let the job fail: a dead rank, unlike a cell's own error, is not a result of the cell."""

    def check_devices_answer(self, context: CollectiveContext) -> None:
        """End the job after a rank has died. This process itself leaves the GPUs to the ranks."""
        if context.failure is not None:
            raise context.failure

    def measure(self, spec: CollectiveSpec, cell: CollectiveCell, context: CollectiveContext, trial: Trial) -> None:
        from workers.measure.memory import OutOfMemory

        cells = spec.cells()
        position = cells.index(cell)
        if context.ranks is None:
            context.ranks = launch_ranks(spec, cells, position, context)
        try:
            answers = listen(context.ranks, position, spec.world_size, context, trial)
        except RankRaised as error:
            context.ranks.join()
            context.ranks.report_logs(context.report)
            context.ranks = None
            trial.values.set_missing(error.outcome, str(error))
            return
        if reason := next((answer["reason"] for answer in answers if answer.get("reason")), None):
            raise OutOfMemory(reason)
        self._take(spec, cell, answers, context, trial)

    def _take(
        self,
        spec: CollectiveSpec,
        cell: CollectiveCell,
        answers: Sequence[Mapping[str, Any]],
        context: CollectiveContext,
        trial: Trial,
    ) -> None:
        """Set the cell's values from its ranks' measurements."""
        from workers.measure.validity import check_stability, check_steady

        size = answers[0]["bytes"]
        steps = list(zip(*(answer["times_ms"] for answer in answers), strict=True))
        latency = [max(times) for times in steps]
        median_ms = statistics.median(latency)
        values = trial.values
        values.set("latency_ms", None, latency)
        values.set("skew_ms", None, [max(times) - min(times) for times in steps])
        values.set("algorithm_gb_per_s", None, [1e-9 * algorithm_bandwidth(size, 1e-3 * median_ms)])
        bus = bus_bandwidth(cell.operation, size, 1e-3 * median_ms, spec.world_size)
        values.set("bus_gb_per_s", None, [1e-9 * bus])
        values.set("tensor_mib", None, [size / 2**20])
        on_gpu = spec.backend == "nccl"
        host_us = (
            [max(each) for each in zip(*(answer["host_us"] for answer in answers), strict=True)] if on_gpu else None
        )
        values.set("host_us", None, host_us, GPU_ONLY)
        first = answers[0]
        trial.checks += [
            *check_stability(latency, on_gpu=on_gpu, metric="latency_ms"),
            check_steady(first["steady"], first["warmup"], too_slow=first["too_slow"], hidden=first["hidden_drift"]),
            check_hidden(answers, spec.measure_steps) if on_gpu else check_cores(spec.resources().devices, "ranks"),
        ]
        wrong = next(
            (f"rank {rank}: {answer['wrong']}" for rank, answer in enumerate(answers) if answer["wrong"]), None
        )
        if wrong is not None:
            values.overrule(wrong)
            return
        of_size = context.times.setdefault((cell.operation, cell.dtype), {})
        of_size[size] = [1e-3 * time_ms for time_ms in latency]
        context.rows += [rank_row(spec, cell, rank, answer, latency, context) for rank, answer in enumerate(answers)]

    def close(self, spec: CollectiveSpec, context: CollectiveContext) -> None:
        """Report each rank's measurements, once the ranks have ended."""
        if context.ranks is not None:
            context.ranks.join()
            context.ranks.report_logs(context.report)
            context.ranks.report_nodes(context.report)
        if context.rows:
            columns = (*RANKS_COLUMNS, *([NODE_COLUMN] if spec.nodes > 1 else []))
            context.report.table("ranks", columns, context.rows)
            context.report.table("fit", FIT_COLUMNS, fit_rows(context.times, spec.seed))


RUNNER = CollectiveRunner()


def launch_ranks(
    spec: CollectiveSpec, cells: Sequence[CollectiveCell], first: int, context: CollectiveContext
) -> RankReports:
    """Start ranks that measure the cells from the first one on."""
    from workers.measure.collective_timing import TimedCollective, time_cells

    rest = [
        asdict(TimedCollective(at, cell.operation, cell.dtype, cell.size_mb))
        for at, cell in enumerate(cells[first:], first)
    ]
    context.waiting.clear()
    context.launches += 1
    # Every rank makes, sends and checks a tensor of this size between two heartbeats.
    moved = 2**20 * spec.world_size * max(cell.size_mb for cell in cells)
    return RankReports(
        time_cells,
        [rest, spec.warmup_steps, spec.measure_steps, spec.seed],
        world_size=spec.world_size,
        backend=spec.backend,
        folder=context.report.scratch / f"ranks-{context.launches}",
        step_timeout_s=STEP_TIMEOUT_S + moved / SLOWEST_BYTES_PER_S,
        nodes=spec.nodes,
    )


def listen(
    ranks: RankReports, position: int, world_size: int, context: CollectiveContext, trial: Trial
) -> list[Mapping[str, Any]]:
    """Return each rank's answer about the cell at a position, watching the devices until all have answered. Raises
    RankRaised: a rank's operation has raised an error; RunnerError: the ranks have failed; the context keeps it."""
    answers: dict[int, Mapping[str, Any]] = {}
    raised: dict[int, Mapping[str, Any]] = {}
    while len(answers) < world_size:
        trial.monitor.watch()
        try:
            rank_report = next_report(ranks, position, context)
        except Exception as error:
            blamed = error.rank if isinstance(error, RanksFailed) else None
            # If a rank dies, others raise errors too. Only the launcher knows which one was first.
            if blamed in raised and isinstance(error, RanksFailed) and error.trace:
                raise RankRaised(blamed, raised[blamed]["outcome"], raised[blamed]["reason"]) from error
            context.failure = job_failure(error, started=ranks.reported)
            ranks.report_logs(context.report, context.failure, blamed)
            raise context.failure from error
        if rank_report is None:
            continue
        rank, report = rank_report
        match report["event"]:
            case "raised":
                raised[rank] = report
            case "done" | "oom":
                answers[rank] = report
            case stage if rank == 0:
                trial.tell(stage)
                if stage == "measuring":
                    trial.monitor.start()
    return [answers[rank] for rank in range(world_size)]


def next_report(ranks: RankReports, position: int, context: CollectiveContext) -> tuple[int, Mapping[str, Any]] | None:
    """Return the next report about the cell at a position; None if there is none now. Reports about others wait. Raises
    RanksFailed: a rank has failed, and all were ended."""
    mine = context.waiting.get(position)
    if mine:
        return mine.popleft()
    rank_report = ranks.next(LOOK_S)
    if rank_report is not None and rank_report[1]["position"] != position:
        context.waiting.setdefault(rank_report[1]["position"], deque()).append(rank_report)
        return None
    return rank_report


def check_hidden(answers: Sequence[Mapping[str, Any]], steps: int) -> Check:
    """Check that GPUs did not wait for their hosts within the measured times: check `host_bound`."""
    late = {rank: steps - answer["hidden"] for rank, answer in enumerate(answers) if answer["hidden"] < steps}
    if not late:
        return Check("host_bound", True, "every call was issued before its device began with it")
    each = ", ".join(f"{count} of {steps} on rank {rank}" for rank, count in late.items())
    # More than half of the steps decide the median.
    return Check("host_bound", max(late.values()) <= steps // 2, f"calls that the host issued too late: {each}")


def rank_row(
    spec: CollectiveSpec,
    cell: CollectiveCell,
    rank: int,
    answer: Mapping[str, Any],
    latency: Sequence[float],
    context: CollectiveContext,
) -> list[Scalar]:
    """Return the row of one rank and cell in the table `ranks`."""
    times: Sequence[float] = answer["times_ms"]
    node, local = divmod(rank, spec.resources().devices)
    device = context.devices[local] if len(context.devices) > 1 else context.device
    last = sum(own == slowest for own, slowest in zip(times, latency, strict=True))
    return [
        *(cell.operation, cell.dtype, cell.size_mb, rank, str(device), answer["threads"], answer["warmup"]),
        *(statistics.median(times), min(times), max(times), last),
        *([node] if spec.nodes > 1 else []),
    ]
