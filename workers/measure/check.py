"""A check of one aspect of a measurement. Imports no torch, since the agent reads checks, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["note", "suspect", "invalid", "wrong"]
SEVERITIES: tuple[Severity, ...] = ("wrong", "invalid", "suspect", "note")
"""All severities, from worst to mildest."""


@dataclass(frozen=True)
class Check:
    """The result of one check. If not ok, it lowers the verdict to its `severity`; a "note" does not change it."""

    name: str
    ok: bool
    detail: str
    severity: Severity = "suspect"
