"""Numbers for JSON and for people. Standard library only."""

import math
from typing import Any

NOTHING = "–"
"""Stands for a value that does not exist or is not known, wherever people read it."""


def finite(value: float | None) -> float | None:
    """Return None for NaN and infinity, which JSON lacks, and every other value unchanged."""
    return value if value is not None and math.isfinite(value) else None


def number(value: Any) -> str:
    """Write a value with four significant digits, or all digits before the point; NOTHING if there is none."""
    if value is None:
        return NOTHING
    if not isinstance(value, float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
