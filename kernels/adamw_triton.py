"""AdamW's update (Loshchilov & Hutter, 2019, algorithm 2) in Triton, with one launch for each parameter.

An update reads the parameter, its gradient and both moments once, and writes all but the gradient once. It computes in
float32, and can write the new parameter in another dtype, too. Launches of different parameters are independent, so
where the device can, a launch's first programs already run while the last ones of the launch before it end.
"""

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention.triton.inputs import capability
from .derivatives import NoDerivative, is_transformed, refuse
from .interpreted import patch_interpreter
from .launching import Address, Launch
from .rows import check_device

patch_interpreter()

TILE = 1024
"""Elements of a program."""
WARPS = 4
"""Warps of a program: a thread has 16 bytes of each tensor in half precision, and 32 in float32."""
LAUNCHES = 256
"""Launches that are kept, for parameters of different sizes, dtypes or hyper-parameters."""
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
NAMES = "adamw", "torch.optim.AdamW(…, differentiable=True)"


def adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    lr: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    copies: Sequence[Tensor] | None = None,
) -> None:
    """Update parameters and their moments in place, as torch.optim.AdamW does.

    The host does not wait for the device, and a CUDA graph can capture the call. Tensors that are not contiguous are
    copied, which costs time; those that are not a multiple of 16 elements long take more time, too.

    Args:
        parameters: Any shapes, in float32, bfloat16 or float16, on one CUDA device. Updates of different parameters
            overlap, so they share no elements.
        gradients: One for each parameter, of its shape and of one of these dtypes.
        exp_avgs: The first moments, like the gradients.
        exp_avg_sqs: The second moments, like the gradients.
        steps: The number of steps before this one, for each parameter: tensors without axes on the device. They are
            not changed.
        lr: Learning rate, a tensor without axes on the device.
        betas: Decay rates of the two moments.
        eps: Added to the square root of the second moment.
        weight_decay: Decay per unit of learning rate.
        copies: Tensors like the gradients that get the new parameters, rounded to their dtypes: with `parameters` in
            float32, these are a model's weights in half precision (Micikevicius et al., 2018, section 3.1).

    Raises:
        ValueError: dtypes, devices, shapes or numbers of tensors are others, a tensor is there twice, a decay rate is
            not in [0, 1), or `eps` or `weight_decay` is negative.
        TypeError: there are others than tensors.
        NoDerivative: the update would be differentiated: one of its inputs depends on tensors that require a gradient
            (nothing is recorded under torch.no_grad), has a tangent of forward mode, or is one of torch.func.
    """
    if not parameters:
        return
    rounded = [] if copies is None else [copies]
    everything = list(zip(parameters, exp_avgs, exp_avg_sqs, gradients, *rounded, steps, strict=True))
    try:
        _check(everything, lr, betas, eps, weight_decay)
    except AttributeError as error:
        raise TypeError(f"parameters, gradients, moments, steps, copies and lr must be tensors: {error}") from error
    written = [*parameters, *exp_avgs, *exp_avg_sqs, *(copies or ())]
    addresses = [tensor.data_ptr() for tensor in written if tensor.numel()]
    if len(set(addresses)) < len(addresses):
        raise ValueError(
            "a tensor, or its memory, is twice among parameters, moments and copies: updates overlap in time"
        )
    betas = betas[0], betas[1]
    with torch.no_grad():
        _update(everything, lr, betas, eps, weight_decay)
    torch.autograd.graph.increment_version(written)


def _update(
    everything: Sequence[Sequence[Tensor]], lr: Tensor, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    overlap = False
    with torch.cuda.device_of(lr):  # type: ignore[no-untyped-call]
        for *tensors, step in everything:
            if not tensors[0].numel():
                continue
            arguments = [*(tensor.resolve_neg().contiguous() for tensor in tensors), step, lr]
            copied = [pair for pair in zip(tensors, arguments, strict=False) if pair[0] is not pair[1]]
            launch = _launch(
                tensors[0].numel(), tuple([argument.dtype for argument in arguments]), lr.device,
                betas, eps, weight_decay, overlap and not copied,
            )  # fmt: skip
            launch(arguments)
            overlap = True
            for tensor, copy in copied:
                if tensor is not tensors[3]:
                    tensor.copy_(copy)


def _check(
    everything: Sequence[Sequence[Tensor]], lr: Tensor, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    """Check that nothing is differentiated; and devices and shapes: a kernel would write outside of other tensors."""
    if is_transformed():
        refuse(*NAMES, [lr, *(tensor for tensors in everything for tensor in tensors)], vmap=False)
    if torch.is_grad_enabled() and (lr.requires_grad or any(map(_would_be_recorded, everything))):
        raise NoDerivative(NAMES[0], "derivative (call it under torch.no_grad if you need none)", NAMES[1])
    check_device(lr.device, "torch.optim.AdamW")
    if lr.numel() != 1:
        raise ValueError(f"expected lr as a tensor without axes, not {tuple(lr.shape)}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"expected two decay rates (betas) from 0 to below 1, not {betas}")
    if not (eps >= 0 and weight_decay >= 0):
        raise ValueError(f"expected eps and weight_decay from 0 on, not {eps} and {weight_decay}")
    if len(devices := {lr.device, *(tensor.device for tensors in everything for tensor in tensors)}) > 1:
        raise ValueError(f"expected tensors on one device, not on {', '.join(sorted(map(str, devices)))}")
    for *tensors, step in everything:
        shape = tensors[0].shape
        if any(tensor.shape != shape for tensor in tensors) or step.numel() != 1:
            raise ValueError(f"expected tensors of one shape and a step, not {[tuple(t.shape) for t in tensors]}")


def _would_be_recorded(tensors: Sequence[Tensor]) -> bool:
    """Return True if autograd would record this update, which for leaves, as parameters are, it does not."""
    parameter, first, second, gradient, *copy, step = tensors
    inputs = first, second, gradient, step, *(tensor for tensor in (parameter, *copy) if not tensor.is_leaf)
    return any(tensor.requires_grad for tensor in inputs)


@functools.lru_cache(maxsize=LAUNCHES)
def _launch(
    numel: int, dtypes: tuple[torch.dtype, ...], device: torch.device, betas: tuple[float, float], eps: float,
    weight_decay: float, overlap: bool,
) -> Launch:  # fmt: skip
    """Return the launch for one parameter, with the dtypes of the kernel's first seven arguments, of which the copy may
    be missing. It keeps the kernel that was compiled for them and loaded on the device."""
    if not DTYPES.issuperset(dtypes[:-2]):
        raise ValueError(f"expected float32, bfloat16 or float16, not {', '.join(map(str, dtypes[:-2]))}")
    copies = len(dtypes) == 7
    places = range(7) if copies else (0, 1, 2, 3, 0, 4, 5)  # the kernel does not use a copy that is missing
    # Differences from 1 and logarithms of float32 numbers would have errors of 10⁻⁵.
    decays = [(beta, 1 - beta, math.log(beta) if beta else -math.inf) for beta in betas]
    ahead = capability(device) >= (9, 0)
    overlap = overlap and ahead
    return Launch(
        fused_adamw_kernel,
        triton.cdiv(numel, TILE),
        (*map(Address, places), numel, *decays[0], *decays[1], eps, weight_decay),
        {"TILE": TILE, "COPY": copies, "AHEAD": ahead, "OVERLAP": overlap, "num_warps": WARPS, "launch_pdl": overlap},
    )


@triton.jit
def fused_adamw_kernel(
    parameter, exp_avg, exp_avg_sq, gradient, copy, step, lr, numel,
    beta1, beta1_rest, beta1_log, beta2, beta2_rest, beta2_log, eps, weight_decay,
    TILE: tl.constexpr, COPY: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Update one tile; if COPY, write the new parameter to `copy`, too.

    If AHEAD, the next launch may start when all programs of this one have started. If OVERLAP, this is a launch that
    started so; the one before it updates another parameter.
    """
    if AHEAD:
        gdc_launch_dependents()
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < numel
    g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(parameter + place, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(exp_avg + place, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + place, mask=inside, other=0.0).to(tl.float32)
    rate = tl.load(lr).to(tl.float32)
    count = tl.load(step).to(tl.float32) + 1
    # 1 - beta ** step, in float64: it is near 0 at first.
    correction1 = (1 - tl.exp((count * beta1_log).to(tl.float64))).to(tl.float32)
    correction2 = (1 - tl.exp((count * beta2_log).to(tl.float64))).to(tl.float32)
    unbiased = 1 / tl.sqrt(correction2)
    p -= rate * weight_decay * p
    m = beta1 * m + beta1_rest * g
    v = beta2 * v + beta2_rest * g * g
    p -= rate / correction1 * m / (tl.sqrt(v) * unbiased + eps)
    tl.store(parameter + place, p.to(parameter.dtype.element_ty), mask=inside)
    if COPY:
        tl.store(copy + place, p.to(copy.dtype.element_ty), mask=inside)
    tl.store(exp_avg + place, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + place, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
    if OVERLAP:
        gdc_wait()  # This launch ends after the one before it, so what waits for this one waits for both.
