"""Tiled attention in plain PyTorch against the oracle."""

import math
import random

import pytest
import torch
from torch import Tensor

from kernels.attention import TiledFlashAttention2, tiled
from kernels.attention.oracle import oracle
from kernels.attention.problem import AttentionProblem
from kernels.attention.reference import attention
from kernels.tolerance import TOLERANCES, error, fixed_limits

LENGTHS = [(1, 1), (16, 16), (37, 37), (5, 40), (40, 5), (33, 1)]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "TILE", 16)


def draw(*shape: int, rng: random.Random, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_output_logsumexp_and_gradients_agree_with_the_oracle(queries, keys, is_causal, rng) -> None:
    for dtype, tolerance in TOLERANCES.items():
        for leading in ((2,), (2, 3)):
            q = draw(*leading, queries, 8, rng=rng, dtype=dtype).requires_grad_()
            k, v = (draw(*leading, keys, 8, rng=rng, dtype=dtype).requires_grad_() for _ in range(2))
            gradient = draw(*leading, queries, 8, rng=rng, dtype=dtype)
            right = oracle(q, k, v, gradient, AttentionProblem(is_causal=is_causal))
            logsumexp = right.logsumexp
            out = TiledFlashAttention2.apply(q, k, v, is_causal)
            saved = [tensor for tensor in out.grad_fn.saved_tensors if tensor.shape == (*leading, queries)]
            out.backward(gradient)
            assert len(saved) == 1
            assert error(saved[0], logsumexp).why_wrong(fixed_limits(tolerance)) is None
            assert error(out.detach(), right.out).why_wrong(right.limits[0]) is None
            for given, expected, limit in zip((q, k, v), right.gradients, right.limits[1:], strict=True):
                assert given.grad.dtype == dtype
                assert error(given.grad, expected).why_wrong(limit) is None


def test_strides_do_not_matter(rng: random.Random) -> None:
    q, k, v = (draw(2, 20, 3, 8, rng=rng).transpose(1, 2) for _ in range(3))
    torch.testing.assert_close(TiledFlashAttention2.apply(q, k, v), attention(q, k, v))


def test_large_scores_do_not_overflow(rng: random.Random) -> None:
    q, k, v = (draw(1, 40, 8, rng=rng) for _ in range(3))
    torch.testing.assert_close(TiledFlashAttention2.apply(1e4 * q, k, v, True), attention(1e4 * q, k, v, True))


def test_nan_reaches_only_the_queries_that_see_it(rng: random.Random) -> None:
    for bad in (math.nan, math.inf):
        q, k, v = (draw(1, 40, 8, rng=rng) for _ in range(3))
        q[0, 20, 3] = bad
        assert torch.equal(TiledFlashAttention2.apply(q, k, v, True).isnan(), attention(q, k, v, True).isnan())
        q, k, v = (draw(1, 40, 8, rng=rng) for _ in range(3))
        k[0, 20] = math.nan
        out = TiledFlashAttention2.apply(q, k, v, True)
        assert not out[0, :20].isnan().any()
        assert out[0, 20:].isnan().all()


def test_no_call_waits_for_the_device() -> None:
    q, k, v = (torch.empty(1, 40, 8, device="meta", requires_grad=True) for _ in range(3))
    options = {"window": 9, "document_ends": torch.empty(2, dtype=torch.int32, device="meta")}
    TiledFlashAttention2.apply(q, k, v, True, options).sum().backward()
    with pytest.raises(RuntimeError):
        options["document_ends"].tolist()


def test_no_tensor_grows_with_the_product_of_the_lengths(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """Each tensor that any operation makes has at most a tile of scores, or the inputs' size."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self.elements = max(self.elements, *sizes, 0)
            return result

    q, k, v = (draw(1, 200, 2, rng=rng).requires_grad_() for _ in range(3))
    for function, most in ((TiledFlashAttention2.apply, 400), (attention, 40_000)):
        with Largest() as largest:
            function(q, k, v, True).sum().backward()
        assert largest.elements == most


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, tracing a Function
@pytest.mark.parametrize(
    ("dtype", "compiled"), [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)]
)
def test_under_autocast_sums_stay_in_float32(dtype: torch.dtype, compiled: bool, rng: random.Random) -> None:
    """Whether the backward pass runs under it or not, it must compute the weights of the forward pass again."""
    tensors = [8 * draw(1, 40, 16, rng=rng, dtype=dtype) for _ in range(3)]
    function = torch.compile(TiledFlashAttention2.apply, backend="eager") if compiled else TiledFlashAttention2.apply

    def results(*, forward: bool, backward: bool) -> list[Tensor]:
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        with torch.autocast("cpu", dtype, enabled=forward):
            out = function(*inputs)
        with torch.autocast("cpu", dtype, enabled=backward):
            return [out, *torch.autograd.grad(out.sum(), inputs)]

    plain = results(forward=False, backward=False)
    for backward in (False, True):
        torch.testing.assert_close(results(forward=True, backward=backward), plain, rtol=0, atol=0)
