"""Judges a comparison: each metric of each case, the whole in one plain sentence, and the gate of a CI job."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from app.metrics import Direction, better, headline, is_count, is_error, is_size, is_speed
from app.results import inference
from app.results.inference import ALPHA, FEWEST, Estimate, Hypothesis
from app.results.sheet import Cell

Finding = Literal["better", "worse", "changed", "no_difference", "differs", "within_margin", "inconclusive"]
"""Of a tested metric: better, worse, changed (one without a direction), no_difference or inconclusive. Of another, by
its interval: differs, within_margin or inconclusive."""
Conclusion = Literal[
    "better",
    "worse",
    "changed",
    "mixed",
    "no_difference",
    "inconclusive",
    "invalid",
    "wrong",
    "missing",
    "not_comparable",
]
GateOutcome = Literal[
    "passed", "slower", "not_confirmed", "inconclusive", "invalid", "missing", "not_comparable", "wrong"
]

SIDES = ("baseline", "candidate")
ASKED_FOR = (1, 3, 5)
"""Differences in percent for which a row says how many replicates would find them."""
RELEVANT_PERCENT = 5.0
"""If no difference is found but there may be one larger than this, the answer is "inconclusive"."""
DEFAULT_REPLICATES = 8
MOST_PROCESSES = 100
"""If a difference needs more processes of each side than this, the answer is that the host is too noisy to find it."""
APART = 0.01
"""Two statistics of the same processes tell different stories if their intervals are further apart than this."""
STATISTICS = {"fastest": "fastest samples", "median": "medians", "mean": "means"}
"""The names of the statistics by which a process counts, or could count."""
NOISE_MIB = 1.0
"""An interpreter that collects its garbage at another moment may make a counted size differ by so much."""
MUCH = 2.0
"""A difference from this factor on is written as a factor, and not in percent."""
IN_TURNS = "measure them in turns: `flopwatch compare A B --alternate`, one job of each side"

NOTHING = Estimate(None, None, None, None)
"""The estimate if there is nothing to compare."""


@dataclass
class Row:
    """A metric of a case on both sides, before and after it was judged.

    Only `judge` changes it. A frozen row would be copied three times, and a comparison of large jobs has 150 000.
    """

    case: str
    """The coordinates that distinguish the case from others of the comparison, in words; may be empty."""
    metric: str
    unit: str
    cells: tuple[Cell, Cell]
    verdicts: tuple[str | None, str | None]
    baseline: Sequence[float] = ()
    """One value per process, in turn; empty if a process has none."""
    candidate: Sequence[float] = ()
    blocks: Sequence[int] = ()
    """The turns that each side had in each block; empty if the sides did not take turns."""
    estimate: Estimate | None = None
    p_adjusted: float | None = None
    alpha: float = ALPHA
    """The p-value that it has to reach."""
    is_tested: bool = False
    """True for the headline of its case, or metrics that were asked for; others are described by their intervals."""
    drift: float = 0.0
    """The largest relative change within one side, if the sides were not alternated."""
    finding: Finding | None = None
    """None if a side has no value."""
    statistic: Literal["fastest", "median"] | None = None
    """By what a process counts that took several samples."""
    samples: int | None = None
    """The number of samples of each process that count."""
    witnesses: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    """Both sides' values by other statistics of the same samples; their names are keys of STATISTICS."""
    testimonies: Sequence[tuple[str, Estimate]] = ()
    """The ratio and the interval of each witness that has one."""
    cut_from: int | None = None
    """The largest number of samples of a process, if some of them do not count."""
    unequal: str | None = None
    """Why processes with different numbers of samples could not be compared by equally many."""
    is_computed: bool = False
    """True if no chance is in the values: jobs of kind `estimate` compute them from formulas."""
    is_counted: bool = False
    """True if it is a size in MiB that an allocator counted, not one that was sampled."""
    remedy: Callable[[int], str | None] = lambda _: None
    """Returns the command that measures so many processes of each side; None if no single one does."""

    @property
    def better(self) -> Direction | None:
        """Whether less or more is better; None if neither is."""
        return better(self.metric, self.unit)

    @property
    def is_missing(self) -> bool:
        """True if the baseline has a value and the candidate none."""
        return self.cells[0].value is not None and self.cells[1].value is None

    @property
    def is_wrong(self) -> bool:
        """True if the candidate's result differs from the reference: then its errors are no better or worse."""
        return self.verdicts[1] == "wrong"

    @property
    def is_up(self) -> bool:
        """True if the candidate's values are above the baseline's, also where values below 0 leave no ratio."""
        ratio = (self.estimate or NOTHING).ratio
        return ratio > 1 if ratio is not None else inference.is_above(self.baseline, self.candidate)

    @property
    def invalid_sides(self) -> tuple[str, ...]:
        """The sides for which a check found that other work was measured."""
        return tuple(side for side, verdict in zip(SIDES, self.verdicts, strict=True) if verdict == "invalid")

    @property
    def smallest_difference(self) -> float | None:
        """The smallest relative difference that this number of processes is likely to find."""
        if self.estimate is None:
            return None
        difference = inference.smallest_difference(
            self.estimate.distances, len(self.baseline), len(self.candidate), self.alpha, self.blocks
        )
        return None if difference is None else max(difference, self.drift)

    def replicates_for(self, percent: float) -> int | None:
        """Return how many processes each side needs to find a difference of so many percent."""
        if self.estimate is None:
            return None
        # Also by the witnesses without which the test would be conclusive.
        hiding = self.may_lose(percent / 100) if self.is_tested and self.finding == "inconclusive" else []
        of = [self.estimate, *map(self._by, hiding)]
        needed = [inference.replicates_for(percent / 100, its.distances, self.alpha) for its in of]
        return None if None in needed else max(number for number in needed if number is not None)

    def _by(self, name: str) -> Estimate:
        """Return the estimate by a witness, with its distances."""
        return replace(dict(self.testimonies)[name], distances=inference.distances_within(*self.witnesses[name]))

    @property
    def bound(self) -> float | None:
        """The largest relative difference that the interval contains; None without an interval."""
        most = None if self.estimate is None else _most(self.estimate)
        return None if most is None else max(most, self.drift)

    @property
    def processes(self) -> str:
        """The numbers of processes, in words, and by what each of them counts."""
        if self.statistic is None or self.samples is None:
            return self._number
        return f"{self._number}, by the {self.statistic} of {self.samples} samples"

    @property
    def _number(self) -> str:
        baseline, candidate = len(self.baseline), len(self.candidate)
        if baseline == candidate:
            return f"{baseline} process{'es' if baseline > 1 else ''} each"
        return f"{baseline} and {candidate} processes"

    @property
    def contradicted(self) -> tuple[str, Estimate] | None:
        """The witness that comes to another conclusion than the estimate; None if all agree on the direction."""
        own = _side_of_one(self.estimate or NOTHING)
        return next(((name, story) for name, story in self.stories if _side_of_one(story) != own), None)

    def loss(self, by: Estimate | None = None) -> tuple[float, float, float] | None:
        """Return the fraction by which the candidate is worse, with the ends of its interval; negative: it is better.
        None if the metric has no direction, or no interval. `by`: an estimate of another statistic than the row's
        own."""
        estimate = by or self.estimate or NOTHING
        if self.is_exact:
            estimate = replace(estimate, low=estimate.ratio, high=estimate.ratio)
        if self.better is None or estimate.ratio is None or estimate.low is None or estimate.high is None:
            return None
        if self.better == "less":
            return estimate.ratio - 1, estimate.low - 1, estimate.high - 1
        return 1 - estimate.ratio, 1 - estimate.high, 1 - estimate.low

    @property
    def stories(self) -> list[tuple[str, Estimate]]:
        """The witnesses that tell a different story: their intervals lie more than APART from the estimate's."""
        low, high = (self.estimate or NOTHING).low, (self.estimate or NOTHING).high
        if low is None or high is None:
            return []
        return [
            (name, its)
            for name, its in self.testimonies
            if its.low is not None and its.high is not None and max(its.low / high, low / its.high) > 1 + APART
        ]

    def may_lose(self, limit: float) -> list[str]:
        """Return the witnesses by which the candidate may be worse by more than this fraction, the worst first."""
        told = sorted(self.testimonies, key=lambda told: -self._worst(told[1]))
        return [name for name, its in told if beyond(self._worst(its), limit)]

    def _worst(self, estimate: Estimate) -> float:
        """Return the largest loss in the interval, or the largest difference of a metric without a direction."""
        loss = self.loss(estimate)
        return (_most(estimate) or 0.0) if loss is None else loss[2]

    def sentence(self) -> str | None:
        """State the finding; None if a side has no value."""
        if self.finding is None:
            return None
        if self.finding in ("better", "worse", "changed", "differs"):
            return f"candidate is {self.factor()}{self._other_stories()}; {self.processes}"
        if self.finding in ("no_difference", "within_margin"):
            if not self.bound:
                return f"no difference: the same in all processes; {self.processes}"
            return f"no difference larger than {percent(self.bound)}{self._others()}; {self.processes}"
        return f"inconclusive: {self.doubt()}"

    def factor(self, by: Estimate | None = None) -> str:
        """Write by how much the candidate differs, with its interval: "1.25× faster, 95 % CI 1.24–1.26".

        by: an estimate of another statistic; None: the row's own.
        """
        estimate = by or self.estimate
        assert estimate is not None
        if estimate.ratio is None:
            return self.word()
        up = estimate.ratio > 1
        low, high = estimate.low or estimate.ratio, estimate.high or estimate.ratio
        ends = (low, high) if up else (1 / high, 1 / low)
        factor = estimate.ratio if up else 1 / estimate.ratio
        digits = decimals(factor)
        interval = "" if self.is_exact else f", 95 % CI {ends[0]:.{digits}f}–{ends[1]:.{digits}f}"
        return f"{factor:.{digits}f}× {self.word(up=up)}{interval}"

    def word(self, *, up: bool | None = None) -> str:
        """Return the adjective for what the candidate is: faster, slower, larger, smaller, higher, lower.

        up: whether its values are above the baseline's; None: as they are.
        """
        up = self.is_up if up is None else up
        if self.better is not None and is_speed(self.metric, self.unit):
            return "faster" if up == (self.better == "more") else "slower"
        if is_size(self.metric, self.unit):
            return "larger" if up else "smaller"
        return "higher" if up else "lower"

    def _end(self, end: float) -> str:
        """Write an end of the interval as a difference with its direction: "19 % faster"; "0 %" for none."""
        if end == 1:
            return "0 %"
        factor = end if end > 1 else 1 / end
        by = f"{factor:.3g}×" if factor >= MUCH else percent(factor - 1)
        return f"{by} {self.word(up=end > 1)}"

    def _range(self, by: Estimate | None = None) -> str:
        """Write the interval as differences, from the lower to the upper ratio: "19 % faster to 1 % slower"."""
        estimate = by or self.estimate
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        return f"{self._end(estimate.low)} to {self._end(estimate.high)}"

    def _others(self) -> str:
        """Write the largest differences in the intervals of witnesses, where they are larger: " (by means 3.1 %)"."""
        larger = {name: most for name, its in self.testimonies if (most := _most(its) or 0.0) > (self.bound or 0.0)}
        words = ", ".join(f"by {STATISTICS[name]} {percent(most)}" for name, most in larger.items())
        return f" ({words})" if words else ""

    def _other_stories(self) -> str:
        """Write what other statistics of the same samples say, where that is something else."""
        return "".join(
            f", but by {STATISTICS[name]} "
            + (
                self.factor(story)
                if _side_of_one(story)
                else f"there is no difference larger than {percent(_most(story) or 0)}"
            )
            for name, story in self.stories
        )

    def doubt(self, limit_percent: float = RELEVANT_PERCENT) -> str:
        """Say why it is inconclusive, and how to detect a difference of this many percent."""
        if self.is_counted and max(len(self.baseline), len(self.candidate)) == 1:
            return f"the sides differ by less than {NOISE_MIB:g} MiB, which may be chance; {self._number}"
        if min(len(self.baseline), len(self.candidate)) < FEWEST:
            return (
                f"{self._number}, and at least {FEWEST} per side are needed; the steps of one process are not "
                f"independent; measure both sides with {DEFAULT_REPLICATES} replicates"
                f"{self._command(DEFAULT_REPLICATES)}"
            )
        if self.estimate is not None and self._is_drift(self.estimate):
            return (
                f"the sides differ by {percent(abs((self.estimate.ratio or 1) - 1))}, and one side alone drifted by "
                f"{percent(self.drift)}; {IN_TURNS}"
            )
        if self.unequal is not None:
            return f"{self.unequal}; {self.processes}"
        if self.bound is None:
            return f"no interval, since not all values are positive; {self.processes}"
        if self.contradicted is not None:
            return self._contradiction()
        if (hidden := self.hidden(limit_percent / 100)) is not None:
            return hidden
        cure = self.cure(limit_percent)
        if self.is_beyond_correction:
            return (
                f"{round(ALPHA / self.alpha)} tests at once need p of at most {self.alpha:.2g}, which takes "
                f"{inference.fewest_for(self.alpha)} processes each; the interval goes from {self._range()}; "
                f"{self.processes}{cure}"
            )
        if (self.estimate or NOTHING).excludes_one and (self.p_adjusted or 0) > ALPHA:
            return f"the interval excludes 1, but the adjusted p is {self.p_adjusted:.3g}; {self.processes}{cure}"
        return f"no difference found, but the candidate may be {self._range()}; {self.processes}{cure}"

    def _contradiction(self) -> str:
        """Say that other statistics of the same samples come to another conclusion."""
        estimate = self.estimate or NOTHING
        own = (
            f"candidate is {self.factor()}"
            if _side_of_one(estimate)
            else f"no difference larger than {percent(_most(estimate) or 0)}"
        )
        by = STATISTICS[self.statistic] if self.statistic else "these values"
        return f"by {by} {own}{self._other_stories()}: only some of the steps differ; {self.processes}"

    def hidden(self, limit: float) -> str | None:
        """Say which other statistic of the samples may hide a loss beyond the limit; None if none does, or if that by
        which the processes count may itself."""
        own = max(self._worst(self.estimate or NOTHING), self.drift)
        if self.bound is None or beyond(own, limit) or not (names := self.may_lose(limit)):
            return None
        name, by = names[0], STATISTICS[self.statistic] if self.statistic else "these values"
        return (
            f"by {by} no loss larger than {percent(limit)}, but by {STATISTICS[name]} the candidate may be "
            f"{self._range(dict(self.testimonies)[name])}: some of the steps may differ; {self.processes}"
            f"{self.cure(100 * limit, name)}"
        )

    @property
    def is_beyond_correction(self) -> bool:
        """True if the interval excludes 1, and so few processes could not pass the correction for all cases."""
        smallest = inference.smallest_p_value(len(self.baseline), len(self.candidate), self.blocks)
        return self.is_tested and self.alpha < smallest and (self.estimate or NOTHING).excludes_one

    def cure(self, limit_percent: float, by: str | None = None) -> str:
        """Say what would decide about a difference of this many percent: more processes, or measuring in turns.

        More processes make finding it more likely, and narrow the interval. If there are already as many as usually
        find it, the sides differ by nearly this much, and the number that would decide is unknown.

        by: the witness that decides; None: the statistic by which the processes count.
        """
        if 100 * self.drift > limit_percent:
            return f"; one side alone drifted by {percent(self.drift)}: {IN_TURNS}"
        estimate = self.estimate if by is None else self._by(by)
        if estimate is None or estimate.spread is None:
            return ""
        present = min(len(self.baseline), len(self.candidate))
        needed = inference.replicates_for(limit_percent / 100, estimate.distances, self.alpha)
        if needed is None or needed > MOST_PROCESSES:
            differ = percent(estimate.spread)
            return f"; this host is too noisy to find {limit_percent:g} %: its processes differ by {differ}"
        if needed > present:
            return f"; {needed} processes each would find {limit_percent:g} %{self._command(needed)}"
        return f"; more processes would narrow the interval{self._command(2 * present)}"

    def _command(self, processes: int) -> str:
        command = self.remedy(processes)
        return "" if command is None else f": `{command}`"

    def _is_drift(self, estimate: Estimate) -> bool:
        """Return True if the sides differ, but by no more than the drift within one side."""
        return (
            self._differs(estimate)
            and estimate.excludes_one
            and estimate.ratio is not None
            and abs(estimate.ratio - 1) <= self.drift
        )

    def _differs(self, estimate: Estimate) -> bool:
        """Return True if the interval excludes 1 and, for a tested metric, the test agrees. Without an interval, since
        not all values are positive, the test decides alone."""
        p_value = self.p_adjusted if self.is_tested else 0.0 if estimate.low is not None else estimate.p_value
        return p_value is not None and p_value <= ALPHA and estimate.excludes_one

    def finding_of_test(self) -> Finding | None:
        """Return the finding that follows from estimate, p-value and drift."""
        if self.estimate is None:
            return None
        if self.is_exact:
            if self._is_same():
                return "no_difference" if self.is_tested else "within_margin"
            return self._which() if self.is_tested else "differs"
        too_few = min(len(self.baseline), len(self.candidate)) < FEWEST
        if too_few or self.unequal is not None or self._is_drift(self.estimate):
            return "inconclusive"
        own = _side_of_one(self.estimate)
        if any(own * _side_of_one(story) < 0 for _, story in self.stories):  # some steps are faster, others slower
            return "inconclusive"
        if self._is_same():  # 0 has no ratio
            return "no_difference" if self.is_tested else "within_margin"
        if self._differs(self.estimate):
            if not self.is_tested:
                return "differs"
            return self._which()
        relevant = RELEVANT_PERCENT / 100
        is_small = self.bound is not None and not beyond(self.bound, relevant) and not self.may_lose(relevant)
        if (
            is_small
            and self.contradicted is None
            and (self.estimate.low == self.estimate.high == 1 or not self.estimate.excludes_one)
        ):
            return "no_difference" if self.is_tested else "within_margin"
        return "inconclusive"

    def _which(self) -> Finding:
        if self.better is None:
            return "changed"
        return "better" if self.is_up == (self.better == "more") else "worse"

    @property
    def is_exact(self) -> bool:
        """True if the sides are equal or differ, without any chance."""
        is_one_each = len({*self.baseline}) == len({*self.candidate}) == 1
        if is_one_each and self.is_counted:
            return not 0 < abs(self.candidate[0] - self.baseline[0]) < NOISE_MIB
        return self.is_computed or (is_count(self.unit) and is_one_each)

    def _is_same(self) -> bool:
        return len({*self.baseline, *self.candidate}) == 1


def _side_of_one(estimate: Estimate) -> int:
    """Return 1 if the interval is above 1, -1 if it is below, and 0 if it contains 1 or is unknown."""
    if estimate.low is None or estimate.high is None:
        return 0
    return (estimate.low > 1) - (estimate.high < 1)


def _most(estimate: Estimate) -> float | None:
    """Return the largest relative difference that the interval contains; None without an interval."""
    if estimate.low is None or estimate.high is None:
        return None
    return max(abs(estimate.low - 1), abs(estimate.high - 1))


def percent(part: float) -> str:
    """Write a fraction in percent, with two digits: "0.6 %", "12 %"."""
    value = 100 * part
    return f"{value:.0f} %" if value >= 9.95 else f"{value:.1f} %" if value >= 0.095 else f"{value:.2g} %"


def decimals(factor: float) -> int:
    """Return how many decimals of a factor, at least 1, show by how much it differs from 1."""
    if factor >= 1.1:
        return 2
    return min(9, 1 - math.floor(math.log10(factor - 1))) if factor > 1 else 3


def beyond(part: float, limit: float) -> bool:
    """Return True if a fraction is larger than a limit, by more than rounding: 105 / 100 - 1 is not beyond 0.05."""
    return part > limit and not math.isclose(part, limit, rel_tol=1e-9, abs_tol=1e-15)


def headline_of(rows: Sequence[Row], columns: Sequence[str]) -> str | None:
    """Return the metric that summarises the comparison: the most important one of the baseline that is no error.

    The candidate does not choose it: a wrong result has no times, only an error.
    """
    of_baseline = {row.metric for row in rows if row.cells[0].value is not None and not is_error(row.metric)}
    either = {row.metric for row in rows if not is_error(row.metric)}
    every = list(dict.fromkeys([*columns, *(row.metric for row in rows)]))
    return headline([metric for metric in every if metric in (of_baseline or either)])


def choose(rows: Sequence[Row], columns: Sequence[str], requested: Sequence[str] = ()) -> list[str]:
    """Set which rows are tested, and return their metrics: those that were requested or, by default, the headline and,
    of cases that have no such metric, their own: copies and products of `ceiling` have different ones."""
    metrics, left = list(requested), [] if requested else list(rows)
    for row in rows:
        row.is_tested = row.metric in requested
    while (metric := headline_of(left, columns)) is not None:
        metrics.append(metric)
        chosen = [row for row in left if row.metric == metric]
        for row in chosen:
            row.is_tested = True
        done = {row.case for row in chosen}
        left = [row for row in left if row.case not in done]
    return metrics


def judge(rows: Sequence[Row], *, alternated: bool) -> list[Row]:
    """Return the rows, with their estimates, adjusted p-values and findings set. `alternated`: False if the sides were
    measured one after the other."""
    for row in rows:
        if not row.baseline or not row.candidate:
            continue
        row.estimate = inference.estimate(row.baseline, row.candidate, row.blocks)
        row.drift = 0.0 if alternated else drift(row.baseline, row.candidate)
        row.testimonies = [(name, inference.interval(*its, row.blocks)) for name, its in row.witnesses.items()]
    with_p = [(row, p) for row in rows if row.is_tested and (p := (row.estimate or NOTHING).p_value) is not None]
    values, needed = inference.adjusted([Hypothesis(row.baseline, row.candidate, p) for row, p in with_p])
    for (row, _), value in zip(with_p, values, strict=True):
        row.p_adjusted, row.alpha = value, needed
    for row in rows:
        row.finding = row.finding_of_test()
    return list(rows)


def drift(*sides: Sequence[float]) -> float:
    """Return the largest relative change from the first half of a side's processes to the second."""
    changes = [0.0]
    for side in sides:
        half = len(side) // 2
        if half >= 2 and min(side) > 0:
            changes.append(abs(statistics.median(side[-half:]) / statistics.median(side[:half]) - 1))
    return max(changes)


@dataclass(frozen=True)
class Gate:
    """The gate of a CI job: whether the candidate is worse by more than `fail_above_percent`."""

    fail_above_percent: float | None
    """None: only what the steps returned is judged."""
    metrics: Sequence[str]
    outcome: GateOutcome
    sentence: str


@dataclass(frozen=True)
class Judgement:
    """A comparison as a whole."""

    sentence: str
    conclusion: Conclusion
    headline: str | None
    gate: Gate | None

    def completed(self, sentences: Sequence[str]) -> Self:
        """Return the judgement with further sentences, in that of the gate as well."""
        gate = self.gate and replace(self.gate, sentence="; ".join([self.gate.sentence, *sentences]))
        return replace(self, sentence="; ".join([self.sentence, *sentences]), gate=gate)


def conclude(
    rows: Sequence[Row],
    metrics: Sequence[str],
    obstacles: Sequence[str],
    *,
    alternated: bool,
    same: str | None = None,
    hosts: str | None = None,
    fail_above_percent: float | None = None,
    confirm: str = IN_TURNS,
) -> Judgement:
    """Sum a judged comparison up. `metrics` are those that `choose` returned; `obstacles` are the reasons why the sides
    cannot be compared; `same` is the sentence to say where both sides are the same jobs, since findings about these
    mislead; `hosts` names those of both sides if they are not the same; `confirm` says how to confirm a slowdown that
    was not measured in turns."""
    chosen = [row for row in rows if row.is_tested]
    conclusion, sentence = _summed_up(chosen, obstacles)
    if same is not None:
        sentence = same
    elif (
        not alternated
        and not all(row.is_computed or row.is_counted for row in chosen)
        and conclusion in ("better", "worse", "changed", "mixed", "no_difference")
    ):
        on = f" and on other hosts ({hosts})" if hosts else ""
        sentence += f"; not alternated{on}, so changes of the host count as well"
    gate = None
    if fail_above_percent is not None:
        unconfirmed = None if alternated else confirm
        gate = _gate(chosen, metrics, obstacles, sentence, fail_above_percent, unconfirmed)
    if same is not None and gate is not None and gate.outcome in ("passed", "inconclusive"):
        gate = replace(gate, sentence=f"{gate.outcome}: {same}")
    elif gate is not None and gate.outcome == conclusion == "inconclusive" and len(chosen) == 1:
        sentence = gate.sentence  # one answer, with the processes that find a difference of the limit
    return Judgement(sentence, conclusion, next(iter(metrics), None), gate)


def cut_short(judgement: Judgement, rows: Sequence[Row], job: int, stopped: str, planned: int) -> Judgement:
    """Return the judgement of a comparison in turns that ended before its time, with `planned` processes of each side:
    what was measured is told, and nothing is found or passed by it, since who ends it may have looked at the
    numbers."""
    headline = next((row for row in rows if row.metric == judgement.headline and row.baseline and row.candidate), None)
    if headline is None:
        return judgement
    one, other = len(headline.baseline), len(headline.candidate)
    so_far = headline.factor() if headline.estimate is not None and headline.estimate.low is not None else "no interval"
    sentence = (
        f"inconclusive: job {job} ended before its time ({stopped}), after {one} and {other} of {planned} processes; "
        f"so far the candidate is {so_far}"
    )
    if judgement.conclusion not in ("wrong", "invalid", "not_comparable"):
        judgement = replace(judgement, conclusion="inconclusive", sentence=sentence)
    gate = judgement.gate
    if gate is not None and gate.outcome in ("passed", "slower", "not_confirmed", "missing", "inconclusive"):
        judgement = replace(judgement, gate=replace(gate, outcome="inconclusive", sentence=sentence))
    return judgement


def _summed_up(rows: Sequence[Row], obstacles: Sequence[str]) -> tuple[Conclusion, str]:
    if obstacles:
        return "not_comparable", f"not comparable: {'; '.join(obstacles)}"
    with_values = [row for row in rows if row.finding is not None and not row.is_wrong]
    if not with_values:
        conclusion: Conclusion = "wrong" if any(row.is_wrong for row in rows) else "missing"
        return conclusion, f"{conclusion}: {_nothing_in_common(rows)}"
    without = len(rows) - len(with_values)
    others = f"; no value on a side in {without} of {len(rows)} cases" if without else ""
    if invalid := [row for row in with_values if row.invalid_sides]:
        which = f" in {len(invalid)} of {len(with_values)} cases" if len(with_values) > 1 else ""
        return "invalid", f"invalid: {_of_other_work(invalid)}{which}{others}"
    if len(with_values) == 1:
        (row,) = with_values
        of_tested: Any = row.finding
        return of_tested, f"{_where(row, rows)}: {row.sentence()}{others}"
    return _of_many(with_values, rows)


def _of_other_work(invalid: Sequence[Row]) -> str:
    sides = [side for side in SIDES if any(side in row.invalid_sides for row in invalid)]
    return f"the {' and the '.join(sides)} measured other work than was asked for"


def _nothing_in_common(rows: Sequence[Row]) -> str:
    if not rows:
        return "the sides have no case and metric in common"
    if wrong := [row for row in rows if None not in (row.cells[0].value, row.cells[1].value)]:
        return f"the candidate's result differs from the reference: {_where(wrong[0], rows)}"
    without = [side for at, side in enumerate(SIDES) if all(row.cells[at].value is None for row in rows)]
    which = "either side" if len(without) == len(SIDES) else f"the side of the {without[0]}" if without else "one side"
    lacking = (cell for row in rows for cell in row.cells if cell.value is None)
    outcomes = dict.fromkeys(cell.outcome for cell in lacking if cell.outcome not in (None, "ok"))
    why = f" ({', '.join(map(str, outcomes))})" if outcomes else ""
    metrics = dict.fromkeys(row.metric for row in rows)
    return f"{', '.join(metrics)} {'has' if len(metrics) == 1 else 'have'} no value on {which}{why}"


def _where(row: Row, rows: Sequence[Row]) -> str:
    several = len({other.case for other in rows}) > 1
    return f"{row.metric}, {row.case}" if several and row.case else row.metric


def _of_many(with_values: Sequence[Row], rows: Sequence[Row]) -> tuple[Conclusion, str]:
    of: dict[str, list[Row]] = {}
    for row in with_values:
        of.setdefault(str(row.finding), []).append(row)
    parts = []
    for finding in ("better", "worse", "changed"):
        if matching := of.get(finding):
            most = max(matching, key=_how_far)
            far = _how_far(most)
            factor = f", {far:.{decimals(far)}f}×" if far > 1 else ""
            parts.append(f"{finding} in {len(matching)} (most in {_where(most, rows)}: {most.word()}{factor})")
    if matching := of.get("no_difference"):
        parts.append(f"no difference larger than {percent(max(row.bound or 0 for row in matching))} in {len(matching)}")
    if matching := of.get("inconclusive"):
        most_telling = next((row for row in matching if row.stories or row.is_beyond_correction), matching[0])
        parts.append(f"inconclusive in {len(matching)} ({_where(most_telling, rows)}: {most_telling.doubt()})")
    if missing := len(rows) - len(with_values):
        parts.append(f"no value on a side in {missing}")
    found_any = [finding for finding in ("better", "worse", "changed") if finding in of]
    conclusion: Any
    if found_any:
        conclusion = found_any[0] if len(found_any) == 1 else "mixed"
    else:
        conclusion = "inconclusive" if "inconclusive" in of else "no_difference"
    metrics = ", ".join(dict.fromkeys(row.metric for row in with_values))
    return conclusion, f"{metrics}, {len(rows)} cases: {'candidate is ' if found_any else ''}{', '.join(parts)}"


def _how_far(row: Row) -> float:
    """Return the factor by which the sides differ, at least 1; 1 if there is no ratio."""
    ratio = (row.estimate or NOTHING).ratio
    return 1.0 if ratio is None else math.exp(abs(math.log(ratio)))


def _gate(
    rows: Sequence[Row],
    metrics: Sequence[str],
    obstacles: Sequence[str],
    sentence: str,
    fail_above_percent: float,
    unconfirmed: str | None,
) -> Gate:
    """Judge for every row whether the candidate is worse by more than the limit; the worst answer counts.

    "slower" needs a found difference larger than the limit; "passed" needs an interval that excludes a larger one. Of
    sides that were not measured in turns a slowdown may be the host's: it is "not_confirmed", and `unconfirmed` says
    how to confirm it.
    """

    def answer(outcome: GateOutcome, text: str) -> Gate:
        return Gate(fail_above_percent, list(metrics), outcome, text)

    if obstacles:
        return answer("not_comparable", sentence)
    judged = [(row, _gate_outcome(row, fail_above_percent / 100)) for row in rows]
    if unconfirmed is not None:
        for at, (row, its) in enumerate(judged):  # the host changes neither memory nor what formulas give
            if its == "slower" and not (row.is_computed or is_size(row.metric, row.unit)):
                judged[at] = row, "not_confirmed"
    for outcome in ("wrong", "slower", "invalid", "missing", "not_confirmed", "inconclusive"):
        matching = [row for row, its in judged if its == outcome]
        if matching:
            text = _gate_sentence(outcome, matching, rows, fail_above_percent)
            if outcome == "not_confirmed":
                text = f"not confirmed: {text}; the sides ran one after the other, and the host may have changed: "
                text += str(unconfirmed)
            if outcome == "inconclusive" and "`flopwatch " in text:  # the command measures, and judges nothing
                text += f"; judge what that measures by `flopwatch compare … --fail-above {fail_above_percent:g}`"
            return answer(outcome, text)
    if not any(its == "passed" for _, its in judged):
        return answer("missing", sentence if sentence.startswith("missing") else "missing: there is nothing to judge")
    passed = f"passed: not worse by more than {fail_above_percent:g} %"
    if any(row.finding == "inconclusive" for row in rows):  # too little is known to say more
        processes = {row.processes for row, its in judged if its == "passed"}
        of = f"; {processes.pop()}" if len(processes) == 1 else ""
        return answer("passed", f"{passed}; {', '.join(metrics)}{of}")
    return answer("passed", f"{passed}; {sentence}")


def _gate_outcome(row: Row, limit: float) -> GateOutcome | None:
    """Judge one row; None if the baseline has nothing to compare with."""
    if row.is_wrong:
        return "wrong"
    if row.is_missing:
        return "missing"
    if row.finding is None:
        return None
    if row.invalid_sides:
        return "invalid"
    loss = row.loss()
    if row.finding == "worse" and (loss is None or beyond(loss[0], limit)):
        return "slower"
    if row.contradicted is not None or row.unequal is not None or row.may_lose(limit):
        return "inconclusive"  # "better" by the fastest of its steps may still be worse in most of them
    is_enough = row.is_exact or min(len(row.baseline), len(row.candidate)) >= FEWEST
    if loss is not None and is_enough and not beyond(max(loss[2], row.drift), limit):
        return "passed"
    is_same = row.finding == "no_difference" and not beyond(row.bound or 0.0, limit)  # of 0, or without a direction
    return "passed" if row.finding == "better" or is_same else "inconclusive"


def _gate_sentence(
    outcome: GateOutcome, matching: Sequence[Row], rows: Sequence[Row], fail_above_percent: float
) -> str:
    row = matching[0]
    more = f" (and {len(matching) - 1} more)" if len(matching) > 1 else ""
    where = _where(row, rows)
    if outcome == "missing":
        outcome_of = row.cells[1].outcome
        return f"missing: the candidate has no {where}{f' ({outcome_of})' if outcome_of else ''}{more}"
    if outcome == "wrong":
        return f"wrong: the candidate's result differs from the reference: {where}{more}"
    if outcome == "invalid":
        return f"invalid: {where}: {_of_other_work(matching)}{more}"
    if outcome in ("slower", "not_confirmed"):
        return f"worse by more than {fail_above_percent:g} %: {where}: {row.sentence()}{more}"
    loss = row.loss()
    if row.finding == "inconclusive":
        return f"{where}: inconclusive: {row.doubt(fail_above_percent)}{more}"
    if loss is None or row.stories:
        return f"inconclusive: {where}: {row.sentence()}{more}"
    if (hidden := row.hidden(fail_above_percent / 100)) is not None:
        return f"inconclusive: {where}: {hidden}{more}"
    return (
        f"inconclusive: {where}: the candidate may be worse by up to {percent(max(loss[2], row.drift))}; "
        f"{row.processes}{row.cure(fail_above_percent)}{more}"
    )
