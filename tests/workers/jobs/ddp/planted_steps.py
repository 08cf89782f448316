"""Steps of several ranks, of which rank 1, or each rank in turn, is late while the profiler watches. The ranks of
test_ddp.py get this file as uploaded code."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import flopwatch

LATE_S = 0.1
TOKENS, MORE = 64, 4
WIDTH = 128


class Documents(Dataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 1000

    def __getitem__(self, _index):
        if torch.autograd.profiler._is_profiler_enabled:
            time.sleep(self.seconds)
        return 0


@torch.library.custom_op("planted::read", mutates_args=())
def read(x: torch.Tensor, seconds: float) -> torch.Tensor:
    """Takes as long on a busy host as on a quiet one, as a product of matrices does not."""
    time.sleep(seconds)
    return x.clone()


def make_step(device, late):
    rank, count = dist.get_rank(), 0
    model = nn.Linear(WIDTH, WIDTH, device=device)
    if late == "groups":
        dist.new_group()
    tokens = TOKENS * (MORE if late == "documents" and rank else 1)
    batches = iter(DataLoader(Documents(LATE_S if late == "input" and rank else 0.0)))

    def step():
        nonlocal count
        count += 1
        watched = torch.autograd.profiler._is_profiler_enabled
        with flopwatch.phase("data"):
            next(batches)
        with flopwatch.phase("forward"):
            if watched and ((late == "host" and rank) or (late == "in turns" and count % 2 == rank)):
                time.sleep(LATE_S)
            x = torch.randn(TOKENS, WIDTH, device=device)
            if watched and late == "documents" and rank:
                x = read(x, LATE_S)
            for _ in range(8):
                loss = model(x).square().mean()
        with flopwatch.phase("backward"):
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            model.zero_grad()
        flopwatch.work(tokens=tokens)

    return step
