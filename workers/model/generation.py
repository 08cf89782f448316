"""Generation: key-value cache, sampling, and the loop over new tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from workers.model.transformer import TransformerLM


class KeyValueCache:
    """Keys and values of every layer for the tokens seen so far: two (layers, batch, key heads, max_length,
    head_dim)."""

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.keys = torch.empty(num_layers, batch_size, num_kv_heads, max_length, head_dim, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self.length = 0
        """Number of tokens in the cache; the model advances it after the last layer."""

    def layer(self, index: int) -> LayerCache:
        """Return one layer's part of the cache, at the present length."""
        return LayerCache(self.keys[index], self.values[index], self.length)


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values, (batch, key heads, max_length, head_dim), of which `length` tokens are filled.

    All layers' caches are alike, so that one compiled block serves every layer.
    """

    keys: Tensor
    values: Tensor
    length: int

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values (batch, key heads, new, head_dim); return all up to them."""
        end = self.length + k.shape[-2]
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        return self.keys[:, :, :end], self.values[:, :, :end]


def sample(
    logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Draw one token per row.

    Args:
        logits: (batch, vocabulary).
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Draw among the k most likely tokens only.

    Returns:
        Token ids (batch, 1).
    """
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(f"temperature must be at least 0 and top_k at least 1, not {temperature} and {top_k}")
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is None or top_k >= logits.shape[-1]:
        return torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator)
    likeliest, token_ids = logits.topk(top_k, dim=-1)
    return token_ids.gather(-1, torch.multinomial(torch.softmax(likeliest, dim=-1), 1, generator=generator))


@torch.no_grad()
def generate(
    model: TransformerLM,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    use_cache: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue each row of `prompt`. Raises ValueError: the prompt is empty, or prompt and new tokens exceed the
    model's context length.

    Args:
        prompt: (batch, prompt length) or (prompt length,), at least one token.
        max_new_tokens: Tokens to add.
        temperature, top_k, generator: See `sample`.
        use_cache: Keep keys and values; without it, every step runs the whole sequence again.

    Returns:
        Prompt and continuation, (batch, prompt length + new tokens), or without the batch axis as `prompt`.
    """
    if prompt.dim() == 1:
        rows = generate(
            *(model, prompt.unsqueeze(0), max_new_tokens),
            temperature=temperature, top_k=top_k, use_cache=use_cache, generator=generator,
        )  # fmt: skip
        return rows.squeeze(0)
    batch_size, length = prompt.shape
    if length == 0:
        raise ValueError("the prompt is empty")
    if length + max_new_tokens > model.context_length:
        raise ValueError(f"{length} + {max_new_tokens} tokens exceed the context length ({model.context_length})")
    cache = model.new_cache(batch_size, length + max_new_tokens) if use_cache else None
    tokens = new = prompt
    for _ in range(max_new_tokens):
        logits = model(tokens if cache is None else new, cache=cache, last_only=True)[:, -1]
        new = sample(logits, temperature=temperature, top_k=top_k, generator=generator)
        tokens = torch.cat((tokens, new), dim=-1)
    return tokens
