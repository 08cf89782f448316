"""Attribution of hand-written events, and of small models whose work is known."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.workers.measure.profiling.events import host, kernel, recording
from workers.measure.profiling.attribution import Attribution
from workers.measure.profiling.classes import MATMUL, classify
from workers.measure.profiling.products import Product
from workers.measure.profiling.recording import NODE, MemoryEvent, record
from workers.measure.ranges import Ranges, named_layers
from workers.measure.timing import run_step

PHASES = ("forward", "backward")


def gpu_step():
    """One step: a product in a layer, whose kernel runs while the host is in backward already, and its gradient."""
    events = [
        host("warmup", "range", 0, 90),
        host("forward", "range", 5, 80),
        host("step_1", "range", 100, 1000),
        host("forward", "range", 110, 400),
        host("layers.0", "range", 120, 300, id=3),
        host("scores", "range", 130, 200),
        host("aten::matmul", "operator", 135, 195, id=4, sequence=7),
        host("aten::bmm", "operator", 140, 195, id=5, sequence=7),
        host("cudaLaunchKernel", "launch", 150, 160, id=900),
        host("backward", "range", 400, 800),
        host(NODE + "BmmBackward0", "backward", 450, 700, thread=2, id=10, sequence=7, forward_thread=1),
        host("aten::bmm", "operator", 460, 690, thread=2, id=11),
        host("cudaLaunchKernel", "launch", 470, 480, thread=2, id=901),
        host("cuLaunchKernel", "launch", 720, 730, id=902),
    ]
    work = [
        kernel("warm", 20, 30, launch=1),
        kernel("sgemm", 500, 600, launch=900, operator=5),
        kernel("sgemm_back", 650, 850, launch=901, operator=11),
        kernel("ours", 860, 870, launch=902),
    ]
    return recording(events, work)


def test_work_belongs_to_the_phase_in_which_it_was_launched() -> None:
    forward, back, ours = Attribution(gpu_step(), PHASES, on_gpu=True).work
    assert (forward.phase, back.phase, ours.phase) == ("forward", "backward", "backward")
    assert (forward.step, forward.time_ns, forward.operator) == (1, 100, "aten::bmm")
    assert forward.launch_to_start_us == pytest.approx(0.35)
    assert (ours.operator, ours.ranges) == (None, ())


def test_backward_work_belongs_to_its_forward_range() -> None:
    forward, back, _ = Attribution(gpu_step(), PHASES, on_gpu=True).work
    assert forward.ranges == back.ranges == ("layers.0", "scores")


def test_calls_hold_their_own_time_and_that_of_their_launches() -> None:
    calls = {(call.name, call.phase): call for call in Attribution(gpu_step(), PHASES, on_gpu=True).calls}
    assert (calls["aten::matmul", "forward"].self_ns, calls["aten::matmul", "forward"].device_ns) == (5, 0)
    assert (calls["aten::bmm", "forward"].self_ns, calls["aten::bmm", "forward"].device_ns) == (55, 100)


def test_the_kernels_of_a_graph_share_one_launch() -> None:
    events = [
        host("step_1", "range", 0, 100),
        host("graph", "range", 10, 90),
        host("cudaGraphLaunch", "launch", 20, 30, id=5),
    ]
    work = [kernel("a", 40, 50, launch=5), kernel("b", 50, 80, launch=5)]
    kernels = Attribution(recording(events, work), ("graph",), on_gpu=True).work
    assert [(one.name, one.phase, one.launch_to_start_us) for one in kernels] == [
        ("a", "graph", None),
        ("b", "graph", None),
    ]


def test_the_last_operator_that_tells_a_number_made_the_node() -> None:
    """An operator that makes no node has the number of the next node, which another operator makes."""
    events = [
        host("step_1", "range", 0, 1000),
        host("forward", "range", 0, 400),
        host("softmax", "range", 10, 50),
        host("aten::ones", "operator", 20, 30, id=1, sequence=3),
        host("values", "range", 60, 100),
        host("aten::bmm", "operator", 70, 80, id=2, sequence=3),
        host("backward", "range", 400, 900),
        host(NODE + "BmmBackward0", "backward", 500, 600, id=3, sequence=3, forward_thread=1),
        host("aten::bmm", "operator", 510, 590, id=4),
    ]
    operators = {(one.name, one.phase): one for one in Attribution(recording(events), PHASES, on_gpu=False).work}
    assert operators["aten::bmm", "backward"].ranges == ("values",)


@pytest.mark.parametrize("modules", [("fc",), ()])
@pytest.mark.parametrize("thread", [1, 2])
@pytest.mark.parametrize("around", [("Epoch",), ()])
def test_ranges_of_the_codes_own_around_its_passes_have_their_work(
    thread: int, around: tuple[str, ...], modules: tuple[str, ...]
) -> None:
    """On a GPU autograd runs nodes on a thread of its own."""
    events = [
        host("step_1", "range", 0, 1000),
        host("step", "range", 1, 999),
        *(host(name, "range", 2, 998) for name in around),
        host("Forward", "range", 10, 400),
        *(host(name, "range", 20, 200) for name in modules),
        host("aten::mm", "operator", 30, 40, id=1, sequence=3),
        host("aten::sum", "operator", 300, 310, id=2, sequence=4),
        host("Backward", "range", 400, 900),
        host(NODE + "SumBackward0", "backward", 450, 480, thread=thread, id=3, sequence=4, forward_thread=1),
        host(NODE + "MmBackward0", "backward", 500, 800, thread=thread, id=4, sequence=3, forward_thread=1),
        host("MmBackward0", "backward", 510, 790, thread=thread, id=5, sequence=3, forward_thread=1),
    ]
    work = Attribution(recording(events), ["step"], on_gpu=False, modules=modules).work
    assert [one.ranges[len(around) :] for one in work if one.ranges[: len(around)] == around] == [
        *(("Forward", *modules), ("Forward",), ("Backward",), ("Backward", *modules), ("Backward", *modules)),
    ]


class Chain(nn.Module):
    """One matrix product per layer, each followed by an operation that needs its result in the backward pass."""

    def __init__(self, depth: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Sigmoid()) for _ in range(depth))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


def profiled(model: nn.Module, device: str, steps: int = 2) -> Attribution:
    x = torch.randn(32, 64, device=device)
    model.to(device)
    held: list[torch.Tensor] = []
    phases: dict[str, Callable[[], None]] = {
        "forward": lambda: held.append(model(x).sum()),
        "backward": lambda: held.pop().backward(),
    }
    ranges = Ranges()

    def run() -> None:
        for number in range(1 + steps):
            ranges.counting = number > 0
            run_step(phases, [ranges])

    with named_layers(model):
        return Attribution(record(run, on_gpu=device == "cuda").recording, PHASES, on_gpu=device == "cuda")


@pytest.mark.parametrize("recompute", [False, True])
def test_products_of_a_known_chain(device: str, recompute: bool) -> None:
    """Backward has two products for each layer, except one for the first, whose input needs no gradient."""
    attribution = profiled(Chain(3, recompute=recompute), device)
    assert [step.name for step in attribution.steps] == ["step_1", "step_2"]
    products = Counter(
        (one.phase, one.ranges, one.step)
        for one in attribution.work
        if one.operator == "aten::mm" and classify(one) == MATMUL and "reduce" not in one.name.lower()
    )
    # The sigmoid saves its output, so every layer is recomputed whole.
    again = int(recompute)
    for step in (1, 2):
        for layer, backward in ((0, 1), (1, 2), (2, 2)):
            assert products.pop(("forward", (f"layers.{layer}",), step)) == 1
            assert products.pop(("backward", (f"layers.{layer}",), step)) == backward + again
    assert not products


def test_a_product_in_which_a_checkpoint_stops_is_none(device: str) -> None:
    """A checkpoint recomputes until its last tensor is saved, which is before the call that would use it has begun."""
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(device)
    given = torch.empty(64, 64, device=device)

    class Checkpointed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.mm(layers[0].weight.detach(), layers[1].weight.detach(), out=given)
            return checkpoint(layers, x, use_reentrant=False) + x

    calls = profiled(Checkpointed(), device, steps=1).calls
    products = Counter((call.phase, call.product.rows) for call in calls if call.product is not None)
    # Backward: the first layer again, and the products of three gradients, as x has none.
    assert products == {("forward", 64): 1, ("forward", 32): 2, ("backward", 32): 2, ("backward", 64): 2}


@pytest.mark.parametrize("launches", [True, False])
def test_a_product_that_launches_has_run_though_its_result_has_no_allocation(launches: bool) -> None:
    events = [
        *(host("step_1", "range", 0, 100), host("forward", "range", 0, 90)),
        host("aten::mm", "operator", 10, 60, id=4, product=Product(1, 2, 3, 4, "float32", 4)),
        host("cudaLaunchKernel", "launch", 20, 30, id=900),
    ]
    seen = recording(events, [kernel("gemm", 40, 50, launch=900, operator=4)] * launches)
    seen = replace(seen, memory=[MemoryEvent(1, 80, 512, False)])
    (call,) = Attribution(seen, PHASES, on_gpu=True).calls
    assert (call.product is not None) is launches


def test_a_product_that_a_dispatch_mode_calls_again_counts_once(device: str) -> None:
    class Again(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            return function(*arguments, **(options or {}))

    class Dispatched(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with Again():
                return super().forward(x)

    calls = profiled(Dispatched(2), device, steps=1).calls
    assert len([call for call in calls if call.phase == "forward" and call.name == "aten::mm"]) == 4
    (one, other) = [call for call in calls if call.phase == "forward" and call.product is not None]
    assert one.product == other.product
