import math
import random

import pytest
import torch

from kernels.attention.oracle import oracle
from kernels.attention.problem import AttentionProblem
from kernels.tolerance import TOLERANCES, Error, error, fixed_limits, limits_of_mean


def test_the_error_of_the_whole_and_of_its_worst_element() -> None:
    right = torch.ones(100, 4, dtype=torch.float64)
    right[7] = 2
    out = right.clone()
    out[7, 3] += 0.5
    distance = error(out, right)
    assert distance.relative == pytest.approx(0.5 / math.sqrt(99 * 4 + 16))
    assert distance.element == pytest.approx(0.25), "relative to its row's largest"


def test_a_vanishing_row_is_measured_by_the_others() -> None:
    right = torch.ones(4, 4, dtype=torch.float64)
    right[0] = 0
    out = right.clone()
    out[0] = 1e-3
    assert error(out, right).element == pytest.approx(1e-3), "of the size of those that do not vanish"


def test_an_oracle_that_is_zero_everywhere() -> None:
    zero = torch.zeros(3, 4, dtype=torch.float64)
    assert error(zero.float(), zero) == Error(0.0, 0.0)
    distance = error(zero + 1, zero)
    assert (distance.relative, distance.element) == (pytest.approx(1.0), pytest.approx(1.0))
    assert error(zero + 1, zero, scale=100.0).relative == pytest.approx(0.01)
    out = zero.clone()
    out[1] = 0.5
    distance = error(out, zero)
    assert (distance.relative, distance.element) == (pytest.approx(0.5 / math.sqrt(3)), pytest.approx(0.5))
    assert error(zero[:0], zero[:0]) == Error(0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_wrong_element_of_a_row_is_wrong(dtype: torch.dtype, is_causal: bool, rng: random.Random) -> None:
    """In a long sequence, where it changes the error of the whole by next to nothing."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    q, k, v, grad_out = (torch.randn(1, 2, 700, 32, generator=generator).to(dtype) for _ in range(4))
    expected = oracle(q, k, v, grad_out, AttentionProblem(is_causal=is_causal))
    for right, limit in zip((expected.out, *expected.gradients), expected.limits, strict=True):
        given = right.to(dtype)
        assert error(given, right).why_wrong(limit) is None
        for row in rng.sample(range(700), 4):
            worst = int(right[0, 1, row].abs().argmax())
            if right[0, 1, row, worst].abs() < right.square().mean().sqrt():
                continue  # too small a row to matter
            for wrong in (0.0, -right[0, 1, row, worst].item(), right[0, 1, row, worst].item() * 1.2, math.nan):
                damaged = given.clone()
                damaged[0, 1, row, worst] = wrong
                reason = error(damaged, right).why_wrong(limit)
                assert reason is not None, (row, wrong)


@pytest.mark.parametrize("queries", [2, 5, 16])
def test_keys_that_no_query_sees_do_not_loosen_the_limits(queries: int, rng: random.Random) -> None:
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    q, grad_out = (torch.randn(1, 2, queries, 64, generator=generator).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, 2, 1377, 64, generator=generator).bfloat16() for _ in range(2))
    with_unseen = oracle(q, k, v, grad_out, AttentionProblem(is_causal=True))
    seen = oracle(q, k[:, :, :queries], v[:, :, :queries], grad_out, AttentionProblem(is_causal=True))
    for right, limit, part, expected in zip(
        with_unseen.gradients, with_unseen.limits[1:], seen.gradients, seen.limits[1:], strict=True
    ):
        # Those to as many keys as queries; but for the rows of zeros nothing differs.
        assert limit.relative == pytest.approx(expected.relative, rel=0.8)
        assert limit.element == pytest.approx(expected.element, rel=0.5)
        given = right.bfloat16()
        given[..., : part.shape[-2], :] *= 3
        assert error(given, right).why_wrong(limit) is not None
        assert error(right.bfloat16(), right).why_wrong(limit) is None


@pytest.mark.parametrize("head_dim", [1, 16, 1024])
@pytest.mark.parametrize("rows", [1, 1000])
def test_only_round_off_may_stand_for_zero(head_dim: int, rows: int, rng: random.Random) -> None:
    """One key: the gradient of q is (grad_out · v − grad_out · out) k / sqrt(head_dim), where out = v."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    grad_out, v, k = (torch.randn(rows, head_dim, generator=generator) for _ in range(3))
    zero = torch.zeros(rows, head_dim, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rounded = [tensor.to(dtype) for tensor in (grad_out, v)]
        there = (rounded[0] * rounded[1]).sum(-1, keepdim=True)
        back = (rounded[0] * rounded[1]).flip(-1).float().cumsum(-1)[:, -1:].to(dtype)  # summed in another order
        gradient = (there - back) * k.to(dtype) / math.sqrt(head_dim)
        assert error(gradient, zero).why_wrong(fixed_limits(TOLERANCES[dtype])) is None
    forgotten = 0.1 * (grad_out * v).sum(-1, keepdim=True) * k / math.sqrt(head_dim)
    if rows > 1:  # one row may be small by chance
        assert error(forgotten, zero).why_wrong(fixed_limits(TOLERANCES[torch.bfloat16])) is not None
        assert error(1e-2 * forgotten, zero).why_wrong(fixed_limits(TOLERANCES[torch.float32])) is not None
    not_finite = zero.clone()
    not_finite[0, 0] = math.nan
    assert error(not_finite, zero).why_wrong(fixed_limits(TOLERANCES[torch.bfloat16])) is not None


@pytest.mark.parametrize(
    ("distance", "wrong"),
    [
        (Error(0.01, 0.05), None),
        (Error(0.03, 0.03), "relative error 3.00e-02, allowed 2.0e-02"),
        (Error(0.01, 0.3), "relative error 3.00e-01 in one element, allowed 6.0e-02"),
        (Error(math.nan, 0.0), "relative error nan, "),
        (Error(0.0, math.nan), "relative error nan in one element"),
    ],
)
def test_errors_above_the_tolerance_are_wrong(distance: Error, wrong: str | None) -> None:
    reason = distance.why_wrong(fixed_limits(TOLERANCES[torch.bfloat16]))
    assert (reason is None) if wrong is None else (reason or "").startswith(wrong)


@pytest.mark.parametrize("factor", [1.0, 1.001, 0.999])
@pytest.mark.parametrize("shape", [(3, 40, 16), (2000,)])
def test_the_slope_shows_a_factor_below_round_off(shape: tuple[int, ...], factor: float, rng: random.Random) -> None:
    right = torch.randn(shape, generator=torch.Generator().manual_seed(rng.getrandbits(32)), dtype=torch.float64)
    found = error((factor * right).bfloat16(), right)
    assert found.relative < 3e-3, "round-off hides it"
    reason = found.why_wrong(Error(1.0, 1.0, 2e-4))
    assert (reason is None) is (factor == 1.0)
    assert factor == 1.0 or (reason or "").startswith("too large or too small everywhere by a factor of 1 ± ")


@pytest.mark.parametrize("plain", [0.0, 2**-9, 2**-8])
def test_the_rounding_of_a_mean_says_nothing_of_the_errors_before(plain: float) -> None:
    found = Error(plain, plain)
    assert limits_of_mean(found, torch.bfloat16, 4096) == limits_of_mean(Error(0.0, 0.0), torch.bfloat16, 4096)
    assert 2**-8 < limits_of_mean(found, torch.bfloat16, 4096).relative < 0.005
