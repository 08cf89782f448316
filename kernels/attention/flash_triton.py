"""FlashAttention in Triton, forward and backward: for CUDA devices from Ampere on.

Takes float32, bfloat16 and float16; head dimensions up to 256; any strides (the last axis is made contiguous if it is
not); grouped keys and values (a multiple of their heads in the queries); any lengths, also different ones. Memory grows
linearly with the length. Products are of the inputs' dtype with float32 sums; products of float32 keep its precision
(see `triton.operands` for how, and for infinities), unless torch allows tf32. Under autocast inputs are cast as for
torch's scaled_dot_product_attention.

`flash_attention` is the function to call. Under it lie two `torch.library` operations, which `torch.compile` takes as
they are, without a graph break; `TritonFlashAttention2` is the same as an autograd.Function.

On compute capability 9.0 the kernels of `kernels.attention.hopper` compute what they take: half precision with head
dimensions from 40 on. Few queries to many keys, as in decoding, have the keys split among programs
(`triton.decoding`). All else is FlashAttention-2 in `kernels.attention.triton`. Its backward pass has two forms: it
takes the one that was measured to be faster (see `triton.tilings`). If torch's deterministic algorithms are on, it
takes two passes, whose results are the same bit for bit in every run: above head dimension 128 those for compute
capability 9.0, else those of FlashAttention-2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kernels.attention.hopper import launch as hopper
from kernels.attention.hopper import native
from kernels.attention.triton import decoding, launch
from kernels.attention.triton.inputs import (
    allocate_results,
    cast_for_autocast,
    check_device,
    empty_like,
    on_device,
    tf32_is_allowed,
    with_heads,
)
from kernels.attention.triton.tilings import precision_of
from kernels.registry import Implementation

PLAIN = frozenset({Tensor, Parameter})

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of q, k and v; None for those that are not needed."""


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, *, tf32: bool | None = None, only_hopper: bool = False
) -> Tensor:
    """Softmax attention.

    Args:
        q: Queries (batch, heads, queries, head_dim), or (batch, queries, head_dim).
        k: Keys (batch, key heads, keys, head_dim), or (batch, keys, head_dim); `heads` is a multiple of `key heads`.
        v: Values, of k's shape.
        is_causal: Query i sees keys 0 … i only (top-left alignment).
        tf32: True lets products round float32 inputs to tf32 (10 bits of mantissa). None: as torch is set for its own
            products (`torch.backends.cuda.matmul`).
        only_hopper: Refuse what the kernels for compute capability 9.0 do not take.

    Returns:
        The output, of q's shape.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or are not taken.
    """
    q, k, v = cast_for_autocast(q, k, v)
    if tf32 is None:
        tf32 = q.dtype == torch.float32 and tf32_is_allowed()
    out: Tensor
    if _is_plain(q, k, v):
        known = native.attend(q, k, v, is_causal)
        if known is not None:
            return known
        out = _Checked.apply(q, k, v, is_causal, tf32, only_hopper)  # type: ignore[no-untyped-call]
    else:
        out = _forward_operation(q, k, v, is_causal, tf32, only_hopper)[0]
    return out


class TritonFlashAttention2(torch.autograd.Function):
    """`TritonFlashAttention2.apply(q, k, v, is_causal=False)`: `flash_attention` as an autograd.Function."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        tf32: bool | None = None,
        only_hopper: bool = False,
    ) -> Tensor:
        """Return the output; save it, the inputs, and the log-sum-exp of each query's scores."""
        q, k, v = cast_for_autocast(q, k, v)
        if tf32 is None:
            tf32 = q.dtype == torch.float32 and tf32_is_allowed()
        out, logsumexp = (_forward if _is_plain(q, k, v) else _forward_operation)(q, k, v, is_causal, tf32, only_hopper)
        return _saved(ctx, q, k, v, out, logsumexp, is_causal, tf32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v."""
        return _from_saved(ctx, out_gradient)


def _saved(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool, tf32: bool | None
) -> Tensor:
    """Save all that `_from_saved` needs, and return the output."""
    ctx.save_for_backward(q, k, v, out, logsumexp)
    ctx.is_causal, ctx.tf32 = is_causal, tf32
    return out


def _from_saved(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, logsumexp = ctx.saved_tensors
    needed = ctx.needs_input_grad[:3]
    gradients = differentiate(out_gradient, q, k, v, out, logsumexp, ctx.is_causal, ctx.tf32, needed)
    return *gradients, None, None, None


def differentiate(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    is_causal: bool, tf32: bool, needed: tuple[bool, bool, bool],
) -> Gradients:  # fmt: skip
    """Compute the gradients of q, k and v that are needed, from all that the forward pass saves."""
    inputs = out_gradient, None, q, k, v, out, logsumexp, is_causal, tf32
    if _is_plain(out_gradient, q, k, v, out, logsumexp):
        return _gradients(*inputs, needed)
    return cast("Gradients", _backward_operation(*inputs))


class _Checked(TritonFlashAttention2):
    """The same after `flash_attention` has looked at autocast and at who else must see the inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        tf32: bool | None = None,
        only_hopper: bool = False,
    ) -> Tensor:
        """As that of the base."""
        out, logsumexp = _forward(q, k, v, is_causal, bool(tf32), only_hopper)
        return _saved(ctx, q, k, v, out, logsumexp, is_causal, tf32)

    @staticmethod
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        """As that of the base, without what costs the host more: that refuses to be differentiated in turn."""
        if torch.is_grad_enabled():
            return TritonFlashAttention2.backward(ctx, out_gradient)
        return _from_saved(ctx, out_gradient)


def _is_plain(*tensors: Tensor) -> bool:
    """Return True if kernels can be launched directly.

    Otherwise torch.compile, functorch, a dispatch mode or a subclass of Tensor must see an operation. Going through
    torch's dispatcher takes the host as long as the launches do.
    """
    return (
        not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()
        and not torch._C._are_functorch_transforms_active()  # autograd.Function checks the same
        and PLAIN.issuperset(map(type, tensors))
        and not tensors[0].is_meta
    )


def _forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, tf32: bool, only_hopper: bool = False
) -> tuple[Tensor, Tensor]:
    known = hopper.attend(q, k, v, is_causal)
    if known is not None:
        return known
    out, logsumexp = allocate_results(q, k, v)
    check_device(q.device)
    if out.numel():
        q, k, v, heads_out = with_heads(q, k, v, out)
        with on_device(q.device):
            if not only_hopper and decoding.suits(q, k, is_causal):
                decoding.decode(q, k, v, heads_out, logsumexp)
            elif not hopper.forward(q, k, v, heads_out, logsumexp, is_causal):
                if only_hopper:
                    raise ValueError(f"attention 'hopper' cannot take these inputs: {hopper.why_not(q, k, v)}")
                precision = precision_of(q, tf32)
                q, k, v = launch.operands(precision, q, k, v)
                launch.forward(q, k, v, heads_out, logsumexp, is_causal, precision)
    return out, logsumexp


def _gradients(
    out_gradient: Tensor, logsumexp_gradient: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    is_causal: bool, tf32: bool, needed: tuple[bool, bool, bool],
) -> Gradients:  # fmt: skip
    """Compute the gradients that are needed; those of k and v come together."""
    if needed == (True, True, True) and logsumexp_gradient is None:
        known = hopper.gradients(out_gradient, q, k, v, out, logsumexp, is_causal)
        if known is not None:
            return known
    dq = empty_like(q) if needed[0] else None
    dk, dv = (empty_like(k), empty_like(v)) if needed[1] or needed[2] else (None, None)
    if q.numel() == 0:
        return dq, None if dk is None else dk.zero_(), None if dv is None else dv.zero_()
    out_gradient, q, k, v, out = with_heads(out_gradient, q, k, v, out)
    dq_room, dk_room, dv_room = (None if room is None else with_heads(room)[0] for room in (dq, dk, dv))
    logsumexp = logsumexp.contiguous()
    if logsumexp_gradient is not None:
        logsumexp_gradient = logsumexp_gradient.contiguous()
    rest = logsumexp, logsumexp_gradient, is_causal
    with on_device(q.device):
        if (
            dq_room is None or dk_room is None or dv_room is None
            or not hopper.backward(out_gradient, q, k, v, out, dq_room, dk_room, dv_room, *rest)
        ):  # fmt: skip
            launch.backward(out_gradient, q, k, v, out, dq_room, dk_room, dv_room, *rest, precision_of(q, tf32))
    return dq, dk if needed[1] else None, dv if needed[2] else None


def _backward(
    out_gradient: Tensor, logsumexp_gradient: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    is_causal: bool, tf32: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = out_gradient, logsumexp_gradient, q, k, v, out, logsumexp, is_causal, tf32
    return cast("tuple[Tensor, Tensor, Tensor]", _gradients(*inputs, needed=(True, True, True)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.is_causal, ctx.tf32, _only_hopper = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, out_gradient: Tensor | None, logsumexp_gradient: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, logsumexp = ctx.saved_tensors
    if out_gradient is None:
        out_gradient = torch.zeros_like(out)
    gradients = _backward_operation(out_gradient, logsumexp_gradient, q, k, v, out, logsumexp, ctx.is_causal, ctx.tf32)
    return *gradients, None, None, None


# Defined by hand: `torch.library.custom_op` does the same, and takes the host 13 µs longer to call.
_library: Any = torch.library.Library("flopwatch", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Operations live as long as this does."""
_library.define(
    "flash_attention(Tensor q, Tensor k, Tensor v, bool is_causal, bool tf32, bool only_hopper=False) "
    "-> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "flash_attention_backward(Tensor out_gradient, Tensor? logsumexp_gradient, Tensor q, Tensor k, Tensor v, "
    "Tensor out, Tensor logsumexp, bool is_causal, bool tf32) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("flash_attention", _forward, "CompositeExplicitAutograd")
_library.impl("flash_attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    "flopwatch::flash_attention",
    lambda q, k, v, is_causal, tf32, only_hopper=False: allocate_results(q, k, v),
    lib=_library,
)
torch.library.register_fake(
    "flopwatch::flash_attention_backward",
    lambda out_gradient, logsumexp_gradient, q, k, v, out, logsumexp, is_causal, tf32: tuple(
        map(empty_like, (q, k, v))
    ),
    lib=_library,
)
torch.library.register_autograd("flopwatch::flash_attention", _differentiate, setup_context=_save, lib=_library)
_forward_operation = torch.ops.flopwatch.flash_attention.default
_backward_operation = torch.ops.flopwatch.flash_attention_backward.default
native.begin(differentiate)


def _tune(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, *, backward: bool, tell: Callable[[str], None]) -> str:
    from kernels.attention.triton.tune import tune  # used on request only

    return tune(q, k, v, is_causal, backward=backward, tell=tell)


def _hopper_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return flash_attention(q, k, v, is_causal, only_hopper=True)


hopper_implementation = Implementation("hopper", _hopper_attention, {"cuda": frozenset({"bfloat16", "float16"})})
implementation = Implementation(
    "triton",
    flash_attention,
    {"cuda": frozenset({"float32", "bfloat16", "float16"})},
    tune=_tune,
)
