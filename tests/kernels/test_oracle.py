"""The oracle in parts against the reference as a whole."""

import random

import pytest
import torch

from kernels.attention.oracle import oracle
from kernels.attention.problem import AttentionProblem
from kernels.tolerance import Error, error


def draw(queries: int, keys: int, dtype: torch.dtype, rng: random.Random) -> list[torch.Tensor]:
    """q, k, v and the output's gradient, with two heads of which the keys have one."""
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    sizes = (2, queries), (1, keys), (1, keys), (2, queries)
    return [torch.randn(1, *size, 64, generator=generator).to(dtype) for size in sizes]


@pytest.mark.parametrize(
    ("keys", "fields", "fault"),
    [
        (65, {"is_causal": True}, {"bottom_right": True}),
        (64, {"is_causal": True, "window": 48}, {"window": 49}),
        (64, {"is_causal": True, "window": 48, "scale": 0.25}, {"window": 47}),
        (64, {"document_lengths": (40, 0, 24)}, {"document_lengths": (41, 0, 23)}),
        (64, {"is_causal": True, "scale": 0.25, "document_lengths": (40, 24)}, {"document_lengths": (39, 25)}),
        (64, {"is_causal": True}, {"scale": 1.02 / 8}),
        (64, {"is_causal": True, "scale": 0.25}, {"scale": 1.02 * 0.25}),
        (64, {"softcap": 2.0, "scale": 0.25}, {"softcap": 2.1}),
    ],
)
def test_a_small_fault_exceeds_the_limits_of_half_precision(keys, fields, fault, rng) -> None:
    """By a factor of two: masks off by one, a scale by 2 %, a soft cap by 5 %."""
    inputs = draw(64, keys, torch.float16, rng)
    right = oracle(*inputs, AttentionProblem(2, 1, **fields))
    wide = [tensor.double() for tensor in inputs]
    wrong = oracle(*wide, AttentionProblem(2, 1, **fields | fault))
    rights, wrongs = (right.out, *right.gradients), (wrong.out, *wrong.gradients)
    for expected, limit in zip(rights, right.limits, strict=True):
        assert error(expected.half(), expected).why_wrong(limit) is None
    doubled = [Error(2 * limit.relative, 2 * limit.element) for limit in right.limits]
    assert any(map(Error.why_wrong, map(error, wrongs, rights), doubled))


def test_a_soft_cap_keeps_the_limits_of_large_scales_tight(rng: random.Random) -> None:
    inputs = draw(64, 64, torch.bfloat16, rng)
    right = oracle(*inputs, AttentionProblem(2, 1, is_causal=True, scale=5 / 8, softcap=1.0))
    for gradient, limit in zip(right.gradients, right.limits[1:], strict=True):
        assert error(gradient.bfloat16(), gradient).why_wrong(limit) is None
        assert error(1.15 * gradient, gradient).why_wrong(limit) is not None
