"""SwiGLU's product in Triton against float64: in Triton's interpreter without a GPU, compiled on one."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

import kernels
from kernels.swiglu_triton import _swiglu, _swiglu_backward
from tests.kernels.beside import DEVICES, HALF_AND_FULL, assert_same

SHAPES = [(7,), (1, 1), (33, 100), (2, 3, 5, 257), (3, 2500)]


def plain(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def draw(*shape: int, rng: random.Random, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    return 3 * torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


@pytest.mark.parametrize("dtype", HALF_AND_FULL)
@pytest.mark.parametrize("device", DEVICES)
def test_product_and_gradients(device: str, dtype: torch.dtype, rng: random.Random) -> None:
    for shape in SHAPES:
        inputs = [draw(*shape, rng=rng, dtype=dtype, device=device) for _ in range(2)]
        assert_same(kernels.swiglu, plain, inputs, dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides(device: str, rng: random.Random) -> None:
    base = draw(2, 5, 7, rng=rng, dtype=torch.float64, device=device)
    for x in (base, base.transpose(0, 1), base.mT, base[:, :, :1].expand(2, 5, 7)):
        for other in (x, torch.flip(x, (0,)).contiguous()):
            assert_same(kernels.swiglu, plain, (x, other), torch.float64)
    gate, up = draw(3, 5000, rng=rng, dtype=torch.float64, device=device).chunk(2, -1)
    assert_same(kernels.swiglu, plain, (gate, up), torch.float64)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # by NumPy: its reciprocal is 0
@pytest.mark.parametrize("device", DEVICES)
def test_large_gates_overflow_nowhere(device: str) -> None:
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], device=device, requires_grad=True)
    out = kernels.swiglu(gate, torch.ones_like(gate))
    assert torch.equal(out, torch.tensor([0.0, 0.0, 0.0, 100.0, 1e4], device=device))
    out.sum().backward()
    assert torch.equal(gate.grad, torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0], device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_nothing(device: str) -> None:
    for shape in ((0, 5), (3, 0)):
        gate = torch.ones(shape, device=device, requires_grad=True)
        out = kernels.swiglu(gate, gate)
        assert out.shape == shape
        out.sum().backward()
        assert gate.grad.shape == shape


@pytest.mark.parametrize("device", DEVICES)
def test_operations_pass_opcheck(device: str, rng: random.Random) -> None:
    gate, up = draw(2, 3, 40, rng=rng, dtype=torch.float32, device=device).chunk(2, -1)
    torch.library.opcheck(_swiglu, (gate.detach().requires_grad_(), up.detach().requires_grad_()))
    torch.library.opcheck(
        _swiglu_backward, (gate.contiguous(), gate, up), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(
    ("gate", "up", "words"),
    [
        (torch.ones(3, 4), torch.ones(3, 5), r"not \(3, 4\) torch.float32 and \(3, 5\)"),
        (torch.ones(3, 4), torch.ones(3, 4, dtype=torch.bfloat16), "one shape"),
        (torch.tensor(1.0), torch.tensor(1.0), "columns"),
        (torch.ones(3, 4, dtype=torch.int64), torch.ones(3, 4, dtype=torch.int64), "floating-point"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(gate: Tensor, up: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kernels.swiglu(gate, up)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts() -> None:
    gate = torch.ones(2**31 + 5, device="cuda", dtype=torch.bfloat16)
    out = kernels.swiglu(gate, gate)
    assert (out[0], out[-1]) == (out[1], out[1])
