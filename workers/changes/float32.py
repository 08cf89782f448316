"""float32 where the code asks for float64."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from workers.changes._base import Change, Look, all_replaced, own_only, replaced, used

OF_TENSORS = ("to", "type", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty", "softmax", "log_softmax",
              "sum", "mean", "prod", "cumsum")  # fmt: skip
OF_TORCH = ("zeros", "ones", "full", "empty", "tensor", "as_tensor", "arange", "linspace", "eye", "rand", "randn",
            "from_numpy", "zeros_like", "ones_like", "full_like", "empty_like", "softmax", "log_softmax", "sum", "mean",
            "prod", "cumsum", "set_default_dtype")  # fmt: skip
"""Functions that are told a data type."""


def _why_not(look: Look) -> str | None:
    return own_only(look) or (None if look.doubles else "none of its operators computes in float64")


@contextmanager
def _single(_device: torch.device) -> Iterator[None]:
    of = {torch.float64: torch.float32, float: torch.float32, "torch.DoubleTensor": "torch.FloatTensor"}
    of_numpy = (torch.from_numpy, torch.tensor, torch.as_tensor)  # whose type the array has

    def halved(one: Any) -> Any:
        if not isinstance(one, torch.dtype | str | type) or one not in of:
            return one
        called()
        return of[one]

    def single(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if "dtype" in options:
                options["dtype"] = halved(options["dtype"])
            made = plain(*map(halved, arguments), **options)
            if plain not in of_numpy or made.dtype is not torch.float64 or made.requires_grad:
                return made
            called()
            return made.float()

        return call

    def floats(tensor: Any, **options: Any) -> Any:
        called()
        return tensor.float(**options)

    places = [(torch.Tensor, name) for name in OF_TENSORS] + [(torch, name) for name in OF_TORCH]
    instead = all_replaced(single, *places), replaced(torch.Tensor, "double", floats)
    with used("its float64 is asked for in other ways") as called, instead[0], instead[1]:
        os.register_at_fork(after_in_parent=called)  # what a loader's worker processes ask for is not seen here
        yield


CHANGE = Change(
    causes=("precision",),
    how=".float() in place of .double(), torch.float32 in place of torch.float64",
    why_not=_why_not,
    before=_single,
)
