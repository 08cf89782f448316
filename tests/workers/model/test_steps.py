import copy

import pytest
import torch
from torch import nn

from workers.model import TransformerLM
from workers.model.batches import RandomBatches
from workers.model.loss import cross_entropy
from workers.model.optimizer import AdamW
from workers.model.precision import PRECISIONS
from workers.model.steps import MAX_LEARNING_RATE, BackwardStep, Step, TrainStep


def small_model(device: str = "cpu") -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(vocab_size=31, context_length=16, d_model=16, num_layers=2, num_heads=2, d_ff=24).to(device)


def batches(device: str = "cpu") -> RandomBatches:
    return RandomBatches(31, 4, 8, torch.device(device), seed=5)


def run(step: Step, times: int = 1) -> None:
    for _ in range(times):
        step.prepare()
        for phase in step.phases.values():
            phase()


def train_step(model: nn.Module, precision: str = "fp32", device: str = "cpu", **options) -> TrainStep:
    optimizer = AdamW(model.parameters())
    return TrainStep(model, batches(device), PRECISIONS[precision], model, optimizer, total_steps=30, **options)


def test_backward_leaves_one_batchs_gradients() -> None:
    model = small_model()
    step = BackwardStep(model, batches(), PRECISIONS["fp32"], model)
    run(step, times=3)
    expected = small_model()
    cross_entropy(expected(step.inputs), step.targets).backward()
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_what_gets_no_gradient_is_named_and_a_loss_without_any_is_refused() -> None:
    model = small_model()
    model.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    model.register_parameter("frozen", nn.Parameter(torch.zeros(2), requires_grad=False))
    step = train_step(model)
    block, calls = model.layers[0].forward, iter([False])
    model.layers[0].forward = lambda x, *others: block(x, *others) if next(calls, True) else x  # left out once
    run(step)
    assert len(step.without_gradient) > 1
    run(step, times=2)
    assert step.without_gradient == ["unused"]
    detached = BackwardStep(lambda tokens: model(tokens).detach(), batches(), PRECISIONS["fp32"], model)
    with pytest.raises(ValueError, match="the loss has no gradient: the model detaches its output"):
        run(detached)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_micro_batches_add_up_to_the_whole_batch(micro_batches: int) -> None:
    whole, split = small_model(), small_model()
    sizes: list[int] = []
    split.register_forward_hook(lambda _model, inputs, _output: sizes.append(len(inputs[0])))
    steps = [
        BackwardStep(model, batches(), PRECISIONS["fp32"], model, micro_batches=parts)
        for model, parts in ((whole, 1), (split, micro_batches))
    ]
    for step in steps:
        run(step, times=2)
    assert list(steps[1].phases) == ["accumulation", "forward", "backward"]
    assert sizes == [4 // micro_batches] * micro_batches * 2
    for mine, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_train_step_with_micro_batches_updates_once(precision: str) -> None:
    whole, split = small_model(), small_model()
    # Halves of a batch round differently in fp16.
    run(train_step(whole, precision), times=3)
    step = train_step(split, precision, micro_batches=2)
    run(step, times=3)
    assert list(step.phases) == ["accumulation", "forward", "backward", "optimizer"]
    tolerance = {"rtol": 1.3e-6, "atol": 1e-5} if precision == "fp32" else {"rtol": 1e-2, "atol": 1e-3}
    for mine, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_train_step_is_the_loop_written_out(clip: float | None) -> None:
    model = small_model()
    reference = copy.deepcopy(model)
    step = train_step(model, gradient_clip_norm=clip)
    run(step, times=2)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=MAX_LEARNING_RATE)
    data = batches()
    for index in range(2):
        inputs, targets = data.next()
        cross_entropy(reference(inputs), targets).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), clip)
        optimizer.param_groups[0]["lr"] = MAX_LEARNING_RATE * (index + 1) / 3  # warm-up: a tenth of 30 steps
        optimizer.step()
        optimizer.zero_grad()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.grad is None


def test_a_rate_in_a_tensor_follows_the_schedule() -> None:
    rates: dict[bool, list[float]] = {}
    for in_tensor in (False, True):
        model = small_model()
        rate = torch.tensor(1.0) if in_tensor else 1.0
        optimizer = AdamW(model.parameters(), lr=rate, capturable=in_tensor)
        step = TrainStep(model, batches(), PRECISIONS["fp32"], model, optimizer, total_steps=30)
        rates[in_tensor] = []
        for _ in range(6):
            run(step)
            rates[in_tensor].append(float(optimizer.param_groups[0]["lr"]))
        assert optimizer.param_groups[0]["lr"] is rate or not in_tensor, "a graph reads it at its address"
    assert rates[True] == pytest.approx(rates[False])
    assert len(set(rates[False])) == 6


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_on_one_batch_learns_it(precision: str, device: str) -> None:
    model = small_model(device)
    step = train_step(model, precision, device, gradient_clip_norm=1.0)
    data = step.batches.next()
    step.batches.next = lambda: data  # type: ignore[method-assign]
    run(step)
    first = step.loss.item()
    run(step, times=29)
    assert step.loss.item() < 0.9 * first
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.gpu
def test_on_a_gpu_fp32_is_fp32_and_tf32_is_not() -> None:
    a, b = torch.randn(2, 512, 512, dtype=torch.float64, device="cuda")
    before = torch.get_float32_matmul_precision()
    errors = {}
    try:
        for name in ("fp32", "tf32"):
            PRECISIONS[name].apply()
            errors[name] = ((a.float() @ b.float()).double() - a @ b).norm() / (a @ b).norm()
    finally:
        torch.set_float32_matmul_precision(before)
    assert errors["fp32"] < 1e-6
    assert 1e-5 < errors["tf32"] < 1e-3
