"""Sums up the verdicts on cases, for one unit and for the whole job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from app.states import VERDICTS, Verdict, worst
from workers.measure.check import NOT_JUDGED, SEVERITIES, Check
from workers.measure.table import Column, Scalar, Table, TooLarge

MAX_CHECKS = 100
"""Largest number of checks in the verdict of a job with several cases."""
NOISE = ("variation", "host_load")
"""Checks that fail on a noisy host."""
TABLE = "checks"
"""Name of the table that keeps all checks of a unit with several cases."""
TABLE_COLUMNS = Column.parse("case_key, case, check, ok: boolean, severity, detail")


@dataclass(frozen=True)
class CaseVerdict:
    """A unit's verdict on one case, or (`case_key` None) on all its other cases."""

    unit_title: str
    case_key: str | None
    title: str
    verdict: Verdict
    checks: Sequence[Check]
    cases: int = 1
    """Number of measured cases that it covers."""

    def joined(self, other: CaseVerdict) -> CaseVerdict:
        """Join this verdict with a later one on the same case, which a unit gives if it continued after a crash."""
        return CaseVerdict(
            unit_title=self.unit_title,
            case_key=self.case_key,
            title=other.title or self.title,
            verdict=worst((self.verdict, other.verdict)) or self.verdict,
            checks=[*self.checks, *other.checks],
        )


def summed_up(verdicts: Sequence[CaseVerdict]) -> dict[str, Any] | None:
    """Sum up verdicts as {"verdict", "noisy", "counts", "checks"}; return None if there are none.

    `noisy` is the number of cases with a failed check of NOISE, or left out.
    `counts` has the number of cases with each verdict; a case that several units measure counts once for each. `checks`
    lists all checks of a single case. Of several cases it lists the failed checks that are not notes; `checks_table`
    has the others. It lists at most MAX_CHECKS, failed ones first; one more entry has the number of the rest.
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
        if not (several_cases and (check.ok or check.severity == "note"))
    ]
    if len(checks) > MAX_CHECKS:
        checks.sort(key=lambda check: bool(check["ok"]))  # stable
        left_out = checks[MAX_CHECKS:]
        more = f"{len(left_out)} more checks" + (" found something" if several_cases else "")
        ok = all(check["ok"] for check in left_out)
        checks = [*checks[:MAX_CHECKS], {"name": "more", "ok": ok, "detail": more, "severity": "suspect"}]
    noisy = sum(
        verdict.cases for verdict in verdicts if any(not check.ok and check.name in NOISE for check in verdict.checks)
    )
    return {
        "verdict": worst([verdict.verdict for verdict in verdicts]),
        **({"noisy": noisy} if noisy else {}),
        "counts": {name: counts[name] for name in VERDICTS if counts[name]},
        "checks": checks,
    }


def checks_table(verdicts: Sequence[CaseVerdict], *, max_rows: int) -> Table | None:
    """Make a table of all checks on all cases of one unit; return None for a unit with one case.

    The table leaves out checks that do not fit, passed ones and notes first; a last row gives their number.
    """
    if sum(verdict.cases for verdict in verdicts) < 2:
        return None
    judged = [(verdict, check) for verdict in verdicts for check in verdict.checks]
    if (left_out := len(judged) - max_rows) > 0:
        judged = sorted(judged, key=lambda each: _rank(each[1]))[: max_rows - 1]
    rows = [_row(*each) for each in judged]
    if left_out > 0:
        said = f"{left_out + 1} more checks are left out, since the table would be too large"
        rows.append([None, None, "more", None, None, said])
    try:
        return Table(TABLE, TABLE_COLUMNS, rows)
    except TooLarge:  # details are longer than usual
        return checks_table(verdicts, max_rows=min(len(judged), max_rows) // 2)


def _row(verdict: CaseVerdict, check: Check) -> list[Scalar]:
    severity = None if check.ok and check.severity != NOT_JUDGED else check.severity
    return [verdict.case_key, verdict.title or None, check.name, check.ok, severity, check.detail]


def _rank(check: Check) -> int:
    """Return a check's sort key: the most severe failures come first, and passed checks last."""
    return len(SEVERITIES) if check.ok else SEVERITIES.index(check.severity)


def _as_json(check: Check, verdict: CaseVerdict, *, with_case: bool, with_unit: bool) -> dict[str, Any]:
    entry: dict[str, Any] = asdict(check)
    if with_case and verdict.title:
        entry["case"] = verdict.title
    if with_case and verdict.case_key is not None:
        entry["case_key"] = verdict.case_key  # by it, tables of results find the row of the check
    if with_unit:
        entry["unit"] = verdict.unit_title
    return entry
