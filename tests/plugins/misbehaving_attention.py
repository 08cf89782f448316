"""An installed distribution with attention of its own, most of which goes wrong.

It comes to a worker as any user's does: the folder is on the worker's path, and its metadata registers these as entry
points `flopwatch.attention`.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flopwatch.kernels.registry import AttentionFunction, Implementation

FLOATS = frozenset({"float32", "bfloat16"})


def _implementation(name: str, function: AttentionFunction, *, has_backward: bool = True) -> Implementation:
    return Implementation(name, function, {"cpu": FLOATS, "cuda": FLOATS}, has_backward)


def _right(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=causal)


def _wrong_element(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Right but for one element of all."""
    out = _right(q, k, v, causal)
    mask = torch.ones_like(out)
    mask.view(-1)[out.detach().flatten().abs().argmax()] = 0.9
    return out * mask


def _wrong_gradient(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Forgets what keys are to be blamed for."""
    return _right(q, k.detach(), v, causal) + 0 * k.sum()


def _hungry(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def _poisons(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """On a GPU, reads outside of a tensor: the process's CUDA context is lost."""
    rows = torch.full((1,), 1 << 30, device=q.device)
    return _right(q, k, v, causal) + q[..., rows, :]


own = _implementation("own", _right)
wrong = _implementation("wrong", lambda q, k, v, causal: 1.5 * _right(q, k, v, causal))
wrong_element = _implementation("wrong_element", _wrong_element)
wrong_gradient = _implementation("wrong_gradient", _wrong_gradient)
forward_only = _implementation("forward_only", lambda *inputs: _right(*inputs).detach(), has_backward=False)
poisons = _implementation("poisons", _poisons)
hungry = _implementation("hungry", _hungry)
