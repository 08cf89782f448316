"""FlashAttention-2 with the roundings of tensor cores, in plain PyTorch: what honest kernels compute on a GPU."""

import math
from typing import Any

import torch
from torch import Tensor


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        logsumexp = scores.logsumexp(-1, keepdim=True)
        maximum = scores.amax(-1, keepdim=True)
        weights = (scores - maximum).exp()
        out = (weights.to(q.dtype).float() @ v.float() / weights.sum(-1, keepdim=True)).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, (scores - logsumexp).exp())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, weights = ctx.saved_tensors
        delta = (gradient.float() * out.float()).sum(-1, keepdim=True)
        of_scores = (weights * (gradient.float() @ v.float().mT - delta)).to(q.dtype).float() / math.sqrt(q.shape[-1])
        dv = weights.to(q.dtype).float().mT @ gradient.float()
        return (of_scores @ k.float()).to(q.dtype), (of_scores.mT @ q.float()).to(q.dtype), dv.to(q.dtype), None


def rounded_flash_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Return attention; q, k and v have one length."""
    return _Rounded.apply(q, k, v, is_causal)
