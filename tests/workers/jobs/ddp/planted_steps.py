"""Steps of several ranks, of which rank 1, or each rank in turn, is late while the profiler watches. The ranks of
test_ddp.py get this file as uploaded code."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import flopwatch

LATE_S = 0.1
TOKENS, MORE_TOKENS = 64, 16384


class Documents(Dataset):
    def __init__(self, tokens, seconds):
        self.tokens, self.seconds = tokens, seconds

    def __len__(self):
        return 1000

    def __getitem__(self, _index):
        if torch.autograd.profiler._is_profiler_enabled:
            time.sleep(self.seconds)
        return torch.randn(self.tokens, 128)


def make_step(device, late):
    model, rank, count = nn.Linear(128, 128), dist.get_rank(), 0
    tokens = MORE_TOKENS if late == "documents" and rank else TOKENS
    batches = iter(DataLoader(Documents(tokens, LATE_S if late == "input" and rank else 0.0)))

    def step():
        nonlocal count
        count += 1
        watched = torch.autograd.profiler._is_profiler_enabled
        with flopwatch.phase("data"):
            x = next(batches)
        with flopwatch.phase("forward"):
            if watched and ((late == "host" and rank) or (late == "in turns" and count % 2 == rank)):
                time.sleep(LATE_S)
            for _ in range(8):
                loss = model(x).square().mean()
        with flopwatch.phase("backward"):
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            model.zero_grad()
        flopwatch.work(tokens=tokens)

    return step
