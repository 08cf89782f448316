"""Compares what the steps of both sides returned (their losses, say), and the work of a step: a step that computes
something else is no faster version.

Each unit reports the table `values` (workers/measure/returned.py). Steps of one seed drew the same random numbers; what
those of different seeds returned is not compared.

In later steps rounding grows, gradually, to 6 % of a number's range in hundreds of steps of training (a transformer,
Adam with a rate ten times too high). So there a difference counts beyond a share of that range, or if it comes at once;
and a number that stops changing while the baseline's goes on is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, NamedTuple

from app.results.cases import CaseOfJob
from app.results.findings import SIDES, Gate, GateOutcome, Judgement, beyond, percent
from app.results.sides import Pair, Side
from app.results.unit_tables import UNIT_INDEX, table_of, tables_of
from app.specs import Scalar
from app.store.database.engine import Snapshot

VALUES = "values"
COLUMNS = frozenset({"what", "step", "name", "value", "not_finite"})
MAX_JOBS = 50
"""Most jobs of both sides whose tables are read."""
FIRST = 5
"""The first steps; in later ones rounding has grown."""
OF_RANGE = 0.1
"""Up to this share of a number's range in all steps, later steps may differ."""
AT_ONCE, GROWTH = 2e-3, 1e3
"""Up to this relative difference, or this multiple of the one in the kept steps before, rounding may grow between two
kept steps."""
CONVERGED = 1e-6
"""Up to this share of its range, a number has stopped changing at the same value on both sides."""
STILL = 2
"""So many kept steps in which a number stays the same have stopped changing it."""
AGREES = 1e-4
"""Up to this relative difference the sentence says "agree to", beyond "differ by"."""
WORST_FIRST: tuple[GateOutcome, ...] = (
    *("wrong", "slower", "invalid", "missing", "not_comparable", "not_confirmed", "inconclusive", "passed"),
)
OBSTACLES: tuple[GateOutcome, ...] = ("not_comparable", "invalid")

Place = tuple[str | None, Scalar, int | None, str]
"""The key by which a case is matched, the seed of the job, the step, and the number's name; of work, which no seed
changes, neither seed nor step."""
Found = Mapping[Place, Sequence[float]]
"""One value per process."""


class Returned(NamedTuple):
    """What one side's steps returned, and their work."""

    numbers: Found
    work: Found
    steps: Mapping[tuple[str | None, Scalar], int] = {}
    """By case and seed, the steps that each process made at least; of results that did not keep it, nothing."""

    def made(self, place: Place) -> bool:
        """Return True if all processes made that step."""
        return (place[2] or 0) <= self.steps.get(place[:2], math.inf)


class Number(NamedTuple):
    """How far the values of one number in one step differ, relatively."""

    difference: float
    """The largest difference between processes of either side."""
    apart: float
    """The smallest."""
    within: float
    """The largest difference between processes of one side."""
    grown: float = 0.0
    """How far rounding alone may have led by this step."""
    where: str = ""
    """The values that differ most."""

    @property
    def is_beyond(self) -> bool:
        """Return True if rounding does not explain the difference."""
        return self.difference > max(self.grown, AGREES)

    def outcome(self, tolerance: float) -> GateOutcome:
        """Judge whether both sides return the same."""
        tolerance = max(tolerance, self.grown)
        if beyond(self.apart, max(tolerance, self.within)):
            return "wrong"
        if beyond(self.within, tolerance):
            return "inconclusive"
        return "wrong" if beyond(self.difference, tolerance) else "passed"


@dataclass(frozen=True)
class Agreement:
    """How far both sides' returned numbers agree."""

    difference: float | None
    """The largest relative difference |b - a| / max(|a|, |b|) in the first steps and, beyond what rounding explains, in
    later ones; infinite where only one is finite; None if nothing was compared."""
    numbers: Sequence[Number] = ()
    """Each number that was compared."""
    where: str = ""
    """The number with the largest difference, and its values."""
    names: Sequence[str] = ()
    steps: int = 0
    """The first steps that were compared."""
    last_step: int = 0
    """The last one."""
    later: float = 0.0
    """The largest relative difference in later steps."""
    doubts: Sequence[str] = ()
    """Numbers of the candidate that stopped changing."""
    is_constant: bool = False
    """True if each number is the same in all steps, on both sides."""
    nothing: str = ""
    """Why nothing was compared."""
    obstacle: GateOutcome | None = None
    """The outcome if nothing can be judged, whatever the numbers are; None if it can."""
    lacking: Sequence[str] = ()
    """Numbers that only one side returns, each with the side; of a name that both return, the first such step. Also the
    seeds that only one side has."""
    is_lost: bool = False
    """True if the candidate lacks a number that the baseline returns."""
    not_finite: str | None = None
    """A number that is not finite on both sides."""
    work: Sequence[str] = ()
    """Work of a step that differs: "tokens 1024 → 512"."""

    def sentence(self) -> str:
        """Say how far they agree, and whether the work is the same."""
        parts = [self._of_numbers()]
        if (within := max((number.within for number in self.numbers), default=0.0)) > 0:
            by = f"by {percent(within)}" if math.isfinite(within) else "in whether it is finite"
            parts.append(f"processes of one side alone differ {by}")
        if self.lacking:
            parts.append(", ".join(self.lacking))
        parts += self.doubts
        if self.is_constant:
            parts.append("they are the same in every step, and so do not show that each step computes them")
        if self.not_finite is not None:
            parts.append(f"both return {self.not_finite}")
        if self.work:
            parts.append(f"the work of a step is not the same: {', '.join(self.work)}")
        return "; ".join(parts)

    def _of_numbers(self) -> str:
        if self.difference is None:
            return self.nothing
        of = f"{', '.join(self.names[:3])}{' …' if len(self.names) > 3 else ''}, {self._steps}"
        if math.isinf(self.difference):
            return f"returned numbers differ ({self.where})"
        if self.difference > AGREES:
            return f"returned numbers differ by up to {percent(self.difference)} ({self.where})"
        same = "are equal" if self.difference == 0 else f"agree to {self.difference:.1e}"
        further = ""
        if self.last_step > FIRST:
            to = percent(self.later) if self.later > AGREES else f"{self.later:.1e}" if self.later else "the last digit"
            further = f", and up to step {self.last_step} to {to}"
        return f"returned numbers {same} ({of}){further}"

    @property
    def _steps(self) -> str:
        return (
            f"step {self.last_step}"
            if not self.steps
            else "the first step"
            if self.steps == 1
            else f"the first {self.steps} steps"
        )

    def outcome(self, tolerance: float) -> GateOutcome:
        """Judge whether both return the same, to this relative difference."""
        if self.obstacle is not None:
            return self.obstacle
        outcomes = {number.outcome(tolerance) for number in self.numbers}
        if self.difference is None or self.is_lost:
            outcomes.add("missing")
        if self.doubts:
            outcomes.add("inconclusive")
        return min(outcomes, key=WORST_FIRST.index)

    def under(self, judgement: Judgement) -> Agreement:
        """Return what may be judged of it: nothing if the sides are not comparable, or one did other work. Then other
        numbers are no fault of the candidate."""
        obstacle = next((its for its in OBSTACLES if its == judgement.conclusion), None)
        return self if obstacle is None else replace(self, obstacle=obstacle)

    def as_json(self, tolerance: float | None) -> dict[str, Any]:
        """Return it as JSON has it; an infinite difference is null, and `sentence` says what it is."""
        finite = self.difference is not None and math.isfinite(self.difference)
        return {
            "relative_difference": self.difference if finite else None,
            "names": list(self.names),
            "steps": self.steps,
            "last_step": self.last_step,
            "work_differs": list(self.work),
            "expect_equal": tolerance,
            "outcome": None if tolerance is None else self.outcome(tolerance),
            "sentence": self.sentence(),
        }


def read(snapshot: Snapshot, pair: Pair, match: Callable[[Side, CaseOfJob], str | None]) -> Agreement | None:
    """Compare the tables of both sides; None if neither has any. `match` returns the key by which a case is matched."""
    if (number := sum(len(side.jobs) for side in pair.both)) > MAX_JOBS:
        return Agreement(None, nothing=f"of {number} jobs, nothing that steps returned was compared")
    ones, others = (_of_side(snapshot, side, match) for side in pair.both)
    if ones is not None and others is not None:
        return compare(ones, others)
    if ones is None and others is None:
        return None
    name = SIDES[ones is not None]
    return Agreement(None, nothing=f"the {name} has kept nothing that its step returned, so no result was compared")


def _of_side(snapshot: Snapshot, side: Side, match: Callable[[Side, CaseOfJob], str | None]) -> Returned | None:
    returned: dict[Place, list[float]] = {}
    work: dict[Place, list[float]] = {}
    steps: dict[tuple[str | None, Scalar], int] = {}
    has_any = False
    for job in side.jobs:
        table = next((table for table in tables_of(snapshot, job.id) if table["name"] == VALUES), None)
        if table is None or not {column["name"] for column in table["columns"]} >= COLUMNS:
            continue
        of_job = {match(side, case) for case in side.cases if case.job == job.id}
        spec, units = (job.spec, None) if side.units is None else (job.spec.get(side.name, {}), side.units)
        if spec.get("kind") == "diagnosis":
            spec, units = spec["step"], frozenset({min(table["units"])})  # the others change the step
        key = next(iter(of_job)) if len(of_job) == 1 else None
        has_any = has_any or units is None or bool(units & {*table["units"]})
        sheet = table_of(snapshot, job.id, VALUES)
        for cells in sheet.rows:
            row = dict(zip(sheet.names(), cells, strict=True))
            if units is not None and row.get(UNIT_INDEX, table["units"][0]) not in units:
                continue
            value = float(row["not_finite"] or "nan") if row["value"] is None else float(row["value"])
            if row["what"] == "returned":
                returned.setdefault((key, spec.get("seed"), row["step"], row["name"]), []).append(value)
            elif row["what"] == "steps":
                steps[key, spec.get("seed")] = min(int(value), steps.get((key, spec.get("seed")), int(value)))
            else:
                work.setdefault((key, None, None, row["name"]), []).append(value)
    return Returned(returned, work, steps) if has_any else None


def compare(baseline: Returned, candidate: Returned) -> Agreement:
    """Compare what both sides returned, and their work."""
    (ones, work, _), (others, other_work, _) = baseline, candidate
    differing = [
        f"{place[-1]} {_texts(work[place])} → {_texts(other_work[place])}"
        for place in work
        if place in other_work and _spread([*work[place], *other_work[place]]) > AGREES
    ]
    seeds = [list(dict.fromkeys(seed for _, seed, _, _ in side)) for side in (ones, others)]
    if ones and others and not {*seeds[0]} & {*seeds[1]}:
        which_seeds = " → ".join(", ".join(map(str, side)) for side in seeds)
        why = f"the seeds differ ({which_seeds}), so nothing that steps returned can be compared"
        return Agreement(None, nothing=why, obstacle="not_comparable", work=differing)
    common = [place for place in ones if place in others]
    if not common:
        which = [name for name, side in zip(SIDES, (ones, others), strict=True) if not side]
        who = "the step returns" if len(which) == 2 else f"the {which[0]}'s step returns" if which else "both return"
        what = "no numbers" if which else "no number of the same name"
        return Agreement(None, nothing=f"{who} {what}, so no result was compared", work=differing)
    ranges = _ranges(ones, common)
    numbers = _numbers(ones, others, common, ranges)
    counted = {place: its for place, its in numbers.items() if not _is_later(place) or its.is_beyond} or numbers
    worst = max(counted, key=lambda place: counted[place].difference)
    names = list(dict.fromkeys(place[-1] for place in common))
    lost = _lacking(SIDES[0], baseline, candidate, names)
    alone = [
        f"only the {who} has seed {seed}, which was not compared"
        for who, its, other in zip(SIDES, seeds, seeds[::-1], strict=True)
        for seed in its
        if seed not in other
    ]
    nan = next((place for place in common if not math.isfinite(ones[place][0]) and ones[place] == others[place]), None)
    nan = nan or next((place for place in common if all(map(math.isnan, [*ones[place], *others[place]]))), None)
    return Agreement(
        difference=counted[worst].difference,
        numbers=[*numbers.values()],
        where=f"{_named(worst)}: {numbers[worst].where}",
        names=names,
        steps=len({place[2] for place in common if not _is_later(place)}),
        last_step=max(place[2] or 0 for place in common),
        later=max((its.difference for place, its in numbers.items() if place not in counted), default=0.0),
        doubts=_doubts(ones, others, ranges),
        is_constant=nan is None
        and len({place[2] for place in common}) > STILL
        and not any(its for side in (ones, others) for its in _ranges(side, side).values()),
        lacking=[*lost, *_lacking(SIDES[1], candidate, baseline, names), *alone],
        is_lost=bool(lost),
        not_finite=None if nan is None else f"{_text(ones[nan][0])} ({_named(nan)}): {_finite(ones, common)}",
        work=differing,
    )


def _numbers(
    ones: Found, others: Found, common: Sequence[Place], ranges: Mapping[Series, float]
) -> dict[Place, Number]:
    """Compare each number in each step, in the order of the steps."""
    numbers: dict[Place, Number] = {}
    before: dict[Series, float] = {}
    for place in sorted(common, key=lambda place: place[2] or 0):
        pairs = {pair: relative(*pair) for pair in product(_distinct(ones[place]), _distinct(others[place]))}
        one, other = furthest = max(pairs, key=pairs.__getitem__)
        series, grown = _series(place), 0.0
        if _is_later(place):
            of_range = OF_RANGE * ranges[series] / (max(abs(one), abs(other)) or 1.0)
            grown = min(of_range, max(AT_ONCE, GROWTH * before.get(series, 0.0)))
        before[series] = max(pairs[furthest], before.get(series, 0.0))
        within = max(_spread(ones[place]), _spread(others[place]))
        where = f"{_text(one)} → {_text(other)}"
        numbers[place] = Number(pairs[furthest], min(pairs.values()), within, grown, where)
    return numbers


def _finite(found: Found, places: Sequence[Place]) -> str:
    finite = sum(all(map(math.isfinite, found[place])) for place in places)
    return f"only {finite} of {len(places)} numbers are finite"


def _lacking(who: str, side: Returned, other: Returned, common: Sequence[str]) -> list[str]:
    alone: dict[str, str] = {}
    seeds = {seed for _, seed, _, _ in other.numbers}
    cases = {case for case, _, _, _ in other.numbers}
    for place in side.numbers:
        case, seed, step, name = place
        if place not in other.numbers and seed in seeds and other.made(place):
            where = f" in step {step}" if name in common else ""
            where = where if case in cases else " in a case that the other side has not measured"
            alone.setdefault(name, f"only the {who} returns {name}{where}")
    return list(alone.values())


Series = tuple[str | None, Scalar, str]
"""One number of all steps: a place without its step."""


def _series(place: Place) -> Series:
    return place[0], place[1], place[3]


def _is_later(place: Place) -> bool:
    return (place[2] or 0) > FIRST


def _ranges(side: Found, places: Iterable[Place]) -> dict[Series, float]:
    values: dict[Series, list[float]] = {}
    for place in places:
        values.setdefault(_series(place), []).extend(value for value in side[place] if math.isfinite(value))
    return {series: max(its, default=0.0) - min(its, default=0.0) for series, its in values.items()}


def _doubts(baseline: Found, candidate: Found, ranges: Mapping[Series, float]) -> list[str]:
    """Tell of cases and seeds in which all numbers of the candidate have stopped changing, though they change in the
    baseline, or have stopped there at other values."""
    ended, stopped = _stopped(baseline), _stopped(candidate)
    moving = [series for series, its in ranges.items() if its > 0]
    at_once = {
        series
        for series, (_, value) in stopped.items()
        if series in moving and abs(ended.get(series, (0, math.inf))[1] - value) > CONVERGED * ranges[series]
    }
    goes_on = {series[:2] for series in moving if series not in at_once}
    return [
        f"the candidate's {series[-1]} is {_text(stopped[series][1])} in each step from {stopped[series][0]} on, as if "
        "it computed nothing there (if it has converged, compare fewer steps: measure_steps, warmup_steps)"
        for series in moving
        if series in at_once and series[:2] not in goes_on
    ][:1]


def _stopped(side: Found) -> dict[Series, tuple[int, float]]:
    """Return the numbers that stayed the same in the last STILL kept steps: since which step, and at which value."""
    found: dict[Series, tuple[int, float]] = {}
    by_step: dict[Series, dict[int, Sequence[float]]] = {}
    for place, values in side.items():
        by_step.setdefault(_series(place), {})[place[2] or 0] = values
    for series, steps in by_step.items():
        backwards = sorted(steps, reverse=True)
        changes = [step for step in backwards if {*steps[step]} != {*steps[backwards[0]]}]
        same = backwards[: backwards.index(changes[0])] if changes else backwards
        if len(same) >= STILL and backwards[0] > FIRST:
            found[series] = same[-1], steps[same[-1]][0]
    return found


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


def _named(place: Place) -> str:
    return f"{place[-1]}, step {place[2]}"


def _text(value: float) -> str:
    return f"{value:.6g}"


def _texts(values: Sequence[float]) -> str:
    return ", ".join(dict.fromkeys(map(_text, values)))


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
        if agreement.doubts and judgement.conclusion == "better":
            judgement = replace(judgement, conclusion="inconclusive")
        if agreement.doubts and gate is not None and gate.outcome == "passed":
            gate = replace(gate, outcome="inconclusive")
        return replace(judgement, gate=gate)
    outcome = agreement.outcome(tolerance)
    said = f"expected to agree to {tolerance:g}"
    of_numbers = f"{outcome.replace('_', ' ')}: {text}" + ("" if outcome == "passed" else f"; {said}")
    if judgement.conclusion in OBSTACLES:
        of_numbers = judgement.sentence
    if gate is None:
        gate = Gate(None, [], outcome, of_numbers)
    elif WORST_FIRST.index(outcome) < WORST_FIRST.index(gate.outcome):
        gate = replace(gate, outcome=outcome, sentence=of_numbers)
    if outcome == "wrong":
        return replace(judgement, gate=gate, conclusion="wrong", sentence=f"wrong: {judgement.sentence}; {said}")
    return replace(judgement, gate=gate)
