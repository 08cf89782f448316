import pytest
import torch
from torch import nn

from workers.measure.ranges import named_layers


class Norm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.norm()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.last = Norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def names(work) -> list[str]:
    """The ranges that the profiler sees, in the order in which they begin."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        work()
    events = sorted(profiler.events(), key=lambda event: (event.time_range.start, -event.time_range.end))
    return [event.name for event in events if event.is_user_annotation]


def test_layers_and_norms_are_named_inside_the_context_only() -> None:
    model, x = Model(), torch.ones(3)
    with named_layers(model):
        assert names(lambda: model(x)) == ["layers.0", "norm", "layers.1", "norm", "norm"]
    assert names(lambda: model(x)) == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("inside_hooks", [False, True])
def test_a_compiled_layer_is_named_from_outside(inside_hooks: bool) -> None:
    model, x = Model(), torch.ones(3)
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for layer in model.layers:
        # The compiler guards a module's hooks only if it has some, as sharded modules have.
        layer.norm.register_forward_pre_hook(lambda *_: None)
        if inside_hooks:
            layer.forward = torch.compile(layer.forward, backend=backend)
        else:
            layer.compile(backend=backend)
    model(x)
    compiled = len(graphs)
    with named_layers(model):
        ranges = [name for name in names(lambda: model(x)) if name.startswith(("layers", "norm"))]
    assert ranges == ["layers.0", "layers.1", "norm"]
    model(x)
    assert len(graphs) == compiled, "nothing was compiled anew"
    torch._dynamo.reset()
