"""The last unit of a diagnosis: the tables `causes` and `changes`, and the answer in at most a dozen sentences."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.results.inference import interval
from app.specs.diagnosis import DiagnosisSpec
from workers.jobs._base import Unit
from workers.jobs._values import Metric, Values
from workers.jobs.diagnosis.planning import GAIN
from workers.jobs.diagnosis.turn import JOINED
from workers.measure.table import Column, Scalar
from workers.reporter import Reporter

CAUSES = Column.parse(
    "rank: integer, cause, where, lost_ms: number ms, lost_percent: number %, bound_ms: number ms, bound_is"
)
CHANGES = Column.parse(
    "change, cause, step_ms: number ms, ratio: number, ratio_low: number, ratio_high: number, verdict, "
    "loss_difference: number, how"
)
ANSWER = Column.parse("answer")
TOGETHER = "together"
MOST_CAUSES = 30
TOLD_CAUSES, TOLD_CHANGES = 5, 4
"""Causes and changes that the answer tells; the tables have all of them."""
BROAD = ("kernels", "host", "launches")
"""Causes against which so many changes may help that a refused one says little."""
LEAST_PERCENT = 1.0
EQUAL = 1e-5
"""Numbers that differ by less, relative to the largest, are equal but for rounding."""


@dataclass(frozen=True)
class Result:
    """What one change, or several together, did to the step."""

    change: str
    cause: str
    how: str
    verdict: str
    step_ms: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    difference: float | None = None
    removes: bool = False
    reason: str | None = None

    @property
    def row(self) -> list[Scalar]:
        how = f"{self.how}: {self.reason}" if self.reason else self.how
        numbers = (self.step_ms, self.ratio, self.low, self.high)
        return [self.change, self.cause, *numbers, self.verdict, self.difference, how]

    @property
    def gain(self) -> str:
        """The change of the step's time in percent, with its interval."""
        assert self.ratio is not None
        text = f"{_percent(self.ratio)} %"
        if self.low is None or self.high is None:
            return f"{text} in one process"
        return f"{text} ({_percent(self.low)} … {_percent(self.high)})"


def run(spec: DiagnosisSpec, unit: Unit, report: Reporter) -> None:
    """Write the answer from what the other units found."""
    found = unit.params
    results = [_result(found, row) for row in found["candidates"]]
    joined = _joined(found, results)
    step_ms = _step_ms(found)
    causes = _causes(found["seen"], results, step_ms)
    report.table("causes", CAUSES, causes)
    report.table("changes", CHANGES, [one.row for one in [*results, joined]])
    report.table("answer", ANSWER, [[line] for line in answer(step_ms, causes, results, joined)])
    if found["device_key"] is not None:
        values = Values([Metric("together_ms", TOGETHER, "ms")])
        why_not = "no change shortened the step"
        values.set("together_ms", TOGETHER, None if joined.step_ms is None else [joined.step_ms], why_not)
        values.report(spec.case(), found["device_key"], report)


def _step_ms(found: Mapping[str, Any]) -> float | None:
    values = found["turns"].get("") or found["screened"].get("") or found["looked"]
    return statistics.median(values) if values else None


def _result(found: Mapping[str, Any], candidate: Mapping[str, Any]) -> Result:
    name = candidate["change"]
    known = {"change": name, "cause": candidate["cause"], "how": candidate["how"], "removes": candidate["removes"]}
    if candidate["why_not"] is not None:
        return Result(**known, verdict="refused", reason=candidate["why_not"])
    if name in found["refused"]:
        return Result(**known, verdict="refused", reason=found["refused"][name])
    return _measured(found, name, known)


def _measured(found: Mapping[str, Any], name: str, known: Mapping[str, Any]) -> Result:
    """Return the result of the turns or, without turns, of the one process that has tried the change."""
    before, after = found["turns"].get("") or [], found["turns"].get(name) or []
    if not (before and after):
        before, after = found["screened"].get("") or [], found["screened"].get(name) or []
    if not (before and after):
        return Result(**known, verdict="not_tried", reason="no time was left: a larger budget_s tries it")
    estimate = interval(before, after)
    verdict = "inconclusive"
    if estimate.ratio is not None and estimate.low is not None and estimate.high is not None:
        if estimate.high < 1 and estimate.ratio < 1 - GAIN:
            verdict = "better"
        elif estimate.low > 1 and estimate.ratio > 1 + GAIN:
            verdict = "worse"
        elif estimate.low >= 1 - GAIN and estimate.high <= 1 + GAIN:
            verdict = "no_difference"
    elif estimate.ratio is not None and abs(estimate.ratio - 1) <= GAIN:
        verdict = "no_difference"
    numbers = (statistics.median(after), estimate.ratio, estimate.low, estimate.high)
    return Result(**known, verdict=verdict, **dict(zip(("step_ms", "ratio", "low", "high"), numbers, strict=True)),
                  difference=found["differences"].get(name))  # fmt: skip


def _joined(found: Mapping[str, Any], results: Sequence[Result]) -> Result:
    """Return the result of the changes that help together."""
    names: list[str] = found["joined"]
    how = " + ".join(names) or "no change shortened the step"
    causes = JOINED.join(dict.fromkeys(one.cause for one in results if one.change in names))
    known: dict[str, Any] = {"change": TOGETHER, "cause": causes, "how": how}
    if not names:
        return Result(**known, verdict="no_difference")
    return _measured(found, JOINED.join(names), known)


def _causes(seen: Sequence[Mapping[str, Any]], results: Sequence[Result], step_ms: float | None) -> list[list[Scalar]]:
    """Return the rows of `causes`, the largest first. A bound that a counterfactual measured is one of all that is lost
    to its cause."""
    total = sum(row["lost_ms"] for row in seen) or 1.0
    # The same shares, of the step as the turns have measured it.
    seen = [{**row, "lost_ms": row["lost_ms"] * (step_ms or total) / total} for row in seen]
    total = step_ms or total
    of_cause: Counter[str] = Counter()
    for row in seen:
        of_cause[row["cause"]] += row["lost_ms"]
    measured = {one.cause: one for one in results if one.removes and one.step_ms is not None}
    rows: list[list[Scalar]] = []
    for row in sorted(seen, key=lambda row: -row["lost_ms"]):
        percent = 100 * row["lost_ms"] / total
        if percent < LEAST_PERCENT or len(rows) == MOST_CAUSES:
            break
        bound = measured.get(row["cause"])
        alone = of_cause[row["cause"]] * 0.5 < row["lost_ms"]
        if bound is not None and alone:
            limit, how = bound.step_ms, "measured"
        else:
            limit, how = None if step_ms is None else max(0.0, step_ms - row["lost_ms"]), "ceiling"
        rows.append([len(rows) + 1, row["cause"], row["where"] or None, row["lost_ms"], percent, limit, how])
    return rows


def answer(
    step_ms: float | None, causes: Sequence[Sequence[Scalar]], results: Sequence[Result], joined: Result
) -> list[str]:
    """Return the sentences that a terminal shows."""
    if step_ms is None:
        return ["The step could not be measured: its verdict says why."]
    lines = [f"A step takes {step_ms:.4g} ms."]
    by_cause: dict[str, list[Result]] = {}
    for one in results:
        if one.verdict == "better" and not one.removes:
            by_cause.setdefault(one.cause, []).append(one)
    told: set[str] = set()
    for rank, cause, where, lost_ms, percent, bound_ms, bound_is in causes[:TOLD_CAUSES]:
        at = f" at {where}" if where else ""
        line = f"{rank}. {cause}: {lost_ms:.3g} ms ({percent:.0f} %){at}"
        line += f"; without it {bound_ms:.4g} ms, {_bound(bound_is)}"
        if str(cause) not in told:
            line += _cure(str(cause), by_cause.get(str(cause), []), results)
        told.add(str(cause))
        lines.append(line)
    others = [one for group in by_cause.values() for one in group if one.cause not in told]
    lines += [f"{one.change}: {one.step_ms:.4g} ms, {one.gain}{_numbers(one)}" for one in others[:TOLD_CHANGES]]
    lines += _rest(results)
    if joined.step_ms is not None and len(joined.how.split(" + ")) > 1:
        lines.append(f"Together ({joined.how}): {joined.step_ms:.4g} ms, {joined.gain}{_numbers(joined)}")
    elif not by_cause:
        lines.append("No change that was tried shortened the step by more than 1 % for certain.")
    return lines


def _cure(cause: str, better: Sequence[Result], results: Sequence[Result]) -> str:
    """Return what helped most against a cause or, if nothing did, why the change that would be made first cannot be."""
    if better:
        best = min(better, key=lambda one: one.ratio or 1.0)
        return f" -> {best.change}: {best.step_ms:.4g} ms, {best.gain}{_numbers(best)}"
    refused = [one for one in results if one.cause == cause and one.verdict == "refused" and cause not in BROAD]
    return f" ({refused[0].change}: {refused[0].reason})" if refused else ""


def _rest(results: Sequence[Result]) -> list[str]:
    lines = []
    losers = [
        f"{one.change} {_percent(one.ratio)} %"
        for one in results
        if one.verdict in ("no_difference", "worse", "inconclusive") and not one.removes and one.ratio is not None
    ]
    if losers:
        lines.append(f"Not worth it, or not certain: {', '.join(losers)}.")
    if late := [one.change for one in results if one.verdict == "not_tried"]:
        lines.append(f"Not tried for lack of time: {', '.join(late)} (a larger budget_s tries them).")
    return lines


def _bound(how: Scalar) -> str:
    return "measured" if how == "measured" else "at best"


def _numbers(one: Result) -> str:
    """Say whether the change leaves the numbers that the step returns as they are."""
    if one.difference is None:
        return ""
    if one.difference <= EQUAL:
        return f", numbers equal within {max(one.difference, 1e-9):.0e}"
    return f", changes the numbers by up to {100 * one.difference:.2g} %"


def _percent(ratio: float | None) -> str:
    assert ratio is not None
    return f"{100 * (ratio - 1):+.1f}".replace("-", "−")
