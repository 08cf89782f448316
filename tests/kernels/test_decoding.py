"""Few queries to many keys, split over the keys: against the float64 oracle, in the interpreter or on a GPU."""

import math
import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.attention.flash_triton import _forward_operation, flash_attention
from kernels.attention.triton import decoding
from kernels.attention.triton.decoding import Plan, slices, suits
from kernels.attention.triton.launch import Scoring
from kernels.tolerance import TOLERANCES
from tests.kernels.flash import Shape, assert_right, cases, draw, draw_inputs, exact

pytestmark = pytest.mark.usefixtures("_small_tiles_in_the_interpreter")
SHORT = [
    Shape(1, 2, 1, 1, 513, 64),
    Shape(2, 3, 3, 1, 600, 16),
    Shape(1, 6, 2, 3, 777, 80),
    Shape(1, 1, 1, 16, 512, 20),
]
LONG = [
    *SHORT,
    Shape(1, 32, 8, 1, 10_007, 128),
    Shape(3, 8, 8, 1, 4096, 64),
    Shape(1, 4, 1, 16, 70_001, 64),
    Shape(2, 16, 1, 4, 5003, 128),
    Shape(1, 2, 1, 1, 3000, 256),
    Shape(1, 2, 2, 2, 131_072, 32),
]
CASES = cases(SHORT, LONG)
PLAN = Plan(64, 4, 3, 4)


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the keys whose attention was split."""
    seen: list[tuple[int, ...]] = []
    real = decoding.decode
    monkeypatch.setattr(decoding, "decode", lambda q, k, *rest: seen.append(tuple(k.shape)) or real(q, k, *rest))
    return seen


def check(q: Tensor, k: Tensor, v: Tensor, **options: float) -> None:
    out, logsumexp = _forward_operation(q, k, v, False, False, **options)
    oracle, oracle_logsumexp, _ = exact(q, k, v, False, **options)
    assert_right("output", out, oracle)
    assert_right("log-sum-exp", logsumexp, oracle_logsumexp, TOLERANCES[q.dtype])


@pytest.mark.parametrize(("device", "shape"), CASES)
def test_output_and_logsumexp_agree_with_the_oracle(device, shape, rng, taken) -> None:
    for dtype in (torch.bfloat16, torch.float16) if device == "cuda" else [torch.bfloat16]:
        check(*draw_inputs(shape, rng, dtype, device))
        assert len(taken) == 1
        taken.clear()


def test_gradients_follow_from_the_logsumexp(device: str, rng: random.Random, taken: list[tuple[int, ...]]) -> None:
    q, k, v = (one.requires_grad_() for one in draw_inputs(Shape(1, 2, 1, 2, 515, 16), rng, torch.float16, device))
    out = flash_attention(q, k, v)
    gradient = draw(*out.shape, rng=rng, dtype=out.dtype, device=device)
    _, _, right = exact(q, k, v, False, gradient)
    for name, given, expected in zip("qkv", torch.autograd.grad(out, (q, k, v), gradient), right, strict=True):
        assert_right(f"gradient of {name}", given, expected)
    assert taken


def test_a_cache_with_room_for_more_and_heads_behind_rows(device, rng, taken) -> None:
    k = draw(1, 2, 900, 16, rng=rng, dtype=torch.bfloat16, device=device)[:, :, :600]
    v = draw(1, 600, 2, 21, rng=rng, dtype=torch.bfloat16, device=device).transpose(1, 2)[..., :16]
    q = draw(1, 3, 4, 16, rng=rng, dtype=torch.bfloat16, device=device).transpose(1, 2)
    check(q, k, v)
    check(*(one[:, 0] for one in (q, k, v)), scale=0.4, softcap=2.0)  # three axes
    assert len(taken) == 2


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_a_slice_without_weight_and_what_is_not_a_number(device: str, rng: random.Random) -> None:
    q, k, v = draw_inputs(Shape(1, 1, 1, 2, 640, 16), rng, torch.bfloat16, device)
    q[..., 0] = q[..., 0].abs() + 1
    k[..., :300, 0] = -math.inf  # a whole slice, and a part of the next
    check(q, k, v)
    k[..., 0] = -math.inf  # every key: as in torch, the output is no number
    assert flash_attention(q, k, v).isnan().all()
    q, k, v = draw_inputs(Shape(1, 1, 1, 2, 640, 16), rng, torch.bfloat16, device)
    q[0, 0, 1, 3] = math.nan
    given = flash_attention(q, k, v)
    assert given[0, 0, 1].isnan().all()
    assert not given[0, 0, 0].isnan().any()


@pytest.mark.parametrize(
    ("shape", "is_causal", "dtype", "split"),
    [
        (Shape(1, 4, 1, 16, 512, 16), False, torch.float16, True),
        (Shape(1, 1, 1, 1, 512, 16), True, torch.float16, False),
        (Shape(1, 1, 1, 17, 512, 16), False, torch.float16, False),
        (Shape(1, 1, 1, 1, 511, 16), False, torch.float16, False),
        (Shape(1, 5, 1, 16, 512, 16), False, torch.float16, False),
        (Shape(1, 1, 1, 1, 512, 16), False, torch.float32, False),
    ],
)
def test_few_queries_to_many_keys_are_split(shape, is_causal, dtype, split, rng) -> None:
    q, k, _ = draw_inputs(shape, rng, dtype)
    assert suits(q, k, Scoring.of(q, k, is_causal)) == split
    if shape.queries == 1:
        assert suits(q, k, Scoring.of(q, k, True, bottom_right=True)) == suits(q, k, Scoring.of(q, k, False))


def test_no_query_and_no_batch(device: str, taken: list[tuple[int, ...]]) -> None:
    k = torch.ones(2, 1, 600, 16, device=device, dtype=torch.float16)
    assert flash_attention(k[:, :, :0], k, k).shape == (2, 1, 0, 16)
    assert flash_attention(k[:0, :, :1], k[:0], k[:0]).shape == (0, 1, 1, 16)
    assert not taken


def test_slices_cover_the_keys_and_none_is_empty(rng: random.Random) -> None:
    for _ in range(300):
        keys, planes = rng.randrange(512, 300_000), rng.randrange(1, 600)
        splits, length = slices(keys, planes, PLAN, 132)
        assert length % PLAN.keys == 0
        assert (splits - 1) * length < keys <= splits * length
        assert splits == 1 or splits * planes <= PLAN.programs * 132
    assert slices(131_072, 1, PLAN, 132) == (512, 256), "programs for the whole device"
    assert slices(131_072, 600, PLAN, 132)[0] == 1, "there are programs enough"


@pytest.mark.gpu
def test_decoding_in_a_graph_and_compiled(rng: random.Random) -> None:
    q, k, v = draw_inputs(Shape(2, 8, 2, 1, 3000, 64), rng, torch.bfloat16, "cuda")
    expected = flash_attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_attention(q, k, v)
    graph.replay()
    assert torch.equal(captured, expected)
    assert torch.equal(torch.compile(flash_attention, fullgraph=True)(q, k, v), expected)
