"""The oracle in parts against the reference as a whole."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.attention import oracle as module
from kernels.attention.oracle import oracle
from kernels.attention.problem import AttentionProblem
from kernels.attention.reference import attention


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(37, 37), (37, 20), (20, 37), (1, 1)])
def test_parts_add_up(
    queries: int, keys: int, is_causal: bool, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SCORE_BYTES", 8 * 2 * 3 * keys * rng.randint(1, 40))
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    q, k, v, grad_out = (
        torch.randn(2, 3, length, 8, dtype=torch.float64, generator=generator)
        for length in (queries, keys, keys, queries)
    )
    inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out = attention(inputs[0], inputs[1], inputs[2], is_causal)
    problem = AttentionProblem(is_causal=is_causal)
    results = oracle(q, k, v, grad_out, problem)
    torch.testing.assert_close(results.out, out.detach())
    torch.testing.assert_close(results.gradients, torch.autograd.grad(out, inputs, grad_out))
    assert oracle(q, k, v, None, problem).gradients == ()
