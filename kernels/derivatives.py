"""Derivatives that a kernel does not have: an error in place of the zeros that torch would compute.

torch takes an operation of `torch.library` for a constant in forward mode (`torch.func.jvp`, `jacfwd`, `hessian`,
`torch.autograd.forward_ad`), and what an autograd function computes of saved tensors for a constant in a second
backward pass. `register` gives an operation its backward pass, and lets it refuse the rest; `refuse` does so in
functions that are no operation.
"""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn
from warnings import catch_warnings

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad

_library: Any = torch.library.Library("flopwatch", "IMPL")  # type: ignore[no-untyped-call]
"""Registrations live as long as this does."""


class NoDerivative(RuntimeError):
    """An operation has no such derivative; the message names what has it."""

    def __init__(self, name: str, kind: str, instead: str) -> None:
        super().__init__(f"{name} has no {kind}; {instead} has")


def register(
    operation: Any,
    name: str,
    instead: str,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    *,
    missing: str = "second derivative",
) -> None:
    """Register the backward pass of an operation, which then refuses all other derivatives.

    Args:
        operation: What `torch.library.custom_op` returns, or an overload in `torch.ops`.
        name: What users call it.
        instead: What has every derivative, for messages.
        backward: As of `torch.library.register_autograd`; None: there is none.
        setup_context: As there.
        missing: What has no `backward`.
    """

    def refuse_backward(_ctx: Any, *_gradients: Any) -> NoReturn:
        raise NoDerivative(name, missing, instead)

    overload = getattr(operation, "_opoverload", operation)
    usual = make_autograd_impl(overload, Info(backward or refuse_backward, setup_context))

    def differentiate(keys: Any, *inputs: Any) -> Any:
        if is_transformed():
            refuse(name, instead, inputs)
        return usual(keys, *inputs)

    with catch_warnings(action="ignore"):  # custom_op has registered a function of its own
        _library.impl(
            overload.name().partition("::")[2], differentiate, "Autograd", with_keyset=True, allow_override=True
        )


def is_transformed() -> bool:
    """Return True in forward mode and in transforms of torch.func. It takes 0.2 µs."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def is_batched(gradient: Tensor) -> bool:
    """Return True for the gradient of a backward pass with `is_grads_batched`, which has no memory of its own."""
    return not torch.compiler.is_compiling() and bool(torch._C._functorch.is_legacy_batchedtensor(gradient))


def refuse(name: str, instead: str, inputs: Iterable[Any], *, vmap: bool = True) -> None:
    """Refuse inputs with a tangent, those that torch.func differentiates and, without `vmap`, those that it batches.
    Raises NoDerivative: one is of these."""
    for tensor in inputs:
        if not isinstance(tensor, Tensor):
            continue
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        if is_wrapped and not vmap:
            raise NoDerivative(name, "form for torch.func (vmap, grad, jvp and what is made of them)", instead)
        if forward_ad._current_level >= 0 and _tangent(tensor) is not None:
            raise NoDerivative(name, "derivative in forward mode (jvp, jacfwd, hessian)", instead)
        if is_wrapped and tensor.requires_grad and torch.is_grad_enabled():
            raise NoDerivative(name, "gradient through torch.func (only through torch.autograd)", instead)


def _tangent(tensor: Tensor) -> Tensor | None:
    tangent: Tensor | None = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    return tangent


@torch.library.custom_op("flopwatch::linked", mutates_args=())
def linked(tensor: Tensor, source: Tensor) -> Tensor:
    """Return a copy of a tensor that a compiled backward pass computes from results of the forward pass alone.

    torch.compile takes such results for constants in a second backward pass, and refuses one only if the first has read
    an input of the graph that requires a gradient, such as `source`.
    """
    return tensor.clone()


@linked.register_fake
def _(tensor: Tensor, _source: Tensor) -> Tensor:
    return torch.empty_like(tensor)
