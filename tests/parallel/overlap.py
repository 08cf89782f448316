"""Measurements of ranks on GPUs: the share of communication that overlaps with computation, and memory."""

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import parallel
from tests.parallel.training import device

WIDTH, LAYERS, BATCH = 4096, 8, 4096


def layers() -> nn.Module:
    """A stack whose layers' computation takes longer than the communication of their gradients."""
    torch.manual_seed(0)
    with device():
        return Stack()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


WRAPPERS: dict[str, Any] = {
    "naive": parallel.NaiveDataParallel,
    "overlapped": parallel.OverlappedDataParallel,
    "bucketed": lambda module: parallel.BucketedDataParallel(module, 200),
    "fully sharded": parallel.FullyShardedDataParallel,
}


def backward(model: Any, inputs: torch.Tensor) -> None:
    model(inputs).sum().backward()
    if hasattr(model, "finish_gradient_synchronization"):
        model.finish_gradient_synchronization()
    model.zero_grad(set_to_none=True)


def shares(strategy: str) -> dict[str, float]:
    """Profile a step; return NCCL's time, and the share of it in which a computing kernel also runs."""
    model = WRAPPERS[strategy](layers())
    inputs = torch.randn(BATCH, WIDTH, device=device())
    for _ in range(3):
        backward(model, inputs)
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        backward(model, inputs)
        torch.cuda.synchronize()
    kernels = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    nccl = [(one.time_range.start, one.time_range.end) for one in kernels if "nccl" in one.name.lower()]
    computing = [
        (one.time_range.start, one.time_range.end)
        for one in kernels
        if any(word in one.name.lower() for word in ("gemm", "cutlass", "sm90", "nvjet"))
    ]
    total = sum(end - start for start, end in nccl)
    beside = sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in nccl
        for other_start, other_end in computing
    )
    return {"communication_ms": total / 1e3, "beside_computation": beside / total if total else 0.0}


def peaks() -> dict[str, float]:
    """Peak bytes of a step without an optimizer, by strategy."""
    peak_bytes: dict[str, float] = {"parameters": LAYERS * WIDTH * WIDTH * 4}
    inputs = torch.randn(8, WIDTH, device=device())
    for name in ("alone", "bucketed", "fully sharded"):
        model = WRAPPERS.get(name, lambda module: module)(layers())
        backward(model, inputs)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        backward(model, inputs)
        peak_bytes[name] = torch.cuda.max_memory_allocated()
        del model
        gc.collect()
    return peak_bytes
