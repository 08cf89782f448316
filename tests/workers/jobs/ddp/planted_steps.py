"""Steps of several ranks, of which rank 1 is late while the profiler watches: however busy the host is, it comes
`LATE_S` after the other one. The ranks of test_ddp.py get this file as uploaded code."""

import itertools
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import flopwatch

LATE_S = 0.1
TOKENS, MORE = 64, 4
WIDTH = 128


def told(rank: int, more: int = 0) -> int:
    """How often a rank has told that it is about to communicate."""
    return dist.distributed_c10d._get_default_store().add(f"told by rank {rank}", more)


def come_after_the_other() -> None:
    """Wait until the other rank has told so in this step, and a while more."""
    rank = dist.get_rank()
    while told(1 - rank) == told(rank):
        time.sleep(0.001)
    time.sleep(LATE_S)


@torch.library.custom_op("planted::read", mutates_args=())
def read(x: torch.Tensor) -> torch.Tensor:
    come_after_the_other()
    return x.clone()


class Documents(Dataset):
    def __init__(self, load):
        self.load = load

    def __len__(self):
        return 1000

    def __getitem__(self, _index):
        self.load()
        return 0


def make_step(device, late):
    rank = dist.get_rank()
    model = nn.Linear(WIDTH, WIDTH, device=device)
    if late == "groups":
        dist.new_group()
    tokens = TOKENS * (MORE if late == "documents" and rank else 1)

    def is_late(how):
        return torch.autograd.profiler._is_profiler_enabled and late == how and rank == 1

    batches = iter(DataLoader(Documents(lambda: come_after_the_other() if is_late("input") else None)))

    def step():
        with flopwatch.phase("data"):
            next(batches)
        with flopwatch.phase("forward"):
            if is_late("host"):
                come_after_the_other()
            x = torch.randn(TOKENS, WIDTH, device=device)
            if is_late("documents"):
                x = read(x)
            for _ in range(8):
                loss = model(x).square().mean()
        with flopwatch.phase("backward"):
            loss.backward()
            if late != "groups":  # where nobody is to be late
                told(rank, 1)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            model.zero_grad()
        flopwatch.work(tokens=tokens)

    return step


class Lookahead(torch.optim.Optimizer):
    """It has the state of the optimizer that it wraps, and in this a tensor of its own."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.state, self.step = inner.state, inner.step
        self.state["slow"] = torch.zeros(4)


def make_uneven_step(device):
    """Every third step takes eight times as long, for as many tokens; nothing holds the parameters but optimizers."""
    weights = [torch.randn(8, 4, requires_grad=True), torch.randn(4, requires_grad=True)]
    optimizers, calls = [Lookahead(torch.optim.AdamW([weight])) for weight in weights], itertools.count()

    def step():
        (torch.randn(2, 8) @ weights[0] * weights[1]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with flopwatch.phase("communication"):
            time.sleep(2e-3)
        if heavy := next(calls) % 3 == 2:
            with flopwatch.phase("heavy"):
                time.sleep(35e-3)
        time.sleep(5e-3)
        flopwatch.work(tokens=8 if heavy else 1)

    return step


def make_apart_step(device):
    torch.manual_seed(dist.get_rank())
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2, device=device), init_sync=False)
    return lambda: model(torch.ones(1, 2, device=device)).sum().backward()


class Float32(torch.nn.Module):
    """A model that computes outside of autocast."""

    def __init__(self, vocab_size, context_length, d_model, num_layers, num_heads, d_ff, *, attention):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, d_model)
        self.head = torch.nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, tokens):
        with torch.autocast("cpu", enabled=False):
            return self.head(self.embedding(tokens))
