"""The one rule of who sees whom, as tensors: each query sees consecutive keys, from `first` to before `end`.

Both grow with the query. The Triton kernels compute the same numbers in registers (`triton.visible`).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .problem import band_of, may_see_nothing


class VisibleKeys(NamedTuple):
    """The keys that each query sees."""

    first: Tensor | None
    """(queries,) int64; None: 0."""
    end: Tensor | None
    """(queries,) int64; None: the number of keys."""
    may_be_none: bool
    """True if some queries see no key: their output is 0, and their log-sum-exp −∞."""

    def hidden(self, keys: slice, queries: slice | None = None) -> Tensor | None:
        """Return a mask (queries, keys), true where a query does not see a key; None if it sees all."""
        # Dynamo of torch 2.11 knows no default argument that is a slice.
        hidden = None
        for bounds, is_first in ((self.first, True), (self.end, False)):
            if bounds is not None:
                columns = torch.arange(keys.start, keys.stop, device=bounds.device)
                rows = (bounds if queries is None else bounds[queries]).unsqueeze(-1)
                outside = columns < rows if is_first else columns >= rows
                hidden = outside if hidden is None else hidden | outside
        return hidden


def visible_keys(
    queries: int, keys: int, device: torch.device, is_causal: bool, *,
    window: int | None = None, bottom_right: bool = False, document_ends: Tensor | None = None,
) -> VisibleKeys:  # fmt: skip
    """Return which keys the queries see; the arguments are those of `kernels.flash_attention`. Raises ValueError:
    `document_ends` do not fit."""
    band = band_of(queries, keys, is_causal, window=window, bottom_right=bottom_right)
    rows = torch.arange(queries, device=device)
    first = None if band.lower is None else (rows + band.lower).clamp(min=0)
    end = None if band.upper is None else (rows + (band.upper + 1)).clamp(0, keys)
    if document_ends is not None:
        check_documents(queries, keys, device, document_ends)
        numbers = documents_of(document_ends, keys)
        starts = torch.searchsorted(numbers, numbers)
        stops = torch.searchsorted(numbers, numbers, right=True)
        first = starts if first is None else torch.maximum(first, starts)
        end = stops if end is None else torch.minimum(end, stops)
    return VisibleKeys(first, end, may_see_nothing(queries, keys, band))


def check_documents(queries: int, keys: int, device: torch.device, document_ends: Tensor) -> None:
    """Check `document_ends`; their values only on a CPU, since reading them would wait for a GPU. Raises ValueError:
    they do not fit the queries and keys; TypeError: they are no tensor."""
    _refuse_lists(document_ends)
    if document_ends.dim() != 1 or document_ends.dtype != torch.int32 or document_ends.device != device:
        raise ValueError(
            f"document_ends must be int32 with one axis on {device}, not {document_ends.dtype} with "
            f"{document_ends.dim()} on {document_ends.device}"
        )
    if document_ends.device.type == "cpu" and not torch.compiler.is_compiling() and not is_in_torch_dispatch_mode():
        ends = document_ends.tolist()
        if ends != sorted(ends) or min(ends, default=0) < 0 or max(ends, default=0) > keys:
            raise ValueError(f"document_ends must grow from 0 to at most {keys} tokens, not {ends}")
    if queries != keys:
        raise ValueError(f"packed documents have as many queries as keys, not {queries} and {keys}")


def version_of(document_ends: Tensor | None) -> object:
    """Return what differs if the ends have changed, for caches of what is made of them. Tensors made under
    `torch.inference_mode` have no version: they always count as changed."""
    if document_ends is None:
        return None
    _refuse_lists(document_ends)
    try:
        return document_ends._version
    except RuntimeError:
        return object()


def _refuse_lists(document_ends: object) -> None:
    if not isinstance(document_ends, Tensor):
        raise TypeError(f"document_ends must be a tensor of int32, not {type(document_ends).__name__}")


def documents_of(document_ends: Tensor, tokens: int) -> Tensor:
    """Return the number of each token's document, (tokens,). Tokens behind the last end are one more document."""
    return torch.searchsorted(document_ends, torch.arange(tokens, device=document_ends.device), right=True)
