"""Findings of `flopwatch doctor`, in the words that it prints. Standard library only."""

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: Literal["works", "absent", "broken"]
    """absent: it is not there, and need not be."""
    found: str
    cure: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def works(name: str, found: str) -> Finding:
    return Finding(name, "works", found)


def absent(name: str, found: str, cure: str = "") -> Finding:
    return Finding(name, "absent", found, cure)


def broken(name: str, found: str, cure: str) -> Finding:
    return Finding(name, "broken", found, cure)
