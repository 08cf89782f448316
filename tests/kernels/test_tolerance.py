from __future__ import annotations

import math

import pytest
import torch

from kernels.tolerance import TOLERANCES, Error, error


def test_the_error_of_the_whole_and_of_its_worst_row() -> None:
    oracle = torch.ones(100, 4, dtype=torch.float64)
    out = oracle.clone()
    out[7] *= 1.5
    found = error(out, oracle)
    assert found.relative == pytest.approx(0.05)
    assert found.worst_row == pytest.approx(0.5)


def test_a_vanishing_row_is_measured_by_the_others() -> None:
    oracle = torch.ones(4, 4, dtype=torch.float64)
    oracle[0] = 0
    out = oracle.clone()
    out[0] = 1e-3
    assert error(out, oracle).worst_row == pytest.approx(1e-3 / math.sqrt(3 / 4))


def test_an_oracle_that_is_zero_everywhere() -> None:
    zero = torch.zeros(3, 4, dtype=torch.float64)
    assert error(zero.float(), zero) == Error(0.0, 0.0)
    assert error(zero + 1, zero).relative == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        (Error(0.01, 0.1), None),
        (Error(0.03, 0.03), "relative error 3.00e-02, tolerance 2e-02"),
        (Error(0.01, 0.3), "relative error 3.00e-01 in one row"),
        (Error(math.nan, 0.0), "relative error nan"),
        (Error(0.0, math.nan), "relative error nan in one row"),
    ],
)
def test_what_counts_as_wrong(found: Error, wrong: str | None) -> None:
    reason = found.why_wrong(TOLERANCES[torch.bfloat16])
    assert (reason is None) if wrong is None else (reason or "").startswith(wrong)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="shape"):
        error(torch.zeros(3, 4), torch.zeros(4, 3, dtype=torch.float64))
