"""Sums in several data types and their exact errors."""

from fractions import Fraction

import torch

from workers.measure.accumulation import ACCUMULATIONS, Accumulation, accumulate

CPU = torch.device("cpu")


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
