"""The tables of a recording: categories, the largest allocations, what grows, the timeline, the snapshots."""

from typing import Any

from workers.jobs.memory.recording import INITIALISATION, OOM, Session, height, peak_seen, work_of
from workers.measure.allocations.categories import CATEGORIES
from workers.measure.allocations.growth import pattern
from workers.measure.allocations.ledger import Allocation, Point, Stretch, thinned
from workers.measure.allocations.recording import RecordedStretch
from workers.measure.allocations.snapshot import BEFORE
from workers.measure.allocations.stacks import NEXT, code, is_call, short_stack, site
from workers.measure.saved import SavedTensor
from workers.measure.table import Column
from workers.reporter import Reporter

MIB = 2**20
MAX_POINTS = 1000
"""Largest number of rows of the timeline."""


def report_tables(session: Session, report: Reporter) -> None:
    """Report the tables: categories of each phase, the largest allocations, the timeline, and the snapshots."""
    recorded = {phase.stretch.phase: phase for phase in session.phases()}
    if session.initialisation is not None:
        recorded = {INITIALISATION: session.initialisation, **recorded}
    if session.lacked is not None:
        recorded[OOM] = session.lacked
    for name, phase in recorded.items():
        report_categories(name, phase, report)
    report_allocations(session, recorded, report)
    report_saved(session, report)
    report_growth(session, report)
    report_snapshots(session, {**recorded, **session.moments}, report)
    if session.steps:
        report_timeline(session, report)


def report_categories(name: str, recorded: RecordedStretch, report: Reporter) -> None:
    """Report the use of memory by category, at a phase's peak and at its end."""
    peak, end = recorded.stretch.peak if peak_seen(recorded) else None, recorded.stretch.end
    columns = Column.parse(
        "category, peak_mib: number MiB, peak_percent: number %, peak_bytes: integer bytes, "
        "end_mib: number MiB, end_percent: number %, end_bytes: integer bytes"
    )
    rows: list[list[Any]] = [
        [category, *share(peak, index), *share(end, index)] for index, category in enumerate(CATEGORIES)
    ]
    report.table(f"categories-{name}", columns, rows)


def share(point: Point | None, index: int) -> list[float | int | None]:
    """Return the MiB, the percentage and the bytes of a category at a moment; None if that moment is missing."""
    if point is None:
        return [None, None, None]
    return [point.usage[index] / MIB, 100 * point.usage[index] / max(1, point.total), point.usage[index]]


def report_allocations(session: Session, recorded: dict[str, RecordedStretch], report: Reporter) -> None:
    """Report the largest allocations alive at each phase's peak, the step's peak first; equal ones are one row."""
    columns = Column.parse(
        "at_peak_of, size_mib: number MiB, count: integer allocations, total_mib: number MiB, category, name, "
        "made_in, site, stack, code"
    )
    rows: list[list[Any]] = [
        [name, *row]
        for name, phase in sorted(recorded.items(), key=lambda item: (item[0] == INITIALISATION, -height(item[1])))
        if peak_seen(phase)
        for row in largest(phase.stretch, session.spec.largest_allocations)
    ]
    report.table("allocations", columns, rows)


def largest(stretch: Stretch, most: int) -> list[list[Any]]:
    """Return the largest groups of equal allocations at a peak, the largest allocation first."""
    groups: dict[tuple[Any, ...], list[Allocation]] = {}
    for one in stretch.at_peak:
        key = (one.size, one.category, pattern(one.name), one.made_in, short_stack(one.frames))
        groups.setdefault(key, []).append(one)
    ranked = sorted(groups.items(), key=lambda item: (-item[0][0], -len(item[1]), item[0][1]))
    return [
        [
            *(size / MIB, len(alike), size * len(alike) / MIB, CATEGORIES[category], name),
            *(made_in or BEFORE, site(alike[0].frames), stack, code(alike[0].frames)),
        ]
        for (size, category, name, made_in, stack), alike in ranked[:most]
    ]


def report_saved(session: Session, report: Reporter) -> None:
    """Report what autograd saves, the largest first; what corresponding modules save is one row."""
    if not session.saved:
        return
    groups: dict[tuple[Any, ...], list[SavedTensor]] = {}
    for one in session.saved:
        key = (pattern(one.module), one.site, one.made_by, one.dtype, "×".join(map(str, one.shape)))
        groups.setdefault(key, []).append(one)
    whole = sum(one.size for one in session.saved)
    rows: list[list[Any]] = []
    for key, alike in sorted(groups.items(), key=lambda item: -sum(one.size for one in item[1])):
        size = sum(one.size for one in alike)
        modules = len({one.module for one in alike})
        rows.append([*key, modules, size / modules / MIB, size / MIB, 100 * size / whole])
    columns = [Column(name, "string") for name in ("module", "site", "made_by", "dtype", "shape")]
    columns += [Column("modules", "integer"), Column("each_mib", "number", "MiB")]
    columns += [Column("total_mib", "number", "MiB"), Column("share_percent", "number", "%")]
    report.table("saved", columns, rows)


def report_growth(session: Session, report: Reporter) -> None:
    """Report the allocations that are more or larger after the last of `snapshot_steps` than after the first."""
    moments = session.spec.snapshot_steps
    if session.after_steps is None or moments is None or len(session.after_steps.steps) <= moments[-1] - moments[0]:
        return
    columns = Column.parse(
        "per_step_mib: number MiB, site, code, keeps_growing: boolean, first_mib: number MiB, last_mib: number MiB, "
        "category, name, first_count: integer allocations, last_count: integer allocations, made_in, stack"
    )
    rows: list[list[Any]] = [
        [
            *(one.size / (moments[-1] - moments[0]) / MIB, site(one.example.frames)),
            None if is_call(one.example.frames) else (code(one.example.frames) or "").partition(NEXT)[0] or None,
            *(one.continues, one.sizes[0] / MIB, one.sizes[-1] / MIB),
            *(CATEGORIES[one.example.category], one.place[0]),
            *(*one.counts, one.example.made_in, one.place[1]),
        ]
        for one in session.after_steps.growths()
    ]
    report.table("growth", columns, rows)


def report_snapshots(session: Session, recorded: dict[str, RecordedStretch], report: Reporter) -> None:
    columns = Column.parse(
        "snapshot, phase, of, history_entries: integer entries, complete: boolean, size_mib: number MiB"
    )
    rows: list[list[Any]] = [
        [
            *(f"snapshot-{name}.pickle", phase.stretch.phase, work_of(session, name)),
            *(phase.history, not phase.history_lost, session.files[name] / MIB),
        ]
        for name, phase in recorded.items()
        if name in session.files
    ]
    report.table("snapshots", columns, rows)


def report_timeline(session: Session, report: Reporter) -> None:
    """Report the use of memory by category over the recorded steps, by the number of the history's entry.

    Each row has the allocation that its entry makes or releases, and the place in the code that made it.
    """
    columns = [
        *Column.parse("entry: integer, step: integer, phase, total_mib: number MiB"),
        *(Column(f"{category}_mib", "number", "MiB") for category in CATEGORIES),
        *Column.parse("change_mib: number MiB, category, name, stack"),
    ]
    count = sum(len(step) for step in session.steps)
    rows: list[list[Any]] = []
    before = 0
    for number, step in enumerate(session.steps, start=1):
        for phase in step:
            for point in thinned(phase.stretch.points, MAX_POINTS // count):
                usage = [size / MIB for size in point.usage]
                place = [before + point.entry + 1, number, phase.stretch.phase]
                rows.append([*place, point.total / MIB, *usage, *cause(point)])
            before += phase.stretch.entries
    report.table("timeline", columns, rows)


def cause(point: Point) -> list[Any]:
    """Return the change in MiB that an entry makes, and the category, name and stack of the allocation it touches."""
    touched = point.touched
    if touched is None:
        return [None, None, None, None]
    return [point.change / MIB, CATEGORIES[touched.category], touched.name, short_stack(touched.frames)]
