"""Compares what the steps of both sides returned (their losses, say), and the work of a step: a step that computes
something else is no faster version.

Each unit reports the table `values` (workers/measure/returned.py), of steps that drew the same random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, NamedTuple

from app.results.findings import Gate, GateOutcome, Judgement, percent
from app.results.sides import Pair, Side
from app.results.unit_tables import UNIT_INDEX, table_of, tables_of
from app.store.database.engine import Snapshot

VALUES = "values"
COLUMNS = frozenset({"what", "step", "name", "value", "not_finite"})
MAX_JOBS = 50
"""Most jobs of both sides whose tables are read."""
AGREES = 1e-4
"""Up to this relative difference the sentence says "agree to", beyond "differ by"."""
WORST_FIRST: tuple[GateOutcome, ...] = (
    *("wrong", "not_comparable", "slower", "invalid", "missing", "not_confirmed", "inconclusive", "passed"),
)

Place = tuple[str | None, int | None, str]
"""The key of a case, the step, and the number's name."""
Found = Mapping[Place, Sequence[float]]
"""One value per process."""


class Number(NamedTuple):
    """How far the values of one number in one step differ, relatively."""

    difference: float
    """The largest difference between processes of either side."""
    apart: float
    """The smallest."""
    within: float
    """The largest difference between processes of one side."""

    def outcome(self, tolerance: float) -> GateOutcome:
        """Judge whether both sides return the same."""
        if self.apart > max(tolerance, self.within):
            return "wrong"
        if self.within > tolerance:
            return "inconclusive"
        return "wrong" if self.difference > tolerance else "passed"


@dataclass(frozen=True)
class Agreement:
    """How far both sides' returned numbers agree."""

    difference: float | None
    """The largest relative difference |b - a| / max(|a|, |b|); infinite where only one is finite; None if nothing was
    compared."""
    numbers: Sequence[Number] = ()
    """Each number that was compared."""
    where: str = ""
    """The number with the largest difference, and its values."""
    names: Sequence[str] = ()
    steps: int = 0
    nothing: str = ""
    """Why nothing was compared."""
    lacking: Sequence[str] = ()
    """Numbers that only one side returns, each with the side; of a name that both return, the first such step."""
    not_finite: str | None = None
    """A number that is not finite on both sides."""
    work: Sequence[str] = ()
    """Work of a step that differs: "tokens 1024 → 512"."""

    def sentence(self) -> str:
        """Say how far they agree, and whether the work is the same."""
        parts = [self._of_numbers()]
        if (within := max((number.within for number in self.numbers), default=0.0)) > 0:
            parts.append(f"processes of one side alone differ by {percent(within)}")
        if self.lacking:
            parts.append(", ".join(self.lacking))
        if self.not_finite is not None:
            parts.append(f"both return {self.not_finite}")
        if self.work:
            parts.append(f"the work of a step is not the same: {', '.join(self.work)}")
        return "; ".join(parts)

    def _of_numbers(self) -> str:
        if self.difference is None:
            return self.nothing
        of = f"{', '.join(self.names[:3])}{' …' if len(self.names) > 3 else ''}, {self._steps}"
        if self.difference == 0:
            return f"returned numbers are equal ({of})"
        if math.isinf(self.difference):
            return f"returned numbers differ ({self.where})"
        if self.difference <= AGREES:
            return f"returned numbers agree to {self.difference:.1e} ({of})"
        return f"returned numbers differ by up to {percent(self.difference)} ({self.where})"

    @property
    def _steps(self) -> str:
        return "the first step" if self.steps == 1 else f"the first {self.steps} steps"

    def outcome(self, tolerance: float) -> GateOutcome:
        """Judge whether both return the same, to this relative difference."""
        outcomes = {number.outcome(tolerance) for number in self.numbers}
        if self.difference is None or any("baseline" in name for name in self.lacking):
            outcomes.add("missing")
        return min(outcomes, key=WORST_FIRST.index)

    def as_json(self, tolerance: float | None) -> dict[str, Any]:
        """Return it as JSON has it; an infinite difference is null, and `sentence` says what it is."""
        finite = self.difference is not None and math.isfinite(self.difference)
        return {
            "relative_difference": self.difference if finite else None,
            "names": list(self.names),
            "steps": self.steps,
            "work_differs": list(self.work),
            "expect_equal": tolerance,
            "outcome": None if tolerance is None else self.outcome(tolerance),
            "sentence": self.sentence(),
        }


def read(snapshot: Snapshot, pair: Pair) -> Agreement | None:
    """Compare the tables of both sides; None if neither has any, or both are the same jobs."""
    if not pair.alternated and {job.id for job in pair.baseline.jobs} == {job.id for job in pair.candidate.jobs}:
        return None
    if (number := sum(len(side.jobs) for side in pair.both)) > MAX_JOBS:
        return Agreement(None, nothing=f"of {number} jobs, nothing that steps returned was compared")
    ones, others = (_of_side(snapshot, side) for side in pair.both)
    if ones is not None and others is not None:
        return compare(ones, others)
    if ones is None and others is None:
        return None
    name = "baseline" if ones is None else "candidate"
    return Agreement(None, nothing=f"the {name} has kept nothing that its step returned, so no result was compared")


def _of_side(snapshot: Snapshot, side: Side) -> tuple[Found, Found] | None:
    """Return what the side's steps returned, and their work; None if it has no such table."""
    returned: dict[Place, list[float]] = {}
    work: dict[Place, list[float]] = {}
    has_any = False
    keys = {case.key for case in side.cases}
    for job in side.jobs:
        table = next((table for table in tables_of(snapshot, job.id) if table["name"] == VALUES), None)
        if table is None or not {column["name"] for column in table["columns"]} >= COLUMNS:
            continue
        of_job = {case.key for case in side.cases if case.job == job.id}
        key = next(iter(of_job), None) if len(keys) > 1 and len(of_job) == 1 else None
        has_any = has_any or side.units is None or bool(side.units & {*table["units"]})
        sheet = table_of(snapshot, job.id, VALUES)
        for cells in sheet.rows:
            row = dict(zip(sheet.names(), cells, strict=True))
            if side.units is not None and row.get(UNIT_INDEX, table["units"][0]) not in side.units:
                continue
            value = float(row["not_finite"] or "nan") if row["value"] is None else float(row["value"])
            kept = returned if row["what"] == "returned" else work
            kept.setdefault((key, row["step"], row["name"]), []).append(value)
    return (returned, work) if has_any else None


def compare(baseline: tuple[Found, Found], candidate: tuple[Found, Found]) -> Agreement:
    """Compare what both sides returned, and their work."""
    (ones, work), (others, other_work) = baseline, candidate
    differing = [
        f"{place[2]} {_text(work[place][0])} → {_text(other_work[place][0])}"
        for place in work
        if place in other_work and relative(work[place][0], other_work[place][0]) > AGREES
    ]
    common = [place for place in ones if place in others]
    if not common:
        which = [name for name, side in (("baseline", ones), ("candidate", others)) if not side]
        who = "the step returns" if len(which) == 2 else f"the {which[0]}'s step returns" if which else "both return"
        what = "no numbers" if which else "no number of the same name"
        return Agreement(None, nothing=f"{who} {what}, so no result was compared", work=differing)
    worst, where, numbers = -1.0, "", []
    for place in common:
        differences = [relative(*pair) for pair in product(ones[place], others[place])]
        numbers.append(Number(max(differences), min(differences), max(_spread(ones[place]), _spread(others[place]))))
        for one, other in product(_distinct(ones[place]), _distinct(others[place])):
            if (difference := relative(one, other)) > worst:
                worst, where = difference, f"{place[2]}, step {place[1]}: {_text(one)} → {_text(other)}"
    names = list(dict.fromkeys(name for _, _, name in common))
    lacking = _lacking("baseline", ones, others, names) + _lacking("candidate", others, ones, names)
    nan = next((place for place in common if not math.isfinite(ones[place][0]) and ones[place] == others[place]), None)
    nan = nan or next((place for place in common if all(map(math.isnan, [*ones[place], *others[place]]))), None)
    return Agreement(
        difference=worst,
        numbers=numbers,
        where=where,
        names=names,
        steps=len({step for _, step, _ in common}),
        lacking=lacking,
        not_finite=None if nan is None else f"{_text(ones[nan][0])} ({nan[2]}, step {nan[1]})",
        work=differing,
    )


def _lacking(who: str, side: Found, other: Found, common: Sequence[str]) -> list[str]:
    alone: dict[str, str] = {}
    for place in side:
        if place not in other:
            _, step, name = place
            alone.setdefault(name, f"only the {who} returns {name}" + (f" in step {step}" if name in common else ""))
    return list(alone.values())


def relative(one: float, other: float) -> float:
    """Return |other - one| / max(|one|, |other|); 0 for the same or two NaNs, infinite if only one is finite."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(other - one) / max(abs(one), abs(other))


def _distinct(values: Iterable[float]) -> list[float]:
    return [float(text) for text in dict.fromkeys(map(repr, values))]


def _spread(values: Sequence[float]) -> float:
    return max((relative(*pair) for pair in combinations(_distinct(values), 2)), default=0.0)


def _text(value: float) -> str:
    return f"{value:.6g}"


def applied(judgement: Judgement, agreement: Agreement | None, tolerance: float | None) -> Judgement:
    """Return the judgement with what is said of the returned numbers and, with a tolerance, judged by them."""
    if agreement is None:
        if tolerance is None:
            return judgement
        agreement = Agreement(None, nothing="these jobs have kept no numbers that a step returned")
    text = agreement.sentence()
    gate = judgement.gate
    if judgement.conclusion not in ("missing", "wrong", "invalid", "not_comparable"):
        judgement = replace(judgement, sentence=f"{judgement.sentence}; {text}")
        gate = gate and replace(gate, sentence=f"{gate.sentence}; {text}")
    if tolerance is None:
        return replace(judgement, gate=gate)
    outcome = agreement.outcome(tolerance)
    said = f"expected to agree to {tolerance:g}"
    of_numbers = f"{outcome}: {text}" + ("" if outcome == "passed" else f"; {said}")
    if gate is None:
        gate = Gate(None, [], outcome, of_numbers)
    elif WORST_FIRST.index(outcome) < WORST_FIRST.index(gate.outcome):
        gate = replace(gate, outcome=outcome, sentence=of_numbers)
    if outcome == "wrong":
        return replace(judgement, gate=gate, conclusion="wrong", sentence=f"wrong: {judgement.sentence}; {said}")
    return replace(judgement, gate=gate)
