import copy
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

import parallel
from tests.kernels.beside import DEVICES as TRITON_DEVICES
from workers.model.optimizer import AdamW, TritonAdamW, _local, clip_gradients, make_optimizer

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton")

HYPER_PARAMETERS: list[dict[str, Any]] = [
    {},
    {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3},
    {"weight_decay": 0.0},
]


def model_with_gradients(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    add_gradients(model, seed)
    return model


def add_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", HYPER_PARAMETERS)
def test_adamw_equals_torchs(options: dict[str, Any]) -> None:
    mine = model_with_gradients(0)
    theirs = copy.deepcopy(mine)
    optimizers = AdamW(mine.parameters(), **options), torch.optim.AdamW(theirs.parameters(), **options)
    for step in range(20):
        for model, optimizer in zip((mine, theirs), optimizers, strict=True):
            add_gradients(model, step)
            optimizer.step()
    assert_same(mine, theirs)


@pytest.mark.parametrize("options", HYPER_PARAMETERS)
def test_adamw_that_counts_on_the_device_does_the_same(options: dict[str, Any]) -> None:
    mine = model_with_gradients(0)
    theirs = copy.deepcopy(mine)
    rate = torch.tensor(0.0, dtype=torch.float64)
    rest = {name: value for name, value in options.items() if name != "lr"}
    optimizers = AdamW(mine.parameters(), lr=rate, capturable=True, **rest), AdamW(theirs.parameters(), **rest)
    for step in range(20):
        rate.fill_(0.1 / (1 + step))
        optimizers[1].param_groups[0]["lr"] = rate.item()
        for model, optimizer in zip((mine, theirs), optimizers, strict=True):
            add_gradients(model, step)
            optimizer.step()
    assert_same(mine, theirs)
    assert all(isinstance(state["step"], Tensor) for state in optimizers[0].state.values())


def test_adamw_with_a_rate_in_a_tensor() -> None:
    with pytest.raises(ValueError, match="needs capturable=True"):
        AdamW([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.1))


@pytest.mark.parametrize("capturable", [False, True])
def test_state_of_bfloat16_parameters_is_bfloat16(capturable: bool) -> None:
    model = model_with_gradients(0).bfloat16()
    add_gradients(model, 1)
    optimizer = make_optimizer("adamw", model, lr=torch.tensor(0.1) if capturable else 0.1, capturable=capturable)
    optimizer.step()
    for parameter in model.parameters():
        assert parameter.dtype == optimizer.state[parameter]["exp_avg"].dtype == torch.bfloat16


def test_adamw_honours_groups() -> None:
    mine, theirs = model_with_gradients(1), model_with_gradients(1)
    for model, make in ((mine, AdamW), (theirs, torch.optim.AdamW)):
        first, second = model[0], model[2]
        second.bias.grad = None
        groups = [{"params": first.parameters(), "lr": 0.5}, {"params": second.parameters(), "weight_decay": 0.9}]
        optimizer = make(groups, lr=0.01)
        for _ in range(3):
            optimizer.step()
    assert_same(mine, theirs)


def square_of(parameter: Tensor, optimizer: Optimizer) -> Callable[[], float]:
    """A closure whose loss is the parameter's square."""

    def closure() -> float:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss.item()

    return closure


def test_adamw_returns_the_closures_loss() -> None:
    parameter = nn.Parameter(torch.tensor([3.0]))
    optimizer = AdamW([parameter], lr=0.1, weight_decay=0)
    assert optimizer.step(square_of(parameter, optimizer)) == 9.0
    torch.testing.assert_close(parameter.detach(), torch.tensor([2.9]))  # the first step has the size of lr


def test_adamw_refuses_sparse_gradients_and_complex_parameters() -> None:
    layer, number = nn.Embedding(3, 2, sparse=True), nn.Parameter(torch.ones(1, dtype=torch.complex64))
    (layer(torch.tensor([1])).sum() + number.abs()).backward()
    for parameter, words in ((layer.weight, "no sparse gradients"), (number, "no complex parameters, .*torch_adamw")):
        with pytest.raises(RuntimeError, match=words):
            AdamW([parameter]).step()


@pytest.mark.parametrize("options", [{"lr": -1}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"eps": -1.0}])
def test_adamw_refuses_what_is_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        AdamW([nn.Parameter(torch.zeros(1))], **options)


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_equals_torchs(max_norm: float) -> None:
    mine, theirs = model_with_gradients(3), model_with_gradients(3)
    norm = clip_gradients(mine.parameters(), max_norm)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    torch.testing.assert_close(norm, expected)
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_clipping_without_gradients_is_nothing() -> None:
    assert clip_gradients([nn.Parameter(torch.zeros(2))], 1.0).item() == 0


def test_frozen_parameters_are_left_out() -> None:
    model = model_with_gradients(5)
    model[0].requires_grad_(False)
    assert len(make_optimizer("adamw", model).param_groups[0]["params"]) == 2
    with pytest.raises(ValueError, match="unknown optimizer 'sgd'; known are adamw"):
        make_optimizer("sgd", model)


def trained(make, device, dtype, state=None) -> tuple[nn.Module, Optimizer]:
    """A model after three steps, with two groups and one parameter without gradients; the first steps' rates differ."""
    model = model_with_gradients(1).to(device, dtype)
    first, second = model[0], model[2]
    groups = [{"params": first.parameters(), "lr": 0.5}, {"params": second.parameters(), "weight_decay": 0.9}]
    # Exact in float32, in which torch's fused AdamW computes 1 - beta: of 0.999 it would be wrong by 10⁻⁵.
    optimizer = make(groups, lr=0.01, betas=(0.875, 1 - 2**-10))
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(device, dtype)
        second.bias.grad = None
        assert optimizer.step() is None
    return model, optimizer


MOMENTS = "exp_avg", "exp_avg_sq"
OURS = [
    ("adamw", "cpu"),
    pytest.param("adamw", "cuda", marks=pytest.mark.gpu),
    *(pytest.param("triton_adamw", *device.values, marks=[needs_triton, *device.marks]) for device in TRITON_DEVICES),
]
"""The optimizers that have master weights, and their devices."""


def slowly_trained(name, device, steps, dtype=torch.bfloat16, state=None, **options) -> tuple[nn.Module, Optimizer]:
    """A model whose parameters begin with 1, and lose 10⁻³ in each step, as far as their dtype allows.

    It goes on from a state: with the gradients that come then, and parameters that are the rounded master weights.
    """
    model = model_with_gradients(0).to(device, dtype)
    rate = torch.tensor(1e-3, device=device) if options.get("capturable") else 1e-3
    optimizer = make_optimizer(name, model, rate, **options)
    begun = 0
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))
        begun = int(state["state"][0]["step"])
    for number, parameter in enumerate(model.parameters()):
        kept = {} if state is None else state["state"][number]
        parameter.data = kept.get("master_param", torch.ones_like(parameter)).to(dtype)
    for step in range(begun, begun + steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = (1 + torch.rand(parameter.shape, generator=generator)).bfloat16().to(device, dtype)
        optimizer.step()
    return model, optimizer


def fused(*args: Any, **options: Any) -> Optimizer:
    return torch.optim.AdamW(*args, **options, fused=True)


def assert_trained_alike(mine: tuple[nn.Module, Optimizer], theirs: tuple[nn.Module, Optimizer]) -> None:
    for one, other in zip(mine[0].parameters(), theirs[0].parameters(), strict=True):
        precision = {"rtol": 1e-5, "atol": 1e-6} if one.dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-9}
        torch.testing.assert_close(one, other, **precision)
        ours, torchs = mine[1].state.get(one, {}), theirs[1].state.get(other, {})
        assert ours.keys() == torchs.keys()
        for name, value in ours.items():
            torch.testing.assert_close(value, torchs[name], **precision)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_triton_adamw_equals_torchs(device: str, dtype: torch.dtype) -> None:
    mine, theirs = trained(TritonAdamW, device, dtype), trained(fused, device, dtype)
    assert_trained_alike(mine, theirs)
    assert "exp_avg" in mine[1].state[mine[0][0].weight]
    # Each goes on from the other's state.
    states = [optimizer.state_dict() for _, optimizer in (mine, theirs)]
    ours, torchs = trained(TritonAdamW, device, dtype, states[1]), trained(fused, device, dtype, states[0])
    assert_trained_alike(ours, torchs)
    assert ours[1].state[ours[0][0].weight]["step"].item() == 6
    assert all(group["fused"] for group in torchs[1].param_groups), "torch's goes on fused"


@needs_triton
@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("make", [AdamW, torch.optim.AdamW])
def test_triton_adamw_goes_on_from_a_count_on_the_host(make: type[Optimizer], device: str) -> None:
    state = trained(make, device, torch.float32)[1].state_dict()
    model, optimizer = trained(TritonAdamW, device, torch.float32, state)
    step = optimizer.state[model[0].weight]["step"]
    assert (step.item(), step.dtype, step.device.type) == (6, torch.float32, device)


@needs_triton
@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_triton_adamw_takes_a_rate_in_a_tensor_and_a_closure(device: str) -> None:
    parameter = nn.Parameter(torch.tensor([3.0], device=device))
    optimizer = make_optimizer("triton_adamw", nn.ParameterList([parameter]), torch.tensor(0.1), capturable=True)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    assert optimizer.step(square_of(parameter, optimizer)) == 9.0
    torch.testing.assert_close(parameter.detach(), torch.tensor([2.9], device=device))


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize(("name", "device"), OURS)
def test_master_weights_add_up_what_bfloat16_loses(name: str, device: str, capturable: bool) -> None:
    wide, theirs = slowly_trained("torch_adamw", device, 20, torch.float32)
    plain, _ = slowly_trained(name, device, 20)
    narrow, optimizer = slowly_trained(name, device, 20, capturable=capturable, master_weights=True)
    for right, lost, kept in zip(*(model.parameters() for model in (wide, plain, narrow)), strict=True):
        assert lost.eq(1).all(), "each update is less than half of what bfloat16 tells apart"
        state, expected = optimizer.state[kept], theirs.state[right]
        assert torch.equal(kept, state["master_param"].bfloat16())
        assert kept.lt(0.99).all()
        for mine, other in ((state["master_param"], right), *((state[one], expected[one]) for one in MOMENTS)):
            torch.testing.assert_close(mine, other, rtol=3e-6, atol=0)  # dtypes, too


@pytest.mark.parametrize(("name", "device"), OURS)
def test_training_goes_on_from_saved_master_weights_in_every_bit(name: str, device: str) -> None:
    straight, whole = slowly_trained(name, device, 8, master_weights=True)
    _, half = slowly_trained(name, device, 4, master_weights=True)
    state = copy.deepcopy(half.state_dict())
    loaded = slowly_trained(name, device, 0, master_weights=True)[1]
    loaded.load_state_dict(copy.deepcopy(state))
    for number, values in state["state"].items():
        found = loaded.state_dict()["state"][number]
        assert found.keys() == values.keys() == {"step", *MOMENTS, "master_param"}
        for one in (*MOMENTS, "master_param"):
            assert (found[one].dtype, found[one].tolist()) == (torch.float32, values[one].tolist())
            assert not torch.equal(values[one], values[one].bfloat16().float()), "bfloat16 would lose some of it"
    resumed, rest = slowly_trained(name, device, 4, state=state, master_weights=True)
    for mine, right in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(mine, right)
        assert torch.equal(rest.state[mine]["master_param"], whole.state[right]["master_param"])


@pytest.mark.parametrize("other", ["amsgrad", "maximize"])
@pytest.mark.parametrize("ours", [AdamW, TritonAdamW])
def test_a_state_of_another_update_is_refused(ours: type[AdamW], other: str) -> None:
    parameter = nn.Parameter(torch.ones(3))
    state = torch.optim.AdamW([parameter], **{other: True}).state_dict()
    with pytest.raises(ValueError, match="does neither"):
        ours([parameter]).load_state_dict(state)


@pytest.mark.parametrize(("name", "device"), OURS)
def test_the_constructor_decides_on_master_weights_and_no_loaded_state(name: str, device: str) -> None:
    states = {
        master: slowly_trained(name, device, 4, master_weights=master)[1].state_dict() for master in (False, True)
    }
    torchs = slowly_trained("torch_adamw", device, 4)[1].state_dict()
    for state in (states[False], torchs):
        model, optimizer = slowly_trained(name, device, 1, state=state, master_weights=True)
        for parameter in model.parameters():
            kept = optimizer.state[parameter]
            assert {kept[one].dtype for one in (*MOMENTS, "master_param")} == {torch.float32}
            torch.testing.assert_close(
                kept["master_param"], torch.full_like(kept["exp_avg"], 1 - 1e-3), rtol=0, atol=2e-4
            )
    model, optimizer = slowly_trained(name, device, 1, state=states[True])
    for parameter in model.parameters():
        assert optimizer.state[parameter].keys() == {"step", *MOMENTS}
        assert {optimizer.state[parameter][one].dtype for one in MOMENTS} == {torch.bfloat16}


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def divided_by(way, model, make, **options) -> tuple[nn.Module, Optimizer]:
    """Divide a model and its optimizer among processes: parameters are moved into shared memory, are views of it, or
    are DTensors."""
    if way == "sharded optimizer":
        return model, parallel.ShardedOptimizer(model.parameters(), make, **options)
    if way == "fully sharded":
        model = parallel.FullyShardedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model, make(model.parameters(), **options)


def train_alike(*trained: tuple[nn.Module, Optimizer]) -> None:
    """Train models on the same inputs."""
    for step in range(10):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).bfloat16()
        for model, optimizer in trained:
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            if isinstance(model, parallel.FullyShardedDataParallel):
                model.finish_gradient_synchronization()
            optimizer.step()


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
@pytest.mark.parametrize(
    ("way", "make"), [("sharded optimizer", AdamW), ("fully sharded", TritonAdamW), ("torch's", TritonAdamW)]
)
def test_master_weights_divided(alone: None, way: str, make: type[AdamW]) -> None:
    whole = model_with_gradients(0).bfloat16()
    divided, mine = divided_by(way, model_with_gradients(0).bfloat16(), make, master_weights=True)
    theirs = make(whole.parameters(), master_weights=True)
    train_alike((whole, theirs), (divided, mine))
    masters = [
        torch.cat([_local(state["master_param"]).flatten() for state in optimizer.state.values()]).sort().values
        for optimizer in (mine, theirs)
    ]
    assert torch.equal(*masters)
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(9)).bfloat16()
    assert torch.equal(divided(inputs), whole(inputs))
