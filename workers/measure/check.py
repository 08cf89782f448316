"""A check of one aspect of a measurement. This module imports no torch, since the agent reads checks, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["note", "suspect", "invalid"]
SEVERITIES: tuple[Severity, ...] = ("invalid", "suspect", "note")
"""Severities, the worst first."""


@dataclass(frozen=True)
class Check:
    """One check. `severity` is the verdict if it is not ok; a "note" does not change the verdict."""

    name: str
    ok: bool
    detail: str
    severity: Severity = "suspect"
