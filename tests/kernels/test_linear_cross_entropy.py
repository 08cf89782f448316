"""Cross-entropy of an output layer in chunks, in PyTorch and with its kernel, beside the whole."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

import kernels
from kernels import chunked_cross_entropy as chunked
from kernels.chunked_cross_entropy import linear_cross_entropy
from kernels.linear_cross_entropy_triton import _softmax_gradient_, softmax_gradient_
from kernels.tolerance import TOLERANCES, error, fixed_limits
from tests.kernels.beside import HALF_AND_FULL, draw


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


def test_inference_makes_no_gradient() -> None:
    hidden, weight = (torch.randn(*shape, requires_grad=True) for shape in ((8, 5), (61, 5)))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        linear_cross_entropy(hidden, weight, torch.arange(8))
    assert counter.get_total_flops() == 2 * 8 * 5 * 61


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


def test_autocast_leaves_float64_as_it_is() -> None:
    hidden, weight = torch.randn(8, 5).double(), torch.randn(61, 5).double()
    right = linear_cross_entropy(hidden, weight, torch.arange(8))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear_cross_entropy(hidden, weight, torch.arange(8)), right)
        with pytest.raises(ValueError, match=r"one floating-point dtype, not torch\.float64, torch\.float32"):
            linear_cross_entropy(hidden, weight.float(), torch.arange(8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_adds_products_up_without_rounding_them_before(dtype: torch.dtype) -> None:
    one, other = (torch.randn(512, 64 * n, device="cuda").to(dtype) for n in (1, 2))
    total = torch.randn(64, 128, device="cuda")
    expected = total.double() + one.T.double() @ other.double()
    chunked.add_product(total, one.T, other)
    torch.testing.assert_close(total.double(), expected, rtol=1e-4, atol=1e-3)


SHAPES = [(1, 1), (7, 61), (5, 9000), (2, 33_000)]


@pytest.mark.parametrize("dtype", HALF_AND_FULL)
def test_the_kernels_losses_and_gradients(device: str, dtype: torch.dtype, rng: random.Random) -> None:
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


@pytest.mark.parametrize("target", [-1, 3, 2**40])
def test_a_target_outside_the_vocabulary_makes_the_loss_nan(device: str, target: int) -> None:
    loss, gradient = softmax_gradient_(torch.zeros(1, 3, device=device), torch.tensor([target], device=device))
    assert loss.isnan()
    assert gradient.isnan().all()


def test_the_kernels_operation_passes_opcheck(device: str) -> None:
    targets = torch.tensor([1, 0, 4], device=device)
    torch.library.opcheck(_softmax_gradient_, (torch.randn(3, 5, device=device), targets))
    assert _softmax_gradient_(torch.ones(0, 5, device=device), targets[:0]).shape == (0,)


@pytest.fixture(params=["kernel", "chunked"])
def ours(request: pytest.FixtureRequest) -> Any:
    return kernels.linear_cross_entropy if request.param == "kernel" else linear_cross_entropy


@pytest.mark.parametrize("dtype", HALF_AND_FULL)
def test_rows_that_do_not_count_and_options(ours, device, dtype, rng, monkeypatch) -> None:
    monkeypatch.setattr(chunked, "MIN_CHUNK_ROWS", 1)
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 3 * 61 * dtype.itemsize)
    smoothed = {"label_smoothing": 0.3, "reduction": "sum"}
    for ignored, options in ((-100, {}), (5, {}), (5, smoothed), (-100, {**smoothed, "reduction": "mean"})):
        inputs = [draw(*shape, rng=rng, dtype=dtype, device=device) for shape in ((2, 4, 20), (61, 20))]
        targets = torch.randint(61, (2, 4), device=device)
        targets[0, 1] = targets[1, 1:3] = ignored
        leaves = [one.clone().requires_grad_() for one in inputs]
        wide = [one.double().requires_grad_() for one in inputs]
        loss = ours(*leaves, targets, ignore_index=ignored, **options)
        logits = (wide[0] @ wide[1].T).flatten(0, -2)
        exact = functional.cross_entropy(logits, targets.flatten(), ignore_index=ignored, **options)
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        mine, right = (loss, *torch.autograd.grad(loss, leaves)), (exact, *torch.autograd.grad(exact, wide))
        limit = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.02)
        for one, other in zip(mine, right, strict=True):
            assert (one.double() - other).norm() <= limit * other.norm(), (ignored, options)
        assert not mine[1][targets == ignored].any()
    for wrong in ({"reduction": "none"}, {"label_smoothing": 1.5}):
        with pytest.raises(ValueError, match=r"expected (reduction|a label_smoothing)"):
            ours(*inputs, targets, **wrong)


@pytest.mark.parametrize(("dtype", "last"), [(torch.uint8, 156), (torch.int8, -100), (torch.uint16, 156)])
def test_targets_of_any_integers(ours: Any, device: str, dtype: torch.dtype, last: int) -> None:
    """As files of tokens have them. The byte 156 is -100 modulo 256."""
    hidden, weight = (torch.linspace(-1, 1, rows * 4, device=device).view(rows, 4) for rows in (4, 160))
    targets = torch.tensor([3, 7, 100, last], device=device)
    for ignored in (-100, 100):
        if last >= 0 or ignored == last:
            right = functional.cross_entropy(hidden @ weight.T, targets, ignore_index=ignored)
            loss = ours(hidden, weight, targets.to(dtype), ignore_index=ignored)
            torch.testing.assert_close(loss, right)


def test_without_rows_that_count_the_loss_is_torchs(ours: Any, device: str) -> None:
    for rows in (0, 3):
        leaves = [torch.ones(shape, device=device, requires_grad=True) for shape in ((rows, 4), (5, 4))]
        targets = torch.full((rows,), -100, device=device)
        loss = ours(*leaves, targets)
        right = functional.cross_entropy(leaves[0].detach() @ leaves[1].detach().T, targets)
        torch.testing.assert_close(loss.detach(), right, equal_nan=True)
        loss.sum().backward()
        assert not any(leaf.grad.any() for leaf in leaves)


def test_a_first_tile_of_minus_infinity(device: str) -> None:
    """As logits are that overflow in fp16: the largest of the first 4096 is −∞; others are large."""
    logits = torch.full((2, 9000), -math.inf, device=device)
    logits[:, 5000:] = torch.linspace(-1e5, 1e5, 4000, device=device)
    targets = torch.tensor([6000, 8999], device=device)
    given = logits.clone().requires_grad_()
    right = functional.cross_entropy(given, targets, reduction="sum")
    (right_gradient,) = torch.autograd.grad(right, given)
    loss, gradient = softmax_gradient_(logits, targets)
    torch.testing.assert_close(loss, right.detach())
    torch.testing.assert_close(gradient, right_gradient)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((2, 4, 16), (33, 16), (2, 5)), r"hidden \(2, 4, 16\): \(2, 4\), not \(2, 5\)"),
        (((2, 4, 16), (33, 16), (8,)), r"\(2, 4\), not \(8,\)"),
        (((4, 16), (0, 16), (4,)), r"not \(4, 16\) and \(0, 16\)"),
    ],
)
def test_arguments_that_contradict_each_other(ours, shapes, words) -> None:
    hidden, weight, targets = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=words):
        ours(hidden, weight, targets.long())


def test_dtypes_devices_and_targets_that_contradict_each_other(ours: Any) -> None:
    hidden, weight, targets = torch.ones(4, 16), torch.ones(33, 16), torch.arange(4)
    with pytest.raises(ValueError, match=r"one floating-point dtype, not torch.float32, torch.bfloat16"):
        ours(hidden, weight.bfloat16(), targets)
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(ValueError, match=f"expected integers as targets, not {dtype}"):
            ours(hidden, weight, targets.to(dtype))
    with pytest.raises(ValueError, match="are on cpu, meta and cpu"):
        ours(hidden, weight.to("meta"), targets)
    for wrong in (-1, 33, 2**40):
        with pytest.raises(IndexError, match=rf"target {wrong} is neither one of 0 … 32, .*ignore_index \(-100\)"):
            ours(hidden, weight, torch.tensor([1, wrong, 2, 3]))
    assert ours(hidden, weight, torch.tensor([1, -1, 2, 3]), ignore_index=-1).isfinite()
    torch.testing.assert_close(ours(hidden, weight, targets.int()), ours(hidden, weight, targets))
