"""A check of one aspect of a measurement. Imports no torch, since the agent reads checks, too."""

import os
from dataclasses import dataclass
from typing import Literal

Severity = Literal["not_judged", "note", "suspect", "invalid", "wrong"]
NOT_JUDGED: Severity = "not_judged"
SEVERITIES: tuple[Severity, ...] = ("wrong", "invalid", "suspect", "note")
"""All severities of a failed check, from worst to mildest."""


@dataclass(frozen=True)
class Check:
    """The result of one check. If not ok, it lowers the verdict to its `severity`; a "note" does not change it. If ok,
    it has passed, unless its severity is "not_judged" (`not_judged`): then there was nothing to judge by."""

    name: str
    ok: bool
    detail: str
    severity: Severity = "suspect"


def not_judged(name: str, why: str) -> Check:
    """Return the result of a check that could not judge: it questions nothing, and vouches for nothing."""
    return Check(name, True, why, NOT_JUDGED)


def check_cores(number: int, what: str = "threads") -> Check:
    """Check that so many threads, or ranks, on the CPU have a core each: check `cores`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else number
    return Check("cores", number <= cores, f"{number} {what} on {cores} usable cores")
