"""Intervals, tests and power, against known values and by simulation."""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from itertools import combinations, product

import numpy as np
import pytest
from scipy import stats

from app.results import inference
from app.results.inference import Estimate, Hypothesis, adjusted, estimate, replicates_for, smallest_difference
from app.specs.compare import blocks_of_turns

EIGHT = [1.00, 1.01, 0.99, 1.02, 0.98, 1.005, 0.995, 1.012]


def finds(found: Estimate) -> bool:
    return found.p_value is not None and found.p_value <= inference.ALPHA and found.excludes_one


class TestEstimate:
    def test_p_values_are_exact(self) -> None:
        # Two sides that do not overlap: 2 of all ways to choose the ranks are as extreme.
        for number in (4, 5, 8):
            one, other = [float(i + 1) for i in range(number)], [float(i + 101) for i in range(number)]
            assert estimate(one, other).p_value == pytest.approx(2 / math.comb(2 * number, number))
            assert inference.smallest_p_value(number, number) == pytest.approx(2 / math.comb(2 * number, number))

    def test_p_values_of_ties_are_exact_too(self) -> None:
        found = estimate([100.0] * 4, [120.0] * 4)
        assert found.p_value == pytest.approx(2 / 70)
        assert (found.ratio, found.low, found.high, found.spread) == (1.2, 1.2, 1.2, 0.0)
        assert estimate([100.0] * 4, [100.0] * 4).p_value == 1.0

    @pytest.mark.parametrize(("one", "other"), [(1, 1), (1, 9), (3, 3), (3, 9)])
    def test_few_processes_have_a_ratio_only(self, one: int, other: int) -> None:
        found = estimate(EIGHT[:1] * one, [2.0] * other)
        assert (found.ratio, found.low, found.high, found.p_value) == (2.0, None, None, None)
        assert (found.spread is None) == (one + other == 2)

    def test_without_positive_values_there_is_no_ratio(self) -> None:
        found = estimate([0.0, 1.0, 2.0, 3.0], [5.0, 6.0, 7.0, 8.0])
        assert (found.ratio, found.low, found.spread) == (None, None, None)
        assert found.p_value == pytest.approx(2 / 70)
        assert found.excludes_one, "nothing speaks against it"

    @pytest.mark.parametrize("confidence", [0.5, 0.95, 0.99])
    def test_the_estimate_lies_in_its_interval(self, monkeypatch: pytest.MonkeyPatch, confidence: float) -> None:
        """The ratio of the medians of bimodal times did not in half of comparisons: 1.073, interval 1.000 to 1.011."""
        monkeypatch.setattr(inference, "CONFIDENCE", confidence)
        monkeypatch.setattr(inference, "_place_of_end", inference._place_of_end.__wrapped__)
        rng, medians_outside = random.Random(11), 0
        kinds: list[Callable[[], float]] = [
            lambda: rng.choice((1.0, 1.08)) * rng.gauss(1, 0.003),
            lambda: rng.choice((1.0, 1.0, 1.5)),  # ties
            lambda: rng.paretovariate(1),
            lambda: 1.0,
        ]
        for kind in kinds:
            for one, other in ((4, 4), (4, 9), (5, 6), *[(30, 30)] * 10, (61, 12)):
                sides = [[kind() for _ in range(number)] for number in (one, other)]
                found, turned = estimate(*sides), estimate(*sides[::-1])
                if found.low is None or found.high is None:
                    assert (one, confidence) == (4, 0.99), "the 16 ratios of 4 and 4 have less confidence"
                    continue
                assert found.low <= found.ratio <= found.high
                assert turned.ratio == pytest.approx(1 / found.ratio), "of exchanged sides it is the inverse"
                of_medians = statistics.median(sides[1]) / statistics.median(sides[0])
                medians_outside += not found.low <= of_medians <= found.high
        assert medians_outside or confidence > 0.95, "the draws show what was wrong"

    def test_the_interval_holds_the_ratios_that_the_test_does_not_reject(self) -> None:
        rng = random.Random(5)
        for one, other in ((4, 4), (5, 9), (8, 8), (20, 16)):
            sides = [[math.exp(rng.gauss(0, 0.1)) for _ in range(number)] for number in (one, other)]
            found = estimate(*sides)
            for end, inwards in ((found.low, 1 + 1e-6), (found.high, 1 - 1e-6)):
                inside, outside = ([value / end / step for value in sides[1]] for step in (inwards, 1 / inwards))
                assert inference.p_value(sides[0], inside) > inference.ALPHA >= inference.p_value(sides[0], outside)

    def test_many_processes_have_the_interval_of_the_normal_approximation(self, monkeypatch) -> None:
        exact = inference._place_of_end.__wrapped__
        places = [exact(number, number + 7) for number in (30, 41, 53)]
        monkeypatch.setattr(inference, "MAX_EXACT", 1)
        assert [exact(number, number + 7) for number in (30, 41, 53)] == pytest.approx(places, abs=1)

    def test_the_spread_is_the_median_distance_between_processes_of_a_side(self) -> None:
        found = estimate([1.0, 1.1, 1.0, 1.1], [5.0, 6.0, 5.0, 6.0])
        assert found.distances == pytest.approx(sorted([0] * 4 + [math.log(1.1)] * 4 + [math.log(1.2)] * 4))
        assert found.spread == pytest.approx(0.1)


def by_all_orders(baseline: Sequence[float], candidate: Sequence[float], blocks: Sequence[int]) -> float:
    """The p-value of the sum of ranks among all orders that exchange processes within blocks, tried one by one."""
    ranks = stats.rankdata([*baseline, *candidate])
    sums, found, at = [], 0.0, 0
    for size in blocks:
        one, other = (ranks[begin + at : begin + at + size] for begin in (0, len(baseline)))
        sums.append([sum(chosen) for chosen in combinations([*one, *other], size)])
        found, at = found + sum(one), at + size
    totals = np.array([sum(order) for order in product(*sums)])
    return min(1.0, 2 * min(np.mean(totals <= found), np.mean(totals >= found)))


class TestTurns:
    """Sides that took turns, in an order drawn in blocks."""

    @pytest.mark.parametrize("digits", [9, 2], ids=["no ties", "ties"])
    def test_the_p_value_is_that_of_all_orders_that_could_have_been_drawn(self, digits: int) -> None:
        rng = random.Random(4)
        for blocks in ([4, 4], [5, 4], [2, 3, 2]):
            level = [step * rng.choice((0, 0.1)) for step, size in enumerate(blocks) for _ in range(size)]
            one, other = ([round(math.exp(it + rng.gauss(mean, 0.03)), digits) for it in level] for mean in (0.0, 0.02))
            expected = by_all_orders(one, other, blocks)
            assert inference.p_value(one, other, blocks) == pytest.approx(expected)
            assert inference.p_value(other, one, blocks) == pytest.approx(expected)

    def test_a_load_that_begins_hides_no_difference(self) -> None:
        before, after = [1.00, 1.01, 0.99, 1.005], [1.30, 1.31, 1.29, 1.305]
        one, other = [*before, *after], [1.05 * value for value in (*before[::-1], *after[::-1])]
        assert estimate(one, other, [4, 4]).p_value == pytest.approx(2 / 70**2)
        assert inference.smallest_p_value(8, 8, [4, 4]) == 2 / 70**2
        assert finds(estimate(one, other, [4, 4]))
        assert not finds(estimate(one, other)), "the control: without the blocks the load hides it"

    @pytest.mark.parametrize("processes", [8, 11, 20, 40])
    def test_the_interval_holds_the_ratios_that_the_test_does_not_reject(self, processes: int) -> None:
        rng, blocks = random.Random(6), blocks_of_turns(processes)
        one, other = ([math.exp(rng.gauss(at / 20, 0.1)) for at in range(processes)] for _ in range(2))
        found = estimate(one, other, blocks)
        assert found.low < found.ratio < found.high
        for end, inwards in ((found.low, 1 + 1e-9), (found.high, 1 - 1e-9)):
            inside, outside = ([value / end / step for value in other] for step in (inwards, 1 / inwards))
            assert inference.p_value(one, inside, blocks) > inference.ALPHA >= inference.p_value(one, outside, blocks)
        turned = estimate(other, one, blocks)
        assert (turned.low, turned.high) == pytest.approx((1 / found.high, 1 / found.low))

    def test_many_processes_have_the_p_value_of_the_normal_approximation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rng, blocks = random.Random(8), blocks_of_turns(30)
        sides = [[round(rng.gauss(mean, 0.02), 2) for _ in range(30)] for mean in (1.0, 1.01)]
        exact = inference.p_value(*sides, blocks)
        monkeypatch.setattr(inference, "MAX_EXACT_IN_TURNS", 1)
        assert inference.p_value(*sides, blocks) == pytest.approx(exact, abs=0.003)
        assert inference.p_value([1.0, 2.0] * 15, [1.0, 2.0] * 15, blocks) == 1.0


class TestPower:
    @staticmethod
    def distances(spread: float) -> list[float]:
        """Those of normal noise."""
        normal = statistics.NormalDist(0, spread * math.sqrt(2))
        return [normal.inv_cdf(0.5 + at / 2002) for at in range(1, 1001)]

    def test_three_processes_can_find_nothing(self) -> None:
        assert smallest_difference(self.distances(0.01), 3, 8) is None
        assert smallest_difference([0.0] * 9, 4, 4) == 0.0
        assert smallest_difference([], 8, 8) is None

    def test_a_strict_level_needs_more_processes(self) -> None:
        distances = self.distances(0.01)
        assert smallest_difference(distances, 4, 4, alpha=0.02) is None, "the smallest p-value of 4 and 4 is 0.029"
        assert replicates_for(0.5, distances, alpha=0.02) == 5
        assert replicates_for(0.5, distances) == 4

    def test_replicates_and_difference_agree(self) -> None:
        for spread in (0.01, 0.03, 0.2):
            distances = self.distances(spread)
            for number in (8, 30, 200):
                found = smallest_difference(distances, number, number)
                assert number - 1 <= (replicates_for(found * 1.0001, distances) or 0) <= number
                more = replicates_for(found / 1.01, distances)
                assert number < more <= 1.05 * number + 1

    def test_normal_noise_needs_as_many_as_is_known(self) -> None:
        """3 / pi of the processes that a test of means needs, for a difference that is small beside the noise."""
        needed = replicates_for(0.03, self.distances(0.1))
        of_means = 2 * (1.96 + 0.8416) ** 2 * (0.1 / math.log(1.03)) ** 2
        assert needed == pytest.approx(math.pi / 3 * of_means, rel=0.05)

    def test_a_difference_smaller_than_all_distances_needs_nobody_knows_how_many(self) -> None:
        assert replicates_for(0.01, [0.5] * 12) is None


STEADY = [1.0, 1.01, 0.99, 1.02, 0.98, 1.005, 0.995, 1.015]


class TestAdjusted:
    def test_holm(self) -> None:
        p_values = (0.01, 0.04, 0.03)
        tests = [Hypothesis(STEADY, [*STEADY[1:], 4.0 + number], p) for number, p in enumerate(p_values)]
        found, needed = adjusted(tests)
        assert found == pytest.approx([0.03, 0.06, 0.06])
        assert needed == pytest.approx(0.05 / 3)

    def test_a_metric_and_its_inverse_are_one_hypothesis(self) -> None:
        times = ([1.0, 1.1, 0.9, 1.05], [1.2, 1.3, 1.25, 1.22])
        rates = tuple([512 / value for value in side] for side in times)
        shares = tuple([0.7 * value for value in side] for side in rates)
        memory = ([5.0] * 4, [5.0] * 4)
        p_values = (0.0286, 0.0286, 0.0286, 1.0)
        sides = (times, rates, shares, memory)
        found, needed = adjusted([Hypothesis(*side, p) for side, p in zip(sides, p_values, strict=True)])
        assert found == [0.0286, 0.0286, 0.0286, 1.0]
        assert needed == 0.05
        twice = [[*side, *(1.01 * value for value in side)] for side in times]
        other = [*twice[0][:-1], 1.0501]
        assert adjusted([Hypothesis(*twice, 0.02), Hypothesis(other, twice[1], 0.02)])[0] == [0.04, 0.04]


DRAWS = 150
NOISE: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda rng: rng.gauss(0, 0.02),
    "outliers": lambda rng: rng.gauss(0, 0.008) + (rng.expovariate(5) if rng.random() < 0.25 else 0),
}


def draw(rng: random.Random, kind: str, number: int, factor: float = 1.0) -> list[float]:
    return [factor * math.exp(NOISE[kind](rng)) for _ in range(number)]


@pytest.mark.parametrize("kind", [*NOISE])
def test_the_replicates_asked_for_find_the_difference(kind: str) -> None:
    rng = random.Random(8)
    number = replicates_for(0.03, estimate(draw(rng, kind, 300), [1.0]).distances)
    assert 6 < number < 20

    def share_found(replicates: int) -> float:
        sides = ([draw(rng, kind, replicates, factor) for factor in (1.0, 1.03)] for _ in range(DRAWS))
        return sum(finds(estimate(*pair)) for pair in sides) / DRAWS

    assert share_found(number) >= inference.POWER - 3 * math.sqrt(0.8 * 0.2 / DRAWS)
    assert share_found(number // 2) < inference.POWER, "with half of them, less is found"
