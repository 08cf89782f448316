"""Rotary embeddings in Triton against float64: in Triton's interpreter without a GPU, compiled on one."""

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import kernels
from kernels.operations import rotary_angles, rotate
from kernels.registry import KERNELS
from kernels.rope_triton import _rope
from tests.kernels.beside import HALF_AND_FULL, assert_same, draw

SHAPES = [(7, 2), (1, 1, 64), (3, 33, 80), (2, 5, 9, 6), (2, 1, 2, 3, 8)]


def angles(x: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = rotary_angles(x.shape[-2], x.shape[-1], 100.0)
    return cos.to(x.device), sin.to(x.device)


def check(x: Tensor, dtype: torch.dtype) -> None:
    tables = angles(x)
    assert_same(lambda x: kernels.rope(x, *tables), lambda x: rotate(x, *tables), (x,), dtype)


@pytest.mark.parametrize("dtype", HALF_AND_FULL)
def test_rotation_and_gradient(device: str, dtype: torch.dtype, rng: random.Random) -> None:
    for shape in SHAPES:
        check(draw(*shape, rng=rng, dtype=dtype, device=device), dtype)


def test_a_job_times_nothing_beside_the_kernel(device: str) -> None:
    """The gradient of an index, in contrast to that of squeeze, is a copy into zeros."""
    x = torch.ones(3, 5, 64, device=device, requires_grad=True)
    turned = KERNELS.load("rope").implementation("triton").function(x)
    for out, is_copied in ((turned, False), (turned[None][0], True)):
        node, names = out.grad_fn, []
        while node is not None:
            names.append(node.name())
            node = node.next_functions[0][0] if node.next_functions else None
        assert any("rope" in name for name in names)
        assert ("SelectBackward0" in names) is is_copied


def test_any_strides(device: str, rng: random.Random) -> None:
    base = draw(2, 5, 6, 12, rng=rng, dtype=torch.float64, device=device)
    for x in (base.transpose(1, 2), base.transpose(0, 2), base.mT, base[..., 2:8], base[:1].expand(3, 5, 6, 12)):
        check(x, torch.float64)
    heads = base.transpose(1, 2)
    assert kernels.rope(heads, *angles(heads)).stride() == heads.stride()
    gradient = torch.autograd.grad(kernels.rope(x := base.requires_grad_(), *angles(x)).sum(), x)[0]
    assert torch.allclose(gradient, torch.autograd.grad(rotate(x, *angles(x)).sum(), x)[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the copies that torch 2.14 checks with
def test_the_operation_passes_opcheck(device: str, rng: random.Random) -> None:
    x = draw(2, 5, 3, 8, rng=rng, dtype=torch.float32, device=device).transpose(1, 2)
    for inverse in (False, True):
        torch.library.opcheck(_rope, (x.detach().requires_grad_(), *angles(x), inverse))


def test_nothing(device: str) -> None:
    for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        x = torch.ones(shape, device=device, requires_grad=True)
        cos = torch.ones(shape[1], shape[2] // 2, device=device)
        out = kernels.rope(x, cos, cos)
        assert out.shape == shape
        out.sum().backward()
        assert x.grad.shape == shape
