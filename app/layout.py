"""How measurements are laid out for people, on pages and in the terminal. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

FACTS = ("phase", "metric", "unit", "outcome", "reason", "partial", "attempt", "samples")
STATISTICS = ("n", "mean", "std", "median", "min", "max", "p05", "p25", "p75", "p95")
REPLICATE = "replicate"
"""The coordinate that counts a case's processes; no part of its identity."""
MAX_LISTED = 4
"""More values than these are counted instead of listed."""


def varying_coordinates(measurements: Mapping[str, Any]) -> list[str]:
    """Coordinates of the cases that are not the same in every row: the others say nothing about the difference."""
    rows: Sequence[Mapping[str, Any]] = measurements["rows"]
    coordinates = [column["name"] for column in measurements["columns"] if column["name"] not in (*FACTS, *STATISTICS)]
    return [name for name in coordinates if len({json.dumps(row.get(name)) for row in rows}) > 1]


def case_text(coordinates: Mapping[str, Any]) -> str:
    """A case in words: texts as they are, flags and numbers by name ("triton, causal, head_dim=64").

    A coordinate of a whole job lists its values ("16/32/64"); of many, their number is told ("13 implementations").
    """
    return ", ".join(_coordinate(name, value) for name, value in coordinates.items() if value is not None)


def _coordinate(name: str, value: Any) -> str:
    if value is True:
        return name
    parts = [_part(part) for part in (value.split("/") if isinstance(value, str) else [value])]
    if len(parts) > MAX_LISTED:
        return f"{len(parts)} {name.replace('_', ' ')}s"
    text = "/".join(parts)
    return f"{name}={text}" if all(map(_is_number_or_flag, parts)) else text


def _part(value: Any) -> str:
    text = str(value)
    return text.lower() if text in ("True", "False") else text


def _is_number_or_flag(text: str) -> bool:
    return text in ("true", "false") or text.lstrip("-").replace(".", "", 1).isdecimal()


def missing(rows: Sequence[Mapping[str, Any]], coordinates: Sequence[str]) -> list[str]:
    """Why cells have no numbers, one line for each reason: which cells and how many, their outcome, the reason.

    Metrics are named only where the cell has other metrics with numbers. `rows` are those of a job's measurements:
    coordinates, facts and statistics beside each other.
    """
    names = [name for name in coordinates if name != REPLICATE]

    def case(row: Mapping[str, Any]) -> str:
        return json.dumps([row.get(name) for name in names])

    measured = {case(row) for row in rows if row["mean"] is not None}
    groups: dict[tuple[bool, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["mean"] is None:
            outcome = "unknown" if row["outcome"] == "ok" else row["outcome"]
            groups.setdefault((case(row) in measured, outcome, row["reason"] or ""), []).append(row)
    every = len({case(row) for row in rows})
    lines = []
    # Cells without any number first.
    for (is_measured, outcome, reason), group in sorted(groups.items(), key=lambda item: item[0][0]):
        count = len({case(row) for row in group})
        what = [_shared([row for row in rows if not is_measured or case(row) in measured], group, names)]
        if is_measured:
            metrics = list(dict.fromkeys(row["metric"] for row in group))
            what.append(", ".join(metrics) if len(metrics) <= MAX_LISTED else f"{len(metrics)} metrics")
        where = ", ".join(filter(None, what))
        cells = f"all {count} cells" if count == every else f"{count} cells"
        if count > 1:
            where = f"{where} ({cells})" if where else cells
        lines.append(": ".join(filter(None, (where, outcome, " ".join(reason.split())))))
    return lines


def _shared(rows: Sequence[Mapping[str, Any]], group: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """What is particular to the cells of `group`: the coordinates that take fewer values there than in `rows`."""
    found = {}
    for name in names:
        values = _values(group, name)
        if len(values) < len(_values(rows, name)) and len(values) <= MAX_LISTED:
            found[name] = values[0] if len(values) == 1 else "/".join(map(str, values))
    return case_text(found)


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [json.loads(text) for text in dict.fromkeys(json.dumps(row.get(name)) for row in rows)]


def doubts(validity: Mapping[str, Any]) -> tuple[str, list[str]]:
    """A validity's verdict, and what speaks against the measurements: "name: detail" of each check that failed."""
    failed = [check for check in validity.get("checks", ()) if not check["ok"]]
    return validity.get("verdict", "unknown"), [f"{check['name']}: {check['detail']}" for check in failed]


def number(value: Any) -> str:
    """A value with four significant digits, or all digits before the point; "–" for none."""
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
