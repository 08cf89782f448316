"""Functions of the pool's ranks: a step in a CUDA graph, the recording of a step, and the memory that it takes."""

import gc
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import parallel
from parallel.collectives import GradientUsage, recorded
from tests.parallel.training import WRAPPERS, device, first_ranks_model, one_pass
from workers.measure.own_step import OwnStep

WIDTH, LAYERS = 4096, 8
LARGE: dict[str, Any] = {
    "alone": lambda module: module,
    "bucketed": lambda module: parallel.BucketedDataParallel(module, 200),
    "fully sharded": parallel.FullyShardedDataParallel,
}


def backward(model: Any, inputs: torch.Tensor) -> None:
    model(inputs).sum().backward()
    if hasattr(model, "finish_gradient_synchronization"):
        model.finish_gradient_synchronization()
    model.zero_grad(set_to_none=True)


class Noted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def flags_of_use() -> set[str]:
    """Return the operations that make and exchange the flags of parameters that are all used."""
    with Noted() as noted:
        exchanges = [
            GradientUsage([True] * 3, torch.device("cpu"), dist.group.WORLD, again=again) for again in (False, True)
        ]
    assert [one.is_again_everywhere() for one in exchanges] == [False, True]
    return noted.names


def told_as_lost() -> list[str]:
    """What a step of one's own, whose optimizer is divided among the ranks, is told to have lost of its gradients; and
    how many parameters one with a divided model has."""

    def make() -> Any:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = parallel.ShardedOptimizer(model.parameters(), torch.optim.AdamW)
        return lambda: (model(torch.ones(2, 4)).sum().backward(), optimizer.step(), optimizer.zero_grad())

    def make_divided() -> Any:
        model = parallel.FullyShardedDataParallel(nn.Linear(4, 4))
        return lambda: (model(torch.ones(2, 4)).sum().backward(), model.finish_gradient_synchronization())

    divided = OwnStep()
    divided.make(make_divided)
    divided.phases(())
    assert divided.trainable == 20

    own = OwnStep()
    own.make(make)
    own.phases(())
    return own.lost_gradients()[0]


def peaks() -> dict[str, float]:
    """Peak bytes of a step without an optimizer, by strategy."""
    peak_bytes: dict[str, float] = {"parameters": LAYERS * WIDTH * WIDTH * 4}
    inputs = torch.randn(8, WIDTH, device=device())
    for name, wrap in LARGE.items():
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


def gradients_of_a_graph(wrapper: str, passes: int = 1) -> None:
    """A CUDA graph of forward and backward passes with synchronization gives eager ones' gradients."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).to(device())
    model = WRAPPERS[wrapper](module)
    inputs = torch.randn(4, 16, device=device())

    def one_pass() -> None:
        model.zero_grad(set_to_none=False)
        for _ in range(passes):
            model(inputs).square().mean().backward()
        model.finish_gradient_synchronization()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            one_pass()
    stream.synchronize()
    eager = [parameter.grad.clone() for parameter in model.parameters()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        one_pass()
    for parameter in model.parameters():
        parameter.grad.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    for parameter, gradient in zip(model.parameters(), eager, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def timeline(wrapper: str) -> dict[str, Any]:
    """Record one step of a wrapper, and another one without recording."""
    model = WRAPPERS[wrapper](first_ranks_model())
    with recorded(device()) as both:
        began = time.perf_counter()
        one_pass(model, 0)
        took_ms = 1e3 * (time.perf_counter() - began)
    intervals = both.intervals()
    one_pass(model, 0)
    return {
        "intervals": [(one.operation, one.size_bytes, one.start_ms, one.end_ms) for one in intervals],
        "after": len(both.intervals()),
        "took_ms": took_ms,
        "gradients": sum(p.nbytes for p in model.parameters() if p.requires_grad),
        "parameters": len([p for p in model.parameters() if p.requires_grad]),
    }
