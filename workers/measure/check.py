"""A check: one thing that was looked at to judge a measurement. No torch here: the agent reads checks, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["note", "suspect", "invalid"]
SEVERITIES: tuple[Severity, ...] = ("invalid", "suspect", "note")
"""Severities, the worst first."""


@dataclass(frozen=True)
class Check:
    """One thing looked at. `severity` is what the verdict becomes if it is not ok; a "note" leaves it as it is."""

    name: str
    ok: bool
    detail: str
    severity: Severity = "suspect"
