"""The tables that a job's units reported: kernels of a profile, allocations, dtypes of modules.

Tables of one name from several units become one table, with a column `unit_index`. The store keeps each unit's part
whole, so this module sorts the rows; the agent bounds their number per job. A page in the order of the reports reads
only its own parts.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from app.columns import free_names, type_of
from app.errors import InvalidRequest, NotFound, nearest
from app.results.arranging import Pairs, chosen_rows, ordered, page
from app.results.sheet import Column, Sheet
from app.specs import KINDS, Scalar
from app.store.database.engine import Database, Snapshot
from app.store.public import of_attempt
from app.store.reading.measurements import FinishedJob, JobChoice, choose_jobs
from app.store.reading.unit_tables import TablePart, part_rows, table_parts

UNIT_INDEX = "unit_index"
NOTE = "note"
"""Column of remarks on rows. In formats for people, a remark that many rows share stands once below the table."""
EVERY_COLUMN = "all"
MAX_FOOTNOTES = 9
MAX_JOBS_OF_TABLE = 200
"""Most jobs whose own tables become one."""

Part = tuple[int, Sequence[Mapping[str, Any]], Sequence[Sequence[Scalar]]]
"""One unit's report under a name: the unit's index, the columns ({"name", "type", "unit"}), the rows."""


def list_tables(database: Database, job_id: int, attempt: int | None = None) -> list[dict[str, Any]]:
    """Return the tables of an attempt, by default of the last recorded one, in the order of the kind's `first_tables`,
    the others by name; `rows` is the number of rows. Raises NotFound."""
    with database.read() as snapshot:
        return tables_of(snapshot, job_id, attempt)


def tables_of(snapshot: Snapshot, job_id: int, attempt: int | None = None) -> list[dict[str, Any]]:
    """Return the tables of an attempt, as `list_tables`."""
    kind, parts = table_parts(snapshot, job_id, attempt)
    by_name: dict[str, list[TablePart]] = {}
    for part in parts:
        by_name.setdefault(part.name, []).append(part)
    by_name = {name: by_name[name] for name in sorted(by_name, key=lambda name: _place(kind, name, by_name[name]))}
    return [
        {
            "name": name,
            "columns": [
                {"name": column.name, "type": column.type, "unit": column.unit}
                for column in _columns(its[0].columns, several=len(its) > 1)
            ],
            "rows": sum(part.row_count for part in its),
            "units": [part.unit_index for part in its],
            "answers": kind in KINDS and name in KINDS[kind].answers,
            "partial": any(part.partial for part in its),
            "url": f"/jobs/{job_id}/tables/{quote(name, safe='')}{of_attempt(attempt)}",
        }
        for name, its in by_name.items()
    ]


def _place(kind: str, name: str, parts: Sequence[TablePart]) -> tuple[int, int, str]:
    """Return the sort key of a table; `kind` may be unknown to this version."""
    spec = KINDS.get(kind)
    if spec is None or (place := spec.table_place(name)) == len(spec.first_tables):
        return sys.maxsize, 0, name
    return place, min(part.id for part in parts), name


@dataclass(frozen=True)
class Excerpt:
    """The rows and columns to read of a table."""

    unit: int | None = None
    """The index of a unit; None: all of them."""
    sort: str | None = None
    """A column, in ascending order, or "-column" for descending order; unknown values come last. None: as reported."""
    limit: int | None = None
    """The largest number of rows; None: all."""
    after: int = 0
    """The number of rows before these; `Sheet.next` of the previous page."""
    attempt: int | None = None
    """The number of an attempt; None: the last that recorded results."""
    columns: Sequence[str] | None = None
    """These columns, in this order; "all" for every one. None: formats for people show the kind's `first_columns`, JSON
    and CSV have all."""
    where: Pairs = ()
    """Only rows with these values in these columns."""
    limit_per_job: int | None = None
    """Of a sweep's table the largest number of rows of each job: the first ones, in the order that `sort` asks for."""


WHOLE = Excerpt()


def result_table(database: Database, job_id: int, name: str, excerpt: Excerpt = WHOLE) -> Sheet:
    """Return one table of a job, with the rows of all its units or of one. Raises NotFound, also if this unit reported
    none; InvalidRequest for an unknown column, or a value that no row has; Conflict if the stored table cannot be
    read."""
    with database.read() as snapshot:
        return table_of(snapshot, job_id, name, excerpt)


def table_of(snapshot: Snapshot, job_id: int, name: str, excerpt: Excerpt = WHOLE) -> Sheet:
    """Return one table of a job, as `result_table`."""
    unit, limit, after = excerpt.unit, excerpt.limit, excerpt.after
    kind, known = table_parts(snapshot, job_id, excerpt.attempt)
    names = list(dict.fromkeys(part.name for part in known))
    if name not in names:
        raise NotFound(f"Job {job_id} has no table {name!r}; it has: {', '.join(names) or 'none'}.")
    of_name = [part for part in known if part.name == name]
    parts = [part for part in of_name if unit in (None, part.unit_index)]
    if not parts:
        units = ", ".join(str(part.unit_index) for part in of_name)
        raise NotFound(f"Unit {unit} of job {job_id} has no table {name!r}; these have: {units}.")
    for part in parts:
        part.check()
    described = _columns(parts[0].columns, several=len(parts) > 1)
    end = None if limit is None else after + limit
    if excerpt.sort is not None or excerpt.where:
        sheet = chosen_rows(Sheet(columns=described, rows=_rows(snapshot, parts, 0, None)), excerpt.where)
        sheet = page(ordered(sheet, excerpt.sort), limit, after)
    else:
        total = sum(part.row_count for part in parts)
        following = str(end) if end is not None and end < total else None
        sheet = Sheet(columns=described, rows=_rows(snapshot, parts, after, end), next=following)
    if excerpt.columns is not None:
        return _chosen(sheet, excerpt.columns)
    first = KINDS[kind].columns_first(name) if kind in KINDS else None
    return for_people(sheet, first)


def sweep_table(database: Database, sweep: Mapping[str, Any], name: str, excerpt: Excerpt = WHOLE) -> Sheet:
    """Return one table of all finished jobs of a sweep: each row has its job, and the values of the grid that made it.
    Raises errors as `result_table`, and InvalidRequest for more than MAX_JOBS_OF_TABLE jobs."""
    of_job = Excerpt(unit=excerpt.unit, columns=[EVERY_COLUMN])
    with database.read() as snapshot:
        jobs = choose_jobs(snapshot, JobChoice(sweep=sweep["id"]))
        if len(jobs) > MAX_JOBS_OF_TABLE:
            detail = (
                f"Sweep {sweep['id']} has results of {len(jobs)} jobs; such a table has {MAX_JOBS_OF_TABLE} at most."
            )
            raise InvalidRequest(detail)
        sheets = {}
        known: dict[str, None] = {}
        for job in jobs:
            kind, parts = table_parts(snapshot, job.id, None)
            known |= dict.fromkeys(part.name for part in parts)
            if name in {part.name for part in parts}:
                sheets[job.id] = table_of(snapshot, job.id, name, of_job)
    if not sheets:
        names = ", ".join(known) or "none"
        raise NotFound(f"No finished job of sweep {sweep['id']} has a table {name!r}; they have: {names}.")
    paths = [*sweep["grid"], *([sweep["fit"]["axis"]] if sweep["fit"] else [])]
    points = {job.id: [_scalar_at(job.spec, path) for path in paths] for job in jobs if job.id in sheets}
    own = {column.name: column for sheet in sheets.values() for column in sheet.columns}
    named = free_names(own, ["job", *paths], "table")
    places = zip(paths, zip(*points.values(), strict=True), strict=True)
    columns = [
        Column("job", "integer", role="coordinate", links=True),
        *(Column(path, type_of(values), role="coordinate") for path, values in places),
        *(replace(column, name=named[name]) for name, column in own.items()),
    ]
    rows = []
    for job_id, sheet in sheets.items():
        at = {column.name: index for index, column in enumerate(sheet.columns)}
        order = [at.get(name) for name in own]
        rows += [
            [job_id, *points[job_id], *(None if index is None else row[index] for index in order)] for row in sheet.rows
        ]
    missing = _without([job for job in jobs if job.id not in sheets], sweep["counts"])
    notes = [f"Without rows here: {'; '.join(missing)}."] if missing else []
    whole = Sheet(columns=columns, rows=rows, notes=notes, about={"missing": missing})
    whole = ordered(chosen_rows(whole, excerpt.where), excerpt.sort)
    if excerpt.limit_per_job is not None:
        numbers: Counter[Scalar] = Counter()
        whole = replace(whole, rows=[row for row in whole.rows if _counted(numbers, row[0]) <= excerpt.limit_per_job])
    sheet = page(whole, excerpt.limit, excerpt.after)
    coordinates = ["job", *paths]
    if excerpt.columns is not None:
        return _chosen(sheet, list(dict.fromkeys([*coordinates, *excerpt.columns])))
    first = KINDS[kind].columns_first(name) if kind in KINDS else None
    return for_people(sheet, first and [*coordinates, *(named.get(column, column) for column in first)])


def _without(jobs: Iterable[FinishedJob], counts: Mapping[str, int]) -> list[str]:
    """Say which finished jobs have no such table, and how many of the sweep's have not finished."""
    why: dict[str, list[str]] = {}
    for job in jobs:
        why.setdefault(job.stopped or "no such table", []).append(str(job.id))
    of_jobs = [f"job{'s' if len(ids) > 1 else ''} {', '.join(ids)}: {reason}" for reason, ids in why.items()]
    return of_jobs + [f"{counts[state]} {state}" for state in ("queued", "running") if counts[state]]


def _counted(numbers: Counter[Scalar], job: Scalar) -> int:
    numbers[job] += 1
    return numbers[job]


def _scalar_at(spec: Mapping[str, Any], path: str) -> Scalar:
    """Return the value at a dotted path of a spec, as text if it is a list or an object."""
    value: Any = spec
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)


def _chosen(sheet: Sheet, columns: Sequence[str]) -> Sheet:
    names = sheet.names()
    for name in columns:
        if name not in (*names, EVERY_COLUMN):
            detail = f"There is no column {name!r}{nearest(name, [*names, EVERY_COLUMN])}"
            raise InvalidRequest.at("/columns", detail)
    wanted = dict.fromkeys(column for name in columns for column in (names if name == EVERY_COLUMN else [name]))
    at = [names.index(name) for name in wanted]
    # A request that names the units' column gets it even if there is only one unit.
    described = [
        replace(sheet.columns[index], in_text=sheet.columns[index].in_text or EVERY_COLUMN not in columns)
        for index in at
    ]
    return replace(sheet, columns=described, rows=[[row[index] for index in at] for row in sheet.rows])


def for_people(sheet: Sheet, first: Sequence[str] | None) -> Sheet:
    """Return the sheet for people: with few columns, and with remarks that many rows share below the table.

    first: the columns to show; None: all of them. Those that are left out are named below the table.
    """
    columns, notes = list(sheet.columns), list(sheet.notes)
    shown = [column.name for column in columns] if first is None else [UNIT_INDEX, *first]
    left_out = [column.name for column in columns if column.in_text and column.name not in shown]
    columns = [replace(column, in_text=column.in_text and column.name in shown) for column in columns]
    if left_out:
        every = f"columns={EVERY_COLUMN}, on the command line --columns {EVERY_COLUMN}, shows every column"
        notes.append(f"Not shown: {', '.join(left_out)} ({every}).")
    reduced = replace(sheet, columns=columns, notes=notes)
    return _with_footnotes(reduced) if NOTE in shown else reduced


def _with_footnotes(sheet: Sheet) -> Sheet:
    """Move remarks that several rows share from the column `note` below the table; the rows keep a sign."""
    names = sheet.names()
    if NOTE not in names:
        return sheet
    at = names.index(NOTE)
    remarks = [row[at] for row in sheet.rows if row[at]]
    distinct = list(dict.fromkeys(remarks))
    if len(distinct) == len(remarks) or len(distinct) > MAX_FOOTNOTES:
        return sheet
    columns = [replace(column, in_text=column.in_text and column.name != NOTE) for column in sheet.columns]
    if len(distinct) == 1 and len(remarks) == len(sheet.rows):
        return replace(sheet, columns=columns, notes=[*sheet.notes, f"Of all rows: {distinct[0]}."])
    signs = {note: f"[{number}]" for number, note in enumerate(distinct, start=1)}
    marks = [signs.get(row[at], "") for row in sheet.rows]
    return replace(
        sheet, columns=columns, marks=marks, notes=[*sheet.notes, *(f"{signs[note]} {note}." for note in distinct)]
    )


def _rows(snapshot: Snapshot, parts: Sequence[TablePart], start: int, end: int | None) -> list[list[Scalar]]:
    """Return rows number `start` to `end` of all these parts together, each with its unit's index first. It reads one
    part after the other, and only parts that have such rows, so that a page of a large table is quick."""
    rows: list[list[Scalar]] = []
    before = 0
    for part in parts:
        first, last = max(0, start - before), part.row_count if end is None else min(part.row_count, end - before)
        before += part.row_count
        if first < last:
            rows += ([part.unit_index, *row] for row in part_rows(snapshot, part)[first:last])
    return rows


def merged(parts: Sequence[Part], first: Sequence[str] | None = None) -> Sheet:
    """Merge what several units reported under one name into one table; their columns are the same. Formats for people
    show `unit_index` only if there are several units, and otherwise the columns in `first`."""
    columns = _columns(parts[0][1], several=len(parts) > 1)
    rows = [[index, *row] for index, _, part in parts for row in part]
    return for_people(Sheet(columns=columns, rows=rows), first)


def _columns(reported: Sequence[Mapping[str, Any]], *, several: bool) -> list[Column]:
    names = free_names([column["name"] for column in reported], [UNIT_INDEX], "table")
    own = [Column(names[column["name"]], column["type"], column.get("unit")) for column in reported]
    return [Column(UNIT_INDEX, "integer", in_text=several), *own]
