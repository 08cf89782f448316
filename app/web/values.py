"""Writes values of coordinates and grids as short texts."""

from __future__ import annotations

from typing import Any


def value_text(value: Any) -> str:
    """Write a value: objects by their values, as {"size": "tiny"} is "tiny"; null is "none"."""
    if isinstance(value, dict | list):
        return "/".join(map(value_text, value.values() if isinstance(value, dict) else value))
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)
