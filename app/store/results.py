"""Tables of results: one row per case of a job, one column per metric. The only module that uses pandas.

A case is identified by its coordinates. Rows show the coordinates that a kind asks for (`table_rows`) and every other
one that varies, so that two cases never look the same; where one case was measured by several jobs, the job too.

A cell is the mean of its samples with their standard deviation. Where a case was measured in several processes
(replicates), the process is the unit: the mean of the processes' means, and the standard deviation of those. Nothing is
averaged over what is missing: when one process has no value, or the job did not succeed, the cell has an outcome
instead ("oom", "unsupported", "timeout", …) and its numbers are null.
"""

from __future__ import annotations

import html
import json
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pandas as pd
from pydantic import ValidationError
from sqlalchemy import Connection, Row, Select, select

from app.errors import FieldError, InvalidRequest, NotFound
from app.layout import REPLICATE
from app.specs import KINDS, SpecBase, spec_adapter
from app.store import tables
from app.store.engine import Database
from app.store.public import checked_id, finite

MAX_JOBS = 10_000
UNKNOWN = "unknown"
_Row = Row[Any] | SimpleNamespace
"""A job or a measurement: of the database, or of `flopwatch run`."""


@dataclass
class _Cell:
    """One metric of one case: what each process measured."""

    processes: list[_Row] = field(default_factory=list)

    def outcome(self) -> str:
        return next((row.outcome for row in self.processes if row.outcome != "ok"), "ok")

    def values(self) -> tuple[float | None, float | None, int | None, str]:
        """Mean, standard deviation, number of values behind them, outcome."""
        if self.outcome() != "ok":
            return None, None, None, self.outcome()
        if len(self.processes) == 1:
            row = self.processes[0]
            return finite(row.mean), finite(row.std), row.n, "ok"
        means = [row.mean for row in self.processes]
        return finite(statistics.fmean(means)), finite(statistics.stdev(means)), len(means), "ok"


@dataclass
class _Case:
    """One row: a case of a job. `stopped`: why there are no numbers, when the job did not succeed."""

    job: int | None
    kind: str
    coordinates: dict[str, Any]
    stopped: str | None = None
    cells: dict[str, _Cell] = field(default_factory=dict)

    def show(self, name: str) -> Any:
        return {"job": self.job, "kind": self.kind}.get(name) or self.coordinates.get(name)


def table(
    database: Database,
    *,
    kind: str | None = None,
    sweep: int | None = None,
    jobs: Collection[int] = (),
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> pd.DataFrame:
    """The results of finished jobs, in the order of their submission; what is given narrows the choice of jobs.

    rows: coordinates to show first, and always; those that vary follow. columns: metrics, in this order; by default the
    kind's `table_columns`. Each metric has the columns `<metric>`, `<metric>_std`, `<metric>_n` and `<metric>_outcome`;
    `frame.attrs` has "coordinates", "metrics" and "units" (by metric).

    Raises NotFound for an unknown job or sweep, InvalidRequest for an unknown coordinate or metric or for more than
    MAX_JOBS jobs.
    """
    with database.read() as connection:
        chosen = _choose(connection, kind, sweep, jobs)
        measured = _measurements(connection, [job.id for job in chosen])
    return _frame(*_cases(chosen, measured), rows, columns)


def local_table(spec: SpecBase, measurements: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """The table of one job that is in no database, as `flopwatch run` measured it; `measurements` as on the wire."""
    job = SimpleNamespace(id=None, kind=spec.kind, state="succeeded", spec=spec.model_dump(mode="json"), error=None)
    return _frame(*_cases([job], [SimpleNamespace(job_id=None, **row) for row in measurements]), None, None)


def _frame(
    cases: Sequence[_Case], units: dict[str, str], rows: Sequence[str] | None, columns: Sequence[str] | None
) -> pd.DataFrame:
    coordinates = _coordinates(cases, rows)
    metrics = _metrics(cases, units, columns)
    data: dict[str, pd.Series[Any]] = {
        name: pd.Series([case.show(name) for case in cases], dtype=object) for name in coordinates
    }
    for metric in metrics:
        values = [_values(case, metric) for case in cases]
        for index, (suffix, dtype) in enumerate((("", "Float64"), ("_std", "Float64"), ("_n", "Int64"))):
            data[metric + suffix] = pd.Series([value[index] for value in values], dtype=dtype)
        data[f"{metric}_outcome"] = pd.Series([value[3] for value in values], dtype=object)
    frame = pd.DataFrame(data)
    frame.attrs = {"coordinates": coordinates, "metrics": metrics, "units": units}
    return frame


def _choose(connection: Connection, kind: str | None, sweep: int | None, jobs: Collection[int]) -> Sequence[Row[Any]]:
    job = tables.job.c
    query: Select[Any] = select(job.id, job.kind, job.state, job.spec, job.error)
    if kind is not None:
        query = query.where(job.kind == kind)
    if sweep is not None:
        sweeps = select(tables.sweep.c.id).where(tables.sweep.c.id == checked_id(sweep, "sweep"))
        if connection.execute(sweeps).one_or_none() is None:
            raise NotFound(f"There is no sweep {sweep}.")
        query = query.where(job.sweep_id == sweep)
    if jobs:
        known = select(job.id).where(job.id.in_([checked_id(number, "job") for number in jobs]))
        unknown = set(jobs) - set(connection.execute(known).scalars())
        if unknown:
            raise NotFound(f"There is no job {min(unknown)}.")
        query = query.where(job.id.in_(jobs))
    finished = query.where(job.state.in_(("succeeded", "failed", "cancelled")))
    found = connection.execute(finished.order_by(job.id).limit(MAX_JOBS + 1)).all()
    if len(found) > MAX_JOBS:
        raise InvalidRequest(f"The table would have more than {MAX_JOBS} jobs: choose a sweep, or jobs.")
    return found


def _measurements(connection: Connection, job_ids: Sequence[int]) -> list[Row[Any]]:
    measurement = tables.measurement.c
    names = ("job_id", "case", "phase", "metric", "unit", "outcome", "partial", "n", "mean", "std")
    query = select(*(measurement[name] for name in names)).order_by(measurement.id)
    found: list[Row[Any]] = []
    for start in range(0, len(job_ids), 1000):
        found += connection.execute(query.where(measurement.job_id.in_(job_ids[start : start + 1000])))
    return sorted(found, key=lambda row: row.job_id)  # stable: within a job as measured


def _cases(jobs: Sequence[_Row], measured: Iterable[_Row]) -> tuple[list[_Case], dict[str, str]]:
    by_job: dict[int | None, list[_Row]] = {job.id: [] for job in jobs}
    for row in measured:
        by_job[row.job_id].append(row)
    cases: list[_Case] = []
    units: dict[str, str] = {}
    for job in jobs:
        stopped = None if job.state == "succeeded" else (job.error or {}).get("code", job.state)
        found: dict[str, _Case] = {}
        in_phases = _metrics_of_several_phases(by_job[job.id])
        for row in by_job[job.id]:
            coordinates = _identity(row.case)
            case = found.setdefault(json.dumps(coordinates), _Case(job.id, job.kind, coordinates, stopped))
            name = f"{row.phase}_{row.metric}" if row.metric in in_phases and row.phase else row.metric
            case.cells.setdefault(name, _Cell()).processes.append(row)
            units[name] = row.unit
        if not found and stopped is not None:
            found[""] = _Case(job.id, job.kind, _planned(job.spec), stopped)
        cases += found.values()
    return cases, units


def _identity(case: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in case.items() if name != REPLICATE}


def _metrics_of_several_phases(rows: Iterable[_Row]) -> set[str]:
    phases: dict[str, set[str | None]] = {}
    for row in rows:
        phases.setdefault(row.metric, set()).add(row.phase)
    return {metric for metric, names in phases.items() if len(names) > 1}


def _planned(spec: dict[str, Any]) -> dict[str, Any]:
    """The coordinates of a job that measured nothing; none when the spec is of another version and no longer valid."""
    try:
        return dict(spec_adapter.validate_json(json.dumps(spec)).coordinates())
    except ValidationError:
        return {}


def _values(case: _Case, metric: str) -> tuple[float | None, float | None, int | None, str | None]:
    if case.stopped is not None:
        return None, None, None, case.stopped
    cell = case.cells.get(metric)
    return (None, None, None, None) if cell is None else cell.values()


def _coordinates(cases: Sequence[_Case], asked: Sequence[str] | None) -> list[str]:
    """The coordinates that the rows show: those asked for, those that vary, and the job where they do not suffice."""
    known = list(dict.fromkeys(name for case in cases for name in case.coordinates))
    if asked is None:
        chosen = [name for kind in _kinds(cases) for name in _spec(kind, "table_rows") if name in known]
        chosen = list(dict.fromkeys(["kind", *chosen] if len(_kinds(cases)) > 1 else chosen))
    else:
        _refuse_unknown("rows", asked, [*known, "kind", "job"], there_is_something=bool(cases))
        chosen = list(dict.fromkeys(asked))
    chosen += [name for name in known if name not in chosen and _varies(cases, name)]
    shown = [json.dumps([case.show(name) for name in chosen]) for case in cases]
    if len(set(shown)) < len(shown):
        chosen.append("job")
    return chosen


def _varies(cases: Sequence[_Case], name: str) -> bool:
    # A job that measured nothing knows less of its case (not the device, for one); that is no difference.
    values = [case.coordinates.get(name) for case in cases if case.cells or name in case.coordinates]
    return len(set(map(json.dumps, values))) > 1


def _metrics(cases: Sequence[_Case], units: Mapping[str, str], asked: Sequence[str] | None) -> list[str]:
    preferred = list(dict.fromkeys(name for kind in _kinds(cases) for name in _spec(kind, "table_columns")))
    if asked is not None:
        every = {name for kind in KINDS for name in _spec(kind, "table_columns")}
        _refuse_unknown("columns", asked, [*units, *sorted(every - set(units))], there_is_something=bool(units))
        return list(dict.fromkeys(asked))
    outcomes: dict[str, set[str]] = {}
    for case in cases:
        for name, cell in case.cells.items():
            outcomes.setdefault(name, set()).add(cell.outcome())
    # What no cell knows is no column, though other cells have a worse reason to have no value.
    told = {name for name, found in outcomes.items() if "ok" in found or UNKNOWN not in found}
    if not units:  # nothing but jobs that failed before they measured: their outcomes need a column
        return preferred[:1]
    return [name for name in preferred if name in told] or [name for name in units if name in told]


def _kinds(cases: Sequence[_Case]) -> list[str]:
    return list(dict.fromkeys(case.kind for case in cases))


def _spec(kind: str, attribute: str) -> tuple[str, ...]:
    return getattr(KINDS.get(kind), attribute, ())


def _refuse_unknown(what: str, asked: Sequence[str], known: Sequence[str], *, there_is_something: bool) -> None:
    unknown = [name for name in asked if name not in known]
    if unknown and there_is_something:
        detail = f"{unknown[0]!r} is none of these results' {what}: {', '.join(known)}."
        raise InvalidRequest(detail, errors=(FieldError(f"/{what}", detail),))


def render(frame: pd.DataFrame, format: str) -> str:  # noqa: A002  (the query parameter's name)
    """A table() as text: json | csv (numbers, with every column) | markdown | latex | html (mean ± std, or words)."""
    try:
        renderer = _RENDERERS[format]
    except KeyError:
        raise InvalidRequest(f"There is no format {format!r}; there is {', '.join(_RENDERERS)}.") from None
    return renderer(frame)


def _json(frame: pd.DataFrame) -> str:
    rows = [
        {name: None if pd.isna(value) else value for name, value in row.items()} for row in frame.to_dict("records")
    ]
    columns = []
    for name in frame.columns:
        metric = next((metric for metric in frame.attrs["metrics"] if name in (metric, f"{metric}_std")), None)
        unit = None if metric is None else frame.attrs["units"].get(metric)
        columns.append({"name": name, "type": _json_type([row[name] for row in rows], frame[name]), "unit": unit})
    return json.dumps({"columns": columns, "rows": rows}, allow_nan=False)


def _json_type(values: Iterable[Any], series: pd.Series[Any]) -> str:
    if pd.api.types.is_float_dtype(series.dtype):
        return "number"
    types = {type(value) for value in values if value is not None}
    if pd.api.types.is_integer_dtype(series.dtype) or types == {int}:
        return "integer"
    if types and types <= {int, float}:
        return "number"
    return "boolean" if types == {bool} else "string"


def _csv(frame: pd.DataFrame) -> str:
    return str(frame.to_csv(index=False, lineterminator="\n"))


def _markdown(frame: pd.DataFrame) -> str:
    texts = _texts(frame).map(lambda text: text.replace("|", "\\|"))
    if texts.empty:
        return "No results.\n"
    align = ["right" if name in frame.attrs["metrics"] else "left" for name in texts.columns]
    return str(texts.to_markdown(index=False, disable_numparse=True, colalign=align)) + "\n"


def _latex(frame: pd.DataFrame) -> str:
    texts = _texts(frame)
    layout = "".join("r" if name in frame.attrs["metrics"] else "l" for name in texts.columns)
    return str(texts.to_latex(index=False, escape=True, column_format=layout)).replace("±", r"$\pm$")


def _html(frame: pd.DataFrame) -> str:
    """A table element without styles; cells that hold numbers, and their heads, have the class "number"."""
    texts = _texts(frame)
    numeric = {name for name in texts.columns if name in frame.attrs["metrics"] or any(map(_is_number, frame[name]))}
    heads = [_html_cell("th", name, name in numeric) for name in texts.columns]
    lines = ["<table>", f"<thead><tr>{''.join(heads)}</tr></thead>", "<tbody>"]
    rows = frame[list(texts.columns)].itertuples(index=False)
    for shown, values in zip(texts.itertuples(index=False), rows, strict=True):
        cells = [_html_cell("td", text, _is_number(value)) for text, value in zip(shown, values, strict=True)]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</tbody>", "</table>", ""])


def _html_cell(tag: str, text: str, is_number: bool) -> str:
    number = ' class="number"' if is_number else ""
    return f"<{tag}{number}>{html.escape(text)}</{tag}>"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not pd.isna(value)


_RENDERERS: dict[str, Callable[[pd.DataFrame], str]] = {
    "json": _json,
    "csv": _csv,
    "markdown": _markdown,
    "latex": _latex,
    "html": _html,
}


def _texts(frame: pd.DataFrame) -> pd.DataFrame:
    """The table for people: coordinates and, per metric, one text."""
    texts: dict[str, list[str]] = {name: [_text(value) for value in frame[name]] for name in frame.attrs["coordinates"]}
    for metric in frame.attrs["metrics"]:
        cells = zip(*(frame[metric + suffix] for suffix in ("", "_std", "_n", "_outcome")), strict=True)
        texts[metric] = [_cell_text(mean, std, n, outcome) for mean, std, n, outcome in cells]
    return pd.DataFrame(texts, dtype=object)


TOO_SMALL = 1e-6
"""What six decimals would show as nothing is written with an exponent."""


def _text(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cell_text(mean: Any, std: Any, n: Any, outcome: str | None) -> str:
    if outcome is None:
        return ""
    if outcome != "ok" or pd.isna(mean):
        return UNKNOWN if outcome == "ok" else outcome
    alone = pd.isna(std) or n < 2
    if any(0 < abs(value) < TOO_SMALL for value in ((mean,) if alone else (mean, std))):
        return f"{mean:.3g}" if alone else f"{mean:.3g} ± {std:.2g}"
    if alone:
        return f"{mean:.{_decimals(mean, 4)}f}"
    # The deviation's two leading digits say how far the mean's are worth showing.
    decimals = _decimals(std, 2) if std > 0 else _decimals(mean, 4)
    return f"{mean:.{decimals}f} ± {std:.{decimals}f}"


def _decimals(value: float, digits: int) -> int:
    """How many decimals show `digits` significant digits of `value`, at most 6."""
    if value == 0:
        return 0
    return min(6, max(0, digits - 1 - math.floor(math.log10(abs(value)))))
