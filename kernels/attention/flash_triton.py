"""FlashAttention in Triton, forward and backward: for CUDA devices from Ampere on.

Takes float32, bfloat16 and float16; head dimensions up to 256; any strides (the last axis is made contiguous if it is
not); grouped keys and values (a multiple of their heads in the queries); any lengths, also different ones. Memory grows
linearly with the length. Products are of the inputs' dtype with float32 sums; products of float32 keep its precision
(see `triton.operands` for how, and for infinities), unless torch allows tf32. Under autocast inputs are cast as for
torch's scaled_dot_product_attention.

`flash_attention` is the function to call. Under it lie two `torch.library` operations, which `torch.compile` takes as
they are, without a graph break; `TritonFlashAttention2` is the same as an autograd.Function.

On compute capability 9.0 the kernels of `kernels.attention.hopper` compute what they take: half precision with head
dimensions from 40 on, without a soft cap. Few queries to many keys, as in decoding, have the keys split
among programs (`triton.decoding`). All else is FlashAttention-2 in `kernels.attention.triton`. Its backward pass has
two forms: it takes the one that was measured to be faster (see `triton.tilings`). If torch's deterministic algorithms
are on, it takes two passes, whose results are the same bit for bit in every run: above head dimension 128 those for
compute capability 9.0, else those of FlashAttention-2.
"""

import functools
import operator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..derivatives import is_batched, is_transformed, register
from ..registry import FEATURES, Implementation
from .hopper import launch as hopper
from .hopper import native, rules
from .masks import check_documents
from .problem import DIFFERENTIABLE, check_options
from .triton import decoding, launch
from .triton.inputs import (
    allocate_results,
    cast_for_autocast,
    check_device,
    empty_like,
    on_device,
    tf32_is_allowed,
    with_heads,
)
from .triton.tilings import precision_of

PLAIN = frozenset({Tensor, Parameter})
NAMES = "flash_attention", DIFFERENTIABLE

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of q, k and v; None for those that are not needed."""


class Options(NamedTuple):
    """What a call may ask for beside a plain mask, in the order of the operations' arguments."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    document_ends: Tensor | None = None
    bottom_right: bool = False

    def scoring(self, q: Tensor, k: Tensor, is_causal: bool) -> launch.Scoring:
        """Check them for these inputs. Raises ValueError: they do not fit."""
        check_options(self.scale, self.window, self.softcap)
        if self.document_ends is not None:
            check_documents(q.shape[-2], k.shape[-2], q.device, self.document_ends)
        return launch.Scoring.of(
            q, k, is_causal, scale=self.scale, window=self.window, softcap=self.softcap,
            bottom_right=self.bottom_right, documents=self.document_ends is not None,
        )  # fmt: skip

    def bounds(self, tokens: int) -> Tensor | None:
        """Return where the documents start and stop."""
        return None if self.document_ends is None else launch.document_bounds(self.document_ends, tokens)


PLAIN_OPTIONS = Options()


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, *,
    scale: float | None = None, window: int | None = None, softcap: float | None = None,
    document_ends: Tensor | None = None, bottom_right: bool = False, return_lse: bool = False,
    tf32: bool | None = None, only_hopper: bool = False,
) -> Any:  # fmt: skip
    """Softmax attention.

    Args:
        q: Queries (batch, heads, queries, head_dim), or (batch, queries, head_dim).
        k: Keys (batch, key heads, keys, head_dim), or (batch, keys, head_dim); `heads` is a multiple of `key heads`.
        v: Values, of k's shape.
        is_causal: Query i sees keys 0 … i only.
        scale: Factor of the scores; None: 1/sqrt(head_dim).
        window: Keys that a query sees back, its own position among them; without `is_causal`, also as many forth.
        softcap: Scaled scores s become softcap * tanh(s / softcap).
        document_ends: int32 on the inputs' device: the ends of the documents that are packed into each sequence, which
            are the cumulative sums of their lengths; lengths of 0 are allowed. A query sees the keys of its own
            document only; tokens behind the last end are one more document. There are as many queries as keys.
        bottom_right: The last query's position is that of the last key. False: the first query's is that of the first
            key (top-left). It matters where there are not as many queries as keys.
        return_lse: Return the log-sum-exp, too, through which gradients pass.
        tf32: True lets products round float32 inputs to tf32 (10 bits of mantissa). None: as torch is set for its own
            products (`torch.backends.cuda.matmul`).
        only_hopper: Refuse what the kernels for compute capability 9.0 do not take.

    Returns:
        The output, of q's shape; with `return_lse`, also the natural log-sum-exp of each query's scores: q's shape
        without the last axis, float32. A query that sees no key has the output 0 and the log-sum-exp −∞.

    Raises:
        ValueError: shapes, dtypes, devices or options do not fit together, or are not taken. Values of `document_ends`
            are checked on a CPU only.
        NoDerivative: from the backward pass, if it is differentiated in turn; in forward mode; in torch.func.grad.
    """
    q, k, v = cast_for_autocast(q, k, v)
    if tf32 is None:
        tf32 = q.dtype == torch.float32 and tf32_is_allowed()
    # Written out, since short calls are limited by the host.
    if (
        return_lse or bottom_right
        or scale is not None or window is not None or softcap is not None or document_ends is not None
    ):  # fmt: skip
        options = scale, window, softcap, document_ends, bottom_right
        out, logsumexp = _forward_operation(q, k, v, is_causal, tf32, only_hopper, *options)
        return (out, logsumexp) if return_lse else out
    if _is_plain(q, k, v):
        known = native.attend(q, k, v, is_causal)
        if known is not None:
            return known
        inputs = q, k, v, is_causal, tf32, only_hopper
        return super(TritonFlashAttention2, TritonFlashAttention2).apply(*inputs)
    return _forward_operation(q, k, v, is_causal, tf32, only_hopper)[0]


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
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.is_causal, ctx.tf32 = is_causal, tf32
        return out

    @staticmethod
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        gradients = differentiate(out_gradient, q, k, v, out, logsumexp, ctx.is_causal, ctx.tf32, needed)
        return *gradients, None, None, None

    @staticmethod
    def apply(
        q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, tf32: bool | None = None, only_hopper: bool = False
    ) -> Any:
        """Return the output. torch.compile takes `forward` and `backward` instead."""
        return flash_attention(q, k, v, is_causal, tf32=tf32, only_hopper=only_hopper)


def differentiate(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    is_causal: bool, tf32: bool, needed: tuple[bool, bool, bool],
) -> Gradients:  # fmt: skip
    """Compute the gradients of q, k and v that are needed, from all that the forward pass saves."""
    inputs = out_gradient, None, q, k, v, out, logsumexp, is_causal, tf32
    # If these gradients may be differentiated in turn, the operation refuses that.
    plain = _is_plain(out_gradient, q, k, v, out, logsumexp) and not is_batched(out_gradient)
    if plain and not torch.is_grad_enabled():
        return _gradients(*inputs, needed)
    return cast("Gradients", _backward_operation(*inputs))


def _is_plain(*tensors: Tensor) -> bool:
    """Return True if kernels can be launched directly.

    Otherwise torch.compile, functorch, a dispatch mode or a subclass of Tensor must see an operation. Going through
    torch's dispatcher takes the host as long as the launches do.
    """
    return (
        not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()
        and not is_transformed()
        and PLAIN.issuperset(map(type, tensors))
        and not tensors[0].is_meta
        and not any(map(Tensor.is_neg, tensors))
    )


def _forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, tf32: bool, only_hopper: bool = False, *given: Any
) -> tuple[Tensor, Tensor]:
    options = Options(*given) if given else PLAIN_OPTIONS
    out, logsumexp = allocate_results(q, k, v)
    check_device(q.device)
    scoring = options.scoring(q, k, is_causal)
    if out.numel():
        with_axes = with_heads(q, k, v, out)
        plain = is_causal if options is PLAIN_OPTIONS and all(map(operator.is_, with_axes, (q, k, v, out))) else None
        q, k, v, heads_out = with_axes
        with on_device(q.device):
            bounds = options.bounds(k.shape[2])
            if not only_hopper and decoding.suits(q, k, scoring, bounds):
                decoding.decode(q, k, v, heads_out, logsumexp, scoring)
                return out, logsumexp
            if not hopper.forward(q, k, v, heads_out, logsumexp, scoring, bounds, plain=plain):
                if only_hopper:
                    others = "it takes no soft cap, a scale above 0, and addresses that are multiples of 16 bytes"
                    reason = rules.why_not(*map(launch.kind, (q, k, v))) or others
                    raise ValueError(f"attention 'hopper' cannot take these inputs: {reason}")
                precision = precision_of(q, tf32)
                q, k, v = launch.operands(precision, q, k, v)
                launch.forward(q, k, v, heads_out, logsumexp, scoring, precision, bounds=bounds)
    return out, logsumexp


def _gradients(
    out_gradient: Tensor, logsumexp_gradient: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    is_causal: bool, tf32: bool, needed: tuple[bool, bool, bool], options: Options = PLAIN_OPTIONS,
) -> Gradients:  # fmt: skip
    """Compute the gradients that are needed; those of k and v come together."""
    dq = empty_like(q) if needed[0] else None
    dk, dv = (empty_like(k), empty_like(v)) if needed[1] or needed[2] else (None, None)
    if q.numel() == 0:
        return dq, None if dk is None else dk.zero_(), None if dv is None else dv.zero_()
    out_gradient, *with_axes = with_heads(out_gradient, q, k, v, out)
    is_plain = logsumexp_gradient is None and options is PLAIN_OPTIONS
    plain = is_causal if is_plain and all(map(operator.is_, with_axes, (q, k, v, out))) else None
    q, k, v, out = with_axes
    dq_room, dk_room, dv_room = (None if room is None else with_heads(room)[0] for room in (dq, dk, dv))
    logsumexp = logsumexp.contiguous()
    if logsumexp_gradient is not None:
        logsumexp_gradient = logsumexp_gradient.contiguous()
    scoring = options.scoring(q, k, is_causal)
    with on_device(q.device):
        bounds = options.bounds(k.shape[2])
        tensors, rest = (out_gradient, q, k, v, out), (logsumexp, logsumexp_gradient)
        if (
            dq_room is None or dk_room is None or dv_room is None
            or not hopper.backward(*tensors, dq_room, dk_room, dv_room, *rest, scoring, bounds, plain=plain)
        ):  # fmt: skip
            launch.backward(*tensors, dq_room, dk_room, dv_room, *rest, scoring, precision_of(q, tf32), bounds)
    return dq, dk if needed[1] else None, dv if needed[2] else None


def _backward(
    out_gradient: Tensor, logsumexp_gradient: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    is_causal: bool, tf32: bool, *given: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = out_gradient, logsumexp_gradient, q, k, v, out, logsumexp, is_causal, tf32
    options = Options(*given) if given else PLAIN_OPTIONS
    return cast("tuple[Tensor, Tensor, Tensor]", _gradients(*inputs, needed=(True, True, True), options=options))


def _allocate(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, _tf32: bool, _only_hopper: bool = False, *given: Any
) -> tuple[Tensor, Tensor]:
    results = allocate_results(q, k, v)
    Options(*given).scoring(q, k, is_causal)
    return results


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.is_causal, ctx.tf32, _only_hopper, *given = inputs
    options = Options(*given)
    ctx.save_for_backward(q, k, v, *output, options.document_ends)
    ctx.options = options._replace(document_ends=None)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, out_gradient: Tensor | None, logsumexp_gradient: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, logsumexp, document_ends = ctx.saved_tensors
    if out_gradient is None:
        out_gradient = torch.zeros_like(out)
    gradients = _backward_operation(
        out_gradient, logsumexp_gradient, q, k, v, out, logsumexp, ctx.is_causal, ctx.tf32,
        *ctx.options._replace(document_ends=document_ends),
    )  # fmt: skip
    return *gradients, *[None] * (3 + len(ctx.options))


# Defined by hand: `torch.library.custom_op` does the same, and takes the host 13 µs longer to call.
_library: Any = torch.library.Library("flopwatch", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Operations live as long as this does."""
_OPTIONS = (
    "float? scale=None, int? window=None, float? softcap=None, Tensor? document_ends=None, bool bottom_right=False"
)
_library.define(
    "flash_attention(Tensor q, Tensor k, Tensor v, bool is_causal, bool tf32, bool only_hopper=False, "
    f"{_OPTIONS}) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "flash_attention_backward(Tensor out_gradient, Tensor? logsumexp_gradient, Tensor q, Tensor k, Tensor v, "
    f"Tensor out, Tensor logsumexp, bool is_causal, bool tf32, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("flash_attention", _forward, "CompositeExplicitAutograd")
_library.impl("flash_attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("flopwatch::flash_attention", _allocate, lib=_library)
torch.library.register_fake(
    "flopwatch::flash_attention_backward",
    lambda _out_gradient, _logsumexp_gradient, q, k, v, *_: tuple(map(empty_like, (q, k, v))),
    lib=_library,
)
_forward_operation = torch.ops.flopwatch.flash_attention.default
_backward_operation = torch.ops.flopwatch.flash_attention_backward.default
register(_forward_operation, *NAMES, _differentiate, _save)
register(_backward_operation, *NAMES)
native.begin(differentiate)


hopper_implementation = Implementation(
    "hopper", functools.partial(flash_attention, only_hopper=True), {"cuda": frozenset({"bfloat16", "float16"})},
    features=FEATURES - {"softcap"},
)  # fmt: skip
implementation = Implementation(
    "triton", flash_attention, {"cuda": frozenset({"float32", "bfloat16", "float16"})}, features=FEATURES
)
