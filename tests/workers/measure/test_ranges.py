import pytest
import torch
from torch import nn

from workers.measure.ranges import named_layers


class Norm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.norm()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Norm()) for _ in range(2))
        self.last = Norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@pytest.mark.parametrize("inside_hooks", [False, True])
def test_a_compiled_layer_is_named_from_outside(inside_hooks: bool) -> None:
    model, x, graphs = Model(), torch.ones(3), []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for layer in model.layers:
        # The compiler guards a module's hooks only if it has some, as sharded modules have.
        layer[0].register_forward_pre_hook(lambda *_: None)
        if inside_hooks:
            layer.forward = torch.compile(layer.forward, backend=backend)
        else:
            layer.compile(backend=backend)
    model(x)
    compiled = len(graphs)
    with named_layers(model), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model(x)
    events = sorted((one for one in profiler.events() if one.is_user_annotation), key=lambda one: one.time_range.start)
    names = [one.name for one in events if one.name.startswith(("layers", "norm"))]
    assert names == ["layers.0", "layers.1", "norm"]
    model(x)
    assert len(graphs) == compiled, "nothing was compiled anew"
    torch._dynamo.reset()
