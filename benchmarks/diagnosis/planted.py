"""Steps with one planted slowness each: the lines to blame end with `# planted`. On a CPU they are smaller."""

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Step = Callable[[], Tensor]


class Block(nn.Module):
    """A residual block of two products."""

    def __init__(self, width: int, *, checked: bool = False) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.checked = checked

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.into(self.norm(x)))  # planted: forward
        if self.checked and hidden.abs().max() > 1e9:  # planted: graph_break
            raise OverflowError
        result: Tensor = x + self.out(hidden)  # planted: forward
        return result


class Training:
    """A model of such blocks, its optimizer, and a training step that an argument may widen."""

    def __init__(
        self, device: torch.device, blocks: int, width: int, rows: int, *, checked: bool = False, **options: Any
    ) -> None:
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        self.small = device.type == "cpu"
        if self.small:
            width, rows = min(width, 32), min(rows, 32)
        self.model = nn.Sequential(*(Block(width, checked=checked) for _ in range(blocks))).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **{"lr": 1e-4, "fused": True, **options})
        self.device, self.data = device, torch.randn(rows, width, device=device)

    def step(self, data: Tensor | None = None) -> Tensor:
        loss: Tensor = self.model(self.data if data is None else data).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()  # planted: optimizer
        self.optimizer.zero_grad()
        return loss


def item(device: torch.device) -> Step:
    """Four numbers of each gradient, to be logged."""
    training = Training(device, 8, 1536, 4096)

    def step() -> Tensor:
        loss = training.step()
        for one in training.model.parameters():
            [statistic(one).item() for statistic in (torch.min, torch.max, torch.mean, torch.std)]  # planted: item
        return loss

    return step


class Slow(Dataset[Tensor]):
    """Rows that take a time to make."""

    def __init__(self, row: Tensor, seconds: float) -> None:
        self.row, self.seconds = row, seconds

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        until = time.perf_counter() + self.seconds
        while time.perf_counter() < until:  # planted: loader
            pass  # planted: loader
        return self.row


def loader(device: torch.device) -> Step:
    """Batches that the loader makes in 1.3 times the time of the rest of the step."""
    training = Training(device, 12, 1024, 4096)
    for _ in range(10):
        begun = time.perf_counter()
        training.step().item()
        taken = time.perf_counter() - begun
    cpu = training.data.cpu()
    batches = _endless(DataLoader(Slow(cpu, 1.3 * taken), batch_size=None))

    def step() -> Tensor:
        return training.step(next(batches).to(device))

    return step


def _endless(batches: DataLoader[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from batches  # planted: loader


def tiny_kernels(device: torch.device) -> Step:
    """About 2000 kernels of a few microseconds."""
    training = Training(device, 86, 64, 64)
    return training.step


def printing(device: torch.device) -> Step:
    """A print of the numbers that the model returns."""
    training = Training(device, 12, 1024, 4096)

    def step() -> Tensor:
        loss = training.step()
        print(training.data, loss)  # planted: printing
        return loss

    return step


def pageable(device: torch.device) -> Step:
    """Batches of 64 MiB that are copied from memory that is not pinned."""
    training = Training(device, 4, 512, 32768)
    batches = itertools.cycle(torch.randn(4, *training.data.shape))

    def step() -> Tensor:
        return training.step(next(batches).to(device, non_blocking=True))  # planted: pageable

    return step


def optimizer(device: torch.device) -> Step:
    """An optimizer that loops over the parameters."""
    training = Training(device, 48, 256, 512, fused=False, foreach=False)
    return training.step


def fp32_products(device: torch.device) -> Step:
    """Products in float32 without TF32."""
    training = Training(device, 6, 2048, 4096)
    torch.set_float32_matmul_precision("highest")
    return training.step


def graph_break(device: torch.device) -> Step:
    """A compiled model with a test of a tensor's value in each block, on which the graph breaks."""
    training = Training(device, 12, 1024, 2048, checked=True)
    training.model.compile()
    return training.step


def collecting(device: torch.device) -> Step:
    """Garbage collection in every step, with many objects."""
    training = Training(device, 12, 512, 1024)
    kept = [{"number": number} for number in range(20_000 if training.small else 200_000)]

    def step() -> Tensor:
        assert kept
        gc.collect()  # planted: collecting
        return training.step()

    return step


def sorting(device: torch.device) -> Step:
    """Numbers that the host sorts when it has read one of the device."""
    training, numbers = Training(device, 4, 512, 1024), torch.randn(1_000_000)

    def step() -> Tensor:
        loss = training.step()
        (numbers * loss.item()).sort()  # planted: sorting
        return loss

    return step


def emptying(device: torch.device) -> Step:
    """Memory that goes back to the driver after each step."""
    training = Training(device, 8, 1536, 4096)

    def step() -> Tensor:
        loss = training.step()
        torch.cuda.empty_cache()  # planted: emptying
        return loss

    return step


def threads(device: torch.device) -> Step:
    """Products by one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, data = nn.Sequential(*(nn.Linear(768, 768) for _ in range(4))), torch.randn(768, 768)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        loss: Tensor = model(data).square().mean()  # planted: threads
        loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()
        sgd.zero_grad()
        return loss

    return step


def graph_gaps(device: torch.device) -> Step:
    """A CUDA graph of short kernels, each of which waits for the one before: no host is late between them."""
    data, graph = torch.ones(64, device=device), torch.cuda.CUDAGraph()

    def work() -> None:
        for _ in itertools.repeat(None, 2000):
            data.mul_(1.0)

    work()
    with torch.cuda.graph(graph):
        work()

    def step() -> Tensor:
        graph.replay()
        return data[0]

    return step


def uncaptured(device: torch.device) -> Step:
    """A step that no CUDA graph can hold: the host asks for a number, and decides by it."""
    training = Training(device, 24, 128, 128)

    def step() -> Tensor:
        loss = training.step()
        return loss if loss.item() > 0 else -loss

    return step
