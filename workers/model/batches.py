"""Random batches: the time of a dense model's step does not depend on the tokens."""

from __future__ import annotations

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
