"""The formulas of a mesh, against numbers worked by hand from their sources."""

from fractions import Fraction

import pytest

from parallel import scaling
from parallel.scaling import STRATEGIES, Formula, evaluate

D, F, BLOCKS = 16_384, 53_248, 126
XXL: dict[str, float] = {
    "P": 4 * BLOCKS * 2 * D * F,
    "G": 4 * BLOCKS * 2 * D * F,
    "O": 8 * BLOCKS * 2 * D * F,
    "K": 0,
    "A": 2 * 1024 * BLOCKS * (D + F),
    "f": 0.5,
    "s": 0,
    "R": 80 * 10**9,
    "M": 95 * 10**9,
    "X": 16,
    "Y": 4,
    "Mx": 2,
    "My": 1,
    "W": 2 * 9e10,
    "C": 4.6e14,
    "k": 4 * D * F,
    "g": 2 * 2 * D * F,
    "m": 2 * 2 * D,
}
"""The model of CS336's problem communication_accounting with 1024 tokens, on the TPUs of the scaling book."""
ALPHA = 4.6e14 / 1.8e11
"""The scaling book's C / W, which it rounds to 2550."""


def value(formula: Formula, **changed: float) -> float:
    return float(formula.value({**XXL, **changed}))


class TestText:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("2 + 3 * a", 17),
            ("(2 + 3) * a", 25),
            ("a / b", Fraction(5, 3)),
            ("a**2 - b", 22),
            ("floor(a / b) + 1", 2),
            ("max(a, 2 * b)", 6),
            ("a * 0.1", Fraction(1, 2)),
        ],
    )
    def test_its_value_is_exact(self, text: str, expected: Fraction) -> None:
        assert evaluate(text, {"a": 5, "b": 3}) == expected

    def test_a_float_is_the_decimal_that_people_wrote(self) -> None:
        assert evaluate("f * 10", {"f": 0.1}) == 1
        assert evaluate("W", {"W": 1.8e11}) == 180_000_000_000

    @pytest.mark.parametrize(
        "text", ["c", "a if b else 1", "__import__('os')", "a.real", "'a'", "a % b", "floor(x=a)", "[a]", "a == b"]
    )
    def test_nothing_but_arithmetic_is_computed(self, text: str) -> None:
        with pytest.raises(ValueError, match="is no formula of a, b"):
            evaluate(text, {"a": 1, "b": 2})


class TestMemory:
    def test_each_strategy_by_hand(self) -> None:
        """16 bytes for each of 126 · 2 · 16 384 · 53 248 parameters; 126 · (16 384 + 53 248) · 2 bytes per token."""
        state, saved = 3_517_578_215_424, 17_968_398_336
        by_hand = {
            "data": state + saved,
            "sharded_optimizer": state / 2 + state / 2 / 16 + saved,
            "fully_sharded": state / 16 + saved,
            "sharded_activations": state / 16 + saved / 2 + saved / 32,
            "tensor": (state + saved) / 4,
            "mesh": (state / 16 + saved) / 4,
        }
        assert {name: value(formula) for name, formula in STRATEGIES.items()} == by_hand

    @pytest.mark.parametrize(("tokens", "shards"), [(0, 38), (1024, 41), (4096, 61)])
    def test_fewest_shards_by_hand(self, tokens: int, shards: int) -> None:
        """In GB: 3517.58 / 95 = 37.03, (3517.58 + 8.984) / (95 - 8.984) = 40.999, 3553.52 / (95 - 35.94) = 60.16."""
        assert value(scaling.FEWEST_SHARDS, A=2 * tokens * BLOCKS * (D + F)) == shards

    def test_a_device_at_the_limit_is_not_under_it(self) -> None:
        even = {"P": 40, "G": 40, "O": 80, "A": 0, "f": 0.5, "s": 1, "K": 0, "M": 16}
        assert scaling.FEWEST_SHARDS.value(even) == 11

    @pytest.mark.parametrize("name", ["fully_sharded", "sharded_activations", "mesh"])
    def test_weights_that_travel_in_32_bits_are_copied_on_every_device(self, name: str) -> None:
        copies, ranks = 10**9, 4 if name == "mesh" else 1
        more = value(STRATEGIES[name], K=copies, s=1) - value(STRATEGIES[name], K=copies, s=0)
        assert more == copies / ranks
        assert value(scaling.FEWEST_SHARDS, K=10**10, s=1) > value(scaling.FEWEST_SHARDS, K=10**10, s=0)


class TestBatch:
    def test_fully_sharded_alone_as_in_the_book(self) -> None:
        assert value(scaling.FSDP_TOKENS, Mx=1) == pytest.approx(ALPHA)
        assert value(scaling.FSDP_TOKENS, Mx=3) == pytest.approx(850, rel=0.01)

    def test_tensor_alone_as_in_the_book(self) -> None:
        """Y < F / 2550: 29 000 gives 11, and Gemma's 50 000 stops between 16 and 19 or 20."""
        assert value(scaling.MOST_TENSOR) == pytest.approx(F / ALPHA)
        gemma = {"k": 4 * D * 50_000}
        assert 16 < value(scaling.MOST_TENSOR, **gemma) < 20

    def test_the_best_mesh_as_in_the_book(self) -> None:
        """F = 32 768 and Mx · My = 2 give B / N > 99."""
        book = {"k": 4 * D * 32_768, "g": 4 * D * 32_768}
        assert value(scaling.BEST_TOKENS, **book) == pytest.approx(ALPHA**2 / (2 * 32_768))
        assert value(scaling.BEST_TOKENS, **book) == pytest.approx(99, rel=0.01)
        most = value(scaling.MOST_TENSOR, **book)
        assert value(scaling.OVERLAPPED_TOKENS, **{**book, "Y": most}) == pytest.approx(
            value(scaling.BEST_TOKENS, **book)
        )
