"""Shared by tests of the Triton attention: shapes, inputs, and the float64 oracle that results are compared with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention.flash_triton import flash_attention
from kernels.attention.oracle import limits
from kernels.attention.problem import AttentionProblem
from kernels.attention.reference import attention
from kernels.tolerance import TOLERANCES, Error, error, fixed_limits
from tests.kernels.beside import DEVICES, draw

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    head_dim: int


def cases(short: Sequence[Shape], long: Sequence[Shape]) -> list[Any]:
    """Return parameters ("device", "shape"): short ones for the slow interpreter, long ones for a GPU."""
    every = zip(DEVICES, (short, long), strict=True)
    return [
        pytest.param(*device.values, shape, id=f"{device.values[0]}-{index}", marks=device.marks)
        for device, shapes in every
        for index, shape in enumerate(shapes)
    ]


def draw_inputs(shape, rng, dtype=torch.float32, device="cpu") -> tuple[Tensor, Tensor, Tensor]:
    q = draw(shape.batch, shape.heads, shape.queries, shape.head_dim, rng=rng, dtype=dtype, device=device)
    k, v = (
        draw(shape.batch, shape.key_heads, shape.keys, shape.head_dim, rng=rng, dtype=dtype, device=device)
        for _ in range(2)
    )
    return q, k, v


def exact(q, k, v, is_causal, *gradients, **options) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Output, log-sum-exp and gradients by the oracle in float64, for the gradients of these two outputs."""
    wide = [None if one is None else one.double() for one in (q, k, v, *gradients)]
    return plain(*wide[:3], is_causal, *wide[3:], **options)


def plain(q, k, v, is_causal, *gradients, **options) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The same, computed in the inputs' dtype."""
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    outputs = attention(*inputs, is_causal, return_lse=True, **options)
    pairs = [(output, grad) for output, grad in zip(outputs, gradients, strict=False) if grad is not None]
    grads = (
        torch.autograd.grad([one for one, _ in pairs], inputs, [grad for _, grad in pairs], materialize_grads=True)
        if pairs
        else ()
    )
    return outputs[0].detach(), outputs[1].detach(), grads


def assert_right(name: str, out: Tensor, oracle: Tensor, limit: float | Error | None = None) -> None:
    """By a fixed tolerance, if it is not by another limit."""
    limit = TOLERANCES[out.dtype] if limit is None else limit
    why = error(out.detach(), oracle).why_wrong(limit if isinstance(limit, Error) else fixed_limits(limit))
    assert why is None, f"{name}: {why}"


def check(q, k, v, is_causal, rng, tolerance=None, problem=None, **options) -> None:
    """Output and all gradients: by this tolerance, or beside those of plain PyTorch in the same dtype."""
    problem = problem or AttentionProblem(is_causal=is_causal)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    of_problem = problem.options(q.device)
    out = flash_attention(*inputs, problem.is_causal, **options, **of_problem)
    assert out.shape == q.shape
    gradient = draw(*out.shape, rng=rng, dtype=out.dtype, device=str(out.device))
    gradients = torch.autograd.grad(out, inputs, gradient)
    oracle, _, oracle_gradients = exact(q, k, v, problem.is_causal, gradient, **of_problem)
    eager, _, eager_gradients = plain(q, k, v, problem.is_causal, gradient, **of_problem)
    rights, eagers = (oracle, *oracle_gradients), (eager.detach(), *eager_gradients)
    allowed = limits(eagers, rights, problem)
    for name, given, right, limit in zip(("out", "dq", "dk", "dv"), (out, *gradients), rights, allowed, strict=True):
        assert_right(name, given, right, tolerance or limit)
