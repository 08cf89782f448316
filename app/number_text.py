"""Writes single numbers for people. Standard library only."""

from __future__ import annotations

from typing import Any


def number(value: Any) -> str:
    """Write a value with four significant digits, or all digits before the point; "–" if there is none."""
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
