"""Attention by our Triton kernels, where they take the problem."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from kernels.attention import flash_attention
from workers.changes._attention import why_not
from workers.changes._base import Change, replaced, used


@contextmanager
def _ours(_device: torch.device) -> Iterator[None]:
    plain = functional.scaled_dot_product_attention

    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        heads = query.shape[1:2] == key.shape[1:2] or enable_gqa
        if attn_mask is None and not dropout_p and query.is_cuda and heads:
            try:
                attended = flash_attention(query, key, value, is_causal, scale=scale)
            except ValueError:  # not taken
                pass
            else:
                called()
                return attended
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    instead = replaced(functional, "scaled_dot_product_attention", attend)
    with used("our kernels take none of its calls, as with a mask or dropout") as called, instead:
        yield


CHANGE = Change(
    causes=("attention",),
    how="flopwatch.kernels.flash_attention(q, k, v, is_causal=…) for scaled_dot_product_attention",
    why_not=why_not,
    before=_ours,
    slow=True,
)
