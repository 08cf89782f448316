"""Cross-entropy of an output layer, from its input, chunk by chunk: the full logits never exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 2**30
"""Most memory of one chunk's logits."""
MIN_CHUNK_ROWS = 128
"""Fewest rows of a chunk: matrix products of fewer are slow."""

SoftmaxGradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def softmax_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of -log softmax(logits)[target] over rows, and its gradient: softmax(logits) - one-hot(target).

    Args:
        logits: (rows, vocabulary).
        targets: (rows,), integers below vocabulary.

    Returns:
        A scalar, float32 (float64 for float64 logits), and a tensor of the logits' shape and dtype.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logsumexp = torch.logsumexp(wide, dim=-1, keepdim=True)
    targets = targets.unsqueeze(-1)
    loss = (logsumexp - wide.gather(-1, targets)).sum()
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets
    return loss, ((wide - logsumexp).exp() - is_target.to(wide.dtype)).to(logits.dtype)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, softmax_gradient: SoftmaxGradient = softmax_gradient
) -> Tensor:
    """Return the cross-entropy of `hidden @ weight.T`, computing the logits of one chunk of rows at a time.

    As in Liger-Kernel's FusedLinearCrossEntropy (Hsu et al., 2024, section 3.2), the forward pass also computes the
    gradients of each chunk, whose logits it then frees. Unlike there, the weight's gradient is summed in float32 and
    scaled last: an fp16 gradient of a mean over many rows would vanish.

    Under autocast, products are in its dtype.

    Args:
        hidden: (…, d_model).
        weight: (vocabulary, d_model).
        targets: (…), integers below vocabulary.
        softmax_gradient: `softmax_gradient` of this module, its compiled form, or `softmax_gradient_` of
            `kernels.linear_cross_entropy_triton`, which overwrites the logits.

    Returns:
        A scalar, the mean over rows of -log softmax(logits)[target] in nats, float32 (float64 for float64 logits).
    """
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    loss: Tensor = LinearCrossEntropy.apply(hidden, weight, targets, dtype, softmax_gradient)  # type: ignore[no-untyped-call]
    return loss


class LinearCrossEntropy(torch.autograd.Function):
    """See `linear_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        softmax_gradient: SoftmaxGradient,
    ) -> Tensor:
        rows, matrix, labels = hidden.reshape(-1, hidden.shape[-1]).to(dtype), weight.to(dtype), targets.reshape(-1)
        wide = torch.promote_types(dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        of_hidden = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for start, end in chunks(len(rows), len(weight), dtype.itemsize):
                chunk = rows[start:end]
                chunk_loss, gradient = softmax_gradient(chunk @ matrix.T, labels[start:end])
                loss += chunk_loss
                if of_hidden is not None:
                    torch.mm(gradient, matrix, out=of_hidden[start:end])
                if of_weight is not None:
                    add_product(of_weight, gradient.T, chunk)
                del gradient
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.inputs = hidden.shape, hidden.dtype, weight.dtype, len(rows)
        return loss / len(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        shape, hidden_dtype, weight_dtype, rows = ctx.inputs
        scale = gradient / rows
        if of_hidden is not None:
            of_hidden = (of_hidden * scale).view(shape).to(hidden_dtype)
        if of_weight is not None:
            of_weight = torch.mul(of_weight, scale, out=torch.empty_like(of_weight, dtype=weight_dtype))
        return of_hidden, of_weight, None, None, None


def chunks(rows: int, vocabulary: int, item_bytes: int) -> list[tuple[int, int]]:
    """Return the beginnings and ends of chunks of rows, whose logits take at most CHUNK_BYTES."""
    fitting = CHUNK_BYTES // (vocabulary * item_bytes)
    size = max(MIN_CHUNK_ROWS, 2 ** (max(1, fitting).bit_length() - 1))
    return [(start, min(rows, start + size)) for start in range(0, rows, size)]


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total`, whose dtype is the same or wider. A GPU does not round the product before."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and torch.compiler.is_compiling():  # torch 2.11 cannot trace an addmm with out_dtype
        total += torch.mm(left, right, out_dtype=total.dtype)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
