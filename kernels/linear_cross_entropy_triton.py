"""Cross-entropy of an output layer in chunks, whose softmax and gradient are one Triton kernel.

cuBLAS computes the products. The kernel reads a chunk's logits, and overwrites them with their gradients. It sums
exponentials relative to the largest logit so far (Milakov & Gimelshein, 2018), so it reads the logits twice, the second
time from the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import chunked_cross_entropy as chunked
from .derivatives import register
from .interpreted import patch_interpreter
from .rows import check_device, wide

patch_interpreter()

ELEMENTS = 16
"""Elements of a tile that a thread has."""
WARPS, LONG_WARPS = 8, 32
LONG = 32_768
"""Logits of a row from which on LONG_WARPS share it: with fewer rows at once, the cache has them for the second time.
"""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = chunked.IGNORE_INDEX,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Cross-entropy of `hidden @ weight.T`, whose gradient is one kernel.

    Arguments, result and errors are those of `kernels.chunked_cross_entropy.linear_cross_entropy`, which is the same in
    plain PyTorch, but for these:

    Args:
        hidden: (…, d_model), floating point, on a CUDA device.
        targets: As there. On a GPU, which is not waited for, the loss and gradients of a row whose target is out of
            range are NaN.
        weight, ignore_index, reduction, label_smoothing: As there.
    """
    return chunked.linear_cross_entropy(
        hidden, weight, targets, softmax_gradient_, ignore_index=ignore_index, reduction=reduction,
        label_smoothing=label_smoothing,
    )  # fmt: skip


def softmax_gradient_(
    logits: Tensor, targets: Tensor, ignore_index: int = chunked.IGNORE_INDEX, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses, and its gradient, which overwrites the logits.

    Args:
        logits: (rows, vocabulary), contiguous, floating point, on a CUDA device. Nothing is checked again here.
        targets: (rows,), integers below vocabulary, or `ignore_index`; others make the row's loss and gradient NaN.
        ignore_index, label_smoothing: See `linear_cross_entropy`.

    Returns:
        A scalar, float32 (float64 for float64 logits), and `logits`.
    """
    losses: Tensor = _softmax_gradient_(logits, targets, ignore_index, label_smoothing)
    return losses.sum(), logits


@torch.library.custom_op("flopwatch::softmax_gradient_", mutates_args=("logits",))
def _softmax_gradient_(
    logits: Tensor, targets: Tensor, ignore_index: int = chunked.IGNORE_INDEX, label_smoothing: float = 0.0
) -> Tensor:
    losses: Tensor = _losses(logits, targets)
    check_device(logits.device, "kernels.chunked_cross_entropy.linear_cross_entropy")
    if logits.numel():
        rows, vocabulary = logits.shape
        warps = WARPS if vocabulary < LONG else LONG_WARPS
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            _softmax_gradient_kernel[(rows,)](
                logits, targets.contiguous(), losses, vocabulary,
                IGNORED=ignore_index, SMOOTHING=label_smoothing, WIDE=wide(logits), COLUMNS=32 * warps * ELEMENTS,
                num_warps=warps,
            )  # fmt: skip
    return losses


@_softmax_gradient_.register_fake
def _losses(logits: Tensor, targets: Tensor, *_options: object) -> Tensor:
    return logits.new_empty(targets.shape, dtype=torch.promote_types(logits.dtype, torch.float32))


register(_softmax_gradient_, *chunked.NAMES)


@triton.jit
def _softmax_gradient_kernel(
    logits, targets, losses, vocabulary,
    IGNORED: tl.constexpr, SMOOTHING: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One row: its loss, and its gradient in place of its logits."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocabulary
    target = tl.load(targets + row).to(tl.int64)
    smoothing = tl.full([], SMOOTHING, WIDE)  # a literal would be of 32 bits in float64, too
    if target == IGNORED:
        tl.store(losses + row, 0.0)
        for start in tl.range(0, vocabulary, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            tl.store(logits + column, tl.zeros([COLUMNS], logits.dtype.element_ty), mask=column < vocabulary)
    else:
        known = (target >= 0) & (target < vocabulary)
        target_logit = tl.load(logits + target, mask=known, other=float("nan")).to(WIDE)
        largest = tl.full([], float("-inf"), WIDE)
        total = tl.zeros([], WIDE)
        sum_of_logits = tl.zeros([], WIDE)
        for start in tl.range(0, vocabulary, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            tile = tl.load(logits + column, mask=column < vocabulary, other=float("-inf")).to(WIDE)
            larger = tl.maximum(largest, tl.max(tile, 0))
            base = tl.where(larger == float("-inf"), 0.0, larger)  # as long as all logits were −∞
            total = total * tl.exp(largest - base) + tl.sum(tl.exp(tile - base), 0)
            largest = larger
            if SMOOTHING > 0:
                sum_of_logits += tl.sum(tl.where(column < vocabulary, tile, 0.0), 0)
        logsumexp = largest + tl.log(total)
        if SMOOTHING > 0:
            target_logit = (1 - smoothing) * target_logit + smoothing * (sum_of_logits / vocabulary)
        tl.store(losses + row, logsumexp - target_logit)
        # For an unknown target, NaN in all of the row.
        subtracted = tl.where(known, logsumexp, float("nan"))
        for start in tl.range(0, vocabulary, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            tile = tl.load(logits + column, mask=column < vocabulary, other=float("-inf")).to(WIDE)
            gradient = tl.exp(tile - subtracted) - tl.where(column == target, 1 - smoothing, 0.0)
            if SMOOTHING > 0:
                gradient -= smoothing / vocabulary
            tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < vocabulary)
