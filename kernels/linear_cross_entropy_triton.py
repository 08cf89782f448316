"""Cross-entropy of an output layer in chunks, whose softmax and gradient are one Triton kernel.

cuBLAS computes the products. The kernel reads a chunk's logits, and overwrites them with their gradients. It sums
exponentials relative to the largest logit so far (Milakov & Gimelshein, 2018), so it reads the logits twice, the second
time from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import chunked_cross_entropy as chunked
from .interpreted import patch_interpreter
from .rows import check_device, wide

patch_interpreter()

ELEMENTS = 16
"""Elements of a tile that a thread has."""
WARPS, LONG_WARPS = 8, 32
LONG = 32_768
"""Logits of a row from which on LONG_WARPS share it: with fewer rows at once, the cache has them for the second time.
"""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of `hidden @ weight.T`; see `kernels.chunked_cross_entropy.linear_cross_entropy`.

    Args:
        hidden: (…, d_model), floating point, on a CUDA device.
        weight: (vocabulary, d_model).
        targets: (…), integers below vocabulary; others make the loss NaN.

    Returns:
        A scalar, float32 (float64 for float64 logits).
    """
    return chunked.linear_cross_entropy(hidden, weight, targets, softmax_gradient_)


def softmax_gradient_(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over rows of -log softmax(logits)[target], and its gradient, which overwrites the logits.

    Args:
        logits: (rows, vocabulary), contiguous, floating point, on a CUDA device.
        targets: (rows,), integers below vocabulary; others make the loss NaN.

    Returns:
        A scalar, float32 (float64 for float64 logits), and `logits`.

    Raises:
        ValueError: shapes or devices do not fit together.
    """
    return _softmax_gradient_(logits, targets).sum(), logits


@torch.library.custom_op("flopwatch::softmax_gradient_", mutates_args=("logits",))
def _softmax_gradient_(logits: Tensor, targets: Tensor) -> Tensor:
    losses: Tensor = _losses(logits, targets)
    check_device(logits)
    if logits.numel():
        rows, vocabulary = logits.shape
        warps = WARPS if vocabulary < LONG else LONG_WARPS
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            _softmax_gradient_kernel[(rows,)](
                logits, targets.contiguous(), losses, vocabulary,
                WIDE=wide(logits), COLUMNS=32 * warps * ELEMENTS, num_warps=warps,
            )  # fmt: skip
    return losses


@_softmax_gradient_.register_fake
def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    if logits.dim() != 2 or not logits.is_contiguous() or not logits.is_floating_point():
        raise ValueError(
            f"expected contiguous floating-point logits (rows, vocabulary), not {tuple(logits.shape)} of {logits.dtype}"
        )
    if targets.shape != logits.shape[:1] or targets.is_floating_point() or targets.device != logits.device:
        raise ValueError(
            f"expected integers (rows,) on {logits.device} as targets, not {tuple(targets.shape)} of {targets.dtype} "
            f"on {targets.device}"
        )
    return logits.new_empty(targets.shape, dtype=torch.promote_types(logits.dtype, torch.float32))


@triton.jit
def _softmax_gradient_kernel(logits, targets, losses, vocabulary, WIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """One row: its loss, and its gradient in place of its logits."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocabulary
    target = tl.load(targets + row)
    known = (target >= 0) & (target < vocabulary)
    target_logit = tl.load(logits + target, mask=known, other=float("nan")).to(WIDE)
    largest = tl.full([], float("-inf"), WIDE)
    total = tl.zeros([], WIDE)
    for start in tl.range(0, vocabulary, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        tile = tl.load(logits + column, mask=column < vocabulary, other=float("-inf")).to(WIDE)
        larger = tl.maximum(largest, tl.max(tile, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(tile - larger), 0)
        largest = larger
    logsumexp = largest + tl.log(total)
    tl.store(losses + row, logsumexp - target_logit)
    for start in tl.range(0, vocabulary, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        tile = tl.load(logits + column, mask=column < vocabulary, other=float("-inf")).to(WIDE)
        gradient = tl.exp(tile - logsumexp) - tl.where(column == target, 1.0, 0.0)
        tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < vocabulary)
