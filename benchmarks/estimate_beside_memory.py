"""Peaks of memory as `estimate` plays them beside those that torch's allocator measures, as a table in Markdown.

    python -m benchmarks.estimate_beside_memory            # on a GPU where torch sees one, else on the CPU
    python -m benchmarks.estimate_beside_memory --only tiny --moments

Needs torch, on a GPU also Triton, and none of the service's dependencies. Each case does three training steps, as kind
`memory` does; the third counts. On a GPU the peak is that of torch's counter, on a CPU that of torch's profiler. With
`--moments`, and wherever the two differ by more than 5 %, the peaks of each phase and what the estimate's is made of
follow. The exit code is 1 if a case differs by more than 10 %.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from app.presets import MODEL_SIZES
from kernels.registry import ATTENTION
from workers.measure.allocations import make_recording
from workers.measure.allocations.categories import owners_of
from workers.model.accounting import Shape, StepMemory
from workers.model.batches import RandomBatches
from workers.model.optimizer import make_optimizer
from workers.model.precision import PRECISIONS, set_parameter_dtype
from workers.model.step_memory import PARTS, Choices, Moment, moments
from workers.model.steps import BackwardStep, ForwardStep, TrainStep
from workers.model.transformer import TransformerLM

MIB = 2**20
STEPS = 3
PRINTED, ALLOWED = 0.05, 0.1
"""Relative differences from which on a case's moments are printed, and above which it fails."""


@dataclass(frozen=True)
class Case:
    """A step; the fields are those of the training kinds."""

    size: str
    vocabulary: int
    context: int
    batch: int = 4
    precision: Any = "fp32"
    parameters: Any = "fp32"
    attention: Any = "eager"
    checkpointing: bool = False
    mode: str = "train_step"
    optimizer: str = "adamw"
    master_weights: bool = False
    fused_loss: bool = False
    key_heads: int | None = None

    @property
    def shape(self) -> Shape:
        """The model's sizes."""
        return Shape(self.vocabulary, **MODEL_SIZES[self.size], num_kv_heads=self.key_heads)

    def estimated(self, *, on_gpu: bool) -> list[Moment]:
        """Return the moments of the played step."""
        step = StepMemory(
            self.batch, self.context, self.precision, self.parameters, self.attention, self.checkpointing, on_gpu
        )
        return moments(self.shape, step, Choices(self.mode, self.optimizer, self.master_weights, self.fused_loss))

    def title(self) -> str:
        """Return the case's cells."""
        also = [self.mode] if self.mode != "train_step" else []
        also += ["checkpoints"] if self.checkpointing else []
        also += ["master weights"] if self.master_weights else []
        also += ["fused loss"] if self.fused_loss else []
        also += [f"{self.key_heads} key heads"] if self.key_heads else []
        also += [self.optimizer] if self.optimizer != "adamw" else []
        kind = f"{self.precision}/{self.parameters}"
        what = (self.size, self.vocabulary, f"{self.batch} × {self.context}", kind, self.attention, ", ".join(also))
        return " | ".join(map(str, what))

    def step(self, device: torch.device) -> tuple[Any, torch.nn.Module]:
        """Make the step and its model."""
        torch.manual_seed(0)
        shape, precision = self.shape, PRECISIONS[self.precision]
        precision.apply()
        with device:
            model = TransformerLM(
                shape.vocab_size, self.context, shape.d_model, shape.num_layers, shape.num_heads, shape.d_ff,
                attention=ATTENTION.load(self.attention).function, num_kv_heads=self.key_heads,
                activation_checkpointing=self.checkpointing,
            )  # fmt: skip
        set_parameter_dtype(model, self.parameters)
        batches = RandomBatches(shape.vocab_size, self.batch, self.context, device, seed=0)
        arguments = model, batches, precision
        if self.mode == "forward":
            return ForwardStep(*arguments, model_has_loss=self.fused_loss), model
        if self.mode == "forward_backward":
            return BackwardStep(*arguments, model, model_has_loss=self.fused_loss), model
        optimizer = make_optimizer(self.optimizer, model, master_weights=self.master_weights)
        return TrainStep(*arguments, model, optimizer, STEPS, model_has_loss=self.fused_loss), model


def on_gpus() -> Iterator[Case]:
    """Yield the cases of a GPU: every vocabulary, precision and attention, with and without checkpoints, and others."""
    kinds = (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"))
    for vocabulary in (10_000, 50_257, 151_936):
        for precision, parameters in kinds:
            for attention in ("eager", "triton"):
                for checkpointing in (False, True):
                    base = Case("small", vocabulary, 512, 4, precision, parameters, attention, checkpointing)
                    yield base
    bf16 = Case("small", 50_257, 1024, 2, "bf16", "bf16", "triton")
    yield replace(bf16, master_weights=True)
    yield replace(bf16, master_weights=True, optimizer="triton_adamw")
    yield replace(bf16, master_weights=True, vocabulary=151_936, context=64)
    for optimizer in ("adamw", "torch_adamw", "torch_fused_adamw", "triton_adamw"):
        yield Case("medium", 50_257, 128, 1, optimizer=optimizer)
    for attention in ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "triton"):
        yield Case("small", 10_000, 2048, 4, "bf16", "fp32", attention)
        yield Case("small", 10_000, 2048, 4, "bf16", "fp32", attention, key_heads=4)
    yield Case("small", 10_000, 2048, 4, "bf16", "fp32", key_heads=4)
    yield Case("medium", 10_000, 1024, 4, "bf16", "fp32")
    yield Case("medium", 10_000, 1024, 4, "fp16", "fp32")
    yield Case("medium", 10_000, 1024, 8, checkpointing=True)
    for mode in ("forward", "forward_backward"):
        for precision in ("fp32", "bf16"):
            yield Case("small", 50_257, 512, 8, precision, mode=mode)
    for precision, parameters in kinds:
        yield Case("small", 151_936, 512, 8, precision, parameters, "triton", fused_loss=True)
    yield from tiny_cases("triton")


def tiny_cases(fused: str) -> Iterator[Case]:
    """Yield cases that a CPU can do, with the same variety."""
    for vocabulary in (10_000, 50_257, 151_936):
        for precision, parameters in (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")):
            for attention in ("eager", fused):
                for checkpointing in (False, True):
                    small = vocabulary == 151_936
                    yield Case(
                        "tiny", vocabulary, 128 if small else 256, 1 if small else 4,
                        precision, parameters, attention, checkpointing,
                    )  # fmt: skip
    for optimizer in ("torch_adamw", "torch_fused_adamw"):
        yield Case("tiny", 50_257, 32, 1, optimizer=optimizer)
    yield Case("tiny", 50_257, 32, 1, "bf16", "bf16", master_weights=True)
    yield Case("tiny", 10_000, 256, 4, "bf16", mode="forward")
    yield Case("tiny", 10_000, 256, 4, mode="forward_backward")
    yield Case("tiny", 10_000, 256, 2, "bf16", fused_loss=True)
    yield Case("tiny", 500, 512, 2, key_heads=2)


def measured(case: Case, device: torch.device) -> dict[str, int]:
    """Return the peak of each phase of the third step, in bytes."""
    measure = measured_on_gpu if device.type == "cuda" else measured_on_cpu
    peaks = measure(case, device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return peaks


def measured_on_gpu(case: Case, device: torch.device) -> dict[str, int]:
    """Read the allocator's own counter."""
    step, _ = case.step(device)
    peaks: dict[str, int] = {}
    for _ in range(STEPS):
        step.prepare()
        for name, work in step.phases.items():
            torch.cuda.reset_peak_memory_stats()
            work()
            torch.cuda.synchronize()
            peaks[name] = torch.cuda.max_memory_allocated()
    return peaks


def measured_on_cpu(case: Case, device: torch.device) -> dict[str, int]:
    """Record the allocations, from before the model is made."""
    recording = make_recording(device, 1_000_000)
    recording.begin({}, stacks=False)
    step, model = case.step(device)
    batch = ("inputs", "targets")

    def owners() -> Any:
        optimizers = [one for one in (getattr(step, "optimizer", None),) if one is not None]
        tensors = [getattr(step, name) for name in batch if hasattr(step, name)]
        return owners_of(device, model, optimizers, getattr(step, "scaler", None), tensors, [])

    for _ in range(STEPS):
        step.prepare()
        recording.mark("preparation", owners())
        for name, work in step.phases.items():
            work()
            recording.mark(name, owners())
    return {recorded.stretch.phase: recorded.stretch.peak.total for recorded in recording.end()[-len(step.phases) :]}


def phases_of(found: list[Moment]) -> dict[str, int]:
    """Return the highest moment of each phase."""
    phases: dict[str, int] = {}
    for moment in found:
        name = moment.name.partition(":")[0]
        phases[name] = max(phases.get(name, 0), moment.total)
    return phases


def explain(found: list[Moment], peaks: dict[str, int]) -> None:
    """Print each phase's peaks, and what the highest moment is made of."""
    played = phases_of(found)
    print(
        "  ", "; ".join(f"{name} {played.get(name, 0) / MIB:.0f} of {peak / MIB:.0f}" for name, peak in peaks.items())
    )
    highest = max(found, key=lambda moment: moment.total)
    print("  ", highest.name, {part: round(highest.part(part) / MIB) for part in PARTS})
    largest = sorted(highest.held, key=highest.bytes_of, reverse=True)[:8]
    print("  ", "; ".join(f"{key[1]} {highest.bytes_of(key) / MIB:.0f}" for key in largest))


def main(arguments: list[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Print the table. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="cases whose titles have this text")
    parser.add_argument("--moments", action="store_true", help="print every case's moments")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU where there is one")
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    say(f"{name}, torch {torch.__version__}\n")
    head = ("model", "vocabulary", "batch × context", "precision/parameters", "attention", "also")
    say(f"| {' | '.join(head)} | estimated, MiB | measured, MiB | ratio |")
    say("|---|---:|---|---|---|---|---:|---:|---:|")
    worst, cases = 0.0, on_gpus() if on_gpu else tiny_cases("sdpa_flash")
    for case in (case for case in cases if chosen.only in case.title()):
        found = case.estimated(on_gpu=on_gpu)
        try:
            peaks = measured(case, device)
        except (RuntimeError, NotImplementedError) as error:  # a backend refuses the inputs, or memory runs out
            say(f"| {case.title()} | – | – | {str(error).splitlines()[0][:100]} |")
            continue
        estimate, peak = max(moment.total for moment in found), max(peaks.values())
        ratio = estimate / peak
        worst = max(worst, abs(ratio - 1))
        say(f"| {case.title()} | {estimate / MIB:.0f} | {peak / MIB:.0f} | {ratio:.3f} |")
        if chosen.moments or abs(ratio - 1) > PRINTED:
            explain(found, peaks)
        sys.stdout.flush()
    say(f"\nlargest difference: {100 * worst:.1f} %")
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
