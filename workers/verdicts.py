"""What the verdicts of a job's cases add up to: of one unit, and of the whole job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

VERDICTS = ("valid", "suspect", "invalid")
"""From best to worst."""
Verdict = Literal["valid", "suspect", "invalid"]
MAX_CHECKS = 100
"""That are listed of a job with several cases."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class CaseVerdict:
    """What a unit says of one case, or (`case_key` None) of all its other cases."""

    unit_title: str
    case_key: str | None
    title: str
    verdict: Verdict
    checks: Sequence[Check]
    cases: int = 1
    """How many measured cases it is of."""

    def joined(self, other: CaseVerdict) -> CaseVerdict:
        """This one and a later one of the same case, which a unit gives that went on after a crash."""
        return CaseVerdict(
            unit_title=self.unit_title,
            case_key=self.case_key,
            title=other.title or self.title,
            verdict=worst((self.verdict, other.verdict)),
            checks=[*self.checks, *other.checks],
        )


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of several verdicts."""
    return max(verdicts, key=VERDICTS.index)


def summed_up(verdicts: Sequence[CaseVerdict]) -> dict[str, Any] | None:
    """The verdict of all: {"verdict", "counts", "checks"}; None without any.

    `counts` says of how many cases there is which verdict; a case that several units measure counts in each. With one
    case all its checks are listed, with several only those that found something: at most MAX_CHECKS, and one more entry
    that says how many there are besides.
    """
    if not verdicts:
        return None
    several_cases = sum(verdict.cases for verdict in verdicts) > 1
    several_units = len({verdict.unit_title for verdict in verdicts}) > 1
    counts: Counter[Verdict] = Counter()
    for verdict in verdicts:
        counts[verdict.verdict] += verdict.cases
    checks = [
        _as_json(check, verdict, with_case=several_cases, with_unit=several_units)
        for verdict in verdicts
        for check in verdict.checks
        if not (several_cases and check.ok)
    ]
    if several_cases and len(checks) > MAX_CHECKS:
        more = f"{len(checks) - MAX_CHECKS} more checks found something"
        checks = [*checks[:MAX_CHECKS], {"name": "more", "ok": False, "detail": more}]
    return {
        "verdict": worst(verdict.verdict for verdict in verdicts),
        "counts": {name: counts[name] for name in ("valid", "suspect", "invalid") if counts[name]},
        "checks": checks,
    }


def _as_json(check: Check, verdict: CaseVerdict, *, with_case: bool, with_unit: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": check.name, "ok": check.ok, "detail": check.detail}
    if with_case and verdict.title:
        entry["case"] = verdict.title
    if with_unit:
        entry["unit"] = verdict.unit_title
    return entry
