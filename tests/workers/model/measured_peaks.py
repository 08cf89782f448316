"""A training step as `estimate` plays it, and as torch's allocator measures it."""

import gc
from dataclasses import dataclass
from typing import Any

import torch

from kernels.registry import ATTENTION
from workers.measure.allocations import make_recording
from workers.measure.allocations.categories import owners_of
from workers.model.accounting import Shape, StepMemory
from workers.model.batches import RandomBatches
from workers.model.optimizer import make_optimizer
from workers.model.precision import PRECISIONS, set_parameter_dtype
from workers.model.step_memory import Choices, Moment, moments
from workers.model.steps import BackwardStep, ForwardStep, TrainStep
from workers.model.transformer import TransformerLM

STEPS = 3
"""As kind `memory` does; the third counts."""


@dataclass(frozen=True)
class Case:
    """A step; the fields are those of the training kinds."""

    sizes: dict[str, int]
    vocabulary: int
    context: int
    batch: int
    precision: Any = "fp32"
    parameters: Any = "fp32"
    attention: Any = "eager"
    checkpointing: bool = False
    mode: str = "train_step"
    optimizer: str = "adamw"
    master_weights: bool = False
    fused_loss: bool = False
    key_heads: int | None = None
    window: int | None = None

    @property
    def shape(self) -> Shape:
        return Shape(self.vocabulary, **self.sizes, num_kv_heads=self.key_heads, window=self.window)

    def estimated(self, *, on_gpu: bool) -> list[Moment]:
        step = StepMemory(
            self.batch, self.context, self.precision, self.parameters, self.attention, self.checkpointing, on_gpu
        )
        return moments(self.shape, step, Choices(self.mode, self.optimizer, self.master_weights, self.fused_loss))

    def step(self, device: torch.device) -> tuple[Any, torch.nn.Module]:
        torch.manual_seed(0)
        shape, precision = self.shape, PRECISIONS[self.precision]
        precision.apply()
        with device:
            model = TransformerLM(
                shape.vocab_size, self.context, shape.d_model, shape.num_layers, shape.num_heads, shape.d_ff,
                attention=ATTENTION.load(self.attention).function, num_kv_heads=self.key_heads,
                window=self.window, activation_checkpointing=self.checkpointing,
            )  # fmt: skip
        set_parameter_dtype(model, self.parameters)
        arguments = model, RandomBatches(shape.vocab_size, self.batch, self.context, device, seed=0), precision
        if self.mode == "forward":
            return ForwardStep(*arguments, model_has_loss=self.fused_loss), model
        if self.mode == "forward_backward":
            return BackwardStep(*arguments, model, model_has_loss=self.fused_loss), model
        optimizer = make_optimizer(self.optimizer, model, master_weights=self.master_weights)
        return TrainStep(*arguments, model, optimizer, STEPS, model_has_loss=self.fused_loss), model


def measured_on_gpu(case: Case, device: torch.device) -> dict[str, int]:
    """Return the peak of each phase of the last step in bytes, by the allocator's own counter."""
    step, _ = case.step(device)
    peaks: dict[str, int] = {}
    for _ in range(STEPS):
        step.prepare()
        for name, work in step.phases.items():
            torch.cuda.reset_peak_memory_stats()
            work()
            torch.cuda.synchronize()
            peaks[name] = torch.cuda.max_memory_allocated()
    del step, work
    gc.collect()
    torch.cuda.empty_cache()
    return peaks


def measured_on_cpu(case: Case, device: torch.device) -> dict[str, int]:
    """Return these peaks by torch's profiler, which records from before the model is made."""
    recording = make_recording(device, 1_000_000)
    recording.begin({}, stacks=False)
    step, model = case.step(device)

    def owners() -> Any:
        optimizers = [one for one in (getattr(step, "optimizer", None),) if one is not None]
        tensors = [getattr(step, name) for name in ("inputs", "targets") if hasattr(step, name)]
        return owners_of(device, model, optimizers, getattr(step, "scaler", None), tensors, [])

    for _ in range(STEPS):
        step.prepare()
        recording.mark("preparation", owners())
        for name, work in step.phases.items():
            work()
            recording.mark(name, owners())
    return {recorded.stretch.phase: recorded.stretch.peak.total for recorded in recording.end()[-len(step.phases) :]}


def phases_of(found: list[Moment]) -> dict[str, int]:
    phases: dict[str, int] = {}
    for moment in found:
        name = moment.name.partition(":")[0]
        phases[name] = max(phases.get(name, 0), moment.total)
    return phases
