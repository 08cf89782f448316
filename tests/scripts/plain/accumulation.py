"""Fit a regression with a loader of our own, and gradients accumulated over micro-batches."""

import torch
from torch import nn


class Shards:
    """Endless micro-batches from shards that are read one after the other."""

    def __init__(self, shards, micro_batch_size, device):
        self.shards, self.micro_batch_size, self.device = shards, micro_batch_size, device

    def read(self, number):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(256, 32, generator=generator)
        return x, x.sin().sum(1, keepdim=True)

    def __iter__(self):
        while True:
            for number in range(self.shards):
                x, y = self.read(number)
                for begin in range(0, len(x), self.micro_batch_size):
                    rows = slice(begin, begin + self.micro_batch_size)
                    yield x[rows].to(self.device), y[rows].to(self.device)


class Trainer:
    def __init__(self, device, micro_batch_size=32, accumulate=4):
        self.model = nn.Sequential(nn.Linear(32, 128), nn.LayerNorm(128), nn.SiLU(), nn.Linear(128, 1)).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-4)
        self.batches = iter(Shards(4, micro_batch_size, device))
        self.accumulate = accumulate

    def step(self):
        for _ in range(self.accumulate):
            x, y = next(self.batches)
            loss = nn.functional.mse_loss(self.model(x), y) / self.accumulate
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


if __name__ == "__main__":
    trainer = Trainer("cuda" if torch.cuda.is_available() else "cpu")
    for step in range(5):
        loss = trainer.step()
    print(f"loss {loss:.4f}")
