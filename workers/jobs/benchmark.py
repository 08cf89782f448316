"""Runs `benchmark`: one model at one batch size and context length, its step timed whole and by phases."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from app.settings import Settings
from app.specs.benchmark import BenchmarkSpec
from workers.jobs._base import Reporter, Unit
from workers.outcome import Unsupported
from workers.torch_host import choose_device, load, set_precision, translated

if TYPE_CHECKING:
    import torch

    from workers.measure.timing import StepTimes
    from workers.measure.validity import Monitor
    from workers.model.generation import CachedModel
    from workers.model.steps import Step

PHASES = {
    "forward": ("forward",),
    "forward_backward": ("forward", "backward"),
    "train_step": ("forward", "backward", "optimizer"),
    "generate": ("prefill", "decode"),
}
PHASE_METRICS = {
    "forward": "forward_ms",
    "backward": "backward_ms",
    "optimizer": "optimizer_ms",
    "prefill": "prefill_ms",
    "decode": "decode_ms_per_token",
}
RATES = {"tokens_per_s": "tokens/s", "tflops": "TFLOP/s", "mfu": "fraction", "ceiling_percent": "%"}
ONCE = {"first_step_ms", "peak_memory_mib"}
"""Metrics with one value however many steps are measured."""


@dataclass(frozen=True)
class Metric:
    """A metric's name, the phase it belongs to and its unit."""

    name: str
    phase: str
    unit: str


def metrics(mode: str) -> list[Metric]:
    """The metrics of a mode, in the order they are reported."""
    phases = [Metric(PHASE_METRICS[phase], phase, "ms") for phase in PHASES[mode]]
    steps = [Metric("step_ms", "step", "ms"), Metric("first_step_ms", "first_step", "ms")]
    rates = [Metric(name, "step", unit) for name, unit in RATES.items()]
    return [*phases, *steps, *rates, Metric("peak_memory_mib", "step", "MiB")]


class Values:
    """What was found for each metric: samples, or an outcome and the reason why there are none."""

    def __init__(self) -> None:
        self.samples: dict[str, Sequence[float]] = {}
        self.missing: dict[str, tuple[str, str]] = {}

    def set(self, metric: str, samples: Sequence[float] | None, reason: str) -> None:
        """Samples, or None and why they are unknown."""
        if samples is None:
            self.missing[metric] = ("unknown", reason)
        else:
            self.samples[metric] = samples

    def report(self, mode: str, case: dict[str, Any], report: Reporter) -> None:
        """One measurement per metric of the mode."""
        from workers.measure.measurement import Measurement

        for metric in metrics(mode):
            outcome, reason = self.missing.get(metric.name, ("ok", None))
            samples = self.samples.get(metric.name)
            report.measure(Measurement(case, metric.phase, metric.name, metric.unit, outcome, reason, samples))

    def save(self, report: Reporter, replicate: int) -> None:
        """The raw samples as a file for spreadsheets: one row per step, one column per metric measured each step."""
        columns = {name: samples for name, samples in self.samples.items() if name not in ONCE}
        if not columns:
            return
        name = f"samples-{replicate}.csv.gz"
        path = report.scratch / name
        with gzip.open(path, "wt", compresslevel=1, newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["step", *columns])
            writer.writerows(
                [step, *values] for step, values in enumerate(zip(*columns.values(), strict=True), start=1)
            )
        report.artifact(path, name=name, kind="samples", media_type="application/gzip")


class BenchmarkRunner:
    """The runner of kind `benchmark`."""

    kind = "benchmark"

    def plan(self, spec: BenchmarkSpec) -> list[Unit]:
        """One unit per replicate. A single one is forked, several are exec'd, to be independent samples."""
        return [
            Unit(
                title=f"{spec.model.label()}, context {spec.context_length}"
                + (f", replicate {replicate + 1} of {spec.replicates}" if spec.replicates > 1 else ""),
                params={"replicate": replicate},
                start="exec" if spec.replicates > 1 else "fork",
            )
            for replicate in range(spec.replicates)
        ]

    def run(self, spec: BenchmarkSpec, unit: Unit, report: Reporter) -> None:
        """Measure one replicate and report it. Running out of memory is a result."""
        from workers.measure import environment
        from workers.measure.memory import OutOfMemory
        from workers.measure.validity import Monitor

        device = choose_device(spec.device, spec.precision)
        build_model = choose_model(spec, device)
        set_precision(spec.precision)
        report.environment(environment.fingerprint(device))
        case = {
            **spec.coordinates(),
            "device": environment.device_name(device),
            "replicate": unit.params.get("replicate", 0),
        }
        monitor = Monitor(device)
        try:
            values = measure(spec, device, build_model, monitor, report)
        except OutOfMemory as error:
            monitor.watch(last=True)
            report.validity(monitor.verdict([], compiled=False, warmup_steps=spec.warmup_steps))
            values = Values()
            values.missing = {metric.name: ("oom", str(error)) for metric in metrics(spec.mode)}
        except RuntimeError as error:
            if meaning := translated(error):
                raise meaning from error
            raise
        values.report(spec.mode, case, report)
        values.save(report, case["replicate"])


RUNNER = BenchmarkRunner()


def choose_model(spec: BenchmarkSpec, device: torch.device) -> Callable[[], torch.nn.Module]:
    """A function that builds the spec's model with its attention on the current default device.

    Raises:
        Unsupported: no such model or attention here, or the attention cannot run so.
        InvalidEnvironment: an installed one is broken.
    """
    from kernels.registry import ATTENTION
    from workers.model.precision import PRECISIONS
    from workers.model.registry import MODELS

    model_class = load(MODELS, spec.model.name)
    attention = load(ATTENTION, spec.attention)
    dtype = str(PRECISIONS[spec.precision].compute_dtype).removeprefix("torch.")
    backward = spec.mode in {"forward_backward", "train_step"}
    if reason := attention.why_not(device.type, dtype, backward=backward):
        raise Unsupported(reason)
    generated = spec.new_tokens if spec.mode == "generate" else 0

    def build() -> torch.nn.Module:
        model: torch.nn.Module = model_class(
            vocab_size=spec.model.vocab_size,
            context_length=spec.context_length + generated,
            rope_theta=spec.model.rope_theta,
            attention=attention.function,
            activation_checkpointing=spec.activation_checkpointing,
            **spec.model.shape(),
        )
        if generated and not hasattr(model, "new_cache"):
            raise Unsupported(f"model {spec.model.name!r} has no key-value cache, which mode generate needs")
        return model

    return build


def measure(
    spec: BenchmarkSpec,
    device: torch.device,
    build_model: Callable[[], torch.nn.Module],
    monitor: Monitor,
    report: Reporter,
) -> Values:
    """Build the model, run the steps, and report their validity.

    Raises:
        OutOfMemory: in any phase, the model's making included.
    """
    from workers.measure.memory import memory_meter, memory_needed_for
    from workers.measure.timing import make_clock, time_steps

    meter = memory_meter(device)
    report.progress(0, spec.warmup_steps + spec.measure_steps, "making the model")
    with memory_needed_for("making the model"):
        model, step = build_step(spec, device, build_model)

    def measuring() -> None:
        meter.reset()
        monitor.start(warm=spec.warmup_steps > 0)

    def stepped(done: int, total: int) -> None:
        if done > spec.warmup_steps:
            monitor.watch(last=done == total)
        report.progress(done, total, "measuring" if done > spec.warmup_steps else "warming up")

    times = time_steps(
        step.phases,
        make_clock(device, len(step.phases)),
        prepare=step.prepare,
        warmup_steps=spec.warmup_steps,
        measure_steps=spec.measure_steps,
        measuring=measuring,
        stepped=stepped,
    )
    values = Values()
    peak, how = meter.peak_mib()
    values.set("peak_memory_mib", None if peak is None else [peak], how)
    report.validity(monitor.verdict(times.step, compiled=spec.compile, warmup_steps=spec.warmup_steps))
    add_times(values, spec, times)
    add_rates(values, spec, times, model, device)
    return values


def build_step(
    spec: BenchmarkSpec, device: torch.device, build_model: Callable[[], torch.nn.Module]
) -> tuple[torch.nn.Module, Step]:
    """The model and the step that is repeated."""
    import torch

    from workers.model import steps
    from workers.model.batches import RandomBatches
    from workers.model.optimizer import make_optimizer
    from workers.model.precision import PRECISIONS

    torch.manual_seed(spec.seed)
    with device:
        model = build_model()
    call: Any = torch.compile(model) if spec.compile else model
    batches = RandomBatches(spec.model.vocab_size, spec.batch_size, spec.context_length, device, spec.seed)
    precision = PRECISIONS[spec.precision]
    match spec.mode:
        case "forward":
            return model, steps.ForwardStep(call, batches, precision)
        case "forward_backward":
            return model, steps.BackwardStep(call, batches, precision, model)
        case "train_step":
            optimizer = make_optimizer(spec.optimizer, model)
            total = spec.warmup_steps + spec.measure_steps
            clip = spec.gradient_clip_norm
            return model, steps.TrainStep(call, batches, precision, model, optimizer, total, clip)
        case "generate":
            return model, steps.GenerateStep(call, cast("CachedModel", model), batches, precision, spec.new_tokens)


def add_times(values: Values, spec: BenchmarkSpec, times: StepTimes) -> None:
    """Times of the phases and of the whole step, as measured."""
    values.samples["step_ms"] = times.step
    values.samples["first_step_ms"] = [times.first_step]
    for phase, samples in times.phases.items():
        # The prefill yields the first new token.
        per = spec.new_tokens - 1 if phase == "decode" else 1
        values.samples[PHASE_METRICS[phase]] = samples if per == 1 else [sample / per for sample in samples]


def add_rates(
    values: Values, spec: BenchmarkSpec, times: StepTimes, model: torch.nn.Module, device: torch.device
) -> None:
    """What follows from the step's time: tokens and FLOPs per second, and their share of what the device could do."""
    from workers.measure.ceilings import Ceilings
    from workers.measure.environment import device_name
    from workers.model.accounting import peak_tflops

    seconds = [1e-3 * milliseconds for milliseconds in times.step]
    tokens = spec.batch_size * (spec.new_tokens if spec.mode == "generate" else spec.context_length)
    values.samples["tokens_per_s"] = [tokens / second for second in seconds]
    flops = step_flops(spec, model)
    if flops is None:
        for metric in ("tflops", "mfu", "ceiling_percent"):
            values.set(metric, None, f"model {spec.model.name!r} does not tell its FLOPs")
        return
    rates = [1e-12 * flops / second for second in seconds]
    values.samples["tflops"] = rates
    peak, source = peak_tflops(device_name(device), spec.precision)
    values.set("mfu", None if peak is None else [rate / peak for rate in rates], source)
    ceiling, source = Ceilings(Settings().ceilings_dir).tflops(device, spec.precision)
    values.set("ceiling_percent", None if ceiling is None else [100 * rate / ceiling for rate in rates], source)


def step_flops(spec: BenchmarkSpec, model: torch.nn.Module) -> int | None:
    """FLOPs of one step; None for a model that does not tell."""
    from workers.model import accounting

    if spec.mode == "generate":
        tell = getattr(model, "generate_flops", None)
        return None if tell is None else int(tell(spec.batch_size, spec.context_length, spec.new_tokens))
    tell = getattr(model, "forward_flops", None)
    if tell is None:
        return None
    forward = int(tell(spec.batch_size, spec.context_length))
    return forward if spec.mode == "forward" else accounting.training_flops(forward)
