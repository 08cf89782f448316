"""Batches of tokens: random ones, since the time of a dense model's step does not depend on them, or text that a
model can learn."""

import math
from collections import Counter
from typing import Protocol

import torch
from torch import Tensor


class Batches(Protocol):
    """An endless supply of batches on one device."""

    @property
    def device(self) -> torch.device: ...

    def next(self) -> tuple[Tensor, Tensor]: ...


class RandomBatches:
    """Uniformly random token batches, made on the device; equal for equal seeds on one kind of device."""

    def __init__(self, vocab_size: int, batch_size: int, context_length: int, device: torch.device, seed: int) -> None:
        self.vocab_size = vocab_size
        self.shape = (batch_size, context_length + 1)
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each (batch_size, context_length) int64; targets are the inputs moved on by one
        token."""
        tokens = torch.randint(self.vocab_size, self.shape, device=self.device, generator=self.generator)
        return tokens[:, :-1], tokens[:, 1:]


class ChainBatches:
    """Text that a model can learn: a Markov chain over at most 256 letters, each of which is followed by one of four,
    with probabilities 1/2, 1/4, 1/8 and 1/8. Its entropy is 1.213 nats (with fewer than 4 letters less), the least
    loss that a model can expect, and that of guessing one of 256 letters is 5.5. Equal seeds give equal batches
    on every device.

    Args:
        vocab_size: Tokens of the model; letters are the first ones.
        batch_size, context_length: Shape of a batch.
        seed: Of the chain and the draws.
    """

    LETTERS = 256
    _DRAWS = (0, 0, 0, 0, 1, 1, 2, 3)
    """The follower that each of eight equally likely draws chooses."""

    def __init__(self, vocab_size: int, batch_size: int, context_length: int, device: torch.device, seed: int) -> None:
        self.device = device
        self.shape = (batch_size, context_length + 1)
        self.generator = torch.Generator().manual_seed(seed)
        self.letters = min(vocab_size, self.LETTERS)
        distinct = torch.rand(self.letters, self.letters, generator=self.generator).argsort()
        self.followers = distinct[:, [one % self.letters for one in self._DRAWS]]

    @classmethod
    def entropy(cls, vocab_size: int) -> float:
        """Return the entropy of a letter, in nats, where the letters before it are known."""
        counts = Counter(one % min(vocab_size, cls.LETTERS) for one in cls._DRAWS).values()
        return -sum(count / len(cls._DRAWS) * math.log(count / len(cls._DRAWS)) for count in counts)

    def next(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each (batch_size, context_length) int64."""
        sequences, length = self.shape
        text = torch.empty(self.shape, dtype=torch.int64)
        letter = torch.randint(self.letters, (sequences,), generator=self.generator)
        for position in range(length):
            text[:, position] = letter
            letter = self.followers[letter, torch.randint(8, (sequences,), generator=self.generator)]
        tokens = text.to(self.device)
        return tokens[:, :-1], tokens[:, 1:]
