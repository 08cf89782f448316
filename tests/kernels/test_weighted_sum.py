"""The weighted sum in Triton against float64: in Triton's interpreter without a GPU, compiled on one."""

import random

import pytest
import torch
from torch import Tensor

from kernels.tolerance import TOLERANCES

pytest.importorskip("triton")


import kernels
from kernels.weighted_sum_triton import _weighted_sum, _weighted_sum_backward
from tests.kernels.beside import draw

SHAPES = [(7,), (1, 1), (33, 100), (2, 3, 5, 257), (130, 128), (300, 20), (64, 1)]


def dtypes(device: str) -> list[torch.dtype]:
    return [dtype for dtype in TOLERANCES if device == "cuda" or dtype != torch.bfloat16]


def close(given: Tensor, right: Tensor, tolerance: float) -> bool:
    return bool(torch.linalg.vector_norm(given.double() - right) <= tolerance * torch.linalg.vector_norm(right))


@pytest.mark.parametrize("shape", SHAPES)
def test_sum_and_gradients(device: str, shape: tuple[int, ...], rng: random.Random) -> None:
    for dtype in dtypes(device):
        x = draw(*shape, rng=rng, dtype=dtype, device=device).requires_grad_()
        weight = draw(shape[-1], rng=rng, dtype=dtype, device=device).requires_grad_()
        out = kernels.weighted_sum(x, weight)
        assert out.shape == shape[:-1]
        assert out.dtype == dtype
        gradient = draw(*out.shape, rng=rng, dtype=dtype, device=device)
        dx, dw = torch.autograd.grad(out, (x, weight), gradient)
        exact_x, exact_w = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
        exact = (exact_x * exact_w).sum(-1)
        right = torch.autograd.grad(exact, (exact_x, exact_w), gradient.double())
        # A sum of terms that cancel may be near zero: the terms' size judges its rounding.
        scale = (exact_x * exact_w).abs().sum(-1)
        assert ((out.double() - exact).abs() <= TOLERANCES[dtype] * scale).all()
        assert close(dx, right[0], TOLERANCES[dtype])
        terms = (exact_x.abs().reshape(-1, shape[-1]) * gradient.double().abs().reshape(-1, 1)).sum(0)
        assert ((dw.double() - right[1]).abs() <= TOLERANCES[dtype] * terms).all()


def test_any_strides(device: str, rng: random.Random) -> None:
    base = draw(6, 40, 30, rng=rng, dtype=torch.float64, device=device)
    weight = draw(60, rng=rng, dtype=torch.float64, device=device)[::2]
    for x in (base, base.transpose(0, 1), base[:, 3:20], base[..., :30].expand(6, 40, 30)):
        torch.testing.assert_close(kernels.weighted_sum(x, weight), (x * weight).sum(-1))
    turned = base.transpose(1, 2)
    torch.testing.assert_close(kernels.weighted_sum(turned, base[0, :, 0]), (turned * base[0, :, 0]).sum(-1))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the copies that torch 2.14 checks with
def test_operations_pass_opcheck(device: str, rng: random.Random) -> None:
    x = draw(3, 5, 20, rng=rng, dtype=torch.float32, device=device).requires_grad_()
    weight = draw(20, rng=rng, dtype=torch.float32, device=device).requires_grad_()
    torch.library.opcheck(_weighted_sum, (x, weight))
    gradient = torch.ones(3, 5, device=device)
    torch.library.opcheck(
        _weighted_sum_backward, (gradient, x.detach(), weight.detach()), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.gpu
def test_very_many_columns(rng: random.Random) -> None:
    """More tiles of them than the second axis of a grid may have."""
    columns = 65_536 * 128 + 1
    x = draw(1, columns, rng=rng, dtype=torch.float32, device="cuda").requires_grad_()
    weight = torch.ones(columns, device="cuda", requires_grad=True)
    kernels.weighted_sum(x, weight).backward(torch.ones(1, device="cuda"))
    assert torch.equal(weight.grad, x[0])
