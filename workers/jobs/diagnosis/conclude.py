"""The last unit of a diagnosis: the tables `causes` and `changes`, and the answer in MOST_LINES lines, or in more where
many changes help."""

import statistics
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.results.agreement import FIRST
from app.results.inference import interval
from app.specs.diagnosis import OTHERS_WAIT, RARE, REMOVABLE, SMALL, WORK, WRITTEN, DiagnosisSpec
from flopwatch.intervals import median_interval
from workers.jobs._base import Unit
from workers.jobs._values import Metric, Values
from workers.jobs.diagnosis.look import LARGE, OPTIMIZER, REPEATED
from workers.jobs.diagnosis.planning import CLEAR, DISTURBED, GAIN, is_better
from workers.jobs.diagnosis.turn import JOINED
from workers.measure.check import Check
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
DECIDED, UNTRIED = ("better", "no_difference", "worse"), ("not_tried", "inconclusive")
NONE_JOINED = "no two changes were measured together"
TOGETHER, STEP_MS = "together", "answer_step_ms"
MOST_CAUSES = 30
MOST_LINES, MOST_BELOW, WIDTH = 22, 3, 80
"""Of the answer on a terminal, and of what is said below a cause of a change that is refused; the tables have all."""
INDENT, TIED = "   ", "\N{NO-BREAK SPACE}"
"""What a wrapped line begins with; a space at which no line is broken."""
TOLD_CAUSES = 7
LARGE_PERCENT = 100 * LARGE
"""Of a smaller cause it is not told why a change against it was refused. Smaller ones come after all larger ones."""
BROAD = ("kernels", "host", "launches")
"""Causes against which so many changes may help that a refused one says little."""
VECTORISE = f"{SMALL}: let one take all rounds at once or, where a round needs the one before, use torch.compile"
"""What to do about a loop over such operators."""
IN_ONE = f"{WRITTEN}: torch.nn.functional.scaled_dot_product_attention is one operator"
"""What to do about attention in several."""
PLAIN = "kernels"
STAYS = (*WORK, "unexplained")
"""Causes whose time no cure takes away as a whole."""
CURE, WHOLE = "cure", 0.95
"""`bound_is` of a bound that a cure has reached; the share of a cause that a row must have to be all of it."""
COMPARABLE = 1.5
"""By how much a ceiling must be larger than a measured gain to come before it: no cure takes all of it away."""
LEAST = 0.01
"""A cause that is a smaller share of what the step would take without the larger ones is not told."""
LEAST_SEEN = 0.002
"""A smaller share of the whole step is a few samples of a profile."""
EQUAL = 1e-5
"""Numbers that differ by less, relative to the largest, are equal but for rounding."""
UNLIKE = 1.5
"""By what factor one process that tried a change must be faster to be told, or slower than was predicted to doubt
that."""
AGAIN = "measure again on an idle host"
MOST_APART = 0.2
"""How far an end of the median's interval, or of few processes the farthest one, may be from the median."""
NO_TIME = "no time was left: a larger budget_s tries it"
GRAPH_REPEATS = ": a graph repeats one batch unless each is copied into the same tensors"
BOUND_FOUND = "bound"
"""The verdict of a change that removes work, and so is no cure, if the step is faster with it."""


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
    done: bool = False
    """Whether the step does already what the change would do."""
    sure: bool = True
    """False if one process tried it, and that on a CPU, or those of the step as it is differ by more than it gains."""
    promising: int = 0
    """If it is not certain: how many processes tried it, if the slowest was clearly faster than any of the step as it
    is."""

    @property
    def row(self) -> list[Scalar]:
        how = f"{self.how}: {self.reason}" if self.reason else self.how
        numbers = (self.step_ms, self.ratio, self.low, self.high)
        verdict = BOUND_FOUND if self.removes and self.verdict == "better" else self.verdict
        return [self.change, self.cause, *numbers, verdict, self.difference, how]

    @property
    def gain(self) -> str:
        """The change of the step's time in percent, with its interval; no number that may be noise."""
        assert self.ratio is not None
        text = f"{_percent(self.ratio)} %"
        if not self.sure:
            tried = f"{self.promising} process{'es' * (self.promising > 1)}"
            return f"about {text} ({tried})".replace(" ", TIED) if self.promising else "(too few processes)"
        if self.low is None or self.high is None:
            return f"{text} (no interval)"
        return f"{text} " + f"({_percent(self.low)} … {_percent(self.high)})".replace(" ", TIED)


def run(spec: DiagnosisSpec, unit: Unit, report: Reporter) -> None:
    """Write the answer from what the other units found."""
    found = unit.params
    results = [_result(found, row) for row in found["candidates"]]
    joined = _joined(found, results)
    step_ms = _step_ms(found)
    check = _check_processes(found)
    if check is not None:
        from workers.measure.validity import verdict

        load = None if check.ok else _others(found)
        report.validity(verdict([check, *([load] if load else [])]), title="processes")
    causes = _causes(found["seen"], results, step_ms, rough=_is_rough(found, step_ms), agree=check is None or check.ok)
    report.table("causes", CAUSES, causes)
    report.table("changes", CHANGES, [one.row for one in [*results, joined]])
    lines = answer(_step(found, step_ms), causes, results, joined)
    report.table("answer", ANSWER, [[line] for line in lines])
    if found["device_key"] is not None:
        values = Values([Metric("together_ms", TOGETHER, "ms"), Metric(STEP_MS, None, "ms")])
        values.set(STEP_MS, None, _plain(found) or None, "no process measured the step")
        known = [] if joined.step_ms is None or not joined.sure else [joined.step_ms]
        why_not = "too few processes measured it" if joined.step_ms else NONE_JOINED
        values.set("together_ms", TOGETHER, known or None, why_not)
        values.report(spec.case(), found["device_key"], report)


def _step_ms(found: Mapping[str, Any]) -> float | None:
    values = _plain(found)
    return statistics.median(values) if values else None


def _plain(found: Mapping[str, Any]) -> list[float]:
    """Return the times of the step as it is, one for each process, of the last stage that has measured it."""
    values: list[float] = found["turns"].get("") or found["screened"].get("") or found["looked"]
    return values


def _check_processes(found: Mapping[str, Any]) -> Check | None:
    """Check that the processes of the step as it is agree on its time; None: there was one."""
    values = _plain(found)
    before_ms = min([*found["screened"].get("", ()), *found["looked"]], default=None)
    if values and before_ms and (now_ms := statistics.median(values)) > DISTURBED * before_ms:
        return Check("variation", False, f"the step took {_ms(before_ms)} at first, {_ms(now_ms)} later: {AGAIN}")
    if len(values) < 2:
        return None
    least, most, middle = min(values), max(values), statistics.median(values)
    low, high = median_interval(values) or (least, most)
    apart = max(high / middle - 1, 1 - low / middle)
    detail = f"{len(values)} processes took {_ms(least)} to {_ms(most)}: their median is uncertain by up to {apart:.0%}"
    detail += f"; limit {MOST_APART:.0%}"
    return Check("variation", apart <= MOST_APART, detail)


def _others(found: Mapping[str, Any]) -> Check | None:
    """Return the check that failed because other processes used the host during turns; None if they did not."""
    told = [reason for reason in found["others"] if reason]
    detail = f"in {len(told)} of {len(found['others'])} processes; of the first: {told[0]}" if told else ""
    return Check("host_load", False, detail) if told else None


def _step(found: Mapping[str, Any], step_ms: float | None) -> str:
    """Return the first line: the step, its interval, and the share of it in which a GPU works."""
    if step_ms is None:
        return "The step could not be measured: its verdict says why."
    values = _plain(found)
    line = f"step {_ms(step_ms)}"
    if ends := median_interval(values):
        line += f" ± {100 * max(ends[1] / step_ms - 1, 1 - ends[0] / step_ms):.1f} %"
    else:
        between = f"{_ms(min(values))} … {_ms(max(values))} in ".replace(" ms", "") if len(values) > 1 else ""
        line += f" ({between}{len(values)} process{'es' * (len(values) > 1)})"
    if found["busy_percent"] is not None:
        line += f", the device works {found['busy_percent']:.0f} % of it"
    if found["beside"]:
        line += f"; {found['beside']}"
    if _is_rough(found, step_ms):
        line += f"; {_ms(found['profiled_ms'])} when profiled: shares are rough"
    if (check := _check_processes(found)) is not None and not check.ok:
        others = ", as other processes used the CPU" if _others(found) else ""
        unsure = f"uncertain by more than {MOST_APART:.0%}{others}"
        line += f"; suspect: {check.detail if check.detail.endswith(AGAIN) else unsure}"
    return line


def _is_rough(found: Mapping[str, Any], step_ms: float | None) -> bool:
    """Return True if the profiled step took another time than the turns: then its shares tell little of theirs."""
    looked_ms: float | None = found["profiled_ms"]
    if not looked_ms or not step_ms:
        return False
    return not 1 / DISTURBED <= looked_ms / step_ms <= DISTURBED


def _result(found: Mapping[str, Any], candidate: Mapping[str, Any]) -> Result:
    name = candidate["change"]
    known = {"change": name, "cause": candidate["cause"], "how": candidate["how"], "removes": candidate["removes"]}
    if candidate["why_not"] is not None:
        return Result(**known, verdict="refused", reason=candidate["why_not"], done=bool(candidate.get("done")))
    if name in found["refused"] and not found["turns"].get(name):
        return Result(**known, verdict="refused", reason=found["refused"][name])
    return _measured(found, name, known)


def _measured(found: Mapping[str, Any], name: str, known: Mapping[str, Any]) -> Result:
    """Return the result of the turns or, without turns, of the one process that has tried the change."""
    before, after = found["turns"].get("") or [], found["turns"].get(name) or []
    if not (before and after):
        # Other processes of a busy host only lengthen a step.
        before = sorted([*found["screened"].get("", ()), *found["looked"]])[:1]
        after = found["screened"].get(name) or []
    if not (before and after):
        return Result(**known, verdict="not_tried", reason=NO_TIME)
    estimate = interval(before, after)
    plain = [*found["looked"], *(ms for stage in ("screened", "turns") for ms in found[stage].get("", ()))]
    quiet = found["busy_percent"] is not None and (estimate.ratio or 1.0) < min(plain) / max(plain)
    sure = estimate.low is not None or quiet  # processors are others', too, and two processes may agree by chance
    verdict = "inconclusive"
    if estimate.ratio is not None and estimate.low is not None and estimate.high is not None:
        if is_better(estimate):
            verdict = "better"
        elif estimate.low > 1 and estimate.ratio > 1 + GAIN:
            verdict = "worse"
        elif estimate.low >= 1 - GAIN and estimate.high <= 1 + GAIN:
            verdict = "no_difference"
    numbers = (statistics.median(after), estimate.ratio, estimate.low, estimate.high)
    all_after = [*after, *found["screened"].get(name, ())] if found["turns"].get(name) else after
    clearly = max(all_after) < (1 - CLEAR if len(all_after) > 1 else 1 / UNLIKE) * min(plain)
    return Result(**known, verdict=verdict, **dict(zip(("step_ms", "ratio", "low", "high"), numbers, strict=True)),
                  difference=found["differences"].get(name), sure=sure,
                  promising=len(all_after) if clearly and verdict == "inconclusive" else 0)  # fmt: skip


def _joined(found: Mapping[str, Any], results: Sequence[Result]) -> Result:
    """Return the result of the changes that help together."""
    names: list[str] = found["joined"] if len(found["joined"]) > 1 else []
    how = " + ".join(names) or NONE_JOINED
    causes = JOINED.join(dict.fromkeys(one.cause for one in results if one.change in names))
    known: dict[str, Any] = {"change": TOGETHER, "cause": causes, "how": how}
    if not names:
        return Result(**known, verdict="no_difference")
    return _measured(found, JOINED.join(names), known)


def _causes(
    seen: Sequence[Mapping[str, Any]], results: Sequence[Result], step_ms: float | None, *, rough: bool = False,
    agree: bool = True,
) -> list[list[Scalar]]:  # fmt: skip
    """Return the rows of `causes`, in the order of `_worth`. A bound that a counterfactual measured is one of all that
    is lost to its cause. `rough` shares give none; nor does one process, if those of the step as it is do not
    `agree`."""
    total = sum(row["lost_ms"] for row in seen) or 1.0
    # The same shares, of the step as the turns have measured it.
    seen = [{**row, "lost_ms": row["lost_ms"] * (step_ms or total) / total} for row in seen]
    total = step_ms or total
    seen = _joined_places(seen, results, total)
    of_cause: Counter[str] = Counter()
    for row in seen:
        of_cause[row["cause"]] += row["lost_ms"]
    measured = {row["cause"]: row["bound_ms"] for row in seen if row.get("bound_ms") is not None}
    certain = {*measured, *(one.cause for one in results if one.removes and one.low is not None)}
    # Forks that screen differ from the processes of the turns: only their ratio carries over.
    measured |= {one.cause: one.ratio * total for one in results if one.removes and one.ratio is not None and one.sure}
    not_sure = {one.cause for one in results if one.removes and one.high is not None and one.high >= 1}
    # One process without the cause tells too little of the step, but enough to doubt what the profile saw.
    most = {one: min((1 - GAIN) * total, UNLIKE * (total - lost_ms)) for one, lost_ms in of_cause.items()}
    once = [(one.cause, one.ratio * total) for one in results if one.removes and one.ratio and not one.sure]
    doubted = {cause for cause, ms in once if ms >= most.get(cause, total)}
    vain = _in_vain(results)
    cures: dict[str, float] = {}
    for one in results:
        if one.verdict == "better" and not one.removes and one.step_ms is not None:
            cures[one.cause] = min(one.step_ms, cures.get(one.cause, one.step_ms))
    rows: list[list[Scalar]] = []
    left = total
    for row in sorted(seen, key=lambda row: -row["lost_ms"]):
        percent = 100 * row["lost_ms"] / total
        if row["lost_ms"] < max(LEAST * left, LEAST_SEEN * total) or len(rows) == MOST_CAUSES:
            break
        left -= 0 if row["cause"] in STAYS else row["lost_ms"]
        bound = measured.get(row["cause"])
        alone = of_cause[row["cause"]] * WHOLE < row["lost_ms"]
        limit: float | None
        if bound is not None and alone:  # noise may make the step longer without its work
            certain_ms = bound if bound < total and row["cause"] not in not_sure else None
            limit, how = certain_ms, "ceiling" if certain_ms is None else "measured"
        else:
            limit, how = (
                None
                if step_ms is None or rough or not agree or row["cause"] in vain or (alone and row["cause"] in doubted)
                else max(0.0, step_ms - row["lost_ms"]),
                "ceiling",
            )
        # With the cure the step is at most as long.
        cure = cures.get(row["cause"]) if alone and SMALL not in (row["where"] or "") else None
        if cure is not None and (limit is None or cure < limit):
            limit, how = cure, CURE
        rows.append([0, row["cause"], row["where"] or None, row["lost_ms"], percent, limit, how])
    # What one process measured may be noise: then what the profile saw counts, unless it is less.
    gains = {cause: max(0.0 if cause in certain else of_cause[cause], total - ms) for cause, ms in measured.items()}
    rows.sort(key=lambda row: _worth(row, of_cause, gains, results, total), reverse=True)
    return [[rank, *row[1:]] for rank, row in enumerate(rows, start=1)]


def _joined_places(
    seen: Sequence[Mapping[str, Any]], results: Sequence[Result], step_ms: float
) -> list[Mapping[str, Any]]:
    """Return one row for all places of a cause without which the step was measured: of them all is the bound."""
    whole = {one.cause for one in results if one.removes and one.ratio is not None}
    joined: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in sorted(seen, key=lambda row: -row["lost_ms"]):
        where = row["where"] or ""
        key = (row["cause"], "" if row["cause"] in whole and OTHERS_WAIT not in where else where)
        joined.setdefault(key, []).append(row)
    return [_in_all_places(rows, step_ms) for rows in joined.values()]


def _in_all_places(rows: Sequence[Mapping[str, Any]], step_ms: float) -> Mapping[str, Any]:
    """Return one row for these, the largest first, whose place says what is lost in the second."""
    first, lost_ms = rows[0], sum(row["lost_ms"] for row in rows)
    second = next((row for row in rows[1:2] if row["where"] and row["lost_ms"] >= LEAST * step_ms), None)
    if second is None or not first["where"]:
        return {**first, "lost_ms": lost_ms}
    name, _, notes = first["where"].removesuffix(")").partition(" (")
    parts = [f"{100 * first['lost_ms'] / step_ms:.1f} % here", *filter(None, [notes])]
    parts.append(f"{100 * second['lost_ms'] / step_ms:.1f} % in {second['where'].partition(' (')[0]}")
    return {**first, "lost_ms": lost_ms, "where": f"{name} ({'; '.join(parts)})"}


def _is_vain(one: Result) -> bool:
    """Return True if a change was measured not to save more than GAIN."""
    return not one.removes and one.low is not None and one.low > 1 - GAIN


def _in_vain(results: Sequence[Result]) -> set[str]:
    """Return the causes whose only change was measured to bring nothing: float64 that is not the slower part."""
    return {one.cause for one in results if one.change == "float32" and _is_vain(one)}


def _worth(
    row: Sequence[Scalar],
    of_cause: Mapping[str, float],
    gains: Mapping[str, float],
    results: Sequence[Result],
    step_ms: float,
) -> tuple[bool, bool, float]:
    """Return what it is worth to look at a cause: whether that is a large part of the step, whether anything is known
    to shorten a large one, and by how many ms.

    Time that the device waits is worth itself, or what a step without it or a change was measured to gain. Work is what
    a step is made of: it is worth what a change gains. Attention that is written out, or for which there is a change,
    and float64 are often slower than they need be, so they are worth their time until a change has been tried; and so
    is a loop. A ceiling counts for less than what was measured.

    Args:
        row: A row of `causes`.
        of_cause: What is lost to each cause in all places.
        gains: The ms that steps without a cause were measured to gain.
        results: What each change did.
        step_ms: The step.
    """
    cause, where, lost_ms = str(row[1]), str(row[2]), float(row[3] or 0.0)
    share = lost_ms / (of_cause[cause] or 1.0)
    tried = [
        one for one in results if one.cause == cause and not one.removes and (one.verdict in DECIDED or _is_vain(one))
    ]
    helped = [one.ratio for one in tried if one.ratio is not None and one.verdict == "better"]
    gain_ms = share * step_ms * (1 - min(helped, default=1.0))
    known, worth = True, max(lost_ms, gain_ms)
    measured = cause in gains or gain_ms > GAIN * share * step_ms
    if OTHERS_WAIT in where:  # what only this rank does is not what a step is made of
        worth = lost_ms
    elif cause in gains:
        worth = gains[cause] * share
    elif cause in WORK and gain_ms > GAIN * share * step_ms and SMALL not in where:
        worth = gain_ms
    elif cause in WORK:
        untried = any(one.cause == cause and one.verdict in UNTRIED for one in results)
        slow = cause == "precision" or WRITTEN in where or (cause != PLAIN and untried)
        known, worth = (
            REPEATED in where or RARE in where or (slow and not tried),
            0.0 if cause in _in_vain(results) else lost_ms,
        )
    elif cause == OPTIMIZER and gain_ms == 0:
        known = not any(one.cause == cause and one.done for one in results)
    large = 100 * worth >= LARGE_PERCENT * step_ms
    return large, known and large, worth if measured else worth / COMPARABLE


def answer(step: str, causes: Sequence[Sequence[Scalar]], results: Sequence[Result], joined: Result) -> list[str]:
    """Return the lines that a terminal shows: as many of the causes as MOST_LINES have room for, and all changes.
    `step`: the first line. `causes`: the rows of `causes`. `results`: what each change did; `joined`: those that help,
    together."""
    if not causes and not results:
        return [step]
    lines: list[str] = []
    for told in range(min(len(causes), TOLD_CAUSES), -1, -1):
        lines = [*_wrapped(step), *_of_causes(causes[:told], results)]
        if hidden := causes[told:]:
            percent = sum(float(row[4] or 0.0) for row in hidden)
            what = f"{len(hidden)} more cause{'s' * (len(hidden) > 1)}, {percent:.1f} % of the step"
            lines.append(f"and {what}: table `causes`")
        lines += _of_changes(" ".join(map(str.strip, lines)), results, joined)
        if len(lines) <= MOST_LINES:
            break
    return lines


def _better(results: Sequence[Result]) -> list[Result]:
    """Return the changes that help, the largest gain first."""
    return sorted(
        (one for one in results if one.verdict == "better" and not one.removes), key=lambda one: one.ratio or 1.0
    )


def _of_changes(so_far: str, results: Sequence[Result], joined: Result) -> Iterator[str]:
    """Yield the lines on changes that the causes' lines do not tell."""
    better = _better(results)
    if faster := [f"{_lost(one)}{_numbers(one)}" for one in better if f"-> {one.change}: " not in so_far]:
        yield from _wrapped(f"also faster: {', '.join(faster)}")
    losers = sorted(
        (one for one in results if not one.removes and one.ratio is not None), key=lambda one: one.ratio or 1.0
    )
    for title, verdicts in LOSERS.items():
        yield from _listed(title, [_lost(one) for one in losers if one.verdict in verdicts])
    late = [one.change for one in results if one.verdict == "not_tried"]
    yield from _listed("not tried", late, f" ({NO_TIME})")
    refused = [one for one in results if one.verdict == "refused" and f"no {one.change}: " not in so_far]
    reasons = [f"{one.change} ({one.reason})" for one in refused]
    yield from _listed("refused", reasons) or _listed("refused", [one.change for one in refused])
    yield from _wrapped(_at_last(results, better, losers, joined))


def _at_last(results: Sequence[Result], better: Sequence[Result], losers: Sequence[Result], joined: Result) -> str:
    """Return the last sentence: what the changes that help do together or, without such, what is known."""
    if joined.step_ms is not None and (joined.sure or better) and len(names := joined.how.split(" + ")) > 1:
        became = _became(joined) if joined.sure else f"about {_ms(joined.step_ms)} {joined.gain}"
        return f"all together ({', '.join(names)}): {became}"
    if better:
        return ""
    if not losers:
        bounds = [one.change for one in results if one.removes and one.ratio is not None]
        return f"no change was tried but {', '.join(bounds)}, which is no cure" if bounds else "no change was tried"
    nothing = "nothing that was tried shortens the step by more than 1 % for certain"
    maybe = [one for one in losers if one.verdict == "inconclusive" and (one.ratio or 1.0) < 1 - GAIN]
    if not maybe:
        return nothing
    best = min(maybe, key=lambda one: (not one.promising, one.ratio or 1.0))
    known = f"promising, but not certain yet: {_helped(best)}" if best.promising else nothing
    how = "alone" if best.promising and len(results) > 1 else "with a larger budget_s"
    return f"{known}; `--change {best.change}` {how} measures it again"


def _of_causes(causes: Sequence[Sequence[Scalar]], results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of each cause: its place, and below it what is known of that, and the cure."""
    told: set[str] = set()
    better, heads = _better(results), _columns(causes, results)
    yield from (head.rstrip() for head in heads[:1])
    for head, row in zip(heads[1:], causes, strict=True):
        cause, is_large = str(row[1]), float(row[4] or 0.0) >= LARGE_PERCENT
        name, _, often = str(row[2] or "").partition(" (")
        is_loop = SMALL in often
        # What speeds up products is no cure of a loop, nor compiling the model of one outside of it.
        fit = [one for one in better if not is_loop or ("compile" in one.change and name.endswith("forward"))]
        cure = "" if cause in told else _cure(cause, fit)
        why_not = "" if cure or cause in told or not is_large else _refused(cause, results)
        if cure or not is_loop:
            told.add(cause)
        yield from _wrapped(f"{head}  {name}".rstrip())
        often = often.removesuffix(")")
        if is_loop and is_large:
            often = often.replace(SMALL, VECTORISE)
        elif is_large and not any(one.change == "fused_attention" for one in results):  # our model's
            often = often.replace(WRITTEN, IN_ONE)
        below = "; ".join(filter(None, [often, why_not]))
        if len(_wrapped(below, INDENT)) > MOST_BELOW:  # the table of changes has the reason
            below = often
        yield from _wrapped(below, INDENT)
        yield from _wrapped(f"-> {cure}" if cure else "", INDENT)


LOSERS = {"not worth it": ("no_difference", "worse"), "not certain": ("inconclusive",)}


def _columns(causes: Sequence[Sequence[Scalar]], results: Sequence[Result] = ()) -> list[str]:
    """Return rank, cause, share and bound of each cause, one below the other, and above them what they are."""
    cells = [
        (
            str(place),
            str(row[1]),
            f"{float(row[4] or 0.0):.1f} %",
            OWN if _is_own(row) else _bound(str(row[1]), row[5], str(row[6]), results),
        )
        for place, row in enumerate(causes, start=1)
    ]
    cells[:0] = [HEAD] if causes else []
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        f"{rank:<{widths[0]}}  {cause:<{widths[1]}}  {lost:>{widths[2]}}  {bound:<{widths[3]}}"
        for rank, cause, lost, bound in cells
    ]


HEAD = ("#", "lost to", "share", "step without it")
OWN = "own work"
"""In the place of the step without what it is for."""
BOUND = {"measured": "{}, timed", CURE: "at most {}", "ceiling": "about {}"}


def _is_own(row: Sequence[Scalar]) -> bool:
    """Return True if a row of `causes` is what the step is for: no change takes all of it away."""
    removable = any(note in str(row[2] or "") for note in REMOVABLE)
    return row[1] in WORK and row[6] == "ceiling" and not removable


def _bound(cause: str, bound: Scalar, how: str, results: Sequence[Result]) -> str:
    """Return the step without a cause, with its interval where that is known: "38.1 ms (35.2 … 41)"."""
    if bound is None:
        tried = any(one.removes and one.cause == cause and one.ratio is not None for one in results)
        return "not certain" if tried else "not known"
    text = BOUND[how].format(_ms(float(bound)))
    for one in results if how == "measured" else ():
        if one.removes and one.cause == cause and one.ratio and one.low is not None and one.high is not None:
            low, high = (float(bound) * end / one.ratio for end in (one.low, one.high))
            text = f"{_ms(float(bound))} ({low:.4g} … {high:.4g})"
    return text


def _cure(cause: str, better: Sequence[Result]) -> str:
    """Return what helped most against a cause; "" if nothing did."""
    own = [one for one in better if one.cause == cause]
    return _helped(min(own, key=lambda one: one.ratio or 1.0)) if own else ""


def _refused(cause: str, results: Sequence[Result]) -> str:
    """Return that a change against a cause brought nothing, or why the one that would be made first cannot be."""
    tried = [one for one in results if one.cause == cause and cause not in BROAD and not one.removes]
    for one in tried:
        if _is_vain(one):
            return f"{one.change} does not help: {one.gain}"
    refused = [one for one in tried if one.verdict == "refused"]
    # What is named after the cause is the change that comes to mind first.
    first = next((one for one in refused if cause in one.change), refused[0]) if refused else None
    if first is None:
        return ""
    reason, _, instead = (first.reason or "").partition(": ")
    known = any(one.change == instead.split(" ")[0] and one.ratio is not None for one in results)
    return f"no {first.change}: {reason if known or not instead else first.reason}"


def _ms(time: float) -> str:
    return f"{time:.4g} ms" if time < 999.5 else f"{time:.0f} ms"


def _lost(one: Result) -> str:
    return f"{one.change} {one.gain}"


def _helped(one: Result) -> str:
    return f"{one.change}: {_became(one)}"


def _became(one: Result) -> str:
    return f"{_ms(one.step_ms or 0.0)}, {one.gain}{_numbers(one)}"


def _wrapped(text: str, indent: str = "") -> list[str]:
    lines = textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=INDENT)
    return [line.replace(TIED, " ") for line in lines]


def _listed(title: str, texts: Sequence[str], end: str = "") -> list[str]:
    """Return a list in one line, as many of its texts as fit, or its first text in two; none if that does not fit."""
    for number in range(len(texts), 0, -1):
        more = f" and {len(texts) - number} more" if number < len(texts) else ""
        lines = _wrapped(f"{title}: {', '.join(texts[:number])}{more}{end}")
        if len(lines) == 1 or (number == 1 and len(lines) == 2):
            return lines
    return []


def _numbers(one: Result) -> str:
    """Say whether the change leaves the numbers that the step returns, such as its loss, as they are."""
    if one.difference is None:
        return "; no losses compared"
    if one.difference <= EQUAL:
        return f"; {FIRST} steps' losses equal" + (f" within {one.difference:.0e}" if one.difference else "")
    repeats = GRAPH_REPEATS if "cuda_graph" in (one.change, *one.how.split(" + ")) else ""
    return f"; changes the loss by up to {100 * one.difference:.2g} %{repeats}"


def _percent(ratio: float | None) -> str:
    assert ratio is not None
    return f"{100 * (ratio - 1):+.1f}".replace("-", "−")
