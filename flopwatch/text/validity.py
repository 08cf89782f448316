"""Writes the verdict on measurements in words, with its failed checks. Standard library only."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

NOT_JUDGED = "not_judged"
"""Severity of a check that had nothing to judge by; it counts as ok."""
_MILDER = {"wrong": 0, "invalid": 1}
MAX_DOUBTS = 5
"""Number of a job's failed checks that are shown."""

FEWEST_NOISY = 3
"""Fewest noisy jobs that make a noisy host."""
RECENT_JOBS = 50
"""Number of the last jobs by which a host is called noisy."""


def verdict(validity: Mapping[str, Any]) -> str:
    """Write the verdict of a job or a unit: its worst case's verdict, and the number of cases with each verdict if
    there are several."""
    counts = validity.get("counts") or {}
    text = str(validity.get("verdict", "unknown"))
    if sum(counts.values()) < 2:
        return text
    return f"{text} ({', '.join(f'{count} {name}' for name, count in counts.items())})"


def doubts(validity: Mapping[str, Any]) -> list[str]:
    """Return the doubts about the measurements: "case: check: detail" of checks that failed, the most severe first, of
    each name one before a second."""
    of_name: dict[Any, list[Mapping[str, Any]]] = {}
    for check in _failed(validity):
        of_name.setdefault(check.get("name"), []).append(check)
    failed = [check for turn in itertools.zip_longest(*of_name.values()) for check in turn if check is not None]
    lines = [_line(check) for check in failed[:MAX_DOUBTS]]
    if len(failed) > MAX_DOUBTS:
        lines.append(f"and {len(failed) - MAX_DOUBTS} more")
    return lines


def why(validity: Mapping[str, Any]) -> str | None:
    """Name the checks that failed: "variation, host_load"; None if none did."""
    return ", ".join(dict.fromkeys(str(check.get("name")) for check in _failed(validity))) or None


def noisy_host(validities: Iterable[Mapping[str, Any] | None]) -> str | None:
    """Say that the host of these jobs is noisy, if most of at least three jobs are; else None."""
    judged = [validity for validity in validities if validity]
    noisy = sum(bool(validity.get("noisy")) for validity in judged)
    if noisy < FEWEST_NOISY or 2 * noisy <= len(judged):
        return None
    return f"noisy host: {noisy} of {len(judged)} recent jobs varied by more than 5 % or shared the CPU"


def notes(validity: Mapping[str, Any]) -> list[str]:
    """Return the notes, which inform about the measurements without questioning them: "note: check: detail"."""
    noted = [check for check in validity.get("checks") or () if not check.get("ok") and _is_note(check)]
    return [f"note: {_line(check)}" for check in noted[:MAX_DOUBTS]]


def not_judged(validity: Mapping[str, Any]) -> str | None:
    """Name the checks that could not judge, such as for want of samples: "variation, drift"; None if all could."""
    names = [check.get("name") for check in validity.get("checks") or () if check.get("severity") == NOT_JUDGED]
    return ", ".join(dict.fromkeys(map(str, names))) or None


def _failed(validity: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    failed = [check for check in validity.get("checks") or () if not check.get("ok") and not _is_note(check)]
    return sorted(failed, key=lambda check: _MILDER.get(str(check.get("severity")), len(_MILDER)))


def _is_note(check: Mapping[str, Any]) -> bool:
    return check.get("severity") == "note"


def _line(check: Mapping[str, Any]) -> str:
    # A unit that measures one case has its name.
    words = dict.fromkeys(check.get(name) for name in ("unit", "case", "name", "detail"))
    return ": ".join(str(word) for word in words if word)
