"""The memory of ranks on GPUs."""

import gc
from typing import Any

import torch
from torch import nn

import parallel
from tests.parallel.training import device

WIDTH, LAYERS = 4096, 8
WRAPPERS: dict[str, Any] = {
    "alone": lambda module: module,
    "bucketed": lambda module: parallel.BucketedDataParallel(module, 200),
    "fully sharded": parallel.FullyShardedDataParallel,
}


def backward(model: Any, inputs: torch.Tensor) -> None:
    model(inputs).sum().backward()
    if hasattr(model, "finish_gradient_synchronization"):
        model.finish_gradient_synchronization()
    model.zero_grad(set_to_none=True)


def peaks() -> dict[str, float]:
    """Peak bytes of a step without an optimizer, by strategy."""
    peak_bytes: dict[str, float] = {"parameters": LAYERS * WIDTH * WIDTH * 4}
    inputs = torch.randn(8, WIDTH, device=device())
    for name, wrap in WRAPPERS.items():
        with device():
            model = wrap(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))))
        backward(model, inputs)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        backward(model, inputs)
        peak_bytes[name] = torch.cuda.max_memory_allocated()
        del model
        gc.collect()
    return peak_bytes
