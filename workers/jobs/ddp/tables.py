"""The tables and the traces of `ddp`, from the results of all ranks."""

import base64
import statistics
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from app.specs.ddp import DdpSpec
from workers.jobs.ddp.stragglers import COLUMNS as STRAGGLERS_COLUMNS
from workers.jobs.ddp.stragglers import STRAGGLERS, Lateness
from workers.jobs.ddp.timelines import COLUMNS as WAITS_COLUMNS
from workers.jobs.ddp.timelines import WAITS, Ranks
from workers.jobs.ddp.values import turns_of
from workers.measure.table import Column, Scalar, first_rows
from workers.reporter import Reporter

TRACE, TOGETHER = "trace.json.gz", "trace-all-ranks.json.gz"
RANKS_COLUMNS = Column.parse(
    "rank: integer, device, threads: integer, median_step_ms: number ms, min_step_ms: number ms, "
    "max_step_ms: number ms, peak_mib: number MiB"
)
"""Columns of the table `ranks`; those of `memory.Memory` follow."""
COMMUNICATION_COLUMNS = Column.parse("operation, size: integer bytes, sent_by_rank: integer bytes")
WHEN = "start_ms: number ms, end_ms: number ms"
OPERATIONS_COLUMNS = Column.parse(f"rank: integer, operation, size: integer bytes, {WHEN}")
WAITING, SHOWN_MS = "waiting", 1e-3
"""A stream of `timeline`: the rank is in a collective that another one enters later. Shorter spans are not shown."""
TIMELINE_COLUMNS = Column.parse(f"step: integer, rank: integer, stream, {WHEN}")


def report_traces(spec: DdpSpec, found: Sequence[Mapping[str, Any]], ranks: Ranks, report: Reporter) -> None:
    """Keep one trace of all ranks, and that of each, unless it is larger than the spec allows."""
    from workers.measure.profiling import trace

    def keep(name: str, whose: str, write: Callable[[Path], None]) -> None:
        try:
            write(report.scratch / name)
        except trace.TooLarge as error:
            sys.stderr.write(f"no trace of {whose}: {error}\n")
        else:
            report.artifact(report.scratch / name, name=name, kind="trace", media_type="application/gzip")

    most = spec.trace_max_mib << 20
    raws = {
        rank: file_of(spec, one["overlap"]["trace"], report.scratch / f"raw-{rank}.json")
        for rank, one in enumerate(found)
        if one["overlap"]["why_not"] is None
    }
    if len(raws) == len(found) > 1:
        keep(TOGETHER, "all ranks", lambda target: trace.together([*raws.values()], ranks.ahead_ms, target, most))
    for rank, one in enumerate(found):
        if rank not in raws:
            sys.stderr.write(f"no trace of rank {rank}: {one['overlap']['why_not']}\n")
            continue
        name = TRACE if rank == 0 else f"trace-rank-{rank}.json.gz"
        keep(name, f"rank {rank}", partial(trace.write, raws[rank], max_bytes=most))
        raws[rank].unlink(missing_ok=True)


def file_of(spec: DdpSpec, text: str, target: Path) -> Path:
    """Return a rank's file, from what `overlap.written` returned; with several nodes, write it to `target`."""
    if spec.nodes == 1:
        return Path(text)
    target.write_bytes(zlib.decompress(base64.b64decode(text)))
    return target


def report_snapshots(spec: DdpSpec, found: Sequence[Mapping[str, Any]], report: Reporter) -> None:
    for rank, one in enumerate(found):
        name = f"snapshot-rank-{rank}.pickle"
        path = file_of(spec, one["snapshot"], report.scratch / name)
        report.artifact(path, name=name, kind="snapshot", media_type="application/octet-stream")


def report_tables(spec: DdpSpec, found: Sequence[Mapping[str, Any]], lateness: Lateness, report: Reporter) -> None:
    """Report the tables `ranks`, `communication`, `operations`, `timeline`, `kernels`, `classes`, `waits`,
    `stragglers`, `values`."""
    from workers.measure import returned
    from workers.measure.profiling.tables import CLASS_SHARES, KERNELS

    memory = [Column(name, "number", "MiB") for name in found[0]["memory"]]
    node = [Column("node", "integer")] if spec.nodes > 1 else []
    operations = [[index, *row] for index, rank in enumerate(found) for row in rank["operations"]]
    for name, columns, rows in (
        ("ranks", (*RANKS_COLUMNS, *memory, *node), ranks_rows(spec, found)),
        ("communication", COMMUNICATION_COLUMNS, found[0]["communication"]),
        ("operations", OPERATIONS_COLUMNS, operations),
        ("timeline", TIMELINE_COLUMNS, timeline_rows(found, lateness.ranks)),
    ):
        if rows or spec.step_code is None:  # of a step of one's own nobody knows what it sends
            report.table(name, columns, first_rows(name, rows))
    for name, profiled in (("kernels", KERNELS), ("classes", CLASS_SHARES[1:])):
        rows = [[index, *row] for index, rank in enumerate(found) for row in rank["overlap"].get(name, [])]
        if rows:
            report.table(name, [Column("rank", "integer"), *profiled], first_rows(name, rows))
    if rows := lateness.ranks.rows():
        report.table(WAITS, WAITS_COLUMNS, first_rows(WAITS, rows))
    if rows := lateness.rows():
        report.table(STRAGGLERS, STRAGGLERS_COLUMNS, first_rows(STRAGGLERS, rows))
    report.table(returned.VALUES, returned.COLUMNS, values_rows(spec, found))


def values_rows(spec: DdpSpec, found: Sequence[Mapping[str, Any]]) -> list[list[Scalar]]:
    """Return what steps of each rank's first turn returned, and the work of a rank's step."""
    from workers.measure import returned

    rows: list[list[Scalar]] = []
    for index, turn in enumerate(turns_of(found, spec.strategy)[0]):
        rows += [[what, step, f"rank {index} {name}", *value] for what, step, name, *value in turn["returned"]]
    work = found[0].get("work") or {"flops": found[0].get("flops")}
    return [*rows, *returned.work_rows(work)]


def ranks_rows(spec: DdpSpec, found: Sequence[Mapping[str, Any]]) -> list[list[Scalar]]:
    rows: list[list[Scalar]] = []
    turns = turns_of(found, spec.strategy)
    for index, rank in enumerate(found):
        own = [turn[index] for turn in turns]
        steps = [time_ms for turn in own for time_ms in turn["step_ms"]]
        peaks = [turn["peak_mib"] for turn in own if turn["peak_mib"] is not None]
        times = [statistics.median(steps), min(steps), max(steps)]
        rows.append(
            [index, rank["device"], rank["threads"], *times, max(peaks, default=None), *rank["memory"].values()]
        )
        if spec.nodes > 1:
            rows[-1].append(index // spec.resources().devices)
    return rows


def timeline_rows(found: Sequence[Mapping[str, Any]], ranks: Ranks) -> list[list[Scalar]]:
    """Return the spans in which each rank computed, communicated, and waited for a later one in the profiled steps: all
    ranks of a step on one clock, which begins with the first of them, then the next step."""
    rows: list[list[Scalar]] = []
    steps = [rank["overlap"].get("steps", []) for rank in found]
    for number in range(max(map(len, steps))):
        early = ranks.early_ms[number] if number < len(ranks.early_ms) else [0.0] * len(steps)
        for index, seen in enumerate(steps):
            began = max(early) - early[index]
            streams = {
                name: [(1e-6 * first, 1e-6 * last) for first, last in spans]
                for name, spans in (seen[number]["spans"] if seen else {}).items()
            }
            if streams:
                met = [one.waiting[index] for one in ranks.collectives if one.step == number]
                streams[WAITING] = [(first, last) for first, last in met if last - first > SHOWN_MS]
            for stream, spans in streams.items():
                rows += [[number + 1, index, stream, began + first, began + last] for first, last in spans]
    return rows
