"""Steps as CUDA graphs give the same results as eager steps."""

from typing import Any

import pytest
import torch

from workers.measure.memory import OutOfMemory, translate_oom
from workers.model import TransformerLM
from workers.model.batches import RandomBatches
from workers.model.compiled import compile_blocks
from workers.model.graphed import WARMUP_STEPS, CannotCapture, GraphedStep
from workers.model.optimizer import make_optimizer
from workers.model.precision import PRECISIONS, set_parameter_dtype
from workers.model.steps import BackwardStep, ForwardStep, TrainStep

pytestmark = pytest.mark.gpu
STEPS = 6


def model(**options: Any) -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(61, 32, d_model=32, num_layers=2, num_heads=2, d_ff=48, **options).cuda()


def batches() -> RandomBatches:
    return RandomBatches(61, 4, 16, torch.device("cuda"), seed=5)


def train_step(
    module: TransformerLM,
    optimizer: str,
    precision: str = "fp32",
    clip: float | None = None,
    capturable: bool = True,
    master_weights: bool = False,
    **options: int,
) -> TrainStep:
    rate = torch.tensor(1e-3, device="cuda") if capturable else 1e-3
    chosen = make_optimizer(optimizer, module, rate, capturable=capturable, master_weights=master_weights)
    return TrainStep(
        *(module, batches(), PRECISIONS[precision], module, chosen), total_steps=30, gradient_clip_norm=clip, **options
    )


def losses_as_a_graph(step: ForwardStep) -> list[float]:
    graphed, losses = GraphedStep(step), []
    for _ in range(STEPS):
        graphed.prepare()
        graphed.run()
        losses.append(step.loss.item())
    return losses


def losses_one_by_one(step: ForwardStep, warmup_steps: int = 0) -> list[float]:
    """Losses of eager steps. The first batch runs `warmup_steps` times more, as before a capture."""
    losses = []
    for index in range(STEPS):
        step.prepare()
        for _ in range(warmup_steps + 1 if index == 0 else 1):
            for work in step.phases.values():
                work()
        losses.append(step.loss.item())
    return losses


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "torch_adamw", "torch_fused_adamw", "triton_adamw"])
def test_training_as_a_graph_is_training(optimizer: str, precision: str, clip: float | None) -> None:
    graphed = losses_as_a_graph(train_step(model(), optimizer, precision, clip))
    eager = losses_one_by_one(train_step(model(), optimizer, precision, clip, capturable=False), WARMUP_STEPS)
    assert graphed == pytest.approx(eager, rel=1e-5 if precision == "fp32" else 2e-2)
    assert len(set(graphed)) == STEPS, "every step has its own batch"


def test_a_graph_accumulates_gradients() -> None:
    graphed = losses_as_a_graph(train_step(model(), "adamw", micro_batches=2))
    eager = losses_one_by_one(train_step(model(), "adamw", capturable=False, micro_batches=2), WARMUP_STEPS)
    assert graphed == pytest.approx(eager, rel=1e-5)


def test_fp16_scales_its_gradients_on_the_device() -> None:
    step = train_step(model(), "torch_fused_adamw", "fp16", clip=1.0)
    losses = losses_as_a_graph(step)
    assert all(loss == loss for loss in losses)
    assert step.scaler.get_scale() > 0


def test_the_schedule_goes_on_inside_the_graph() -> None:
    module = model()
    step = train_step(module, "adamw")
    graphed = GraphedStep(step)
    for number in (1, 2, 3):
        before = module.lm_head.weight.detach().clone()
        graphed.prepare()
        graphed.run()
        assert not torch.equal(module.lm_head.weight, before), "parameters move in every replay"
        assert step.optimizer.param_groups[0]["lr"].item() == pytest.approx(1e-3 * number / 3)  # its warm-up: 3 steps


@pytest.mark.parametrize("kind", [ForwardStep, BackwardStep])
def test_forward_and_backward_alone(kind: type[ForwardStep]) -> None:
    modules = [model(), model()]
    steps = [
        kind(module, batches(), PRECISIONS["fp32"], *([module] if kind is BackwardStep else [])) for module in modules
    ]
    assert losses_as_a_graph(steps[0]) == pytest.approx(losses_one_by_one(steps[1]), rel=1e-6)
    if kind is BackwardStep:
        for mine, theirs in zip(*(module.parameters() for module in modules), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "triton_adamw"])
def test_with_master_weights(optimizer: str) -> None:
    results, masters = [], []
    for capture in (True, False):
        module = model()
        set_parameter_dtype(module, "bf16")
        step = train_step(module, optimizer, "bf16", capturable=capture, master_weights=True)
        results.append(losses_as_a_graph(step) if capture else losses_one_by_one(step, WARMUP_STEPS))
        masters.append(step.optimizer.state[module.lm_head.weight]["master_param"])
    assert results[0] == pytest.approx(results[1], rel=2e-2)
    torch.testing.assert_close(*masters, rtol=0, atol=2e-3)  # a step changes a weight by 1e-3


def test_with_checkpointing_and_narrow_parameters() -> None:
    results = []
    for capture in (True, False):
        module = model(activation_checkpointing=True)
        set_parameter_dtype(module, "bf16")
        step = train_step(module, "torch_fused_adamw", "bf16", capturable=capture)
        results.append(losses_as_a_graph(step) if capture else losses_one_by_one(step, WARMUP_STEPS))
    assert results[0] == pytest.approx(results[1], rel=2e-2)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch 2.11's own
def test_with_compiled_blocks() -> None:
    compiled, eager = model(), model()
    compile_blocks(compiled)
    graphed = losses_as_a_graph(train_step(compiled, "torch_fused_adamw"))
    expected = losses_one_by_one(train_step(eager, "torch_fused_adamw", capturable=False), WARMUP_STEPS)
    assert graphed == pytest.approx(expected, rel=1e-4)


def test_phases_inside_the_graph_have_times() -> None:
    step = GraphedStep(train_step(model(), "adamw"))
    step.prepare()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step.run()
    torch.cuda.synchronize()
    for _ in range(3):
        step.prepare()
        start.record()
        step.run()
        end.record()
        torch.cuda.synchronize()
        times = step.inner_times_ms()
        assert list(times) == ["forward", "backward", "optimizer"]
        assert min(times.values()) > 0
        assert sum(times.values()) <= start.elapsed_time(end)
    assert step.peak_mib > 0


@pytest.mark.alone  # a failed capture leaves torch's random generator unfit for what follows in this process
def test_what_asks_the_host_cannot_be_captured() -> None:
    class Asks(TransformerLM):
        def forward(self, token_ids, cache=None, last_only=False):
            logits = super().forward(token_ids, cache, last_only)
            return logits * (1.0 if logits.isfinite().all().item() else 0.0)

    torch.manual_seed(0)
    module = Asks(61, 32, d_model=32, num_layers=2, num_heads=2, d_ff=48).cuda()
    step = GraphedStep(train_step(module, "adamw"))
    step.prepare()
    with pytest.raises(CannotCapture, match=r"a CUDA graph cannot hold this step: .*captur"):
        step.run()
    assert torch.ones(2, device="cuda").sum().item() == 2, "the device still answers"


@pytest.mark.alone  # a failed capture leaves torch's random generator unfit for what follows in this process
def test_running_out_of_memory_while_capturing_is_that(monkeypatch: pytest.MonkeyPatch) -> None:
    step = train_step(model(), "adamw")
    forward, calls = step.phases["forward"], []

    def fail() -> None:
        calls.append(None)
        forward()
        if len(calls) > WARMUP_STEPS:
            torch.empty(1 << 46, dtype=torch.uint8, device="cuda")

    step.phases["forward"] = fail
    graphed = GraphedStep(step)
    graphed.prepare()
    with pytest.raises(OutOfMemory, match="out of memory in graph"), translate_oom("graph"):
        graphed.run()
