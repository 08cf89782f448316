"""FlashAttention-2 in Triton against the float64 oracle: in Triton's interpreter without a GPU, compiled on one.

The interpreter gets short sequences and small tiles.
"""

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.attention.flash_triton import _forward_operation, flash_attention
from kernels.attention.masks import visible_keys
from kernels.attention.problem import AttentionProblem
from kernels.attention.reference import attention
from kernels.attention.triton.launch import Scoring, document_bounds
from kernels.tolerance import TF32_TOLERANCE, TOLERANCES, error
from tests.kernels.flash import DTYPES, Shape, assert_right, cases, check, draw, draw_inputs, exact

pytestmark = pytest.mark.usefixtures("_small_tiles_in_the_interpreter", "_without_hopper")

SHORT = [
    Shape(1, 2, 2, 33, 33, 16),
    Shape(1, 2, 1, 17, 40, 32),
    Shape(1, 1, 1, 40, 17, 64),
    Shape(2, 1, 1, 20, 20, 80),
    Shape(1, 1, 1, 1, 1, 128),
    Shape(1, 1, 1, 1, 37, 16),
    Shape(1, 1, 1, 20, 35, 256),
    Shape(1, 1, 1, 20, 20, 3),
]
LONG = [
    Shape(2, 3, 3, 128, 128, 16),
    Shape(2, 4, 2, 257, 257, 32),
    Shape(1, 2, 2, 1, 1, 64),
    Shape(1, 6, 1, 300, 1111, 64),
    Shape(2, 3, 3, 1111, 300, 64),
    Shape(2, 2, 2, 515, 515, 80),
    Shape(1, 4, 4, 640, 640, 128),
    Shape(1, 2, 1, 333, 450, 128),
    Shape(1, 2, 2, 200, 333, 256),
    Shape(1, 2, 2, 200, 200, 100),
    Shape(1, 2, 1, 130, 140, 250),
]
PADDED = LONG[-2:]
"""Head dimensions that are no multiple of 16, on a GPU."""
CASES = cases(SHORT, LONG)
PROBLEMS = [
    (Shape(1, 4, 2, 50, 50, 16), AttentionProblem(is_causal=True, window=9)),
    (Shape(1, 1, 1, 20, 70, 16), AttentionProblem(window=12, softcap=2.0)),
    (Shape(1, 1, 1, 70, 20, 16), AttentionProblem(is_causal=True, window=17)),
    (Shape(1, 2, 1, 33, 70, 16), AttentionProblem(is_causal=True, bottom_right=True, scale=0.1)),
    (Shape(1, 2, 1, 70, 33, 16), AttentionProblem(is_causal=True, bottom_right=True)),
    (Shape(2, 2, 1, 90, 90, 16), AttentionProblem(is_causal=True, document_lengths=(0, 17, 0, 1, 40, 32, 0))),
    (Shape(1, 2, 2, 70, 70, 16), AttentionProblem(document_lengths=(35, 35), window=20, scale=0.3, softcap=5.0)),
]
"""The second and third have queries that see no key, and so has the fifth."""
TIMES_ON_A_GPU = 13
"""Sizes of a problem on a GPU, where tiles are larger, relative to those above."""


def chosen(device: str, shape: Shape, is_causal: bool, dtypes: Sequence[torch.dtype]) -> Sequence[torch.dtype]:
    """All on a GPU. The slow interpreter gets one: each dtype meets both masks, each shape two dtypes."""
    return dtypes if device == "cuda" else [dtypes[(SHORT.index(shape) + is_causal) % len(dtypes)]]


@pytest.mark.parametrize(("device", "shape"), CASES)
def test_output_and_gradients_agree_with_the_oracle(device, shape, is_causal, form, rng) -> None:
    # Padding does not know of the mask, and float32 takes the compiler longest: there once is enough.
    once = form == "one pass" or (shape in PADDED and not is_causal)
    for dtype in chosen(device, shape, is_causal, DTYPES[once:]):
        check(*draw_inputs(shape, rng, dtype, device), is_causal, rng)


@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_every_problem_agrees_with_the_oracle(device, number, form, rng) -> None:
    shape, problem = PROBLEMS[number]
    dtypes = DTYPES if device == "cuda" else [DTYPES[(number + (form == "one pass")) % len(DTYPES)]]
    if device == "cuda":
        shape, problem = longer(shape, problem)
    for dtype in dtypes:
        check(*draw_inputs(shape, rng, dtype, device), problem.is_causal, rng, problem=problem)


def longer(shape: Shape, problem: AttentionProblem) -> tuple[Shape, AttentionProblem]:
    times = TIMES_ON_A_GPU
    lengths = problem.document_lengths and tuple(times * length for length in problem.document_lengths)
    window = problem.window and times * problem.window
    shape = replace(shape, queries=times * shape.queries, keys=times * shape.keys, head_dim=64)
    return shape, replace(problem, document_lengths=lengths, window=window)


def test_plain_problems_take_no_instruction_of_the_others() -> None:
    """What is None is not compiled; a band that hides nothing is none."""
    q, k = torch.empty(1, 1, 20, 16), torch.empty(1, 1, 30, 16)
    assert Scoring.of(q, k, False) == Scoring.of(q, k, False, window=30) == (False, None, None, 0.25, None)
    assert Scoring.of(q, k, True) == (True, None, None, 0.25, None)
    assert Scoring.of(q, q, True, bottom_right=True) == Scoring.of(q, q, True)
    assert Scoring.of(q[:, :, :1], k, True, bottom_right=True) == Scoring.of(q[:, :, :1], k, False)
    assert Scoring.of(q, k, True, window=5, bottom_right=True) == (False, 6, 10, 0.25, None)
    assert Scoring.of(q, q, True, documents=True) == (False, None, 0, 0.25, None)


def test_the_bounds_of_documents(device: str, rng: random.Random) -> None:
    for _ in range(5):
        lengths = [rng.choice((0, 1, 30, 90)) for _ in range(rng.randint(1, 150))]
        ends = torch.tensor(lengths, device=device).cumsum(0).int()
        tokens = sum(lengths) + rng.randint(1, 40)  # those behind the last end are one more document
        expected = visible_keys(tokens, tokens, ends.device, False, document_ends=ends)[:2]
        assert torch.equal(document_bounds(ends, tokens), torch.stack(expected).int())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 0.0}, "softcap must be a positive number, not 0.0"),
        ({"document_ends": torch.tensor([5])}, "document_ends must be int32 with one axis on cpu, not torch.int64"),
        ({"document_ends": torch.tensor([5], dtype=torch.int32)}, "as many queries as keys, not 5 and 6"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    q, k = torch.ones(1, 1, 5, 16), torch.ones(1, 1, 6, 16)
    for function in (flash_attention, attention):
        with pytest.raises(ValueError, match=message):
            function(q, k, k, **options)


@pytest.mark.usefixtures("one_pass")
def test_one_pass_in_single_precision(device: str, rng: random.Random) -> None:
    for head_dim in (64, 80):
        check(*draw_inputs(Shape(1, 2, 1, 33, 40, head_dim), rng, torch.float32, device), True, rng)


def test_the_logsumexp_is_differentiable_too(device: str, rng: random.Random) -> None:
    shape = Shape(1, 2, 2, 17, 33, 32)
    q, k, v = (tensor.requires_grad_() for tensor in draw_inputs(shape, rng, torch.float32, device))
    out, logsumexp = _forward_operation(q, k, v, True, False)
    gradients = [draw(*tensor.shape, rng=rng, device=device) for tensor in (out, logsumexp)]
    oracle, oracle_logsumexp, both = exact(q, k, v, True, *gradients)
    assert_right("output", out, oracle)
    assert_right("log-sum-exp", logsumexp, oracle_logsumexp)
    for given, right in zip(torch.autograd.grad((out, logsumexp), (q, k, v), gradients), both, strict=True):
        assert_right("of both", given, right)
    _, logsumexp = _forward_operation(q, k, v, True, False)
    _, _, alone = exact(q, k, v, True, None, gradients[1])
    for given, right in zip(torch.autograd.grad(logsumexp, (q, k), gradients[1]), alone[:2], strict=True):
        assert_right("of the log-sum-exp alone", given, right)


def test_the_logsumexp_of_queries_that_see_no_key(device: str, rng: random.Random) -> None:
    q, k, v = (one.requires_grad_() for one in draw_inputs(Shape(1, 2, 1, 40, 17, 16), rng, torch.float32, device))
    options: dict[str, Any] = {"bottom_right": True, "softcap": 3.0}
    outputs = flash_attention(q, k, v, is_causal=True, return_lse=True, **options)
    gradients = [draw(*tensor.shape, rng=rng, device=device) for tensor in outputs]
    *rights, right_gradients = exact(q, k, v, True, *gradients, **options)
    assert outputs[1][..., :23].eq(-math.inf).all()
    assert not outputs[0][..., :23, :].any()
    for name, given, right in zip(("output", "log-sum-exp"), outputs, rights, strict=True):
        assert_right(name, given[:, :, 23:], right[:, :, 23:])
    given_gradients = torch.autograd.grad(outputs, (q, k, v), gradients)
    assert not given_gradients[0][..., :23, :].any()
    for given, right in zip(given_gradients, right_gradients, strict=True):
        assert_right("gradient", given, right)


def test_any_strides(device: str, rng: random.Random) -> None:
    """Heads behind rows, rows that are padded, odd addresses, expanded keys, and a last axis that is not contiguous."""
    for dtype in DTYPES[-2:]:
        drawn = functools.partial(draw, rng=rng, dtype=dtype, device=device)
        tensors = [
            drawn(1, 20, 2, 16).transpose(1, 2),
            drawn(1, 2, 20, 21)[..., :16],
            drawn(2 * 20 * 16 + 1)[1:].view(1, 2, 20, 16),
            drawn(1, 1, 20, 16).expand(1, 2, 20, 16),
            drawn(1, 2, 16, 20).transpose(-2, -1),
        ]
        for first in range(0, len(tensors), 1 if device == "cuda" else 2):
            q, k, v = (tensors[(first + index) % len(tensors)].detach() for index in range(3))
            check(q, k, v, True, rng)


def test_a_gradient_without_strides(device: str, rng: random.Random) -> None:
    """That of a sum is one number, expanded."""
    q, k, v = (tensor.requires_grad_() for tensor in draw_inputs(Shape(1, 2, 2, 20, 20, 16), rng, device=device))
    flash_attention(q, k, v).sum().backward()
    _, _, gradients = exact(q, k, v, False, torch.ones_like(q))
    for tensor, right in zip((q, k, v), gradients, strict=True):
        # Σ of attention's outputs hardly depends on q and k: rounding is judged by the size of what cancels.
        assert torch.allclose(tensor.grad.double(), right, atol=1e-5)


def test_no_query_and_no_batch(device: str) -> None:
    k = torch.ones(2, 1, 5, 16, device=device, requires_grad=True)
    out = flash_attention(torch.ones(2, 1, 0, 16, device=device, requires_grad=True), k, k)
    assert out.shape == (2, 1, 0, 16)
    out.sum().backward()
    assert not k.grad.any()
    assert flash_attention(k[:0], k[:0], k[:0]).shape == (0, 1, 5, 16)


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_reaches_only_the_queries_that_see_it(device: str, rng: random.Random) -> None:
    shape = Shape(1, 1, 1, 70, 70, 16)
    for bad in (math.nan, math.inf):
        q, k, v = draw_inputs(shape, rng, device=device)
        q[0, 0, 40, 3] = bad
        out, _, _ = exact(q, k, v, True)
        given = flash_attention(q, k, v, True)
        assert torch.equal(given.isnan(), out.isnan())
        assert given[0, 0, 40].isnan().all()
        assert given.isnan().any(-1).sum() == 1
        q, k, v = draw_inputs(shape, rng, device=device)
        k[0, 0, 40] = bad
        given = flash_attention(q, k, v, True)
        assert not given[0, 0, :40].isnan().any()
        if math.isnan(bad):
            assert given[0, 0, 40:].isnan().all()


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")  # NumPy's, in the interpreter: rows past the last query
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_keys_that_are_infinitely_far_have_no_weight(device: str, rng: random.Random) -> None:
    for dtype in DTYPES[1:]:  # parts of an infinite float32 are not numbers
        q, k, v = draw_inputs(Shape(1, 1, 1, 70, 200, 16), rng, dtype, device)
        q[..., 0] = q[..., 0].abs() + 1
        k[..., :130, 0] = -math.inf  # whole tiles, the first ones
        out, logsumexp = _forward_operation(q, k, v, False, False)
        oracle, oracle_logsumexp, _ = exact(q, k, v, False)
        assert torch.isfinite(oracle).all()
        assert_right("output", out, oracle)
        assert_right("log-sum-exp", logsumexp, oracle_logsumexp, TOLERANCES[dtype])


@pytest.mark.gpu
def test_keys_that_repeat_without_descriptors(rng: random.Random) -> None:
    for dtype in DTYPES:
        q, k, v = draw_inputs(Shape(2, 4, 4, 200, 200, 128), rng, dtype, "cuda")
        check(q, k[:1, :1].expand(2, 4, 200, 128), v, True, rng)


def test_large_scores_do_not_overflow(device: str, rng: random.Random) -> None:
    q, k, v = draw_inputs(Shape(1, 1, 1, 40, 40, 16), rng, device=device)
    out, _, _ = exact(1e3 * q, k, v, True)
    given = flash_attention(1e3 * q, k, v, True)
    assert torch.isfinite(given).all()
    assert_right("output", given, out, 1e-3)


@pytest.mark.gpu
def test_products_of_single_precision_are_exact_or_tf32(rng: random.Random) -> None:
    for head_dim in (64, 128):
        q, k, v = draw_inputs(Shape(1, 2, 2, 300, 300, head_dim), rng, device="cuda")
        check(q, k, v, True, rng, tf32=False)
        check(q, k, v, True, rng, TF32_TOLERANCE, tf32=True)
        out, _, _ = exact(q, k, v, True)
        assert error(flash_attention(q, k, v, True, tf32=True), out).relative > 10 * TOLERANCES[torch.float32]
        torch.set_float32_matmul_precision("high")
        try:
            assert torch.equal(flash_attention(q, k, v, True), flash_attention(q, k, v, True, tf32=True))
        finally:
            torch.set_float32_matmul_precision("highest")


@pytest.mark.gpu
def test_float32_errors_do_not_grow_with_the_length(rng: random.Random) -> None:
    """Tensor cores cut sums: left to them, the output of 8192 keys is too small by 5e-5 (see `add_product`)."""
    for head_dim in (32, 64, 128):
        inputs = [one.requires_grad_() for one in draw_inputs(Shape(1, 1, 1, 8192, 8192, head_dim), rng, device="cuda")]
        out = flash_attention(*inputs)
        gradient = draw(*out.shape, rng=rng, device="cuda")
        oracle, _, oracle_gradients = exact(*inputs, False, gradient)
        assert_right("output", out, oracle, 2e-6)
        for given, right in zip(torch.autograd.grad(out, inputs, gradient), oracle_gradients, strict=True):
            assert_right("gradient", given, right, 2e-6)
