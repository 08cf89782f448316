"""Cross-entropy of an output layer, from its input, chunk by chunk: the full logits never exist."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .derivatives import NoDerivative, is_batched, is_transformed, linked, refuse

CHUNK_BYTES = 2**30
"""Most memory of one chunk's logits."""
MIN_CHUNK_ROWS = 128
"""Fewest rows of a chunk: matrix products of fewer are slow."""
IGNORE_INDEX = -100
NAMES = "linear_cross_entropy", "torch.nn.functional.cross_entropy of hidden @ weight.T"

SoftmaxGradient = Callable[..., tuple[Tensor, Tensor]]
"""`softmax_gradient` or a function of the same arguments, of which the last two are passed only where they are not at
their defaults."""


def softmax_gradient(
    logits: Tensor, targets: Tensor, ignore_index: int = IGNORE_INDEX, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses, and its gradient: softmax(logits) - one-hot(target), without smoothing.

    Args:
        logits: (rows, vocabulary).
        targets: (rows,), integers below vocabulary, or `ignore_index`.
        ignore_index, label_smoothing: See `linear_cross_entropy`.

    Returns:
        A scalar, float32 (float64 for float64 logits), and a tensor of the logits' shape and dtype.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logsumexp = torch.logsumexp(wide, dim=-1, keepdim=True)
    labels = targets.long().unsqueeze(-1)
    counts = labels != ignore_index
    of_target = wide.gather(-1, labels.where(counts, 0))
    if label_smoothing:
        of_target = (1 - label_smoothing) * of_target + label_smoothing * wide.mean(-1, keepdim=True)
    losses = logsumexp - of_target
    if 0 <= ignore_index < logits.shape[-1]:
        labels = labels.where(counts, -1)
    is_target = torch.arange(logits.shape[-1], device=logits.device) == labels
    gradient = (wide - logsumexp.where(counts, torch.inf)).exp()  # 0 in rows that do not count
    gradient = gradient - is_target.to(wide.dtype)
    if label_smoothing:
        gradient = gradient + label_smoothing * (is_target.to(wide.dtype) - counts.to(wide.dtype) / logits.shape[-1])
    return losses.where(counts, 0).sum(), gradient.to(logits.dtype)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, softmax_gradient: SoftmaxGradient = softmax_gradient, *,
    ignore_index: int = IGNORE_INDEX, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return the cross-entropy of `hidden @ weight.T`, computing the logits of one chunk of rows at a time.

    As in Liger-Kernel's FusedLinearCrossEntropy (Hsu et al., 2024, section 3.2), the forward pass also computes the
    gradients of each chunk, whose logits it then frees. Unlike there, the weight's gradient is summed in float32 and
    scaled last: an fp16 gradient of a mean over many rows would vanish.

    Under autocast, products are in its dtype, except those of float64. There are no second derivatives, no forward mode
    and no torch.func.

    Args:
        hidden: (…, d_model), floating point.
        weight: (vocabulary, d_model), of the same dtype, unless autocast is on.
        targets: (…), integers of 0 … vocabulary - 1, or `ignore_index`.
        softmax_gradient: `softmax_gradient` of this module, its compiled form, or `softmax_gradient_` of
            `kernels.linear_cross_entropy_triton`, which overwrites the logits.
        ignore_index: Rows with this target do not count: their gradients are 0.
        reduction: "mean" over the rows that count, or "sum".
        label_smoothing: The part of the target's probability that all words share, 0 … 1 (Szegedy et al., 2016).

    Returns:
        The loss in nats, a float32 scalar (float64 for float64 logits); the mean is NaN if no row counts, as that of
        torch.nn.functional.cross_entropy.

    Raises:
        ValueError: sizes, dtypes or devices do not fit together, or an option is out of its range.
        IndexError: on a CPU, a target is out of range. On a GPU that is a device-side assertion, as in
            torch.nn.functional.cross_entropy.
        NoDerivative: from the backward pass, if it is differentiated in turn; in forward mode; under torch.func.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"expected reduction mean or sum, not {reduction!r}: {NAMES[1]} has others")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"expected a label_smoothing from 0 to 1, not {label_smoothing}")
    check(hidden, weight, targets, ignore_index)
    if not torch.is_grad_enabled():  # inside of an autograd.Function tensors do not tell
        hidden, weight = hidden.detach(), weight.detach()
    dtype = hidden.dtype
    if dtype != torch.float64 and torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    compute: SoftmaxGradient = softmax_gradient
    if ignore_index != IGNORE_INDEX or label_smoothing:
        compute = functools.partial(compute, ignore_index=ignore_index, label_smoothing=label_smoothing)
    targets = targets.long()  # unsigned ones would be compared with ignore_index modulo their range
    count = (targets != ignore_index).sum() if reduction == "mean" else None
    loss: Tensor = LinearCrossEntropy.apply(hidden, weight, targets, dtype, compute, count)[0]  # type: ignore[no-untyped-call]
    return loss


def check(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = IGNORE_INDEX) -> None:
    """Check the arguments of `linear_cross_entropy`. Raises as it says."""
    if not torch.compiler.is_compiling() and is_transformed():
        refuse(*NAMES, (hidden, weight, targets), vmap=False)
    if weight.dim() != 2 or not weight.numel() or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"expected hidden (…, d_model) and weight (vocabulary, d_model), not {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"expected a target for each row of hidden {tuple(hidden.shape)}: {tuple(hidden.shape[:-1])}, not "
            f"{tuple(targets.shape)}"
        )
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise ValueError(f"expected integers as targets, not {targets.dtype}")
    if not hidden.device == weight.device == targets.device:
        raise ValueError(f"hidden, weight and targets are on {hidden.device}, {weight.device} and {targets.device}")
    dtypes = hidden.dtype, weight.dtype
    # Autocast leaves float64 as it is.
    is_one = len(set(dtypes)) == 1 or (torch.float64 not in dtypes and torch.is_autocast_enabled(hidden.device.type))
    if not (is_one and hidden.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"expected hidden and weight of one floating-point dtype, not {hidden.dtype}, {weight.dtype}")
    if targets.device.type == "cpu" and targets.numel() and not torch.compiler.is_compiling():
        targets = targets.long()
        least, most = targets.aminmax()
        if least >= 0 and most < len(weight):
            return
        counted = targets[targets != ignore_index]
        wrong = counted[(counted < 0) | (counted >= len(weight))]
        if wrong.numel():
            raise IndexError(
                f"target {wrong[0].item()} is neither one of 0 … {len(weight) - 1}, the rows of weight, nor "
                f"ignore_index ({ignore_index})"
            )


class LinearCrossEntropy(torch.autograd.Function):
    """The sum of the losses, divided by `count` if that is not None; see `linear_cross_entropy`.

    Gradients of hidden and weight are results, too. The backward pass reads them, and their own gradients come only
    from a second backward pass: so that is noticed at no cost.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        compute: SoftmaxGradient,
        count: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        loss, of_hidden, of_weight = _sum(hidden, weight, targets, dtype, compute, ctx.needs_input_grad)
        compiled = torch.compiler.is_compiling()
        source = None if not compiled else weight if ctx.needs_input_grad[1] else hidden
        ctx.save_for_backward(of_hidden, of_weight, count, source)
        ctx.inputs = hidden.shape, hidden.dtype, weight.dtype
        if count is not None:
            loss = loss / count
        if compiled:
            return loss, None, None
        ctx.set_materialize_grads(False)
        return loss, of_hidden, of_weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *second: Tensor | None) -> tuple[Tensor | None, ...]:
        if any(one is not None for one in second):
            raise NoDerivative(NAMES[0], "second derivative", NAMES[1])
        of_hidden, of_weight, count, source = ctx.saved_tensors
        shape, hidden_dtype, weight_dtype = ctx.inputs
        scale = gradient if count is None else gradient / count.clamp(min=1)
        if source is not None:
            scale = linked(scale, source)
        if of_hidden is not None:
            of_hidden = (of_hidden * scale).view(shape).to(hidden_dtype)
        if of_weight is not None and (torch.is_grad_enabled() or is_batched(gradient)):  # which `out` does not allow
            of_weight = (of_weight * scale).to(weight_dtype)
        elif of_weight is not None:
            of_weight = torch.mul(of_weight, scale, out=torch.empty_like(of_weight, dtype=weight_dtype))
        return of_hidden, of_weight, None, None, None, None


def _sum(
    hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, compute: SoftmaxGradient,
    needed: tuple[bool, ...],
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the sum of the losses and the gradients of hidden (rows, d_model) and weight, where they are needed."""
    rows, matrix, labels = hidden.reshape(-1, hidden.shape[-1]).to(dtype), weight.to(dtype), targets.reshape(-1)
    wide = torch.promote_types(dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    of_hidden = torch.empty_like(rows) if needed[0] else None
    of_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if needed[1] else None
    with torch.autocast(hidden.device.type, enabled=False):
        for start, end in chunks(len(rows), len(weight), dtype.itemsize):
            chunk = rows[start:end]
            chunk_loss, gradient = compute(chunk @ matrix.T, labels[start:end])
            loss += chunk_loss
            if of_hidden is not None:
                torch.mm(gradient, matrix, out=of_hidden[start:end])
            if of_weight is not None:
                add_product(of_weight, gradient.T, chunk)
            del gradient
    return loss, of_hidden, of_weight


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
