"""Sums in several data types and their exact errors."""

from fractions import Fraction

import torch

from workers.measure.accumulation import ACCUMULATIONS, Accumulation, accumulate

CPU = torch.device("cpu")

HUNDREDTHS = {
    "fp32": ("10.0001", Fraction(35, 2**18)),
    "fp16": ("9.9531", Fraction(-3, 64)),
    "fp16_into_fp32": ("10.0021", Fraction(35, 2**14)),
    "fp16_cast_to_fp32": ("10.0021", Fraction(35, 2**14)),
}
"""The sums of 1000 times 0.01, as CS336 prints them, and their errors."""


def test_every_accumulation_is_tested() -> None:
    assert set(ACCUMULATIONS) == set(HUNDREDTHS)


def test_errors_of_rounding_and_of_adding() -> None:
    half = Fraction(0.01000213623046875)  # the float16 nearest to 0.01
    wide = accumulate(ACCUMULATIONS["fp16_into_fp32"], 0.01, 1000, CPU)
    narrow = accumulate(ACCUMULATIONS["fp16"], 0.01, 1000, CPU)
    for total in (wide, narrow):
        assert Fraction(total.rounding_error or 0) == 1000 * (half - Fraction(1, 100))
    assert wide.adding_error == 0, "a float32 holds every multiple on the way"
    assert Fraction(narrow.adding_error or 0) == Fraction(narrow.value) - 1000 * half


def test_a_sum_that_stops_growing() -> None:
    total = accumulate(Accumulation(torch.bfloat16, torch.bfloat16), 0.01, 1000, CPU)
    assert total.value == 4.0


def test_a_sum_that_overflows_has_no_error() -> None:
    total = accumulate(ACCUMULATIONS["fp16"], 60_000.0, 2, CPU)
    assert total.value == float("inf")
    assert total.right == 120_000
    assert (total.error, total.rounding_error, total.adding_error) == (None, None, None)
