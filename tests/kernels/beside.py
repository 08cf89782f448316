"""An operation beside its plain PyTorch in float64: the output, and the gradients of all inputs."""

import random

import pytest
import torch

from kernels.tolerance import TOLERANCES, error, fixed_limits

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
HALF_AND_FULL = [torch.float32, torch.bfloat16, *([torch.float16, torch.float64] if torch.cuda.is_available() else [])]
"""Types of tensors; the interpreter runs the same code for all, so that two are enough there."""


def draw(*shape: int, rng: random.Random, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def assert_same(function, plain, inputs, dtype) -> None:
    """Check a function of these inputs, of which all floating-point leaves get gradients, by dtype's tolerance."""
    with torch.no_grad():
        exact_inputs = [tensor.double() for tensor in inputs]
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    exact_leaves = [tensor.detach().requires_grad_() for tensor in exact_inputs]
    out, exact = function(*leaves), plain(*exact_leaves)
    assert out.shape == exact.shape
    gradient = torch.randn(exact.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradient = gradient.to(out.device, out.dtype)
    gradients = torch.autograd.grad(out, leaves, gradient)
    right = torch.autograd.grad(exact, exact_leaves, gradient.double())
    for name, mine, theirs, like in zip(
        ("output", *(f"gradient {n}" for n in range(len(leaves)))),
        (out.detach(), *gradients),
        (exact.detach(), *right),
        (out, *leaves),
        strict=True,
    ):
        assert mine.dtype == like.dtype, name
        why = error(mine, theirs).why_wrong(fixed_limits(TOLERANCES[dtype]))
        assert why is None, f"{name}: {why}"
