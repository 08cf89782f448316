"""The C++ functions as torch operations: torch.compile needs no graph break, and `flash` has a backward pass.

Each gets the size of its working memory from C++ and passes it a tensor of that size, so `memory` returns exactly what
a call allocates.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...derivatives import register
from ..problem import DIFFERENTIABLE, check_shapes
from .build import Problem, library

BLOCK = 32
BR, BC = 32, 128
"""Default tile sizes of `flash`: full vectors of queries, and tiles that fit a first-level cache of 32 KiB."""


def naive(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Compute three loop nests per head over the full matrix of scores, on one thread. There is no backward pass.

    Args:
        q: Queries (batch, heads, queries, head_dim), float32, on the CPU; any strides.
        k: Keys (batch, key heads, keys, head_dim); `heads` is a multiple of `key heads`.
        v: Values, the shape of k.
        is_causal: Query i sees keys 0 … i only.

    Returns:
        (batch, heads, queries, head_dim).

    Raises:
        ValueError: shapes that do not fit each other, or an empty one.
        TypeError: not float32 on the CPU.
        NoDerivative: from the backward pass; in forward mode; in torch.func.grad.
        BuildError: the first call could not build the C++.
    """
    _check(q, k, v)
    out: Tensor = _naive(q, k, v, is_causal)
    return out


def blocked(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, *, block: int = BLOCK) -> Tensor:
    """Compute attention as `naive` does, but in tiles of block × block, on one thread. There is no backward pass."""
    _check(q, k, v, block=block)
    out: Tensor = _blocked(q, k, v, is_causal, block)
    return out


def fused(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Compute one query at a time, with one vector of scores per thread, on torch's number of threads.

    There is no backward pass.
    """
    _check(q, k, v)
    out: Tensor = _fused(q, k, v, is_causal)
    return out


def flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, *, br: int = BR, bc: int = BC) -> Tensor:
    """Compute FlashAttention-2, vectorised: tiles of br queries × bc keys, an online softmax. It has a backward pass.

    Any br, bc ≥ 1 for any lengths; multiples of 16 for br fill whole vectors. Arguments otherwise as for `naive`.

    There is no second derivative.
    """
    _check(q, k, v, br=br, bc=bc)
    out: Tensor = _flash(q, k, v, is_causal, br, bc)[0]
    return out


@dataclass(frozen=True)
class ForwardMemory:
    """Bytes that one forward call allocates."""

    working: int
    """Intermediates: scores, a vector per thread, or tiles."""
    output: int

    @property
    def total(self) -> int:
        """Intermediates and output; for `naive` and `blocked` at (1, 4, 1024, 32): 4 MiB of one head's scores + 0.5 MiB
        of output."""
        return self.working + self.output


def memory(
    name: str, batch: int, heads: int, queries: int, keys: int, head_dim: int, *, br: int = BR, bc: int = BC
) -> ForwardMemory:
    """Return the memory that `naive`, `blocked`, `fused` or `flash` allocates, at torch's number of threads.

    In floats of 4 bytes:

    - naive, blocked: queries · keys (one head's scores, used again for the next head);
    - fused: threads · keys (rounded up to 16);
    - flash: threads · (2 · head_dim + bc + 3) · br (rounded up to 16): tiles only, whatever the length;
    - and each: the output, batch · heads · queries · head_dim.
    """
    problem = Problem(batch, heads, heads, queries, keys, head_dim, br, bc, False, torch.get_num_threads())
    floats = getattr(library(), f"{name}_scratch")(ctypes.byref(problem))
    return ForwardMemory(working=4 * floats, output=4 * batch * heads * queries * head_dim)


def _check(q: Tensor, k: Tensor, v: Tensor, **sizes: int) -> None:
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise TypeError(f"{name} must be float32 on the cpu, not {tensor.dtype} on {tensor.device.type}")
        if tensor.dim() != 4 or 0 in tensor.shape:
            raise ValueError(f"{name} must be (batch, heads, sequence, head_dim), none 0, not {tuple(tensor.shape)}")
    check_shapes(q, k, v)
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, not {size}")


def _run(name: str, q: Tensor, k: Tensor, *tensors: Tensor, is_causal: bool, br: int = 1, bc: int = 1) -> None:
    """Call the C++ function with q, k, the other contiguous tensors, and its working memory."""
    problem = Problem(
        *q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], br, bc, is_causal, torch.get_num_threads()
    )
    scratch = torch.empty(getattr(library(), f"{name}_scratch")(ctypes.byref(problem)), dtype=torch.float32)
    pointers = [tensor.data_ptr() for tensor in (q, k, *tensors, scratch)]
    getattr(library(), name)(ctypes.byref(problem), *pointers)


def _contiguous(*tensors: Tensor) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors]


def _forward_only(name: str) -> Callable[..., Tensor]:
    """Make the operation of an implementation without a backward pass."""

    @torch.library.custom_op(f"flopwatch::cpu_{name}", mutates_args=(), device_types="cpu")
    def operation(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, block: int = 1) -> Tensor:
        q, k, v = _contiguous(q, k, v)
        out = torch.empty_like(q)
        _run(name, q, k, v, out, is_causal=is_causal, br=block, bc=block)
        return out

    # torch.compile takes the result's shape from it, without running the operation.
    operation.register_fake(lambda q, *_others: q.new_empty(q.shape))
    register(operation, f"cpu.{name}", f"cpu.flash, or {DIFFERENTIABLE},", missing="backward pass")
    return operation


_naive, _blocked, _fused = map(_forward_only, ("naive", "blocked", "fused"))


@torch.library.custom_op("flopwatch::cpu_flash", mutates_args=(), device_types="cpu")
def _flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, br: int, bc: int) -> tuple[Tensor, Tensor]:
    q, k, v = _contiguous(q, k, v)
    out, logsumexp = torch.empty_like(q), q.new_empty(q.shape[:3])
    _run("flash", q, k, v, out, logsumexp, is_causal=is_causal, br=br, bc=bc)
    return out, logsumexp


@torch.library.custom_op("flopwatch::cpu_flash_backward", mutates_args=(), device_types="cpu")
def _flash_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, grad: Tensor, is_causal: bool, br: int, bc: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, logsumexp, grad = _contiguous(q, k, v, out, logsumexp, grad)
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _run("flash_backward", q, k, v, out, logsumexp, grad, *grads, is_causal=is_causal, br=br, bc=bc)
    return grads


@_flash.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3])


@_flash_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.options = inputs[3:]
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return (*_flash_backward(*ctx.saved_tensors, grad, *ctx.options), None, None, None)


register(_flash, "cpu.flash", DIFFERENTIABLE, _backward, _save)
register(_flash_backward, "cpu.flash", DIFFERENTIABLE)
