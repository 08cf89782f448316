from __future__ import annotations

import math
import random

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
    found = error(zero + 1, zero)
    assert (found.relative, found.worst_row) == (pytest.approx(1.0), pytest.approx(1.0))
    assert error(zero + 1, zero, scale=100.0).relative == pytest.approx(0.01)
    out = zero.clone()
    out[1] = 0.5
    found = error(out, zero)
    assert (found.relative, found.worst_row) == (pytest.approx(0.5 / math.sqrt(3)), pytest.approx(0.5))


@pytest.mark.parametrize("head_dim", [1, 16, 1024])
@pytest.mark.parametrize("rows", [1, 1000])
def test_round_off_in_vanishing_gradients_is_right_and_anything_else_is_wrong(
    head_dim: int, rows: int, rng: random.Random
) -> None:
    """One key: the gradient of q is (grad_out · v − grad_out · out) k / sqrt(head_dim), where out = v."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    grad_out, v, k = (torch.randn(rows, head_dim, generator=generator) for _ in range(3))
    zero = torch.zeros(rows, head_dim, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rounded = [tensor.to(dtype) for tensor in (grad_out, v)]
        there = (rounded[0] * rounded[1]).sum(-1, keepdim=True)
        back = (rounded[0] * rounded[1]).flip(-1).float().cumsum(-1)[:, -1:].to(dtype)  # summed in another order
        gradient = (there - back) * k.to(dtype) / math.sqrt(head_dim)
        assert error(gradient, zero).why_wrong(TOLERANCES[dtype]) is None
    forgotten = 0.1 * (grad_out * v).sum(-1, keepdim=True) * k / math.sqrt(head_dim)
    if rows > 1:  # one row may be small by chance
        assert error(forgotten, zero).why_wrong(TOLERANCES[torch.bfloat16]) is not None
        assert error(1e-2 * forgotten, zero).why_wrong(TOLERANCES[torch.float32]) is not None
    not_finite = zero.clone()
    not_finite[0, 0] = math.nan
    assert error(not_finite, zero).why_wrong(TOLERANCES[torch.bfloat16]) is not None


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
