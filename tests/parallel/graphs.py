"""A function of the pool's ranks: a CUDA graph holds a data-parallel step, in which nothing is copied from the host."""

import torch
from torch import nn

from tests.parallel.training import WRAPPERS, device


def gradients_of_a_graph(wrapper: str) -> None:
    """Capture a forward and a backward pass with synchronization; replayed, it gives an eager one's gradients."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).to(device())
    model = WRAPPERS[wrapper](module)
    inputs = torch.randn(4, 16, device=device())

    def one_pass() -> None:
        model.zero_grad(set_to_none=False)
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
