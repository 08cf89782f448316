"""Adds up one number many times in several data types, and says exactly how far each sum is off, and why.

The right sum is exact: the number's decimal digits times the number of additions. The error of a computed sum has two
parts: each addend is rounded to its data type before it is added, and each addition rounds the sum.
"""

import decimal
import math
from dataclasses import dataclass
from decimal import Decimal

import torch

DIGITS = 1000
"""Digits of exact arithmetic: more than the product of a float64's decimal digits and any number of additions needs."""


@dataclass(frozen=True)
class Accumulation:
    """The data types of a sum and of what is added to it."""

    addend_dtype: torch.dtype
    sum_dtype: torch.dtype
    casts: bool = False
    """True if each addend is cast to the sum's type before it is added; else the addition promotes it."""


ACCUMULATIONS = {
    "fp32": Accumulation(torch.float32, torch.float32),
    "fp16": Accumulation(torch.float16, torch.float16),
    "fp16_into_fp32": Accumulation(torch.float16, torch.float32),
    "fp16_cast_to_fp32": Accumulation(torch.float16, torch.float32, casts=True),
}


@dataclass(frozen=True)
class Sum:
    """A computed sum and its exact errors, each computed less right; `error` is the sum of the other two."""

    value: float
    """Infinite if the data type overflowed; there are no errors then."""
    right: Decimal
    """The exact sum."""
    error: Decimal | None
    rounding_error: Decimal | None
    """Error of the right sum of addends that were rounded to their data type."""
    adding_error: Decimal | None


def accumulate(how: Accumulation, addend: float, additions: int, device: torch.device) -> Sum:
    """Add `addend` to a sum of zero, one addition after another, on the device. `addend`: a finite number; its shortest
    decimal form ("0.01") is taken as exact."""
    total = torch.zeros((), dtype=how.sum_dtype, device=device)
    rounded = torch.tensor(addend, dtype=how.addend_dtype, device=device)
    for _ in range(additions):
        total += rounded.to(how.sum_dtype) if how.casts else rounded
    value = total.item()
    with decimal.localcontext(decimal.Context(prec=DIGITS, traps=[decimal.Inexact])):
        right = Decimal(repr(addend)) * additions
        if not math.isfinite(value):
            return Sum(value, right, None, None, None)
        of_rounded = Decimal(rounded.item()) * additions
        computed = Decimal(value)
        return Sum(value, right, computed - right, of_rounded - right, computed - of_rounded)
