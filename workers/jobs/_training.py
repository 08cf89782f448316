"""Code that all training kinds share: it builds the model and its step from a spec, times the step and derives metrics.

Each kind adds its own observers of the phases, tables and files.
"""

from __future__ import annotations

import importlib.util
import inspect
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from app.specs._training import ACCUMULATION, WITH_BACKWARD, ModelSpec, TrainingSpec
from flopwatch.steps import MOST_STEPS, steps_of_a_second
from workers import uploaded
from workers.jobs import _own_step
from workers.jobs._limits import check_rate
from workers.jobs._values import Metric, Values
from workers.outcome import Unsupported
from workers.reporter import Reporter
from workers.torch_host import as_runner_error, choose_device, load, seed_everything, set_precision

if TYPE_CHECKING:
    import torch

    from kernels.registry import Implementation
    from workers.measure.busy import Busy
    from workers.measure.check import Check
    from workers.measure.memory import MemoryMeter
    from workers.measure.own_step import OwnStep
    from workers.measure.returned import ReturnedNumbers
    from workers.measure.timing import Observer, StepTimes
    from workers.measure.validity import Monitor
    from workers.model.accounting import Shape
    from workers.model.generation import CachedModel
    from workers.model.graphed import GraphableStep, GraphedStep
    from workers.model.steps import Step

PHASE_METRICS = {
    ACCUMULATION: "accumulation_ms",
    "forward": "forward_ms",
    "backward": "backward_ms",
    "optimizer": "optimizer_ms",
    "prefill": "prefill_ms",
    "decode": "decode_ms_per_token",
}
WHOLE = (
    ("tokens_per_s", "tokens/s"),
    ("tflops", "TFLOP/s"),
    ("mfu", "fraction"),
    ("ceiling_percent", "%"),
    ("host_us", "µs"),
    ("gpu_busy_percent", "%"),
    ("peak_memory_mib", "MiB"),
    ("memory_reserved_mib", "MiB"),
    ("device_memory_mib", "MiB"),
    ("parameters", "parameters"),
)
"""Metrics without a phase, of the whole step, with their units."""
Pacing = Literal["step", "loop"]
ISOLATED = "isolated_step"
LOOP_S = 2.0
"""Seconds that a loop of slow steps lasts, and it has at least MIN_LOOP_STEPS. The monitor reads the device between
loops."""
MIN_LOOP_STEPS = 10
OWN_WHOLE = ("items_per_s", "items/s")
"""A further metric of a step of the user's own."""
GPU_ONLY = "known on GPUs only"
STEPS = 10
"""Steps that are measured by default, on a CPU at least."""
MAX_BUSY_PERCENT = 101.0
"""The largest valid share. Steps vary, so a device that never waits may seem busy for a little longer than the median
step; a larger number cannot be a share."""
WINDOW_S = {"cpu": 0.2, "cuda": 0.5}
"""Shortest window in seconds of a warm-up that lasts until times are steady. A GPU that multiplies large matrices takes
seconds to settle at its power limit."""


def metrics(spec: TrainingSpec, pacing: Pacing = "step", phases: Sequence[str] | None = None) -> list[Metric]:
    """Return the metrics of a spec in the order of the report.

    Args:
        spec: The job's spec.
        pacing: `loop` has one metric more.
        phases: The phases that a step of the user's own has named; None: those of the spec.
    """
    whole = WHOLE if spec.step_code is None else (*WHOLE, OWN_WHOLE)
    known = spec.step_phases() if phases is None else phases
    return [
        *(Metric(phase_metric(spec, phase), phase, "ms") for phase in known if phase != "step"),
        Metric("step_ms", "step", "ms"),
        *([Metric("isolated_step_ms", ISOLATED, "ms")] if pacing == "loop" else []),
        Metric("first_step_ms", "first_step", "ms"),
        Metric("device_ms", "step", "ms"),
        *(Metric(name, None, unit) for name, unit in whole),
    ]


def phase_metric(spec: TrainingSpec, phase: str) -> str:
    """Return the metric of a phase's time."""
    return f"{phase}_ms" if spec.step_code is not None else PHASE_METRICS[phase]


@dataclass(frozen=True)
class Training:
    """A model on its device, and the step that is repeated."""

    spec: TrainingSpec
    device: torch.device
    model: torch.nn.Module
    step: Step
    meter: MemoryMeter
    """Measures from before the model was made."""
    graphed: GraphedStep | None = None
    """The step, if it is a CUDA graph."""
    own: OwnStep | None = None
    """The step, if it is the user's own."""

    @property
    def modules(self) -> torch.nn.Module:
        """The model; of a step of the user's own, what has parameters or buffers so far."""
        return self.model if self.own is None else self.own.model

    def returned(self) -> object:
        """Return what the last step has returned, or our own step's loss."""
        if self.own is not None:
            return self.own.returned
        loss = getattr(self.step, "loss", None)
        return None if loss is None else {"loss": loss}

    def take_returned(self, numbers: ReturnedNumbers, *, last: bool = False) -> None:
        """Let `numbers` read what the last step has returned, between steps, and then drop it."""
        numbers.take()
        if self.own is not None:
            self.own.returned, self.own.keeps_returned = None, numbers.wants_next and not last

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases of a step, in order; those of a step of the user's own once it has run."""
        return self.spec.step_phases() if self.own is None else self.own.phase_names


Maker = Callable[[], Any]
"""Builds the model that a spec names, or the user's own step (workers.measure.own_step.OwnStep)."""


def prepare(spec: TrainingSpec) -> tuple[torch.device, Maker]:
    """Make this process ready for a spec. Returns its device, and a function that builds the model or the step there.

    Raises:
        Unsupported: the device, model or attention does not exist here, or cannot run this spec.
        InvalidEnvironment: something is wrong with this host.
    """
    device = choose_device(spec.device, spec.precision)
    _own_step.hear_ranges()
    if spec.step_code is not None:
        set_precision(spec.precision)
        return device, _own_step.maker(spec.step_code, device, spec.arguments)
    if spec.cuda_graph and device.type != "cuda":
        raise Unsupported("cuda_graph: this worker's process sees no GPU, and a CPU has no CUDA graphs")
    build_model = choose_model(spec, device)
    set_precision(spec.precision)
    return device, build_model


def choose_model(spec: TrainingSpec, device: torch.device) -> Callable[[], torch.nn.Module]:
    """Return a function that builds the spec's model with its attention on the current default device.

    Raises:
        Unsupported: the model or attention does not exist here, or does not support the spec's options.
        InvalidEnvironment: an installed model or attention is broken.
        BrokenCode: the job's uploaded one is broken.
    """
    from workers.model.precision import PRECISIONS
    from workers.model.registry import MODELS

    model_class = load(MODELS, spec.model.name) if spec.code is None else uploaded.load(spec.code)
    attention = attention_of(spec)
    dtype = str(PRECISIONS[spec.precision].compute_dtype).removeprefix("torch.")
    problem = shape_of(spec.model, spec.longest).problem
    if reason := attention.why_not(device.type, dtype, backward=spec.mode in WITH_BACKWARD, problem=problem):
        raise Unsupported(reason)
    if spec.fused:
        check_fused(device)
    arguments: dict[str, Any] = {
        "vocab_size": spec.model.vocab_size,
        "context_length": spec.longest,
        **spec.model.shape(),
        **options_of(model_class, spec, attention.function),
    }

    def build() -> torch.nn.Module:
        model: torch.nn.Module = model_class(**arguments)
        if spec.mode == "generate" and not hasattr(model, "new_cache"):
            raise Unsupported(f"model {name_of(spec)!r} has no key-value cache, which mode generate needs")
        if spec.model_has_loss and "targets" not in inspect.signature(model.forward).parameters:
            field = "fused_linear_cross_entropy" if spec.fused_linear_cross_entropy else "fused linear_cross_entropy"
            raise Unsupported(
                f"model {name_of(spec)!r} does not compute its loss: its forward() takes no argument 'targets', which "
                f"{field} needs"
            )
        return model

    return build


def attention_of(spec: TrainingSpec) -> Implementation:
    """Return the model's attention: an installed one, or the job's own code.

    Raises:
        Unsupported, InvalidEnvironment, BrokenCode: it does not exist here, or is broken.
    """
    from kernels.registry import ATTENTION

    if spec.attention_code is not None:
        return uploaded.implementation(spec.attention_code)
    implementation: Implementation = load(ATTENTION, spec.attention)
    return implementation


def check_fused(device: torch.device) -> None:
    """Check that Triton's kernels run on a device.

    Raises:
        Unsupported: they do not.
    """
    if device.type != "cuda":
        raise Unsupported("fused: this worker's process sees no GPU, and Triton has no kernels for a CPU: leave it out")
    if importlib.util.find_spec("triton") is None:
        raise Unsupported("fused: Triton is not installed: install triton, or leave fused out")


def shape_of(model: ModelSpec, tokens: int) -> Shape:
    """Return the sizes of a model for sequences of so many tokens, as `workers.model.accounting` takes them."""
    from workers.model.accounting import Shape

    window, documents = model.masks(tokens)
    return Shape(
        vocab_size=model.vocab_size,
        **model.shape(),
        num_kv_heads=model.num_kv_heads,
        window=window,
        document_lengths=None if documents is None else tuple(documents),
    )


def name_of(spec: TrainingSpec) -> str:
    """Return the name of the model's class, for messages."""
    return spec.model.name if spec.code is None else spec.code.label()


def options_of(model_class: Callable[..., Any], spec: TrainingSpec, attention: Callable[..., Any]) -> dict[str, Any]:
    """Return the optional constructor arguments that a model takes, with the spec's values.

    A model that was written before an option existed lacks it, and still works if the spec does not set that option.

    Raises:
        Unsupported: the spec needs an option that the model lacks.
    """
    fields, shape = type(spec).model_fields, shape_of(spec.model, spec.longest)
    options = {
        "rope_theta": (
            spec.model.rope_theta,
            spec.model.rope_theta == type(spec.model).model_fields["rope_theta"].default,
        ),
        **{
            name: (getattr(shape, name), getattr(shape, name) is None)
            for name in ("num_kv_heads", "window", "document_lengths")
        },
        "attention": (attention, spec.attention_code is None and spec.attention == fields["attention"].default),
        "activation_checkpointing": (spec.activation_checkpointing, not spec.activation_checkpointing),
        "checkpoint_scope": (
            spec.checkpoint_scope,
            not spec.activation_checkpointing or spec.checkpoint_scope == fields["checkpoint_scope"].default,
        ),
        "checkpoint_layers": (
            spec.checkpoint_layers,
            not spec.activation_checkpointing or spec.checkpoint_layers is None,
        ),
        "checkpoint_blocks": (spec.checkpoint_blocks, not spec.activation_checkpointing or spec.checkpoint_blocks == 1),
        "fused": (tuple(sorted(spec.fused)), not spec.fused),
    }
    try:
        parameters = inspect.signature(model_class).parameters
    except (TypeError, ValueError):  # a constructor in another language has no signature
        return {name: value for name, (value, _) in options.items()}
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, (_, left_alone) in options.items():
        if not (takes_all or name in parameters or left_alone):
            raise Unsupported(f"model {name_of(spec)!r} takes no argument {name!r}, which this job sets")
    return {name: value for name, (value, _) in options.items() if takes_all or name in parameters}


def build(
    spec: TrainingSpec, device: torch.device, build_model: Maker, prompt: Sequence[int] | None = None
) -> Training:
    """Build the model and its step, in mode generate for a prompt of these tokens; None: random ones.

    Raises:
        OutOfMemory: the model does not fit.
        Unsupported: the model does not expose its blocks, which compiling them needs.
    """

    from workers.measure.memory import memory_meter, translate_oom
    from workers.model.graphed import GraphedStep
    from workers.model.precision import set_parameter_dtype

    if device.type == "cpu" and (spec.mode == "train_step" or spec.activation_checkpointing):
        # Optimizers and checkpointing import it: 70 MiB that do not belong to the model. Forks of the warm parent have
        # it already.
        importlib.import_module("torch._dynamo")
    meter = memory_meter(device)
    with translate_oom("making the model"):
        seed_everything(spec.seed)
        if spec.step_code is not None:
            own: OwnStep = build_model()
            return Training(spec, device, own.model, own, meter, own=own)
        with device:
            model = build_model()
        set_parameter_dtype(model, spec.parameter_dtype)
        step = build_step(spec, device, model, prompt)
    if not spec.cuda_graph:
        return Training(spec, device, model, step, meter)
    graphed = GraphedStep(cast("GraphableStep", step))
    return Training(spec, device, model, graphed, meter, graphed)


def build_step(
    spec: TrainingSpec, device: torch.device, model: torch.nn.Module, prompt: Sequence[int] | None = None
) -> Step:
    """Build the step that is repeated, not yet captured in a CUDA graph; `prompt` as for `build`."""
    import torch

    from workers.measure.warmup import min_calls
    from workers.model import steps
    from workers.model.batches import FixedPrompt, RandomBatches
    from workers.model.optimizer import make_optimizer
    from workers.model.precision import PRECISIONS

    call: Any = compiled(spec, model)
    fused, micro_batches = spec.model_has_loss, spec.accumulation_steps
    sequences = micro_batches * spec.batch_size
    batches = RandomBatches(spec.model.vocab_size, sequences, spec.context_length, device, spec.seed)
    precision = PRECISIONS[spec.precision]
    match spec.mode:
        case "forward":
            return steps.ForwardStep(call, batches, precision, model_has_loss=fused)
        case "forward_backward":
            return steps.BackwardStep(
                call, batches, precision, model, model_has_loss=fused, micro_batches=micro_batches
            )
        case "train_step":
            rate = torch.tensor(steps.MAX_LEARNING_RATE, device=device) if spec.cuda_graph else steps.MAX_LEARNING_RATE
            options = {"capturable": spec.cuda_graph, "master_weights": spec.master_weights}
            optimizer = make_optimizer(spec.optimizer, model, rate, **options)
            # The steps of the schedule affect only the learning rate, so further steps do no harm.
            total = min_calls(spec.warmup_steps) + (spec.measure_steps or STEPS)
            clip = spec.gradient_clip_norm
            return steps.TrainStep(
                *(call, batches, precision, model, optimizer, total, clip),
                model_has_loss=fused,
                micro_batches=micro_batches,
            )
        case "generate":
            prompts = batches if prompt is None else FixedPrompt(prompt, spec.batch_size, device)
            return steps.GenerateStep(
                call, cast("CachedModel", model), prompts, precision, spec.new_tokens, **spec.sampling()
            )


def compiled(spec: TrainingSpec, model: torch.nn.Module, *, inside_hooks: bool = False) -> Any:
    """Return the model for the step to call, compiled if the spec asks for it; see `compile_blocks` for the hooks."""
    from workers.model.compiled import NoBlocks, compile_blocks, compile_model

    if not spec.compile:
        return model
    if spec.compile_scope == "model":
        return compile_model(model)
    try:
        return compile_blocks(model, inside_hooks=inside_hooks)
    except NoBlocks as error:
        raise Unsupported(f"model {name_of(spec)!r}: {error}") from error


@contextmanager
def known_errors() -> Iterator[None]:
    """Turn known errors of torch and of our steps into the errors that decide the job's outcome.

    Raises:
        Unsupported, InvalidEnvironment: the meaning of the error that occurred inside.
    """
    from workers.model.graphed import CannotCapture

    try:
        yield
    except CannotCapture as error:
        raise Unsupported(f"cuda_graph: {error}") from error
    except RuntimeError as error:
        if meaning := as_runner_error(error):
            raise meaning from error
        raise


def measure(
    training: Training,
    monitor: Monitor,
    report: Reporter,
    observers: Sequence[Observer] = (),
    pacing: Pacing = "step",
) -> tuple[Values, list[Check]]:
    """Time the steps. Returns the values, and the checks of the samples' validity.

    Args:
        pacing: `step`: phases and the whole step are timed in isolated steps. `loop`: phases are timed in isolated
            steps, and the whole step in a loop of as many steps that follows.

    Raises:
        OutOfMemory: the memory did not suffice in some phase.
    """
    from workers.measure.busy import measure_busy
    from workers.measure.own_step import KINDS
    from workers.measure.returned import COLUMNS, VALUES, ReturnedNumbers, work_rows
    from workers.measure.timing import run_step
    from workers.measure.validity import check_kernels

    spec, step, graphed, meter = training.spec, training.step, training.graphed, training.meter
    on_gpu = training.device.type == "cuda"
    numbers = ReturnedNumbers(training.returned)
    times = time_isolated(training, monitor, report, observers, numbers, loops=pacing == "loop")
    work = work_rows({kind: work_of_step(training, kind) for kind in KINDS})
    report.table(VALUES, COLUMNS, [*numbers.rows, *work])
    step_ms = times.step if pacing == "step" else time_loops(training, times, monitor, report)
    values = Values(metrics(spec, pacing, training.phases))
    peak, how = meter.peak_mib() if graphed is None else (graphed.peak_mib, "")
    values.set("peak_memory_mib", None, None if peak is None else [peak], how)
    reserved = meter.reserved_mib()
    values.set("memory_reserved_mib", None, None if reserved is None else [reserved], GPU_ONLY)
    values.set("device_memory_mib", None, *monitor.device_memory_mib())
    checks = check_times(times, step_ms, monitor, spec, on_gpu=on_gpu)
    busy: Busy | str = GPU_ONLY
    if on_gpu:
        busy = measure_busy(lambda: run_step(step.phases, ()), step.prepare)
    checks.append(check_busy(times, step_ms, busy))
    if spec.attention == "triton":
        checks += check_kernels(training.device)
    add_times(values, training, times, step_ms, busy)
    if pacing == "loop":
        values.set("isolated_step_ms", ISOLATED, times.step)
    return values, checks


def time_isolated(
    training: Training,
    monitor: Monitor,
    report: Reporter,
    observers: Sequence[Observer],
    numbers: ReturnedNumbers,
    *,
    loops: bool,
) -> StepTimes:
    """Warm up, and time steps that each begin on an idle device.

    `numbers` takes what steps return; `loops` says that loops of as many steps follow.

    Raises:
        OutOfMemory: the memory did not suffice in some phase.
    """
    from workers.measure.timing import make_clock, time_steps
    from workers.measure.warmup import min_calls

    spec, step, graphed = training.spec, training.step, training.graphed
    least = min_calls(spec.warmup_steps)
    if training.own is not None:
        training.own.takes = _number_of_steps(spec, training.device, loops=loops)

    planned = spec.measure_steps or STEPS

    def measuring(steps: int) -> None:
        nonlocal planned
        planned = steps
        training.meter.reset()
        monitor.start(warm=least > 0)

    def prepare() -> None:
        training.take_returned(numbers)
        step.prepare()

    def on_progress(warmed_up: int, measured: int) -> None:
        if measured:
            monitor.watch(last=measured == planned and not loops)
        total = max(least, warmed_up) + (1 + loops) * planned
        report.progress(warmed_up + measured, total, "measuring" if measured else "warming up")

    by_default = steps_of_a_second if training.device.type == "cpu" else STEPS
    times = time_steps(
        step.phases,
        make_clock(training.device),
        observers=observers,
        prepare=prepare,
        inner_times_ms=dict if graphed is None else graphed.inner_times_ms,
        warmup_steps=spec.warmup_steps,
        window_s=WINDOW_S[training.device.type],
        measure_steps=by_default if spec.measure_steps is None else spec.measure_steps,
        measuring=measuring,
        on_progress=on_progress,
    )
    training.take_returned(numbers, last=True)
    return times


def _number_of_steps(spec: TrainingSpec, device: torch.device, *, loops: bool) -> str:
    """Return how many steps a job takes, in words."""
    from workers.measure.warmup import MIN_CALLS

    warm = f"at least {MIN_CALLS}" if spec.warmup_steps is None else str(spec.warmup_steps)
    measured = str(spec.measure_steps or STEPS)
    if spec.measure_steps is None and device.type == "cpu":
        measured = f"{STEPS} to {MOST_STEPS}"
    return f"{warm} steps to warm up, {measured} measured ones{', as many in a loop' if loops else ''} and a few more"


def time_loops(training: Training, isolated: StepTimes, monitor: Monitor, report: Reporter) -> Sequence[float]:
    """Return the times in ms of steps that follow each other.

    Args:
        isolated: The times of the isolated steps before.

    Raises:
        OutOfMemory: the memory did not suffice in some phase.
    """
    from workers.measure.timing import LOOP_STEPS, make_marks, time_loop

    steps, step = len(isolated.step), training.step
    done = isolated.warmup + steps

    def on_progress(measured: int) -> None:
        monitor.watch(last=measured == steps)
        report.progress(done + measured, done + steps, "measuring in a loop")

    fitting = int(1e3 * LOOP_S / max(statistics.median(isolated.step), 1e-3))
    return time_loop(
        step.phases,
        make_marks(training.device),
        prepare=step.prepare,
        measure_steps=steps,
        loop_steps=min(LOOP_STEPS, max(MIN_LOOP_STEPS, fitting)),
        on_progress=on_progress,
    )


def check_times(
    times: StepTimes, step_ms: Sequence[float], monitor: Monitor, spec: TrainingSpec, *, on_gpu: bool
) -> list[Check]:
    """Return the checks of the validity of the steps' times, of which `step_ms` are the samples."""
    from workers.measure.compilation import compilation
    from workers.measure.validity import check_stability, check_steady

    checks = [
        check_steady(times.steady, times.warmup, too_slow=times.too_slow, hidden=times.hidden),
        *check_stability(step_ms, on_gpu=on_gpu),
    ]
    if spec.compile or (spec.step_code is not None and compilation().graphs):
        checks += monitor.compilation_checks(warmup_steps=times.warmup)
    return checks


def check_busy(times: StepTimes, step_ms: Sequence[float], busy: Busy | str) -> Check:
    """Check that the device did not wait for the host."""
    from workers.measure.validity import check_waiting

    host_us = statistics.median(times.host_us) if times.host_us else None
    return check_waiting(statistics.median(step_ms), host_us, busy)


def add_times(values: Values, training: Training, times: StepTimes, step_ms: Sequence[float], busy: Busy | str) -> None:
    """Set the measured times of the phases, of the host, and of the whole step, whose samples are `step_ms`."""
    spec = training.spec
    values.set("step_ms", "step", step_ms)
    values.set("first_step_ms", "first_step", [times.first_step])
    for phase in training.phases:
        samples: Sequence[float] | None = times.phases.get(phase)
        if samples is not None and phase == "decode" and training.own is None:
            # The prefill yields the first new token.
            samples = [sample / (spec.new_tokens - 1) for sample in samples]
        why_not = None if training.graphed is None else training.graphed.why_no_phases
        if samples is not None and (timed := len(samples)) < len(times.step):
            samples, why_not = None, f"{timed} of {len(times.step)} steps have this phase"
        values.set(phase_metric(spec, phase), phase, samples, why_not or "the phase was not timed")
    values.set("host_us", None, times.host_us or None, "known on GPUs only: a CPU does the work itself")
    add_busy(values, statistics.median(step_ms), busy)
    trainable = sum(parameter.numel() for parameter in training.modules.parameters() if parameter.requires_grad)
    values.set("parameters", None, [trainable])


def add_busy(values: Values, step_ms: float, busy: Busy | str) -> None:
    """Set the device's time in a step, and its share of the wall time, which other steps measured.

    Args:
        values: Takes the two metrics.
        step_ms: Median wall time of the measured steps.
        busy: The device's work in a step, or the reason why it is unknown.
    """
    if isinstance(busy, str):
        values.set("device_ms", "step", None, busy)
        values.set("gpu_busy_percent", None, None, busy)
        return
    values.set("device_ms", "step", [busy.busy_ms])
    share = 100 * busy.busy_ms / step_ms
    if share > MAX_BUSY_PERCENT:
        why = (
            f"a profiled step kept the device busy for {busy.busy_ms:.4g} ms, and the measured ones took {step_ms:.4g}"
        )
        values.set("gpu_busy_percent", None, None, why)
    else:
        values.set("gpu_busy_percent", None, [share])


def add_rates(values: Values, training: Training, ceilings: Path) -> list[Check]:
    """Set the rates of the median step: tokens and FLOPs per second, MFU, and the share of the measured ceiling.

    Returns the check that the device can reach them, where the FLOPs are known.
    """
    from workers.measure.timing import run_step

    spec, device = training.spec, training.device
    seconds = 1e-3 * statistics.median(values.samples("step_ms", "step") or ())
    for kind in ("tokens", "items"):
        amount = work_of_step(training, kind)
        values.set(f"{kind}_per_s", None, None if amount is None else [amount / seconds], not_told(kind))
    flops = work_of_step(training, "flops")
    if flops is None:
        why = not_told("flops") if training.own else f"model {name_of(spec)!r} does not tell its FLOPs"
        values.set_missing("unknown", why)
        return []
    rate = 1e-12 * flops / seconds
    values.set("tflops", None, [rate])
    precision: tuple[str, str] = spec.precision, ""
    if training.own is not None:
        training.step.prepare()
        precision = precision_of_own(lambda: run_step(training.step.phases, ()), device)
    return add_shares(values, rate, precision, device, ceilings)


def add_shares(
    values: Values, rate: float, of_products: tuple[str, str], device: torch.device, ceilings: Path
) -> list[Check]:
    """Set the shares of a rate in the device's peak and in its measured ceiling.

    Args:
        values: Get the metrics `mfu` and `ceiling_percent`.
        rate: TFLOP/s of one device.
        of_products: The precision of the matrix products, or the reason why no peak belongs to them.
        device: The device.
        ceilings: The folder of measured ceilings.

    Returns:
        The check that the device can reach the rate.
    """
    from workers.measure.ceilings import Ceilings
    from workers.measure.environment import device_name
    from workers.model.accounting import peak_tflops

    precision, why_not = of_products
    if why_not:
        values.set("mfu", None, None, why_not)
        values.set("ceiling_percent", None, None, why_not)
        return []
    peak, source = peak_tflops(device_name(device), precision)
    values.set("mfu", None, None if peak is None else [rate / peak], source)
    ceiling, source = Ceilings(ceilings).tflops(device, precision)
    values.set("ceiling_percent", None, None if ceiling is None else [100 * rate / ceiling], source)
    return [check_rate(rate, precision, device, ceilings)]


def precision_of_own(run: Callable[[], object], device: torch.device) -> tuple[str, str]:
    """Return the precision of the matrix products in one more step of the user's own, or the reason why no peak belongs
    to it."""
    from workers.measure.product_precision import precision_of_products

    precision, why_not = precision_of_products(run, device)
    if precision == "fp64":
        return precision, "the step's products are fp64, of which no peak is on record"
    return precision or "", why_not


def not_told(kind: str) -> str:
    """Return why a rate of a step of the user's own is unknown."""
    return f"the step does not tell its {kind}: flopwatch.work({kind}=…)"


def work_of_step(training: Training, kind: str) -> float | None:
    """Return the "flops", "tokens" or "items" of one step; None if nobody tells them."""
    if training.own is not None:
        return training.own.work_of_step(kind)
    spec = training.spec
    if kind == "flops":
        return step_flops(spec, training.model)
    if kind == "items":
        return None
    length = spec.new_tokens if spec.mode == "generate" else spec.context_length
    return spec.accumulation_steps * spec.batch_size * length


def step_flops(spec: TrainingSpec, model: torch.nn.Module) -> int | None:
    """Return the FLOPs of one step, all its micro-batches included; None for a model that does not report them."""
    from workers.model import accounting

    if spec.mode == "generate":
        tell = getattr(model, "generate_flops", None)
        return None if tell is None else int(tell(spec.batch_size, spec.context_length, spec.new_tokens))
    tell = getattr(model, "forward_flops", None)
    if tell is None:
        return None
    forward = spec.accumulation_steps * int(tell(spec.batch_size, spec.context_length))
    return forward if spec.mode == "forward" else accounting.training_flops(forward)
