"""Cross-entropy of an output layer, from its input, chunk by chunk: the full logits never exist."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .derivatives import NoDerivative, is_batched, is_transformed, linked, refuse

CHUNK_BYTES = 2**30
"""Most memory of one chunk's logits."""
MIN_CHUNK_ROWS = 128
"""Fewest rows of a chunk: matrix products of fewer are slow."""
IGNORE_INDEX = -100
REDUCTIONS = ("mean", "sum", "none")
NAMES = "linear_cross_entropy", "torch.nn.functional.cross_entropy of hidden @ weight.T"

SoftmaxGradient = Callable[..., tuple[Tensor, Tensor]]
"""`softmax_gradient` or a function of the same arguments, of which the last two are passed only where they are not at
their defaults."""


class Options(NamedTuple):
    """What a row's loss is made of beside -log softmax(logits)[target]; see `linear_cross_entropy`."""

    ignore_index: int = IGNORE_INDEX
    label_smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0


PLAIN = Options()


def softmax_gradient(
    logits: Tensor, targets: Tensor, options: Options = PLAIN, reduction: str = "sum"
) -> tuple[Tensor, Tensor]:
    """Return the loss, and the gradient of its sum: without options, softmax(logits) - one-hot(target).

    Args:
        logits: (rows, vocabulary).
        targets: (rows,), integers below vocabulary, or `ignore_index`.
        options: See `linear_cross_entropy`.
        reduction: "sum", or "none": each row's loss.

    Returns:
        A scalar or (rows,), float32 (float64 for float64 logits), and a tensor of the logits' shape and dtype.
    """
    ignore_index, label_smoothing, softcap, z_loss = options
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    slope = None
    if softcap is not None:
        capped = torch.tanh(wide / softcap)
        wide, slope = softcap * capped, 1 - capped.square()
    logsumexp = torch.logsumexp(wide, dim=-1, keepdim=True)
    labels = targets.long().unsqueeze(-1)
    counts = labels != ignore_index
    of_target = wide.gather(-1, labels.where(counts, 0))
    if label_smoothing:
        of_target = (1 - label_smoothing) * of_target + label_smoothing * wide.mean(-1, keepdim=True)
    losses = logsumexp - of_target
    if z_loss:
        losses = losses + z_loss * logsumexp.square()
    if 0 <= ignore_index < logits.shape[-1]:
        labels = labels.where(counts, -1)
    is_target = torch.arange(logits.shape[-1], device=logits.device) == labels
    gradient = (wide - logsumexp.where(counts, torch.inf)).exp()  # 0 in rows that do not count
    if z_loss:
        gradient = gradient * (1 + 2 * z_loss * logsumexp)
    if label_smoothing:
        shared = counts.to(wide.dtype) * (label_smoothing / logits.shape[-1])
        gradient = gradient - (1 - label_smoothing) * is_target.to(wide.dtype) - shared
    else:
        gradient = gradient - is_target.to(wide.dtype)
    if slope is not None:
        gradient = gradient * slope
    losses = losses.where(counts, 0).squeeze(-1)
    return losses if reduction == "none" else losses.sum(), gradient.to(logits.dtype)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, softmax_gradient: SoftmaxGradient = softmax_gradient, *,
    ignore_index: int = IGNORE_INDEX, reduction: str = "mean", label_smoothing: float = 0.0,
    softcap: float | None = None, z_loss: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return the cross-entropy of `hidden @ weight.T`, computing the logits of one chunk of rows at a time.

    As in Liger-Kernel's FusedLinearCrossEntropy (Hsu et al., 2024, section 3.2), the forward pass also computes the
    gradients of each chunk, whose logits it then frees. Unlike there, the weight's gradient is summed in float32 and
    scaled last: an fp16 gradient of a mean over many rows would vanish. With reduction "none", the backward pass
    computes the logits anew.

    Under autocast, products are in its dtype. There are no second derivatives, no forward mode and no torch.func.

    Args:
        hidden: (…, d_model), floating point.
        weight: (vocabulary, d_model), of the same dtype, unless autocast is on.
        targets: (…), integers of 0 … vocabulary - 1, or `ignore_index`.
        softmax_gradient: `softmax_gradient` of this module, its compiled form, or `softmax_gradient_` of
            `kernels.linear_cross_entropy_triton`, which overwrites the logits.
        ignore_index: Rows with this target count for nothing: their loss and gradients are 0.
        reduction: "mean" over the rows that count, "sum", or "none".
        label_smoothing: The part of the target's probability that all words share, 0 … 1 (Szegedy et al., 2016).
        softcap: Logits z become softcap * tanh(z / softcap); None: they stay.
        z_loss: Factor of log²(sum of exp(logits)), which is added to each row's loss (Chowdhery et al., 2022,
            section 5).

    Returns:
        The loss in nats, float32 (float64 for float64 logits): a scalar, or of targets' shape with reduction "none". A
        mean is NaN if no row counts, as that of torch.nn.functional.cross_entropy.

    Raises:
        ValueError: sizes, dtypes or devices do not fit together, or an option is out of its range.
        IndexError: on a CPU, a target is out of range. On a GPU that is a device-side assertion, as in
            torch.nn.functional.cross_entropy.
        NoDerivative: from the backward pass, if it is differentiated in turn; in forward mode; under torch.func.
    """
    options = Options(ignore_index, label_smoothing, softcap, z_loss)
    check(hidden, weight, targets, options, reduction)
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    compute: SoftmaxGradient = softmax_gradient
    if options != PLAIN:
        compute = functools.partial(compute, options=options)
    if reduction == "none":
        losses: Tensor = _Losses.apply(hidden, weight, targets, dtype, compute)  # type: ignore[no-untyped-call]
        return losses
    count = (targets != ignore_index).sum() if reduction == "mean" else None
    loss: Tensor = LinearCrossEntropy.apply(hidden, weight, targets, dtype, compute, count)[0]  # type: ignore[no-untyped-call]
    return loss


def check(hidden: Tensor, weight: Tensor, targets: Tensor, options: Options = PLAIN, reduction: str = "mean") -> None:
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
    is_one = hidden.dtype == weight.dtype or torch.is_autocast_enabled(hidden.device.type)
    if not (is_one and hidden.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"expected hidden and weight of one floating-point dtype, not {hidden.dtype}, {weight.dtype}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, not {reduction!r}")
    if not 0 <= options.label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be between 0 and 1, not {options.label_smoothing}")
    if options.softcap is not None and not 0 < options.softcap < float("inf"):
        raise ValueError(f"softcap must be a positive number, not {options.softcap}")
    if not 0 <= options.z_loss < float("inf"):
        raise ValueError(f"z_loss must be a number from 0 on, not {options.z_loss}")
    if targets.device.type == "cpu" and targets.numel() and not torch.compiler.is_compiling():
        least, most = targets.aminmax()
        if least >= 0 and most < len(weight):
            return
        counted = targets[targets != options.ignore_index]
        wrong = counted[(counted < 0) | (counted >= len(weight))]
        if wrong.numel():
            raise IndexError(
                f"target {wrong[0].item()} is neither one of 0 … {len(weight) - 1}, the rows of weight, nor "
                f"ignore_index ({options.ignore_index})"
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
        factors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        loss, of_hidden, of_weight = _sum(hidden, weight, targets, dtype, compute, ctx.needs_input_grad, factors)
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
        return of_hidden, of_weight, None, None, None, None, None


class _Losses(torch.autograd.Function):
    """Each row's loss; see `linear_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, compute: SoftmaxGradient
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.how = dtype, compute
        rows, matrix, labels = hidden.reshape(-1, hidden.shape[-1]).to(dtype), weight.to(dtype), targets.reshape(-1)
        losses = torch.empty(len(rows), dtype=torch.promote_types(dtype, torch.float32), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for start, end in chunks(len(rows), len(weight), dtype.itemsize):
                losses[start:end] = compute(rows[start:end] @ matrix.T, labels[start:end], reduction="none")[0]
        return losses.view(targets.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        if is_batched(gradient):
            raise NoDerivative(f"{NAMES[0]} with reduction 'none'", "batched gradients (is_grads_batched)", NAMES[1])
        # The gradients are those of the losses' sum, times these factors.
        if torch.compiler.is_compiling():
            gradient = linked(gradient, weight if ctx.needs_input_grad[1] else hidden)
        dtype, compute = ctx.how
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            _, *gradients = LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
                hidden, weight, targets, dtype, compute, None, gradient
            )
        else:
            _, of_hidden, of_weight = _sum(hidden, weight, targets, dtype, compute, ctx.needs_input_grad, gradient)
            gradients = [of_hidden, of_weight]
        of_hidden, of_weight = gradients
        if of_hidden is not None:
            of_hidden = of_hidden.view(hidden.shape).to(hidden.dtype)
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None, None, None


def _sum(
    hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, compute: SoftmaxGradient,
    needed: tuple[bool, ...], factors: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the sum of the losses and the gradients of hidden (rows, d_model) and weight, where they are needed.

    With factors of the rows, the gradients are those of the sum of the losses times these.
    """
    rows, matrix, labels = hidden.reshape(-1, hidden.shape[-1]).to(dtype), weight.to(dtype), targets.reshape(-1)
    wide = torch.promote_types(dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    of_hidden = torch.empty_like(rows) if needed[0] else None
    of_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if needed[1] else None
    if factors is not None:
        # Relative to the largest, so that products of rows with small ones do not vanish in fp16.
        factors = factors.reshape(-1, 1).to(wide)
        largest = factors.abs().amax().clamp(min=torch.finfo(wide).tiny) if len(rows) else factors.new_ones(())
        factors = factors / largest
    with torch.autocast(hidden.device.type, enabled=False):
        for start, end in chunks(len(rows), len(weight), dtype.itemsize):
            chunk = rows[start:end]
            chunk_loss, gradient = compute(chunk @ matrix.T, labels[start:end])
            loss += chunk_loss
            if of_hidden is not None:
                torch.mm(gradient, matrix, out=of_hidden[start:end])
            if of_weight is not None:
                add_product(of_weight, gradient.T, chunk if factors is None else (chunk * factors[start:end]).to(dtype))
            del gradient
    if factors is not None:
        of_hidden = None if of_hidden is None else of_hidden * (factors * largest)
        of_weight = None if of_weight is None else of_weight * largest
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
