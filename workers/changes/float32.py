"""float32 where the code asks for float64."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from workers.changes._base import Change, Look, all_replaced, own_only

OF_TENSORS = ("to", "type", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty", "softmax", "log_softmax",
              "sum", "mean", "prod", "cumsum")  # fmt: skip
OF_TORCH = ("zeros", "ones", "full", "empty", "tensor", "as_tensor", "arange", "linspace", "eye", "rand", "randn",
            "from_numpy", "zeros_like", "ones_like", "full_like", "empty_like", "softmax", "log_softmax", "sum", "mean",
            "prod", "cumsum", "set_default_dtype")  # fmt: skip
"""Functions that are told a data type."""


def _why_not(look: Look) -> str | None:
    return own_only(look) or (None if look.doubles else "none of its operators computes in float64")


def _single(_device: torch.device) -> AbstractContextManager[None]:
    of = {torch.float64: torch.float32, float: torch.float32, "torch.DoubleTensor": "torch.FloatTensor"}
    of_numpy = (torch.from_numpy, torch.tensor, torch.as_tensor)  # whose type the array has

    def single(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            kept = [of.get(one, one) if isinstance(one, torch.dtype | str | type) else one for one in arguments]
            if options.get("dtype") in (torch.float64, float):
                options["dtype"] = torch.float32
            made = plain(*kept, **options)
            is_arrays = plain in of_numpy and made.dtype is torch.float64 and not made.requires_grad
            return made.float() if is_arrays else made

        return (lambda tensor, **options: tensor.float(**options)) if plain is torch.Tensor.double else call

    places = [(torch.Tensor, name) for name in ("double", *OF_TENSORS)] + [(torch, name) for name in OF_TORCH]
    return all_replaced(single, *places)


CHANGE = Change(
    causes=("precision",),
    how=".float() in place of .double(), torch.float32 in place of torch.float64",
    why_not=_why_not,
    before=_single,
)
