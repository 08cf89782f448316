"""Cross-entropy of an output layer in chunks, in PyTorch and with its kernel, beside the whole."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels import chunked_cross_entropy as chunked
from kernels.chunked_cross_entropy import linear_cross_entropy
from kernels.tolerance import TOLERANCES, error, fixed_limits
from tests.kernels.beside import DEVICES, HALF_AND_FULL, assert_same

pytest.importorskip("triton")


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy((hidden @ weight.T).flatten(0, -2), targets.flatten())


@pytest.mark.parametrize("rows", [1, 7, 8])
def test_the_loss_in_chunks_equals_the_whole(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(chunked, "MIN_CHUNK_ROWS", 1)
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 3 * 61 * 8)
    assert chunked.chunks(7, 61, 8) == [(0, 2), (2, 4), (4, 6), (6, 7)]
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(61, (2, rows), generator=generator)
    results = []
    for of in (lambda x, w: whole(x, w, targets), lambda x, w: linear_cross_entropy(x, w, targets)):
        generator.manual_seed(1)
        hidden, weight = (
            torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
            for shape in ((2, rows, 5), (61, 5))
        )
        value = of(hidden, weight)
        (3 * value).backward()
        results.append((value.detach(), hidden.grad, weight.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_in_chunks_under_autocast(dtype: torch.dtype) -> None:
    """In float16, one of 2¹⁶ rows' share of a mean's gradient would vanish; the sum must include such small terms."""
    rows, chunk = 2**12, 2**7
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 8, generator=generator).requires_grad_()
    weight = (0.1 * torch.randn(61, 8, generator=generator)).requires_grad_()
    targets = torch.randint(61, (rows,), generator=generator)
    expected = torch.autograd.grad(whole(hidden, weight, targets), (hidden, weight))
    dtypes = []

    def spy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtypes.append(logits.dtype)
        return chunked.softmax_gradient(logits, targets)

    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", dtype):
        patch.setattr(chunked, "CHUNK_BYTES", chunk * 61 * 2)
        value = linear_cross_entropy(hidden, weight, targets, spy)
    assert dtypes == [dtype] * (rows // chunk)
    assert value.dtype == torch.float32
    computed = torch.autograd.grad(value, (hidden, weight))
    for mine, theirs in zip(computed, expected, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_adds_products_up_without_rounding_them_before(dtype: torch.dtype) -> None:
    one, other = (torch.randn(512, 64 * n, device="cuda").to(dtype) for n in (1, 2))
    total = torch.randn(64, 128, device="cuda")
    expected = total.double() + one.T.double() @ other.double()
    chunked.add_product(total, one.T, other)
    torch.testing.assert_close(total.double(), expected, rtol=1e-4, atol=1e-3)


SHAPES = [(1, 1), (7, 61), (5, 9000), (2, 33_000)]


def draw(*shape: int, rng: random.Random, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


@pytest.mark.parametrize("dtype", HALF_AND_FULL)
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_losses_and_gradients(device: str, dtype: torch.dtype, rng: random.Random) -> None:
    from kernels.linear_cross_entropy_triton import softmax_gradient_

    for rows, vocabulary in SHAPES:
        logits = (4 * draw(rows, vocabulary, rng=rng, dtype=dtype, device=device)).requires_grad_()
        targets = torch.randint(vocabulary, (rows,), device=device)
        exact = functional.cross_entropy(logits.double(), targets, reduction="sum")
        (right,) = torch.autograd.grad(exact, logits)
        given = logits.detach().clone()
        loss, gradient = softmax_gradient_(given, targets)
        assert gradient is given
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(loss.double(), exact.detach(), rtol=1e-6, atol=1e-6)
        if vocabulary > 1:
            why = error(gradient, right.double()).why_wrong(fixed_limits(TOLERANCES[dtype]))
            assert why is None, (rows, vocabulary, why)
        else:
            assert not gradient.any()


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_in_chunks(device: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    import kernels

    monkeypatch.setattr(chunked, "MIN_CHUNK_ROWS", 1)
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 4 * 61 * 8)
    hidden, weight = (draw(*shape, rng=rng, dtype=torch.float64, device=device) for shape in ((2, 5, 20), (61, 20)))
    targets = torch.randint(61, (2, 5), device=device)
    assert_same(
        lambda x, w: 3 * kernels.linear_cross_entropy(x, w, targets).unsqueeze(0),
        lambda x, w: 3 * whole(x, w, targets).unsqueeze(0),
        (hidden, weight),
        torch.float64,
    )


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_logits_may_be_large_or_minus_infinity(device: str) -> None:
    from kernels.linear_cross_entropy_triton import softmax_gradient_

    logits = torch.tensor([[1e5, -1e5, 0.0], [float("-inf"), 2.0, 2.0]], device=device)
    loss, gradient = softmax_gradient_(logits, torch.tensor([1, 2], device=device))
    assert loss.item() == pytest.approx(2e5 + math.log(2))
    expected = torch.tensor([[1.0, -1.0, 0.0], [0.0, 0.5, -0.5]], device=device)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("target", [-100, 3, 2**40])
def test_a_target_outside_the_vocabulary_makes_the_loss_nan(device: str, target: int) -> None:
    from kernels.linear_cross_entropy_triton import softmax_gradient_

    assert softmax_gradient_(torch.zeros(1, 3, device=device), torch.tensor([target], device=device))[0].isnan()


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_operation_passes_opcheck(device: str) -> None:
    from kernels.linear_cross_entropy_triton import _softmax_gradient_

    targets = torch.tensor([1, 0, 4], device=device)
    torch.library.opcheck(_softmax_gradient_, (torch.randn(3, 5, device=device), targets))
    assert _softmax_gradient_(torch.ones(0, 5, device=device), targets[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("logits", "targets", "words"),
    [
        (torch.ones(3), torch.zeros(3, dtype=torch.int64), r"\(rows, vocabulary\)"),
        (torch.ones(3, 4).T, torch.zeros(4, dtype=torch.int64), "contiguous"),
        (torch.ones(3, 4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), "floating-point"),
        (torch.ones(3, 4), torch.zeros(4, dtype=torch.int64), r"not \(4,\) of torch.int64"),
        (torch.ones(3, 4), torch.zeros(3), "integers"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(logits: Tensor, targets: Tensor, words: str) -> None:
    from kernels.linear_cross_entropy_triton import softmax_gradient_

    with pytest.raises(ValueError, match=words):
        softmax_gradient_(logits, targets)
