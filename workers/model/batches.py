"""Batches of tokens: random ones, since the time of a dense model's step does not depend on them, or one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Batches(Protocol):
    """An endless supply of batches on one device."""

    @property
    def device(self) -> torch.device: ...

    def next(self) -> tuple[Tensor, Tensor]:
        """Return the next inputs and targets."""
        ...


class FixedPrompt:
    """The same prompt for each sequence and in each batch.

    Args:
        token_ids: Those of the prompt.
        batch_size: Sequences.
        device: Where batches are.
    """

    def __init__(self, token_ids: Sequence[int], batch_size: int, device: torch.device) -> None:
        self.device = device
        self.prompt = torch.tensor([list(token_ids)] * batch_size, device=device)

    def next(self) -> tuple[Tensor, Tensor]:
        """Return the prompts, (batch_size, tokens) int64, twice: they have no targets."""
        return self.prompt, self.prompt


class RandomBatches:
    """Uniformly random token batches, made on the device; equal for equal seeds on one kind of device."""

    def __init__(self, vocab_size: int, batch_size: int, context_length: int, device: torch.device, seed: int) -> None:
        self.vocab_size = vocab_size
        self.shape = (batch_size, context_length + 1)
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each (batch_size, context_length) int64; targets are the inputs moved on by one
        token.
        """
        tokens = torch.randint(self.vocab_size, self.shape, device=self.device, generator=self.generator)
        return tokens[:, :-1], tokens[:, 1:]
