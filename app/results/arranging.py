"""Arranges the cases of a table: relates them to a reference, spreads a coordinate over columns, sorts rows and marks
the best cells.

A *line* is a case with the cells of its metrics, before rows are made of it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

from app.errors import InvalidRequest, nearest
from app.metrics import Direction, better, gain, gain_name, is_rate
from app.results.footnotes import Doubt
from app.results.sheet import NOT_MEASURED, Cell, Column, Sheet
from app.specs import Scalar
from app.states import UNFIT
from flopwatch.text.cases import in_use
from flopwatch.text.values import value_text

if TYPE_CHECKING:
    from app.results.cases import CaseOfJob

T = TypeVar("T")
REFERENCE, NO_COUNTERPART, SEVERAL = "reference", "no counterpart", "several counterparts"
RUN = "run"
"""Column of a pivoted table that counts the jobs which measured the same case."""
MAX_PIVOTED = 1000
"""Most values of a coordinate that become columns."""


def coordinate_of(field: str, known: Collection[str]) -> str:
    """Return the coordinate that shows a field of a spec, so that a swept field can be named as in the sweep: `model`
    for "model.size", `dtype` for "dtypes". Other names stay as they are."""
    others = (field.removesuffix(".size"), field.removesuffix("s"))
    return field if field in known else next((name for name in others if name in known), field)


@dataclass(slots=True)
class Line:
    """A case of a table: its coordinates by name, its cells by column, and the facts about it."""

    coordinates: Mapping[str, Scalar]
    cells: dict[str, Cell]
    job: int | None
    validity: str | None = None
    reason: str | None = None
    doubts: Sequence[Doubt] = ()
    case: CaseOfJob | None = None
    partial: bool = False
    marked: list[Cell] = field(default_factory=list)
    """The cells of a pivoted table that show the signs of this line."""
    reference: Line | None = None
    """The line to which this one is related."""

    def values(self, names: Iterable[str]) -> Hashable:
        """Return the values of these coordinates with their types, to compare lines by: in Python, 1 equals True."""
        used = (in_use(self.coordinates.get(name)) for name in names)
        return tuple((type(value), value) for value in used)


@dataclass(frozen=True)
class Related:
    """Columns that relate metrics to a reference, by name with the metric of each, and notes on them."""

    columns: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


def relate(
    lines: Sequence[Line],
    relative_to: Mapping[str, str],
    metrics: Sequence[str],
    units: Mapping[str, str],
    varying: Sequence[str],
) -> Related:
    """Add to each line how many times better it is than its counterpart, the line with the reference's coordinates.

    The interval of a ratio combines those of both medians on a log scale (MOVER: Zou & Donner, Statistics in Medicine
    27, 2008). A line without a value, one that is invalid or wrong, or of a job that ended early beside one that did
    not, is no reference.

    Args:
        relative_to: the reference's coordinates, as people type them: {"precision": "fp32"}.
        varying: the coordinates in which lines differ, the most important first. A line and its counterpart agree in
            all of them, except the reference's coordinates and those that depend on these.

    Raises:
        InvalidRequest: no line has these coordinates.
    """
    if lines and not any(_is_reference(line, relative_to) for line in lines):
        raise _no_such_row([line.coordinates for line in lines], list(relative_to.items()), "relative_to")
    others = [name for name in varying if name not in relative_to]
    dependent = _dependent(lines, others, [], list(relative_to))
    matched = [name for name in others if name not in dependent]
    references: dict[Hashable, list[Line]] = {}
    for line in lines:
        if _is_reference(line, relative_to):
            references.setdefault(line.values(matched), []).append(line)
    names = {gain_name(metric, units.get(metric)): metric for metric in metrics}
    for line in lines:
        alike = references.get(line.values(matched), [])
        for name, metric in names.items():
            measured = [reference for reference in alike if reference.cells[metric].value is not None]
            fit = [reference for reference in measured if reference.validity not in UNFIT]
            counterparts = [reference for reference in fit if not reference.partial] or fit or measured
            own = [reference for reference in counterparts if reference.job == line.job]
            if _is_reference(line, relative_to):
                itself = line.cells[metric]
                is_one = any(line is other for other in counterparts)
                line.cells[name] = Cell(1.0, None, None, REFERENCE, line.job) if is_one else replace(itself, value=None)
            elif alike and not counterparts:
                line.cells[name] = NOT_MEASURED
            elif not counterparts:
                line.cells[name] = Cell(None, None, None, NO_COUNTERPART, line.job)
            elif len(counterparts) > 1 and len(own) != 1:
                line.cells[name] = Cell(None, None, None, SEVERAL, line.job)
            elif not fit:
                line.cells[name] = Cell(None, None, None, f"reference {counterparts[0].validity}", line.job)
            else:
                base = (own or counterparts)[0]
                gain = _gain(base.cells[metric], line.cells[metric], better(metric, units.get(metric)), line.job)
                line.cells[name] = gain
                line.reference = line.reference if gain.value is None else base
    return Related(names, _on_gains(lines, relative_to, names, units, dependent))


def _on_gains(
    lines: Sequence[Line],
    relative_to: Mapping[str, str],
    names: Mapping[str, str],
    units: Mapping[str, str],
    dependent: Sequence[str],
) -> list[str]:
    what = ", ".join(f"{name}={value}" for name, value in relative_to.items())
    notes = [f"{name}: {_gain_text(metric, units.get(metric))} {what}." for name, metric in names.items()]
    if any(line.cells[name].low is not None for line in lines for name in names):
        notes.append(
            "Beside each ratio its 95 % interval, from those of both medians; only a comparison (`flopwatch submit "
            "compare`) holds what differs between processes."
        )
    if dependent:
        notes.append(f"Rows and their counterparts differ in {', '.join(dependent)}, too.")
    return notes


def on_hidden_references(lines: Sequence[Line]) -> list[str]:
    """Return a note on suspect references that are not among the lines shown, where no sign marks them."""
    shown = {id(line) for line in lines}
    found = [line.reference for line in lines if line.reference is not None and id(line.reference) not in shown]
    suspect = [reference for reference in found if reference.validity == "suspect"]
    if not suspect:
        return []
    of = f"{len(suspect)} of these rows" if len(suspect) > 1 else "a row"
    return [f"Of {of} the reference, not shown, is suspect: {suspect[0].reason or 'see its job'}."]


def _gain(base: Cell, cell: Cell, direction: Direction | None, job: int | None) -> Cell:
    """Return how many times better a cell is than its reference, with the interval if both have one."""
    if cell.value is None or base.value is None:
        return NOT_MEASURED
    ratio = gain(base.value, cell.value, direction)
    if ratio is None:
        return Cell(None, None, None, "unknown", job)
    ends = (base.low, base.value, base.high, cell.low, cell.value, cell.high)
    if any(end is None or end <= 0 for end in ends):
        return Cell(ratio, None, None, "ok", job)
    base_low, base_middle, base_high, low, middle, high = (math.log(end) for end in ends if end is not None)
    if direction == "less":  # reference / row
        down, up = math.hypot(base_middle - base_low, high - middle), math.hypot(base_high - base_middle, middle - low)
    else:
        down, up = math.hypot(middle - low, base_high - base_middle), math.hypot(high - middle, base_middle - base_low)
    return Cell(ratio, None, None, "ok", job, low=ratio * math.exp(-down), high=ratio * math.exp(up))


def _gain_text(metric: str, unit: str | None) -> str:
    direction = better(metric, unit)
    if direction is None:
        return f"{metric}, divided by that of"
    what = f"above 1× is {'faster' if gain_name(metric, unit).endswith('speedup') else 'better'}"
    formula = "reference / row" if direction == "less" else "row / reference"
    return f"{metric}, {formula}, so that {what}; the reference is"


def _is_reference(line: Line, relative_to: Mapping[str, str]) -> bool:
    return all(value in spellings(line.coordinates.get(name)) for name, value in relative_to.items())


Pairs = Sequence[tuple[str, str]]
"""Names with values, as people type them: ("precision", "fp32"). Several values of one name are alternatives."""


def chosen_lines(lines: Sequence[Line], where: Pairs) -> list[Line]:
    """Return the lines with these coordinates. Raises InvalidRequest if there is none."""
    return with_values(lines, [line.coordinates for line in lines], where)


def chosen_rows(sheet: Sheet, where: Pairs) -> Sheet:
    """Return the sheet, which no one has marked yet, with the rows that have these values in its columns.

    Raises InvalidRequest if there is no such column or row.
    """
    names = sheet.names()
    values = [dict(zip(names, row, strict=True)) for row in sheet.rows]
    return replace(sheet, rows=with_values(sheet.rows, values, where))


def with_values(
    items: Sequence[T], values: Sequence[Mapping[str, Any]], where: Pairs, option: str = "where"
) -> list[T]:
    """Return the items whose values are among those asked for, which may be patterns such as "*softmax*" unless an item
    has that very text; all of them if there are none to choose from. Raises InvalidRequest, which names `option` and
    what there is, if none has them.
    """
    known = {name: {text for own in values for text in spellings(own.get(name))} for name, _ in where}
    wanted: dict[str, set[str]] = {}
    for name, value in where:
        wanted.setdefault(name, set()).update(_meant(value, known[name]))
    chosen = [
        item
        for item, own in zip(items, values, strict=True)
        if not any(texts.isdisjoint(spellings(own.get(name))) for name, texts in wanted.items())
    ]
    if not chosen and items:
        raise _no_such_row(values, where, option)
    return chosen


def _meant(value: str, texts: Collection[str]) -> set[str]:
    """Return the texts that a value asks for: itself or, if it is none of them, those like this pattern."""
    pattern = value.replace("[", "[[]")  # a bracket is none
    return {value} if value in texts else {text for text in texts if fnmatchcase(text, pattern)}


def spellings(value: Any) -> list[str]:
    """Return a value as people type it; a whole number also without the decimals that tables leave out."""
    is_whole = isinstance(value, float) and value.is_integer()
    return [value_text(value), *([f"{value:z.0f}"] if is_whole else [])]


def _no_such_row(rows: Sequence[Mapping[str, Any]], wanted: Pairs, option: str) -> InvalidRequest:
    known = list(dict.fromkeys(name for row in rows for name in row))
    for name, value in wanted:
        if name not in known:
            noun = "column" if option == "where" else "coordinate"
            detail = f"These results have no {noun} {name!r}{nearest(name, known)}"
            break
        if not _meant(value, {text for row in rows for text in spellings(row.get(name))}):
            values = list(dict.fromkeys(value_text(row.get(name)) for row in rows))
            detail = f"No row has {name}={value}; there is {', '.join(values[:20])}{'…' if len(values) > 20 else ''}."
            break
    else:
        detail = f"No row has {' and '.join(f'{name}={value}' for name, value in wanted)}."
    return InvalidRequest.at(f"/{option}", detail)


def _dependent(lines: Sequence[Line], names: Sequence[str], fixed: Sequence[str], by: Sequence[str]) -> list[str]:
    """Return those of `names`, the most important first, that depend on the coordinates `by`, which make the columns or
    the reference: where the others agree, `by` determines them. An implementation's block size is an example, since
    other implementations have none: it must not split a row over implementations. `fixed` make the rows in any case."""
    made_of = list(fixed)
    for name in names:
        if not _follows(lines, name, [*made_of, *by]):
            made_of.append(name)
    return [name for name in names if name not in made_of and not _follows(lines, name, made_of)]


def _follows(lines: Sequence[Line], name: str, others: Sequence[str]) -> bool:
    first_values: dict[Hashable, Hashable] = {}
    return all(
        first_values.setdefault(line.values(others), line.values([name])) == line.values([name]) for line in lines
    )


@dataclass(frozen=True)
class Pivoted:
    """A pivoted table: the coordinates of its rows, its columns, and its rows, each with the lines in it."""

    coordinates: Sequence[str]
    columns: Sequence[Column]
    rows: Sequence[tuple[list[Scalar], list[Any], list[Line]]]
    """Values of the coordinates, cells of the columns, lines."""
    notes: Sequence[str]


def pivot(
    lines: Sequence[Line],
    coordinate: str,
    coordinates: Sequence[str],
    fixed: Collection[str],
    metrics: Sequence[Column],
) -> Pivoted:
    """Turn the values of one coordinate into columns, for each of the metrics. `coordinates` are those that rows would
    show, `fixed` those of them that rows show in any case. Raises InvalidRequest for more than MAX_PIVOTED values."""
    others = [name for name in coordinates if name != coordinate]
    kept = [name for name in others if name in fixed]
    dependent = _dependent(lines, [name for name in others if name not in fixed], kept, [coordinate])
    shown = [name for name in others if name not in dependent]
    spread = (line.coordinates.get(coordinate) for line in lines)
    values = _in_order(dict.fromkeys((type(value), value) for value in spread))
    if len(values) > MAX_PIVOTED:
        detail = f"{coordinate} has {len(values)} values, and a table at most {MAX_PIVOTED} columns of one metric."
        raise InvalidRequest.at("/pivot", detail)
    rows: dict[Hashable, list[dict[Hashable, Line]]] = {}
    for line in lines:
        value = line.coordinates.get(coordinate)
        runs = rows.setdefault(line.values(shown), [])
        free = next((run for run in runs if (type(value), value) not in run), None)
        if free is None:
            runs.append(free := {})
        free[type(value), value] = line
    repeated = any(len(runs) > 1 for runs in rows.values())
    heads = _heads(coordinate, [value for _, value in values])
    columns = [
        replace(column, name=f"{column.name}, {head}", group=column.name, head=head)
        for column in metrics
        for head in heads
    ]
    pivoted = []
    for runs in rows.values():
        for number, run in enumerate(runs, start=1):
            first = next(iter(run.values()))
            place = [first.coordinates.get(name) for name in shown] + ([number] if repeated else [])
            cells = [
                _cell(run.get(value), column.name, marked=column.role == "metric")
                for column in metrics
                for value in values
            ]
            pivoted.append((place, cells, list(run.values())))
    notes = [f"The columns differ in {', '.join(dependent)}, too."] if dependent else []
    if repeated:
        notes.append(f"Several jobs measured the same case: column {RUN} counts them.")
    return Pivoted([*shown, *([RUN] if repeated else [])], columns, pivoted, notes)


def _cell(line: Line | None, name: str, *, marked: bool) -> Cell:
    if line is None:
        return NOT_MEASURED
    cell = line.cells[name]
    if cell.outcome is None:
        return cell
    cell = replace(cell, validity=line.validity)
    if marked:
        line.marked.append(cell)
    return cell


def _in_order(values: Iterable[tuple[type, Scalar]]) -> list[tuple[type, Scalar]]:
    """Return numbers in ascending order; other values in their original order."""
    pairs = list(values)
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for _, value in pairs)
    return sorted(pairs, key=lambda pair: pair[1]) if numbers else pairs  # type: ignore[arg-type, return-value]


def _heads(coordinate: str, values: Sequence[Scalar]) -> list[str]:
    """Return the name of each value's column. Where two have one text, as null and the text "none", it is JSON."""
    texts = Counter(map(value_text, values))
    return [
        f"{coordinate}={value_text(value) if texts[value_text(value)] == 1 else json.dumps(value)}" for value in values
    ]


def is_size(coordinate: str, values: Iterable[Scalar]) -> bool:
    """Return True if a coordinate says how much work there is, as lengths and models do, and not how it is done."""
    known = [value for value in values if value is not None]
    return coordinate == "model" or all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in known
    )


WORK = (
    *("model", "mode", "context_length", "new_tokens", "sequence_length", "query_length", "head_dim", "num_heads"),
    *("num_kv_heads", "causal", "bottom_right", "window", "document_lengths", "softcap", "operation", "size_mb"),
    *("world_size", "nodes", "kernel", "rows", "columns"),
)
"""Coordinates that, with those of a model, say what is done. Rows that do other things have no best one among them."""
OF_A_STEP = ("batch_size", "accumulation_steps")
"""How much of it a step does, which a time depends on; a rate is the best whatever it takes."""


def mark_best(sheet: Sheet, *, along_rows: bool) -> None:
    """Mark the best valid cell of each column, where the metric has a direction, and those that cannot be told from
    it, because their intervals overlap, among the rows that do the same; or, `along_rows` of a pivoted table, those of
    each row's cells of a metric."""
    verdict = sheet.names().index("validity") if not sheet.traces and "validity" in sheet.names() else None
    metrics: dict[str, list[int]] = {}
    for index, column in enumerate(sheet.columns):
        if _direction(column) is not None:
            metrics.setdefault(column.group or column.name, []).append(index)
    for metric, places in metrics.items():
        direction = _direction(sheet.columns[places[0]])
        work = _work(sheet, rate=is_rate(metric, sheet.columns[places[0]].unit))
        groups: dict[tuple[Any, ...], list[Any]] = {}
        for number, row in enumerate(sheet.rows):
            key = (number,) if along_rows else tuple(row[index] for index in work)
            groups.setdefault(key, []).append([(row, index) for index in places])
        compared = [cells for group in groups.values() for cells in (group if along_rows else zip(*group, strict=True))]
        for cells in compared:
            valid = [
                row[index]
                for row, index in cells
                if row[index].value is not None
                and (row[index].validity if verdict is None else row[verdict]) not in UNFIT
            ]
            if len(valid) < 2:
                continue
            best = (min if direction == "less" else max)(valid, key=lambda cell: cell.value)
            for cell in valid:
                cell.best = cell.overlaps(best)


def _work(sheet: Sheet, *, rate: bool) -> list[int]:
    """Return the places of the coordinates in which rows that do the same agree."""
    return [
        index
        for index, column in enumerate(sheet.columns)
        if column.role == "coordinate"
        and (column.name in WORK or column.name.startswith("model.") or (column.name in OF_A_STEP and not rate))
    ]


def _direction(column: Column) -> str | None:
    return better(column.group or column.name, column.unit) if column.role == "metric" else None


def ordered(sheet: Sheet, sort: str | None) -> Sheet:
    """Return the sheet with its rows sorted by a column ("-column": descending), and rows without a value last.

    Raises InvalidRequest when there is no such column.
    """
    if sort is None:
        return sheet
    names = sheet.names()
    descending = sort not in names and sort.startswith("-")
    name = coordinate_of(sort[1:] if descending else sort, names)
    if name not in names:
        if not sheet.rows:
            return sheet
        raise InvalidRequest.at("/sort", f"There is no column {name!r} to sort by{nearest(name, names)}")
    index = names.index(name)
    value = _sortable([row[index] for row in sheet.rows])
    numbers = range(len(sheet.rows))
    known = [number for number in numbers if value(number) is not None]
    unknown = [number for number in numbers if value(number) is None]
    known.sort(key=value, reverse=descending)
    order = [*known, *unknown]
    marks = [sheet.marks[number] for number in order] if sheet.marks else ()
    sources = [sheet.sources[number] for number in order] if sheet.sources else ()
    return replace(sheet, rows=[sheet.rows[number] for number in order], marks=marks, sources=sources)


def _sortable(values: Sequence[Any]) -> Callable[[int], Any]:
    """Return a function from a row's number to its sort key. Values of several types are sorted as texts."""
    plain = [value.value if isinstance(value, Cell) else value for value in values]
    types = {type(value) for value in plain if value is not None}
    if len(types) > 1 and not types <= {int, float}:
        plain = [None if value is None else str(value) for value in plain]
    return lambda number: plain[number]


def page(sheet: Sheet, limit: int | None, after: int) -> Sheet:
    """Return the sheet with the rows from number `after` on, at most `limit` of them."""
    end = None if limit is None else after + limit
    following = str(end) if end is not None and end < len(sheet.rows) else None
    return replace(sheet.part(after, end), next=following)
