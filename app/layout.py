"""How measurements are laid out for people, on pages and in the terminal. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

FACTS = ("phase", "metric", "unit", "outcome", "reason", "partial", "attempt", "samples")
STATISTICS = ("n", "mean", "std", "median", "min", "max", "p05", "p25", "p75", "p95")


def varying_coordinates(measurements: Mapping[str, Any]) -> list[str]:
    """Coordinates of the cases that are not the same in every row: the others say nothing about the difference."""
    rows: Sequence[Mapping[str, Any]] = measurements["rows"]
    coordinates = [column["name"] for column in measurements["columns"] if column["name"] not in (*FACTS, *STATISTICS)]
    return [name for name in coordinates if len({json.dumps(row.get(name)) for row in rows}) > 1]


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
