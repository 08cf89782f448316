"""Findings of comparisons, their sentences, and the gate."""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from app.results import findings
from app.results.findings import MOST_PROCESSES, Judgement, Row, conclude, judge, percent
from app.results.sheet import Cell
from tests.builders import STEADY

NOISY = (1.0, 1.3, 0.8, 1.1, 0.9, 1.25, 0.75, 1.05)


def times(factor: float, of: Sequence[float] = STEADY) -> list[float]:
    return [factor * value for value in of]


def row(baseline: Sequence[float], candidate: Sequence[float], metric: str = "step_ms", **changes: Any) -> Row:
    cells = [Cell(it[0], None, len(it), "ok") if it else Cell(None, None, None, "oom") for it in (baseline, candidate)]
    plain: dict[str, Any] = {"case": "", "unit": "ms", "verdicts": ("valid", "valid")}
    both = baseline and candidate
    sides = {"baseline": list(baseline), "candidate": list(candidate)} if both else {}
    return Row(**{**plain, "metric": metric, "cells": tuple(cells), **sides, **changes})


def _drawn(rng: random.Random, processes: int, slower: float) -> list[list[float]]:
    return [[factor * rng.gauss(1, 0.01) for _ in range(processes)] for factor in (1.0, slower)]


def judged(*rows, alternated=True, obstacles=(), limit=None, metrics=()) -> tuple[list[Row], Judgement]:
    chosen = findings.choose(rows, ("forward_ms",), metrics)
    judged_rows = judge(rows, alternated=alternated)
    return judged_rows, conclude(judged_rows, chosen, obstacles, alternated=alternated, fail_above_percent=limit)


@pytest.mark.parametrize(
    ("metric", "unit", "factor", "finding", "words"),
    [
        ("step_ms", "ms", 0.8, "better", "candidate is 1.25× faster, 95 % CI 1.24–1.26; 8 processes each"),
        ("step_ms", "ms", 1.25, "worse", "candidate is 1.25× slower, 95 % CI 1.24–1.26; 8 processes each"),
        ("tokens_per_s", "tokens/s", 1.25, "better", "candidate is 1.25× faster"),
        ("peak_memory_mib", "MiB", 1.25, "worse", "candidate is 1.25× larger"),
        ("mfu", "fraction", 1.25, "better", "candidate is 1.25× higher"),
        ("error", "1", 0.8, "changed", "candidate is 1.25× lower"),
        ("step_ms", "ms", 1.05, "worse", "candidate is 1.050× slower, 95 % CI 1.0"),
    ],
)
def test_metrics_know_what_is_better(metric: str, unit: str, factor: float, finding: str, words: str) -> None:
    (found,), whole = judged(row(STEADY, times(factor, STEADY[::-1]), metric, unit=unit), metrics=(metric,))
    assert found.finding == finding == whole.conclusion
    assert whole.sentence.startswith(f"{metric}: {words}")


def test_no_difference_says_how_large_one_could_be() -> None:
    (metric_row,), whole = judged(row(STEADY, STEADY[::-1]))
    assert (metric_row.finding, whole.conclusion) == ("no_difference", "no_difference")
    assert whole.sentence == "step_ms: no difference larger than 0.7 %; 8 processes each"
    (metric_row,), whole = judged(row([5.0] * 8, [5.0] * 8, "peak_memory_mib", unit="MiB"))
    assert whole.sentence == "peak_memory_mib: no difference: the same in all processes; 8 processes each"


@pytest.mark.parametrize(("above", "finding"), [(0, "inconclusive"), (9, "differs")])
def test_without_a_ratio_the_test_decides_whether_values_differ(above: int, finding: str) -> None:
    (_, counted), _ = judged(
        row(STEADY, STEADY[::-1]), row([0, 1, 2, 3], [above + value for value in (0, 1, 2, 3)], "parameters", unit="")
    )
    assert counted.finding == finding


def test_noise_is_inconclusive_and_says_what_it_takes() -> None:
    mild = [value**0.35 for value in NOISY]
    (metric_row,), whole = judged(row(mild, mild[::-1]))
    assert (metric_row.finding, whole.conclusion) == ("inconclusive", "inconclusive")
    needed = metric_row.replicates_for(5)
    assert 50 < needed <= MOST_PROCESSES
    assert "no difference found, but the candidate may be 8.1 % faster to 8.1 % slower; " in whole.sentence
    assert whole.sentence.endswith(f"; 8 processes each; {needed} processes each would find 5 %")


@pytest.mark.parametrize("apart", [1, 100], ids=["too many processes", "more than can be computed"])
def test_a_host_may_be_too_noisy(apart: float) -> None:
    """It said that 14469 processes each would find 5 %."""
    wild = [math.exp(apart * value) for value in NOISY]
    (metric_row,), whole = judged(row(wild, [*wild[4:], *wild[:4]]))
    assert metric_row.estimate.spread is not None
    differ = percent(metric_row.estimate.spread)
    assert whole.sentence.endswith(f"; this host is too noisy to find 5 %: its processes differ by {differ}")
    assert re.search(r"may be [\d.e+]+(× | % )faster to [\d.e+]+\1slower; ", whole.sentence)[1] == (
        "× " if apart > 1 else " % "
    )


def test_an_interval_that_excludes_1_is_no_finding_after_the_correction() -> None:
    one, apart = (1.0, 1.1, 0.9, 1.05, 0.95, 1.02, 0.98, 1.0), (1.12, 1.3, 1.01, 1.2, 1.06, 1.25, 1.15, 0.97)
    others = [row(NOISY, times(factor, NOISY[::-1]), case=f"part={factor}") for factor in (1.0, 1.1, 1.2, 1.3)]
    (found, *_), _ = judged(row(one, apart), *others)
    assert found.estimate.p_value < 0.05 < found.p_adjusted
    assert found.finding == "inconclusive"
    assert found.sentence() == (
        f"inconclusive: the interval excludes 1, but the adjusted p is {found.p_adjusted:.3g}; 8 processes each; this "
        "host is too noisy to find 5 %: its processes differ by 8.8 %"
    )
    assert judged(row(one, apart))[0][0].finding == "worse", "the control"


def test_as_many_processes_as_there_are_would_not_help() -> None:
    """Sides that may differ by 5 %: as few processes as usually find such a difference are there already."""
    one = [1 + 0.014 * value for value in (0, 2, -2, 3, -3, 1, -1, 0.2, 2.5, -2.5, 0.5, -0.5)]
    other = times(1.024, [*one[3:], *one[:3]])
    (metric_row,), whole = judged(row(one, other))
    assert (metric_row.finding, metric_row.replicates_for(5)) == ("inconclusive", 9)
    assert whole.sentence.endswith("; 12 processes each; more processes would narrow the interval")
    whole = judged(row(one, other), limit=3.0)[1]
    assert whole.sentence == whole.gate.sentence, "one answer, not a number of processes for 5 % and one for 3 %"
    gate = judged(row(one, other, remedy=lambda number: f"flopwatch rerun 7 replicates={number}"), limit=3.0)[1].gate
    assert re.search(r"rerun 7 replicates=\d+`; judge what .* by `flopwatch compare … --fail-above 3`$", gate.sentence)
    (unequal,), whole = judged(row(one, other[:4]))
    assert f"{unequal.replicates_for(5)} processes each" in whole.sentence, "more of the smaller side do help"


def test_no_number_of_processes_cures_drift() -> None:
    drifting = [1.0, 1.001, 0.999, 1.0, 1.06, 1.061, 1.059, 1.06]
    _, whole = judged(row(drifting, drifting), alternated=False, limit=5.0)
    assert "one side alone drifted by 6.0 %: measure them in turns" in whole.sentence
    assert "processes each would find" not in whole.gate.sentence


@pytest.mark.parametrize(("one", "other", "words"), [(1, 1, "1 process each"), (3, 8, "3 and 8 processes")])
def test_few_processes_are_inconclusive_however_far_apart(one: int, other: int, words: str) -> None:
    (metric_row,), whole = judged(row(STEADY[:one], times(9.0)[:other]))
    assert metric_row.finding == "inconclusive"
    assert f"inconclusive: {words}, and at least 4 per side are needed" in whole.sentence
    assert "with 8 replicates" in whole.sentence


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_counts_are_equal_or_differ_without_any_chance(processes: int) -> None:
    for candidate, finding, words in ((10, "within_margin", "no difference"), (20, "differs", "2.00× higher; ")):
        sides = ([10.0] * processes, [float(candidate)] * processes)
        found = judged(row(*sides, metric="parameters", unit="parameters"), row(STEADY, STEADY))[0][0]
        assert found.finding == finding
        assert words in (found.sentence() or "")


@pytest.mark.parametrize(
    ("candidate", "conclusion", "gate", "words"),
    [
        (10.0, "no_difference", "passed", "no difference: the same"),
        (10.0004, "worse", "passed", "candidate is 1.000040× larger; 1 process each"),
        (10.51, "worse", "slower", "candidate is 1.051× larger; 1 process each"),
        (5.0, "better", "passed", "candidate is 2.00× smaller; 1 process each"),
    ],
)
def test_what_formulas_give_is_equal_or_differs(candidate: float, conclusion: str, gate: str, words: str) -> None:
    sides: Any = ([10.0], [candidate])
    options: Any = {"metric": "peak_memory_mib", "unit": "MiB"}
    _, whole = judged(
        row(*sides, **options, is_computed=True), alternated=False, limit=5.0, metrics=("peak_memory_mib",)
    )
    assert (whole.conclusion, whole.gate.outcome) == (conclusion, gate)
    assert words in whole.sentence
    assert "of the host" not in whole.sentence
    _, measured = judged(row(*sides, **options), limit=5.0, metrics=("peak_memory_mib",))
    assert measured.conclusion == "inconclusive", "the control"


@pytest.mark.parametrize(
    ("candidate", "conclusion", "words"),
    [
        (10.0, "no_difference", "no difference: the same in all processes; 1 process each"),
        (10.9, "inconclusive", "the sides differ by less than 1 MiB, which may be chance; 1 process each"),
        (12.0, "worse", "candidate is 1.20× larger; 1 process each"),
        (5.0, "better", "candidate is 2.00× smaller; 1 process each"),
    ],
)
def test_counted_sizes_need_no_replicates(candidate: float, conclusion: str, words: str) -> None:
    _, whole = judged(row([10.0], [candidate], "peak_memory_mib", unit="MiB", is_counted=True), alternated=False)
    assert (whole.conclusion, whole.sentence.partition(": ")[2].removeprefix("inconclusive: ")) == (conclusion, words)


class TestWitnesses:
    """Other statistics of the samples, such as medians where the fastest sample of each process counts."""

    WIDE = (1.0, 1.3, 0.9, 1.2, 1.05, 1.15, 0.95, 1.25)

    def judged(self, one, other, own=1.0, limit=5.0, **changes) -> tuple[Row, Judgement]:
        witnesses = {"median": (times(1.1, one), times(1.1, other))}
        by: dict[str, Any] = {"statistic": "fastest", "samples": 100, "witnesses": witnesses, **changes}
        (found,), whole = judged(row(STEADY, times(own, STEADY[::-1]), **by), limit=limit)
        return found, whole

    def test_a_wide_interval_hides_no_slowdown(self) -> None:
        """It was "no difference larger than 0.7 %", and passed: the interval of the medians contained that of the
        fastest, so it was not apart."""
        found, whole = self.judged(self.WIDE, times(1.1, self.WIDE[::-1]))
        assert (found.stories, found.finding, whole.conclusion) == ([], "inconclusive", "inconclusive")
        assert whole.gate.outcome == "inconclusive"
        for sentence in (whole.sentence, whole.gate.sentence):
            assert "by fastest samples no loss larger than 5.0 %, but by medians the candidate may be " in sentence
            assert f"slower: some of the steps may differ; {found.processes}; " in sentence
        _, without = self.judged(self.WIDE, times(1.1, self.WIDE[::-1]), witnesses={})
        assert (without.conclusion, without.gate.outcome) == ("no_difference", "passed"), "the control"

    def test_the_processes_that_a_witness_needs_are_asked_for(self) -> None:
        mild = [value**0.4 for value in self.WIDE]
        _, whole = self.judged(mild, mild[::-1])
        needed = re.search(r"; (\d+) processes each would find 5 %$", whole.sentence)
        assert 8 < int(needed[1]) <= MOST_PROCESSES
        _, noisy = self.judged(self.WIDE, self.WIDE[::-1])
        assert "; this host is too noisy to find 5 %: its processes differ by" in noisy.sentence

    @pytest.mark.parametrize(
        ("own", "factor", "of_witness", "outcome"),
        [
            (1.0, 0.99, STEADY, "passed"),
            (1.004, 0.99, STEADY, "passed"),
            (0.99, 0.85, [value**0.4 for value in WIDE], "passed"),
            (1.0, 1.045, STEADY, "inconclusive"),
        ],
    )
    def test_a_candidate_that_is_not_slower_by_any_statistic_passes(self, own, factor, of_witness, outcome) -> None:
        _, whole = self.judged(of_witness, times(factor, of_witness[::-1]), own)
        assert whole.gate.outcome == outcome

    def test_the_largest_differences_of_witnesses_are_told(self) -> None:
        slightly = [1 + 2 * (value - 1) for value in STEADY]
        _, whole = self.judged(slightly, slightly[::-1])
        assert whole.sentence.startswith(
            "step_ms: no difference larger than 0.7 % (by medians 1.4 %); 8 processes each"
        )

    def test_a_faster_candidate_may_be_slower_in_most_of_its_steps(self) -> None:
        _, whole = self.judged(self.WIDE, times(1.1, self.WIDE[::-1]), own=0.97)
        assert (whole.conclusion, whole.gate.outcome) == ("better", "inconclusive")
        assert "but by medians the candidate may be" in whole.gate.sentence

    def test_without_a_direction_any_difference_counts(self) -> None:
        wide = {"metric": "launches", "unit": "launches"}
        (found,), _ = judged(row(STEADY, STEADY[::-1], witnesses={"mean": (self.WIDE, self.WIDE[::-1])}, **wide))
        assert found.finding == "inconclusive"


class TestNotAlternated:
    """Jobs that ran one after the other."""

    def test_a_difference_within_the_drift_does_not_count(self) -> None:
        drifting = [1.0, 1.001, 0.999, 1.0, 1.06, 1.061, 1.059, 1.06]
        above = [1.065, 1.068, 1.070, 1.072, 1.066, 1.069, 1.071, 1.073]
        (in_turns,), _ = judged(row(drifting, above))
        (in_a_row,), whole = judged(row(drifting, above), alternated=False)
        assert (in_turns.finding, in_a_row.finding) == ("worse", "inconclusive")
        assert in_a_row.p_adjusted == in_turns.p_adjusted
        assert "differ by 3.8 %, and one side alone drifted by 6.0 %; measure them in turns" in whole.sentence
        assert in_a_row.smallest_difference >= 0.06


class TestManyRows:
    def test_the_headline_is_what_people_look_at_first(self) -> None:
        rows = [row(STEADY, STEADY, metric) for metric in ("host_us", "forward_ms", "step_ms")]
        assert findings.headline_of(rows, ("forward_ms",)) == "step_ms"
        assert findings.headline_of(rows[:2], ("forward_ms",)) == "forward_ms"
        assert findings.headline_of(rows[:1], ("forward_ms",)) == "host_us"
        assert findings.headline_of([row(STEADY, ()), *rows[:2]], ("forward_ms",)) == "step_ms", "candidate lacks it"
        assert findings.headline_of([row((), STEADY), *rows[:2]], ("forward_ms",)) == "forward_ms", "the baseline does"
        assert findings.headline_of([], ()) is None

    def test_an_error_is_no_headline(self) -> None:
        """A wrong result has no times, only its error."""
        error = row(STEADY, STEADY, "output_error", unit="fraction")
        assert findings.headline_of([error, row(STEADY, (), "forward_ms")], ()) == "forward_ms"
        assert findings.headline_of([error], ()) is None

    def test_cases_without_the_headline_are_judged_by_their_own(self) -> None:
        """A gate passed though products took 1.3 times as long: it judged copies only."""
        copies = [row(STEADY, STEADY[::-1], name, case="copy") for name in ("copy_ms", "x_ms")]
        products = [row(STEADY, times(by), "product_ms", case=name) for name, by in (("fp32", 1.0), ("bf16", 1.3))]
        found, whole = judged(*copies, *products, limit=5.0)
        assert [its.is_tested for its in found] == [True, False, True, True]
        assert (whole.headline, whole.conclusion, whole.gate.outcome) == ("copy_ms", "worse", "slower")
        assert "copy_ms, product_ms, 3 cases: candidate is worse in 1 (most in product_ms, bf16" in whole.sentence

    @pytest.mark.parametrize(("samples", "of"), [(10, "; 8 processes each, by the fastest of 10 samples"), (25, "")])
    def test_a_gate_that_passes_says_by_what_where_all_cases_have_it(self, samples: int, of: str) -> None:
        """It said "0 process each" where the first case is not in the baseline."""
        by = [{"statistic": "fastest", "samples": number, "case": f"n={number}"} for number in (10, samples)]
        passed = [row(NOISY, NOISY, **by[0]), row(STEADY, STEADY, **by[1])]
        _, whole = judged(row((), STEADY, case="new"), *passed, limit=900.0)
        assert whole.gate.sentence == f"passed: not worse by more than 900 %; step_ms{of}"

    def test_only_the_headline_is_tested_and_others_are_described(self) -> None:
        """As a comparison on a GPU had it: 528 tokens against 512, and p corrected to 1 for 14 metrics."""
        longer = times(1.041, STEADY[::-1])
        others = [row(STEADY, STEADY[::-1], f"m{number}_ms") for number in range(10)]
        found, whole = judged(
            row(STEADY, times(1.2)), row(STEADY, longer, "forward_ms"), row(NOISY, NOISY, "x_ms"), *others
        )
        step, forward, noisy, equal, *_ = found
        assert step.p_adjusted == step.estimate.p_value, "there is nothing to correct for"
        assert (step.finding, whole.conclusion) == ("worse", "worse")
        assert (forward.finding, forward.p_adjusted) == ("differs", None)
        assert (forward.sentence() or "").startswith("candidate is 1.041× slower, 95 % CI 1.0")
        assert equal.finding == "within_margin"
        assert (equal.sentence() or "").startswith("no difference larger than")
        assert noisy.finding == "inconclusive"

    @pytest.mark.parametrize("is_headline", [True, False])
    @pytest.mark.parametrize("factor", [1.0, 1.01, 1.02])
    def test_no_difference_is_never_said_where_the_interval_excludes_1(self, factor: float, is_headline: bool) -> None:
        rng = random.Random(f"{factor}")
        for number in range(12):
            sides = [[scale * rng.gauss(1, 0.005) for _ in range(4 + number % 5)] for scale in (1, factor)]
            cases = [row(*sides, "step_ms" if is_headline else "x_ms", case=f"n={at}") for at in range(1 + number % 4)]
            for judged_row in judged(row(STEADY, STEADY), *cases)[0]:
                if judged_row.finding in ("no_difference", "within_margin") and judged_row.bound:
                    assert not judged_row.estimate.excludes_one

    def test_several_cases_are_counted(self) -> None:
        rows = [
            row(STEADY, times(0.8), case="length=1"),
            row(STEADY, times(0.5), case="length=2"),
            row(STEADY, STEADY[::-1], case="length=3"),
            row(STEADY, (), case="length=4"),
        ]
        _, whole = judged(*rows)
        assert whole.conclusion == "better"
        assert whole.sentence == (
            "step_ms, 4 cases: candidate is better in 2 (most in step_ms, length=2: faster, 2.00×), "
            "no difference larger than 0.7 % in 1, no value on a side in 1"
        )
        _, mixed = judged(*rows, row(STEADY, times(2.0), case="length=5"))
        assert mixed.conclusion == "mixed"

    @pytest.mark.parametrize(("processes", "found"), [(4, False), (8, True)])
    def test_many_cases_are_always_corrected_for(self, processes: int, found: bool) -> None:
        """Four processes cannot pass the correction for seven cases: it was switched off, and 77 % of comparisons of 50
        equal cases by five processes found something."""
        rng = random.Random(3)
        rows = [row(*_drawn(rng, processes, 1.0), case=f"length={n}") for n in range(6)]
        _, whole = judged(*rows, row(*_drawn(rng, processes, 1.2), case="slower"))
        assert (whole.conclusion == "worse") is found
        assert whole.conclusion == ("worse" if found else "inconclusive")
        if not found:
            assert "7 tests at once need p of at most 0.0071, which takes 6 processes each" in whole.sentence


def test_what_cannot_be_compared() -> None:
    _, whole = judged(row(STEADY, times(2.0)), obstacles=["torch 2.11 against 2.13"], limit=5.0)
    assert (whole.conclusion, whole.sentence) == ("not_comparable", "not comparable: torch 2.11 against 2.13")
    assert whole.gate.outcome == "not_comparable"


INVALID = {"a": ("invalid", "valid"), "b": ("valid", "invalid")}


def test_invalid_numbers_are_not_judged() -> None:
    _, whole = judged(row(STEADY, times(2.0), verdicts=("valid", "invalid")), limit=5.0)
    assert whole.conclusion == "invalid"
    assert whole.sentence == "invalid: the candidate measured other work than was asked for"
    assert whole.gate.outcome == "invalid"
    assert whole.gate.sentence == "invalid: step_ms: the candidate measured other work than was asked for"
    both = [row(STEADY, STEADY, case=name, verdicts=verdicts) for name, verdicts in INVALID.items()]
    _, whole = judged(*both, limit=5.0)
    assert whole.sentence == (
        "invalid: the baseline and the candidate measured other work than was asked for in 2 of 2 cases"
    )
    assert whole.gate.sentence == (
        "invalid: step_ms, a: the baseline and the candidate measured other work than was asked for (and 1 more)"
    )
    _, suspect = judged(row(STEADY, times(2.0), verdicts=("suspect", "valid")))
    assert suspect.conclusion == "worse"


def test_values_that_are_missing() -> None:
    _, whole = judged(row(STEADY, ()), limit=5.0)
    assert whole.sentence == "missing: step_ms has no value on the side of the candidate (oom)"
    (neither,) = judged(row((), ()))[0]
    neither = conclude([neither], ["step_ms"], (), alternated=True)
    assert neither.sentence == "missing: step_ms has no value on either side (oom)"
    _, one_each = judged(row(STEADY, (), case="a"), row((), STEADY, "x_ms", case="b"))
    assert one_each.sentence == "missing: step_ms, x_ms have no value on one side (oom)", "not: on the candidate's"
    assert whole.gate.sentence == "missing: the candidate has no step_ms (oom)"
    _, nothing = judged(limit=5.0)
    assert (nothing.conclusion, nothing.gate.outcome) == ("missing", "missing")


@pytest.mark.parametrize(
    ("candidate", "limit", "outcome"),
    [
        (times(1.0), 5.0, "passed"),
        (times(0.8), 5.0, "passed"),
        (times(1.03), 5.0, "passed"),
        (times(1.03), 1.0, "slower"),
        (times(1.10), 5.0, "slower"),
        (times(1.047, [*STEADY[:6], 0.97, 1.04]), 5.0, "inconclusive"),
        (times(1.0, NOISY), 5.0, "inconclusive"),
        (times(1.2)[:3], 5.0, "inconclusive"),
        ((), 5.0, "missing"),
    ],
)
def test_the_gate(candidate: Sequence[float], limit: float, outcome: str) -> None:
    _, whole = judged(row(STEADY, candidate), limit=limit)
    assert whole.gate.outcome == outcome, whole.gate.sentence
    assert whole.gate.metrics == ["step_ms"]


@pytest.mark.parametrize(
    ("baseline", "candidate", "outcome"),
    [
        ([0.0] * 8, [0.0] * 8, "passed"),
        ([0.0] * 8, [0.0] * 7 + [1e-9], "inconclusive"),
        ([0.0] * 8, [1.0] * 8, "slower"),
        ([0.0] * 3, [0.0] * 3, "inconclusive"),
    ],
)
def test_the_gate_passes_what_is_0_in_all_processes(baseline, candidate, outcome) -> None:
    _, whole = judged(row(baseline, candidate), limit=5.0)
    assert whole.gate.outcome == outcome, whole.gate.sentence


@pytest.mark.parametrize(("limit", "outcome"), [(5.0, "passed"), (0.1, "inconclusive")])
def test_the_gate_of_a_metric_without_a_direction(limit: float, outcome: str) -> None:
    noise = [1.0, 1.001, 0.999, 1.002, 1.0005, 0.9995, 1.0015, 0.9985]
    _, whole = judged(row(noise, noise[::-1], "loss", unit=""), limit=limit, metrics=("loss",))
    assert whole.gate.outcome == outcome, whole.gate.sentence


def test_a_slowdown_that_was_not_measured_in_turns_is_not_confirmed() -> None:
    slow = row(STEADY, times(1.2), case="slow")
    for limit, outcome in ((5.0, "not_confirmed"), (30.0, "passed")):
        _, whole = judged(replace(slow), alternated=False, limit=limit)
        assert whole.gate.outcome == outcome
    _, whole = judged(replace(slow), row(STEADY, times(1.0, NOISY), case="noisy"), alternated=False, limit=5.0)
    assert whole.gate.sentence.startswith("not confirmed: worse by more than 5 %: step_ms, slow: candidate is 1.20×")
    assert whole.gate.sentence.endswith(
        "may have changed: measure them in turns: `flopwatch compare A B --alternate`, one job of each side"
    )
    _, whole = judged(replace(slow), row(STEADY, (), case="missing"), alternated=False, limit=5.0)
    assert whole.gate.outcome == "missing", "this is certain"
    _, whole = judged(row(STEADY, times(1.2), "peak_memory_mib", unit="MiB"), alternated=False, limit=5.0)
    assert whole.gate.outcome == "slower", "the host does not change it"


def test_the_gate_of_rates_and_of_several_cases() -> None:
    slow = row(STEADY, times(0.9), "tokens_per_s", unit="tokens/s", case="a")
    _, whole = judged(slow, limit=5.0)
    assert whole.gate.outcome == "slower"
    rows = [slow, replace(slow, candidate=list(STEADY), case="b"), row(STEADY, (), "tokens_per_s", case="c")]
    _, several = judged(*rows, limit=5.0)
    assert several.gate.outcome == "slower", "the worst answer counts"
    assert "tokens_per_s, a" in several.gate.sentence
