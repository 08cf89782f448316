"""Writes a comparison as a sheet: the metrics of its cases, or the rows of the tables of two profiles or snapshots."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from app.columns import free_names, type_of
from app.results import findings
from app.results.comparing import ComparedMetric, Comparison
from app.results.sheet import Column, Sheet
from app.results.sides import SIDES
from app.specs import Scalar
from app.states import VERDICTS

METRIC_COLUMNS = (
    Column("metric", "string"),
    Column("unit", "string"),
    Column("better", "string", in_text=False),
    Column("baseline", "number", mixed=True),
    Column("candidate", "number", mixed=True),
    Column("change", "number", mixed=True),
    Column("ratio", "number"),
    Column("ratio_low", "number"),
    Column("ratio_high", "number"),
    Column("p_value", "number", in_text=False),
    Column("p_adjusted", "number"),
    Column("finding", "string"),
    Column("sentence", "string", in_text=False),
    Column("spread_percent", "number", "%", in_text=False),
    Column("smallest_difference_percent", "number", "%", in_text=False),
    *(Column(f"replicates_for_{number}_percent", "integer", in_text=False) for number in findings.ASKED_FOR),
    *(Column(f"{side}_processes", "integer", in_text=False) for side in SIDES),
    *(Column(f"{side}_n", "integer", in_text=False) for side in SIDES),
    *(Column(f"{side}_outcome", "string") for side in SIDES),
    *(Column(f"{side}_validity", "string") for side in SIDES),
    Column("statistic", "string", in_text=False),
    Column("samples", "integer", in_text=False),
    Column("case_key", "string", in_text=False),
)
"""Columns of a metric of a case. `ratio` is candidate / baseline, with its interval of 95 %. `statistic` is what a
process counts as ("fastest" or "median"; null if it has a single value), of so many `samples` of each."""


def sheet_of(comparison: Comparison, limit: int | None = None) -> Sheet:
    """Return a comparison as a sheet. `Sheet.about` has the sides, the judgement and all differences. `limit`: of
    profiles and snapshots, the largest number of rows of each table and phase, those with the largest changes."""
    tables = comparison.tables
    sheet = _metric_sheet(comparison.rows) if tables is None else tables.sheet(limit)
    notes = [*filter(None, [comparison.how]), *comparison.notes, *sheet.notes]
    return replace(sheet, notes=notes, lead=_lead(comparison.judgement), about=_about(comparison, notes))


def _about(comparison: Comparison, notes: Sequence[str]) -> dict[str, Any]:
    return {
        **vars(comparison.judgement),
        "alternated": comparison.alternated,
        "agreement": comparison.agreement,
        "baseline": comparison.baseline.as_json(),
        "candidate": comparison.candidate.as_json(),
        "differences": comparison.differences,
        "spec_differences": comparison.spec_differences,
        "environment_differences": comparison.environment_differences,
        "distributions": [] if comparison.tables is not None else _distributions(comparison),
        "notes": list(notes),
    }


def _lead(judgement: findings.Judgement) -> list[str]:
    lead = [f"{judgement.sentence}."]
    if judgement.gate is not None and judgement.gate.sentence != judgement.sentence:
        lead.append(f"Gate: {judgement.gate.sentence}.")
    return lead


def _distributions(comparison: Comparison) -> list[dict[str, Any]]:
    places = {id(row): place for place, row in enumerate(comparison.rows)}
    return [
        {"row": places[id(row)], "baseline": list(row.judged.baseline), "candidate": list(row.judged.candidate)}
        for row in comparison.distributions()
    ]


def _metric_sheet(compared: Sequence[ComparedMetric]) -> Sheet:
    """Return the table of metrics: coordinates, then METRIC_COLUMNS."""
    shown = list(compared[0].place) if compared else []
    rows: list[list[Scalar]] = [[*metric.place.values(), *metric.values().values()] for metric in compared]
    names = free_names(shown, {column.name for column in METRIC_COLUMNS}, "case")
    types = [type_of(row[index] for row in rows) for index in range(len(shown))]
    coordinates = [Column(names[name], type_, role="coordinate") for name, type_ in zip(shown, types, strict=True)]
    return Sheet([*coordinates, *_shown_columns([metric.judged for metric in compared])], rows)


def _shown_columns(judged: Sequence[findings.Row]) -> list[Column]:
    """Return METRIC_COLUMNS; formats for people show only those that carry information here."""
    tested = any(row.p_adjusted is not None for row in judged)
    has_intervals = any((row.estimate or findings.NOTHING).low is not None for row in judged)
    failed = any(cell.outcome not in ("ok", "unknown", None) for row in judged for cell in row.cells)
    doubtful = any(verdict in VERDICTS[1:] for row in judged for verdict in row.verdicts)
    shown = {
        "ratio_low": has_intervals,
        "ratio_high": has_intervals,
        "p_adjusted": tested,
        "finding": tested or has_intervals,
        **{f"{side}_outcome": failed for side in SIDES},
        **{f"{side}_validity": doubtful for side in SIDES},
    }
    several = len({row.unit for row in judged}) > 1
    return [
        replace(column, in_text=shown.get(column.name, column.in_text), mixed=column.mixed and several)
        for column in METRIC_COLUMNS
    ]
