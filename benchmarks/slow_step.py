"""A training step with seven planted slownesses, which the table `lines` of a profile names.

    flopwatch submit profile --step benchmarks/slow_step.py:make_step --wait

They are: an optimizer that updates six numbers at a time, an activation of many operators, norms that wait for each
row, a mask written by Python, a tokenizer in each step, needless copies, and a loss without reduction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import flopwatch

TEXT = "the quick brown fox jumps over the lazy dog and runs away from the bear " * 120
ROW = 6


def encode(text: str, vocabulary: dict[str, int]) -> list[int]:
    """Return the numbers of words."""
    return [vocabulary.setdefault(word, len(vocabulary)) for word in re.findall(r"\w+|\W", text)]


class SlowGELU(nn.Module):
    """The activation, of shape (…), by many operators."""

    def forward(self, x: Tensor) -> Tensor:
        cube = x * x * x
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * cube)
        return 0.5 * x * (1 + torch.tanh(inner))


class SlowAdam(torch.optim.Optimizer):
    """Adam without corrections of the bias, for a few numbers at a time."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                flat, gradient = parameter.view(-1), parameter.grad.view(-1)
                m, v = state["m"].view(-1), state["v"].view(-1)
                for i in range(0, flat.numel(), ROW):
                    g = gradient[i : i + ROW]
                    m[i : i + ROW] = 0.9 * m[i : i + ROW] + 0.1 * g
                    v[i : i + ROW] = 0.99 * v[i : i + ROW] + 0.01 * g * g
                    flat[i : i + ROW] -= group["lr"] * m[i : i + ROW] / (v[i : i + ROW].sqrt() + 1e-8)


def norms_of(model: nn.Module) -> list[float]:
    """Return the sum of the norms of the rows of each parameter."""
    return [sum(row.norm().item() for row in p.reshape(p.shape[0], -1)) for p in model.parameters()]


def mask_of(length: int) -> Tensor:
    """Return a causal mask, of shape (length, length)."""
    return torch.tensor([[1.0 if j <= i else 0.0 for j in range(length)] for i in range(length)])


def make_step(device: torch.device) -> Callable[[], None]:
    """Return the step of a small model."""
    vocabulary: dict[str, int] = {}
    model = nn.Sequential(
        nn.Embedding(256, 64), nn.Linear(64, 256), SlowGELU(), nn.Linear(256, 64), nn.Linear(64, 256)
    ).to(device)
    optimizer = SlowAdam(model.parameters(), {"lr": 1e-3})

    def step() -> None:
        with flopwatch.phase("data"):
            ids = (torch.tensor(encode(TEXT, vocabulary)[:1024]) % 256).to(device)
            mask = mask_of(128).to(device)
        with flopwatch.phase("forward"):
            logits = model(ids)
            losses = nn.functional.cross_entropy(logits, ids, reduction="none").view(8, 128)
            loss = (losses * mask[-1]).mean()
        with flopwatch.phase("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        with flopwatch.phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        norms_of(model)
        for parameter in model.parameters():
            [parameter.detach().clone() for _ in range(20)]

    return step
