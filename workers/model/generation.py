"""Generation: key-value cache, sampling, and the loop over new tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


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


class CachedModel(Protocol):
    """The methods that generation needs of a model."""

    context_length: int

    def __call__(self, token_ids: Tensor, cache: KeyValueCache | None = None, last_only: bool = False) -> Tensor: ...

    def new_cache(self, batch_size: int, max_length: int) -> KeyValueCache: ...


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one token per row.

    Args:
        logits: (batch, vocabulary).
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Draw among the k most likely tokens only.
        top_p: Draw among the fewest most likely tokens only that have this probability together (Holtzman et al., "The
            Curious Case of Neural Text Degeneration", 2020, section 3.1); with `top_k`, of those.

    Returns:
        Token ids (batch, 1).
    """
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(f"temperature must be at least 0 and top_k at least 1, not {temperature} and {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be at least some probability, and 1 at most, not {top_p}")
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float() / temperature
    few = logits.shape[-1] if top_k is None else min(top_k, logits.shape[-1])
    if few == logits.shape[-1] and top_p is None:
        return torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator)
    likeliest, token_ids = logits.topk(few, dim=-1)
    probabilities = torch.softmax(likeliest, dim=-1)
    if top_p is not None:
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    return token_ids.gather(-1, torch.multinomial(probabilities, 1, generator=generator))


def filled_up(drawn: Tensor, before: Tensor | None, end_token_id: int | None) -> Tensor:
    """Return the drawn tokens, (batch, 1), and the end token in rows that have drawn it `before`.

    Args:
        drawn: Token ids.
        before: What was drawn before them; None at first: a prompt's tokens end nothing.
        end_token_id: None: nothing ends a row.
    """
    if before is None or end_token_id is None:
        return drawn
    return drawn.masked_fill(before == end_token_id, end_token_id)


def number_made(token_ids: Tensor, end_token_id: int) -> Tensor:
    """Return how many of the new tokens (batch, new) were made: of each row those up to the end token."""
    is_end = (token_ids == end_token_id).long()
    return (is_end.cumsum(dim=-1) == is_end).sum()


@torch.no_grad()
def generate(
    model: CachedModel,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    end_token_id: int | None = None,
    use_cache: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue each row of `prompt`.

    Args:
        prompt: (batch, prompt length) or (prompt length,), at least one token.
        max_new_tokens: Tokens to add.
        temperature, top_k, top_p, generator: See `sample`.
        end_token_id: A row that has drawn it is filled up with it; generation ends early when all rows have drawn it.
        use_cache: Keep keys and values; without it, every step runs the whole sequence again.

    Returns:
        Prompt and continuation, (batch, prompt length + new tokens), or without the batch axis as `prompt`.

    Raises:
        ValueError: the prompt is empty, or prompt and new tokens exceed the model's context length.
    """
    if prompt.dim() == 1:
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "generator": generator}
        return generate(
            model,
            prompt.unsqueeze(0),
            max_new_tokens,
            end_token_id=end_token_id,
            use_cache=use_cache,
            **options,  # type: ignore[arg-type]
        ).squeeze(0)
    batch_size, length = prompt.shape
    if length == 0:
        raise ValueError("the prompt is empty")
    if length + max_new_tokens > model.context_length:
        raise ValueError(f"{length} + {max_new_tokens} tokens exceed the context length ({model.context_length})")
    cache = model.new_cache(batch_size, length + max_new_tokens) if use_cache else None
    tokens = new = prompt
    made = None
    for _ in range(max_new_tokens):
        logits = model(tokens if cache is None else new, cache=cache, last_only=True)[:, -1]
        drawn = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        made = new = filled_up(drawn, made, end_token_id)
        tokens = torch.cat((tokens, new), dim=-1)
        if end_token_id is not None and bool((new == end_token_id).all()):
            break
    return tokens
