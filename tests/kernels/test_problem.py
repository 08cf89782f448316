"""The problem of attention: its mask, written out pair by pair, against the reference, the oracle and the FLOPs."""

import itertools
import math
import random
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention import oracle as parts
from kernels.attention.oracle import oracle
from kernels.attention.problem import AttentionProblem
from kernels.attention.reference import attention
from kernels.registry import FEATURES, Implementation


def draw_problem(rng: random.Random) -> tuple[AttentionProblem, int, int]:
    """A problem, its number of queries, and that of keys."""
    queries, keys = rng.randint(1, 20), rng.randint(1, 20)
    lengths = None
    if rng.random() < 0.4:
        lengths = (*(rng.randint(0, 6) for _ in range(rng.randint(0, 4))), rng.randint(1, 4))
        queries = keys = sum(lengths)
    problem = AttentionProblem(
        num_heads=4, num_kv_heads=rng.choice((4, 2, 1)), is_causal=rng.random() < 0.5,
        bottom_right=rng.random() < 0.5, window=rng.choice((None, 1, 3, 7)), document_lengths=lengths,
        scale=rng.choice((None, 0.3)), softcap=rng.choice((None, 2.0)),
    )  # fmt: skip
    return problem, queries, keys


def visible(problem: AttentionProblem, queries: int, keys: int) -> Tensor:
    """(queries, keys), by the definitions of the fields."""
    documents = [number for number, length in enumerate(problem.document_lengths or ()) for _ in range(length)]
    offset = keys - queries if problem.bottom_right else 0
    seen = torch.ones(queries, keys, dtype=torch.bool)
    for query, key in itertools.product(range(queries), range(keys)):
        position = query + offset
        seen[query, key] = (
            (not problem.is_causal or key <= position)
            and (problem.window is None or abs(key - position) < problem.window)
            and (not documents or documents[query] == documents[key])
        )
    return seen


def by_definition(q: Tensor, k: Tensor, v: Tensor, problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp, one query at a time, of those keys only that it sees."""
    seen = visible(problem, q.shape[-2], k.shape[-2])
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    out, logsumexp = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for query, keys in enumerate(seen):
        scores = k[:, :, keys] @ q[:, :, query, :, None] * (problem.scale or 1 / math.sqrt(q.shape[-1]))
        if problem.softcap is not None:
            scores = problem.softcap * torch.tanh(scores / problem.softcap)
        if keys.any():
            out[:, :, query] = (torch.softmax(scores, 2) * v[:, :, keys]).sum(2)
            logsumexp[:, :, query] = torch.logsumexp(scores, 2).squeeze(-1)
    return out, logsumexp


def test_the_reference_the_oracle_and_the_pairs_follow_the_definitions(rng, monkeypatch) -> None:
    for _ in range(25):
        problem, queries, keys = draw_problem(rng)
        monkeypatch.setattr(parts, "SCORE_BYTES", 8 * 4 * keys * rng.randint(1, 2 * queries))
        assert problem.visible_pairs(queries, keys) == visible(problem, queries, keys).sum()
        generator = torch.Generator().manual_seed(rng.randrange(2**32))
        sizes = ((4, queries), (problem.num_kv_heads, keys), (problem.num_kv_heads, keys), (4, queries))
        q, k, v, grad_out = (torch.randn(1, *size, 8, dtype=torch.float64, generator=generator) for size in sizes)
        inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
        out, logsumexp = by_definition(q, k, v, problem)
        given = attention(*inputs, problem.is_causal, **problem.options("cpu"), return_lse=True)
        torch.testing.assert_close(given, (out, logsumexp))
        gradients = torch.autograd.grad(out, inputs, grad_out, materialize_grads=True)
        torch.testing.assert_close(torch.autograd.grad(given[0], inputs, grad_out, retain_graph=True), gradients)
        finite = torch.where(given[1].isinf(), 0.0, given[1]).sum()
        assert torch.autograd.grad(finite, q)[0].isfinite().all()
        right = oracle(q, k, v, grad_out, problem)
        torch.testing.assert_close((right.out, right.logsumexp, *right.gradients), (out, logsumexp, *gradients))


def test_long_problems_are_counted_without_a_loop_over_tokens() -> None:
    n = 1 << 20
    assert AttentionProblem(is_causal=True).visible_pairs(n, n) == n * (n + 1) // 2
    assert AttentionProblem().visible_pairs(n, 2 * n) == 2 * n * n
    windowed = AttentionProblem(is_causal=True, window=1024)
    assert windowed.visible_pairs(n, n) == 1024 * n - 1023 * 1024 // 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 6, "num_kv_heads": 4}, "6 heads are no multiple of 4 key heads"),
        ({"window": 0}, "window must be at least 1"),
        ({"scale": 0.0}, "scale must be a positive number, not 0.0"),
        ({"softcap": math.inf}, "softcap must be a positive number, not inf"),
        ({"document_lengths": ()}, "at least one length"),
        ({"document_lengths": (3, -1)}, "none of them negative"),
    ],
)
def test_fields_that_make_no_problem_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionProblem(**fields)


def test_documents_fill_the_sequence() -> None:
    with pytest.raises(ValueError, match="documents have 7 tokens, and there are 7 queries and 8 keys"):
        AttentionProblem(document_lengths=(3, 4)).visible_pairs(7, 8)


def test_an_implementation_takes_the_features_that_it_names() -> None:
    whole = AttentionProblem(
        num_heads=4, num_kv_heads=2, is_causal=True, bottom_right=True, window=3, document_lengths=(2, 0, 3),
        scale=0.5, softcap=9.0, return_lse=True,
    )  # fmt: skip
    assert whole.features == FEATURES == {field.name for field in fields(whole)} - {"num_heads", "is_causal"}
    options = whole.options("cpu")
    assert options.pop("document_ends").tolist() == [2, 2, 5]
    assert options == {"bottom_right": True, "return_lse": True, "scale": 0.5, "softcap": 9.0, "window": 3}
    assert AttentionProblem(4, 4, is_causal=True).options("cpu") == {}

    def why_not(*features: str) -> str | None:
        taken = Implementation("ours", max, {"cpu": frozenset({"float32"})}, features=frozenset(features))
        return taken.why_not("cpu", "float32", backward=True, problem=whole)

    assert why_not(*FEATURES) is None
    assert why_not(*FEATURES - {"softcap", "num_kv_heads"}) == "attention 'ours' does not take num_kv_heads, softcap"
