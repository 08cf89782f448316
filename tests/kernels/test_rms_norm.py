"""RMSNorm in Triton against float64: in Triton's interpreter without a GPU, compiled on one."""

import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

import kernels
from kernels.rms_norm_triton import _rms_norm, _rms_norm_backward
from tests.kernels.beside import HALF_AND_FULL, assert_same, draw

SHAPES = [(7,), (1, 3), (33, 100), (2, 3, 5, 257), (2000, 20), (3, 5000)]
EPS = 1e-5


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


@pytest.mark.parametrize("dtype", HALF_AND_FULL)
def test_norm_and_gradients(device: str, dtype: torch.dtype, rng: random.Random) -> None:
    for shape in SHAPES:
        inputs = [draw(*of, rng=rng, dtype=dtype, device=device) for of in (shape, shape[-1:])]
        assert_same(kernels.rms_norm, plain, inputs, dtype)


def test_dtypes_may_differ(device: str, rng: random.Random) -> None:
    """As under autocast: a wide residual stream and weight, and a result as products take it."""
    x, weight = (draw(*shape, rng=rng, dtype=torch.float32, device=device) for shape in ((9, 70), (70,)))
    assert_same(
        lambda x, weight: kernels.rms_norm(x, weight, EPS, out_dtype=torch.bfloat16), plain, (x, weight), torch.bfloat16
    )
    for dtype in (torch.float32, torch.float64):
        assert_same(kernels.rms_norm, plain, (x.bfloat16(), weight.to(dtype)), torch.bfloat16)


def test_any_strides(device: str, rng: random.Random) -> None:
    base = draw(6, 40, 30, rng=rng, dtype=torch.float64, device=device)
    weight = draw(60, rng=rng, dtype=torch.float64, device=device)[::2]
    for x in (base, base.transpose(0, 1), base[:, 3:20], base[:, :1].expand(6, 40, 30), base.mT.contiguous().mT):
        assert_same(kernels.rms_norm, plain, (x, weight), torch.float64)
    x = base.clone().requires_grad_()
    kernels.rms_norm(x, weight).sum().backward()  # the gradient is one number, expanded
    assert torch.allclose(x.grad, torch.autograd.grad(plain(x, weight).sum(), x)[0])


def test_the_weights_gradient_is_the_same_in_each_run(device: str, rng: random.Random) -> None:
    x = draw(700, 33, rng=rng, dtype=torch.float32, device=device)
    weight = draw(33, rng=rng, dtype=torch.float32, device=device).requires_grad_()
    first, second = (torch.autograd.grad(kernels.rms_norm(x, weight).square().sum(), weight)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the copies that torch 2.14 checks with
def test_operations_pass_opcheck(device: str, rng: random.Random) -> None:
    x, weight = (draw(*shape, rng=rng, dtype=torch.float32, device=device) for shape in ((3, 5, 20), (20,)))
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    torch.library.opcheck(_rms_norm, (*leaves, EPS, torch.bfloat16))
    out, scale = _rms_norm(x, weight, EPS, torch.float32)
    torch.library.opcheck(_rms_norm_backward, (out, x, weight, scale), test_utils=("test_schema", "test_faketensor"))


def test_columns_and_results_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 65536 columns, not 70000"):
        kernels.rms_norm(torch.ones(1, 70_000), torch.ones(70_000))
    with pytest.raises(ValueError, match=r"floating-point out_dtype of 16 bits or more, not torch\.int32"):
        kernels.rms_norm(torch.ones(2, 3), torch.ones(3), out_dtype=torch.int32)


@pytest.mark.gpu
def test_the_longest_rows(rng: random.Random) -> None:
    inputs = [draw(*shape, rng=rng, dtype=torch.bfloat16, device="cuda") for shape in ((5, 65_536), (65_536,))]
    assert_same(kernels.rms_norm, plain, inputs, torch.bfloat16)


def test_nothing(device: str) -> None:
    for shape in ((0, 5), (3, 0)):
        x = torch.ones(shape, device=device, requires_grad=True)
        weight = torch.ones(shape[-1], device=device, requires_grad=True)
        out = kernels.rms_norm(x, weight)
        assert out.shape == shape
        out.sum().backward()
        assert x.grad.shape == shape
        assert not weight.grad.any()
