"""Tables of measurements: one row per case of a job (see `cases`), one column per metric (see `choosing`)."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from app.columns import type_of
from app.errors import InvalidRequest
from app.metrics import column_name, headline, is_rate, metric_names
from app.results.arranging import (
    Line,
    Pairs,
    Related,
    chosen_lines,
    coordinate_of,
    is_size,
    mark_best,
    on_hidden_references,
    ordered,
    page,
    pivot,
    relate,
)
from app.results.cases import OF_THE_JOB, CaseOfJob, MeasuredJobs, cases_of, cell_of
from app.results.choosing import (
    UNKNOWN,
    coordinates_of,
    kinds_of,
    known_of,
    metrics_of,
    refuse_unknown,
    table_rows_of,
    varies,
)
from app.results.environments import VERSION
from app.results.footnotes import MAX_NOISE, NOISY, Doubt, Footnotes, Gap, doubts_of, doubts_text, named, reasons
from app.results.process_values import time_of
from app.results.sheet import Cell, Column, Sheet
from app.specs import KINDS, SpecBase
from app.states import VERDICTS, worst
from app.store.database.engine import Database
from app.store.reading import measurements
from app.store.reading.measurements import FinishedJob, JobChoice
from app.store.reading.packed import unpack
from flopwatch.intervals import FEWEST_FOR_INTERVAL, median_interval
from flopwatch.table_options import DEFAULT_STATISTIC, Statistic
from flopwatch.text.numbers import finite

Reasons = Callable[[CaseOfJob], Sequence[Doubt]]
"""Tells why a case is not valid."""


@dataclass(frozen=True)
class Layout:
    """The layout of a table of cases."""

    rows: Sequence[str] | None = None
    """Coordinates that are always shown, and first; those that vary follow. None: the kind's own."""
    columns: Sequence[str] | None = None
    """Metrics, named as their columns, in this order; "all" for every one. None: the kind's `table_columns` that were
    measured; in a pivoted table the kind's main metric."""
    statistic: Statistic = DEFAULT_STATISTIC
    """Statistic of the samples, and of the processes if there are several."""
    pivot: str | None = None
    """The coordinate whose values become columns, for each of the metrics."""
    relative_to: Mapping[str, str] = field(default_factory=dict)
    """Coordinates of the reference rows, {"precision": "fp32"}: additional columns relate all other rows to these, for
    the metrics in `columns` or, by default, the kind's main metric."""
    where: Pairs = ()
    """Only the cases with these coordinates; the reference may be among the others."""
    best: bool = False
    """Set the best cells of each column in bold, in formats for people."""
    separate: bool = False
    """Put spreads into columns of their own in formats for people; JSON and CSV always do."""
    links: bool = False
    """Show the job of each row in formats for people; JSON and CSV always have it."""
    reasons: bool = True
    """Say in footnotes why rows are not valid. Pages that list the checks themselves do without."""

    def spelled(self, known: Collection[str]) -> Layout:
        """Return the layout with the coordinates that show the fields of specs which it names."""

        def name_of(field: str) -> str:
            return coordinate_of(field, known)

        return replace(
            self,
            rows=None if self.rows is None else [name_of(name) for name in self.rows],
            pivot=None if self.pivot is None else name_of(self.pivot),
            relative_to={name_of(name): value for name, value in self.relative_to.items()},
            where=[(name_of(name), value) for name, value in self.where],
        )


PLAIN = Layout()


def table(
    database: Database,
    choice: JobChoice,
    layout: Layout = PLAIN,
    *,
    sort: str | None = None,
    limit: int | None = None,
    after: int = 0,
    first: int | None = None,
) -> Sheet:
    """Return the results of finished jobs, in submission order.

    Args:
        choice: the jobs. If they are of several kinds, the choice must name these.
        sort: a column, in ascending order, or "-column" for descending order.
        limit, after: the largest number of rows, and the number of rows before them; notes on rows, and reasons for
            missing numbers, are of these rows only.
        first: return only the beginning of the table: at most this many rows, and fewer if they have very many
            measurements; `Sheet.is_cut` says whether there are more. None: the whole table.

    Raises:
        NotFound: there is no such job or sweep.
        InvalidRequest: no row has this coordinate, its value or metric, the jobs are of several kinds, or there are
            more than measurements.MAX_JOBS jobs or measurements.MAX_MEASUREMENTS measurements.
    """
    with database.read() as snapshot:
        chosen = measurements.choose_jobs(snapshot, choice, None if first is None else first + 1)
        if choice.kind is None or isinstance(choice.kind, str):
            refuse_several_kinds(job.kind for job in chosen)
        measured, is_cut = None, False
        if first is not None:
            chosen, measured, is_cut = measurements.first_measurements(snapshot, chosen, layout.statistic)
        swept = measurements.swept_fields(snapshot, choice)
        unfinished = measurements.unfinished_jobs(snapshot, choice)
        hosts = measurements.hosts(snapshot, chosen) if layout.relative_to or layout.best else []
        read = MeasuredJobs.read(snapshot, chosen, layout.statistic, measured)
    cases, units = read.cases()
    if first is not None:
        cases, is_cut = cases[:first], is_cut or len(cases) > first

    def part(sheet: Sheet) -> Sheet:
        return page(ordered(sheet, sort), limit, after)

    sheet = _sheet(cases, units, layout, read.why, swept=swept, part=part)
    states = [f"{state}{named(jobs)}" for state, jobs in unfinished.items()]
    notes = [f"Not finished, and not in the table: {'; '.join(states)}."] if states else []
    if len(hosts) > 1:
        notes.append(f"Different hosts measured these jobs: {', '.join(hosts)}.")
    return replace(sheet, is_cut=is_cut, missing=[*(sheet.missing or ()), *states], notes=[*sheet.notes, *notes])


def metric_table(database: Database, choice: JobChoice, metrics: Sequence[str]) -> Sheet:
    """Return the table of these metrics, named as their columns, as `table` does. It reads no other metrics, so a page
    that shows a few need not wait for all."""
    with database.read() as snapshot:
        chosen = measurements.choose_jobs(snapshot, choice)
        refuse_several_kinds(job.kind for job in chosen)
        names = {name for column in metrics for name in metric_names(column)}
        rows = measurements.measurements(snapshot, chosen, DEFAULT_STATISTIC, names)
        measured = [row for row in rows if column_name(row.metric, row.phase) in metrics]
        read = MeasuredJobs.read(snapshot, chosen, DEFAULT_STATISTIC, measured)
        swept = measurements.swept_fields(snapshot, choice)
    cases, units = read.cases()
    return _sheet(cases, units, Layout(columns=list(metrics)), read.why, swept=swept)


def refuse_several_kinds(kinds: Iterable[str]) -> None:
    """Raise InvalidRequest when the kinds are several, naming them."""
    several = sorted(set(kinds))
    if len(several) > 1:
        detail = (
            f"These jobs are of several kinds, which have different rows and columns: {', '.join(several)}. "
            "Choose one with kind (--kind), or name all that shall share the table."
        )
        raise InvalidRequest.at("/kind", detail)


def local_table(
    spec: SpecBase, measurements: Iterable[Mapping[str, Any]], validity: Mapping[str, Any] | None = None
) -> Sheet:
    """Return the table of one job that is in no database, with the reasons for missing numbers (`Sheet.missing`). One
    process ran all its units, as `flopwatch run` does, and the note on the cells says so. `measurements` are as on the
    wire (Measurement.to_wire); each may have "validity", its case's verdict, and in a comparison "side"."""
    job = FinishedJob(0, spec.kind, "succeeded", spec.model_dump(mode="json"))
    optional: dict[str, Any] = {"side": None, "validity": None, "unit_index": None}
    rows = [SimpleNamespace(**{**optional, **row, **_median_of(row), "job_id": job.id}) for row in measurements]
    cases, units = cases_of([job], rows, lambda row: row.side)
    cases = [replace(case, job=None) for case in cases]
    return _sheet(cases, units, Layout(), lambda case: doubts_of(validity, case.key), one_process=True)


def _median_of(row: Mapping[str, Any]) -> dict[str, Any]:
    samples = unpack(None if row["samples"] is None else base64.b64decode(row["samples"])) or ()
    low, high = median_interval([sample for sample in samples if sample is not None]) or (None, None)
    return {"value": row["median"], "low": low, "high": high, "fastest": row.get("min"), "slowest": row.get("max")}


def _sheet(
    cases: Sequence[CaseOfJob],
    units: Mapping[str, str],
    layout: Layout,
    why: Reasons,
    *,
    one_process: bool = False,
    swept: Collection[str] = (),
    part: Callable[[Sheet], Sheet] = lambda sheet: sheet,
) -> Sheet:
    """Return the table of these cases. `one_process`: one ran all units; `swept`: fields of which a sweep tries several
    values; `part` sorts the rows and chooses those that are shown, to which the notes refer."""
    layout = layout.spelled([*known_of(cases), *OF_THE_JOB])
    rows = layout.rows
    if layout.pivot is not None:
        refuse_unknown("pivot", [layout.pivot], [*known_of(cases), *OF_THE_JOB], there_is_something=bool(cases))
        rows = None if rows is None else [name for name in rows if name != layout.pivot]
    coordinates = coordinates_of(cases, rows, also=layout.pivot, swept=swept)
    if VERSION not in coordinates and any(case.show(VERSION) is not None for case in cases):
        coordinates = [*coordinates, VERSION]
    metrics = metrics_of(cases, units, layout.columns)
    main = [name for name in [headline(metrics)] if name]
    shown = metrics if layout.columns is not None or layout.pivot is None else main
    lines = _lines(cases, shown, layout, why)
    related = _related(lines, cases, layout, shown if layout.columns is not None else main, units)
    lines = chosen_lines(lines, layout.where)
    columns = _value_columns(shown, units, related)
    if layout.pivot is None:
        sheet = _unpivoted(lines, coordinates, columns, layout)
    else:
        labels = [name for name in table_rows_of(cases) if layout.pivot.startswith(f"{name}.")]
        asked = rows or [name for name in table_rows_of(cases) if name not in labels]
        fixed = [name for name in coordinates if name in asked]
        # A label comes last: the pivot and its other fields may determine it.
        coordinates = sorted(coordinates, key=lambda name: name in labels and name not in asked)
        sheet = _pivoted(lines, layout, coordinates, fixed, columns)
    if layout.best:
        # Along each column or, unless the pivot is a size, along each row of a pivot.
        values = (case.show(layout.pivot) for case in cases) if layout.pivot else ()
        mark_best(sheet, along_rows=layout.pivot is not None and not is_size(layout.pivot, values))
    sheet = part(sheet)
    lines = [line for of_row in sheet.sources for line in of_row]
    cases = [line.case for line in lines if line.case is not None]
    marks, footnotes = _marks(lines, shown, layout)
    notes = _on_statistics(cases, shown, layout, one_process=one_process)
    if layout.best:
        is_bold = any(getattr(cell, "best", False) for row in sheet.rows for cell in row)
        notes.append(_BEST if is_bold else _NO_BEST)
        if is_bold and any(name.startswith("arguments") and varies(cases, name) for name in coordinates):
            notes.append("Rows with other arguments of your own code count as doing the same: nobody knows if they do.")
    notes += [*_of_kinds(cases, shown), *related.notes, *on_hidden_references(lines), *footnotes, *sheet.notes]
    return replace(
        sheet,
        missing=_missing(cases, coordinates, set(shown)),
        statistic=layout.statistic,
        separate=layout.separate,
        marks=marks if layout.pivot is None and any(marks) else (),
        notes=notes if cases else [],
        sources=(),
    )


def _related(
    lines: Sequence[Line], cases: Sequence[CaseOfJob], layout: Layout, metrics: Sequence[str], units: Mapping[str, str]
) -> Related:
    if not layout.relative_to:
        return Related()
    varying = [name for name in dict.fromkeys([*table_rows_of(cases), *known_of(cases)]) if varies(cases, name)]
    return relate(lines, layout.relative_to, metrics, units, varying)


def _lines(cases: Sequence[CaseOfJob], metrics: Sequence[str], layout: Layout, why: Reasons) -> list[Line]:
    lines = []
    for case in cases:
        verdict = case.validity()
        doubts = why(case) if verdict in VERDICTS[1:] else ()
        cells = {metric: cell_of(case, metric, layout.statistic) for metric in metrics}
        for metric, cell in cells.items() if layout.best else ():
            if cell.value is not None:
                cell.of_time = _interval_of_rate(case, metric, cell, layout.statistic)
        partial = case.partial and any(cell.value is not None for cell in cells.values())
        reason = doubts_text(list(dict.fromkeys(doubts))) if doubts else None
        coordinates = {**case.coordinates, "job": case.job, "kind": case.kind, "case_key": case.key}  # all OF_THE_JOB
        lines.append(Line(coordinates, cells, case.job, verdict, reason, doubts, case, partial))
    return lines


def _value_columns(metrics: Sequence[str], units: Mapping[str, str], related: Related) -> list[Column]:
    columns = []
    for name in metrics:
        columns.append(Column(name, "number", units.get(name), role="metric"))
        columns += [Column(gain, "number", "1", role="gain") for gain, of in related.columns.items() if of == name]
    return columns


def _unpivoted(lines: Sequence[Line], coordinates: Sequence[str], columns: Sequence[Column], layout: Layout) -> Sheet:
    places = [
        Column(name, type_of(line.coordinates.get(name) for line in lines), role="coordinate", links=name == "job")
        for name in coordinates
    ]
    about = list(_VERDICT) if lines else []
    if lines and lines[0].job is not None and "job" not in coordinates:
        about.append(Column("job", "integer", in_text=layout.links, links=True))
    rows = [
        [
            *(line.coordinates.get(name) for name in coordinates),
            *(line.cells[column.name] for column in columns),
            *(line.validity, line.reason, line.partial, line.job)[: len(about)],
        ]
        for line in lines
    ]
    return Sheet(columns=[*places, *columns, *about], rows=rows, sources=[[line] for line in lines])


_VERDICT = (
    Column("validity", "string", in_text=False),
    Column("validity_reason", "string", in_text=False),
    Column("partial", "boolean", in_text=False),
)
"""The columns about the validity of each row."""


def _pivoted(
    lines: Sequence[Line], layout: Layout, coordinates: Sequence[str], fixed: Collection[str], columns: Sequence[Column]
) -> Sheet:
    assert layout.pivot is not None
    # Cases that look the same get separate rows below each other, so no further coordinate is needed.
    plain = [name for name in coordinates if name in fixed or name not in OF_THE_JOB]
    pivoted = pivot(lines, layout.pivot, plain, fixed, columns)
    described = [
        Column(name, type_of(place[index] for place, _, _ in pivoted.rows), role="coordinate")
        for index, name in enumerate(pivoted.coordinates)
    ]
    described += pivoted.columns
    if lines:
        described += [*_VERDICT, Column("jobs", "string", in_text=layout.links, links=True)]
    rows = []
    for place, cells, inside in pivoted.rows:
        verdicts = {line.validity for line in inside}
        verdict = worst(verdicts)
        why = "; ".join(dict.fromkeys(line.reason for line in inside if line.reason is not None)) or None
        jobs = ", ".join(map(str, sorted({line.job for line in inside if line.job is not None})))
        rows.append([*place, *cells, verdict, why, any(line.partial for line in inside), jobs])
    sources = [inside for _, _, inside in pivoted.rows]
    return Sheet(columns=described, rows=rows, notes=pivoted.notes, traces=True, sources=sources)


def _marks(lines: Sequence[Line], metrics: Sequence[str], layout: Layout) -> tuple[list[str], list[str]]:
    """Return the signs of these lines, which their cells in a pivoted table get too, and the footnotes."""
    footnotes = Footnotes(layout.reasons)
    for line in lines:
        footnotes.count(line.validity, line.doubts)
        if line.partial and line.case is not None and line.case.stopped is not None:
            footnotes.count_partial(line.job, line.case.stopped)
    marks = []
    for line in lines:
        mark = footnotes.mark(line.validity, line.doubts, partial=line.partial)
        noise, column = max(((_noise(line.cells[name]), name) for name in metrics), default=(0.0, ""))
        if line.validity == "valid" and noise > MAX_NOISE:
            footnotes.count_noisy(noise, column)
            mark += NOISY
        for cell in line.marked:
            cell.mark = mark
        marks.append(mark)
    return marks, footnotes.notes()


def _noise(cell: Cell) -> float:
    """Return the spread of a median as a share of it; 0 if the cell has none."""
    if not cell.value or cell.spread is None or cell.low is None:
        return 0.0
    return cell.spread / abs(cell.value)


def _on_statistics(
    cases: Sequence[CaseOfJob], metrics: Sequence[str], layout: Layout, *, one_process: bool
) -> list[str]:
    """Return a sentence that explains the cells, and their spreads."""
    measured = [rows for case in cases for metric, rows in case.processes.items() if metric in metrics]
    counts = sorted({len(rows) for rows in measured if len(rows) > 1})
    sampled = {row.metric for rows in measured for row in rows if (row.n or 0) > 1}
    if not counts and not sampled:
        return []
    of_processes = {metric for kind in kinds_of(cases) for metric in KINDS[kind].process_metrics}
    samples = "processes" if sampled and sampled <= of_processes else "samples of one process"
    name = _STATISTIC_NAMES.get(layout.statistic, layout.statistic)
    spreads = _SEPARATE_SPREADS if layout.separate else _SPREADS
    times = ""
    if counts:
        of = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        what = "repetitions in one process, which are no independent samples," if one_process else "processes"
        times = f", and of {of} {what} the {name} of these"
    sentences = [f"Cells: {name} of the {samples}{times}{spreads.get(layout.statistic, '')}."]
    if layout.statistic != DEFAULT_STATISTIC and (rates := _rates(cases, metrics)):
        sentences.append(f"{', '.join(rates)}: by the median time of each process, whatever the statistic.")
    return sentences


def _rates(cases: Sequence[CaseOfJob], metrics: Sequence[str]) -> list[str]:
    """Return the metrics of single values that were derived from the median time."""
    return [
        metric
        for metric in metrics
        if any(row.n == 1 and is_rate(metric, row.unit) for case in cases for row in case.processes.get(metric, ())[:1])
    ]


def _interval_of_rate(case: CaseOfJob, metric: str, cell: Cell, statistic: Statistic) -> tuple[float, float] | None:
    """Return the interval of a rate that has a single value, which follows from its time's; None if there is none."""
    row = case.processes[metric][0]
    time = time_of(row, [case]) if is_rate(metric, row.unit) and cell.low is None is cell.least else None
    of_time = cell_of(case, time, statistic) if time is not None else None
    if cell.value is None or of_time is None or of_time.value is None or of_time.ends[0] <= 0:
        return None
    least, greatest = of_time.ends
    return cell.value * of_time.value / greatest, cell.value * of_time.value / least


_BEST = (
    "Bold: the best of rows that do the same, and all whose intervals overlap with it. The interval of one process "
    "leaves out how processes differ: flopwatch compare measures that."
)
_NO_BEST = (
    "No cell is bold: no two valid values are of the same work. Let rows, or a pivot's columns, differ in how it is "
    "done, such as precision or attention."
)
_INTERVAL = f"its 95 % interval (of fewer than {FEWEST_FOR_INTERVAL}: from the smallest to the largest)"
_SPREADS: Mapping[Statistic, str] = {
    "mean": " ± their standard deviation",
    "median": f" ± the larger distance to an end of {_INTERVAL}",
}
_SEPARATE_SPREADS: Mapping[Statistic, str] = {
    "mean": "; std: their standard deviation",
    "median": f"; low, high: the ends of {_INTERVAL}",
}
_STATISTIC_NAMES = {"min": "minimum", "max": "maximum"}


def _of_kinds(cases: Sequence[CaseOfJob], metrics: Sequence[str]) -> list[str]:
    of_metrics = [
        sentence
        for kind in kinds_of(cases)
        for names, sentence in KINDS[kind].metric_notes.items()
        if not names.isdisjoint(metrics)
    ]
    return of_metrics + [
        sentence
        for kind in kinds_of(cases)
        for name, sentences in KINDS[kind].table_notes.items()
        for value, sentence in sentences.items()
        if any(kind in case.tabled_as and case.coordinates.get(name) == value for case in cases)
    ]


def _missing(cases: Sequence[CaseOfJob], coordinates: Sequence[str], metrics: Collection[str]) -> list[str]:
    measured: set[int] = set()
    gaps = []
    for number, case in enumerate(cases):
        for metric, rows in case.processes.items():
            for row in rows:
                if row.outcome == "ok" and finite(row.value) is not None:
                    measured.add(number)
                elif metric in metrics:
                    gaps.append(Gap(number, metric, UNKNOWN if row.outcome == "ok" else row.outcome, row.reason or ""))
    if not gaps:
        return []
    return reasons([{name: case.show(name) for name in coordinates} for case in cases], measured, gaps)
