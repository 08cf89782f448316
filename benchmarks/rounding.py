"""How far rounding drives two training runs apart, and whether a comparison still tells them from a step that stops.

    python -m benchmarks.rounding [--seeds N --first SEED]

An honest pair differs by rounding alone: one of them sees each batch in reverse order. A cheat is the first run that
returns its last loss again from some step on (`stops`), or makes every second step only (`lags`). Each pair is judged
as a comparison judges it (app/results/agreement.py). CPU, one thread, float32; about a minute for each seed.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from app.results.agreement import Returned, compare
from workers.measure.returned import ROUND, STEPS

WIDTH, WORDS, BATCH = 64, 100, 8
MODELS = ("mlp", "transformer")
OPTIMIZERS = (("adamw", 1e-3), ("adamw", 1e-2), ("sgd", 0.1), ("sgd", 1.0))
NUMBER_OF_STEPS = 300
CHEATS_FROM = (7, 50, 150)
EXPECTED = 1e-4
"""`--expect-equal` of the judgement."""


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
        self.embedding, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(128, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.layers(self.embedding(words)))
        return logits


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True)
        self.embedding, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.layer(self.embedding(words)))
        return logits


def losses(model: str, optimizer: str, rate: float, seed: int, *, is_reversed: bool, is_fresh: bool) -> list[float]:
    """Return the loss of each step; `is_fresh`: batches are drawn anew."""
    torch.manual_seed(seed)
    trained = Mlp() if model == "mlp" else Transformer()
    step = (torch.optim.AdamW if optimizer == "adamw" else torch.optim.SGD)(trained.parameters(), lr=rate)
    words = torch.randint(0, WORDS, (BATCH, 33))
    found = []
    for _ in range(NUMBER_OF_STEPS):
        if is_fresh:
            words = torch.randint(0, WORDS, (BATCH, 33))
        batch = words.flip(0) if is_reversed else words
        loss = nn.functional.cross_entropy(trained(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        step.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        step.step()
        found.append(loss.item())
    return found


def agree(baseline: Sequence[float], candidate: Sequence[float]) -> bool:
    """Judge two runs as a comparison does, by the steps whose numbers jobs keep."""
    one, other = (
        Returned(
            {(None, 0, step, "loss"): [loss] for step, loss in enumerate(run, 1) if step <= STEPS or step in ROUND},
            {},
            {(None, 0): len(run)},
        )
        for run in (baseline, candidate)
    )
    return compare(one, other).outcome(EXPECTED) == "passed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    agreed: Counter[str] = Counter()
    number: Counter[str] = Counter()
    furthest: dict[str, float] = {}
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        for model in MODELS:
            for optimizer, rate in OPTIMIZERS:
                for is_fresh in (False, True):
                    one, other = (
                        losses(model, optimizer, rate, seed, is_reversed=is_reversed, is_fresh=is_fresh)
                        for is_reversed in (False, True)
                    )
                    pairs = {"honest": [other], "stops": [], "lags": []}
                    for start in CHEATS_FROM:
                        later = range(start, NUMBER_OF_STEPS)
                        pairs["stops"].append(one[:start] + [one[start - 1]] * len(later))
                        pairs["lags"].append(one[:start] + [one[start + (step - start) // 2] for step in later])
                    for name, runs in pairs.items():
                        number[name] += len(runs)
                        agreed[name] += sum(agree(one, run) for run in runs)
                    name = f"{model}, {optimizer} {rate:g}"
                    apart = max(abs(a - b) / (max(one) - min(one)) for a, b in zip(one, other, strict=True))
                    furthest[name] = max(apart, furthest.get(name, 0.0))
    print(f"seeds {arguments.first} to {arguments.first + arguments.seeds - 1}, {NUMBER_OF_STEPS} steps")
    for name, count in number.items():
        print(f"{name}: {agreed[name]} of {count} agree")
    for name, apart in furthest.items():
        print(f"{name}: honest pairs differ by at most {100 * apart:.1g} % of the loss's range")


if __name__ == "__main__":
    main()
