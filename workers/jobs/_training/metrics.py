"""The metrics of a step: their names, and their values from its times, its memory and its work."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from app.specs._training import ACCUMULATION, TrainingSpec
from workers.jobs._limits import FASTEST_FIRST, check_rate
from workers.jobs._training.building import Training, name_of
from workers.jobs._values import GPU_ONLY, Metric, Values
from workers.measure.check import Check, not_judged
from workers.model import accounting
from workers.model.accounting import mixed_rate, peak_tflops

if TYPE_CHECKING:
    import torch

    from workers.measure.busy import Busy
    from workers.measure.timing import StepTimes
    from workers.measure.validity import Monitor
    from workers.model.float8 import LinearLayer

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
OWN_WHOLE = ("items_per_s", "items/s")
"""A further metric of a step of the user's own."""
Shares = tuple[Mapping[str, float], str]
"""The share of each precision in the FLOPs of a step, or the reason why it is unknown."""
Pacing = Literal["step", "loop"]
ISOLATED = "isolated_step"
NO_PARAMETERS = "the code has made no module and no optimizer that is known"
MAX_BUSY_PERCENT = 101.0
"""The largest valid share. Steps vary, so a device that never waits may seem busy for a little longer than the median
step; a larger number cannot be a share."""


def metrics_of(spec: TrainingSpec, pacing: Pacing = "step", phases: Sequence[str] | None = None) -> list[Metric]:
    """Return the metrics of a spec in the order of the report. `pacing`: `loop` has one metric more. `phases`: the
    phases that a step of the user's own has named; None: those of the spec."""
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
    return f"{phase}_ms" if spec.step_code is not None else PHASE_METRICS[phase]


def add_times(values: Values, training: Training, times: StepTimes, step_ms: Sequence[float], busy: Busy | str) -> None:
    """Set the measured times of the phases, of the host, and of the whole step, whose samples are `step_ms`."""
    spec = training.spec
    values.set("step_ms", "step", step_ms)
    values.set("first_step_ms", "first_step", [times.first_step])
    for phase in training.phases:
        if phase == "step":  # of a step of the user's own that names none
            continue
        samples: Sequence[float] | None = times.phases.get(phase)
        if samples is not None and phase == "decode" and training.own is None:
            # The prefill yields the first new token.
            samples = [sample / (spec.new_tokens - 1) for sample in samples]
        why_not = "the phase was not timed"
        if samples is not None and (timed := len(samples)) < len(times.step):
            samples, why_not = None, f"{timed} of {len(times.step)} steps have this phase"
        values.set(phase_metric(spec, phase), phase, samples, why_not)
    values.set("host_us", None, times.host_us or None, "known on GPUs only: a CPU does the work itself")
    add_busy(values, statistics.median(step_ms), busy)
    trainable = training.trainable
    values.set("parameters", None, None if trainable is None else [trainable], NO_PARAMETERS)


def add_memory(values: Values, training: Training, monitor: Monitor, records: int) -> None:
    """Set the peak of the memory without so many bytes of times, and what the allocator and the device hold."""
    meter, graphed = training.meter, training.graphed
    peak, how = meter.peak_mib(records) if graphed is None else (graphed.peak_mib, "")
    values.set("peak_memory_mib", None, None if peak is None else [peak], how)
    reserved = meter.reserved_mib()
    values.set("memory_reserved_mib", None, None if reserved is None else [reserved], GPU_ONLY)
    values.set("device_memory_mib", None, *monitor.device_memory_mib())


def add_busy(values: Values, step_ms: float, busy: Busy | str) -> None:
    """Set the device's time in a step, and its share of the wall time, which other steps measured. `step_ms`: median
    wall time of the measured steps."""
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
    step_ms = values.samples("step_ms", "step") or ()
    for kind in ("tokens", "items"):
        per_s = _per_s(training, kind, step_ms)
        values.set(f"{kind}_per_s", None, None if per_s is None else [per_s], not_told(kind))
    flops = work_of_step(training, "flops")
    flops_per_s = _per_s(training, "flops", step_ms)
    if flops is None or flops_per_s is None:
        values.set_missing("unknown", no_flops(spec))
        return []
    rate = 1e-12 * flops_per_s
    values.set("tflops", None, [rate])
    if training.own is None:
        shares = precisions_of(spec, training.linear_layers, flops)
    else:
        training.step.prepare()
        shares = precisions_of_own(lambda: run_step(training.step.phases, ()), device)
    return add_shares(values, rate, shares, device, ceilings, recipe=spec.fp8_recipe)


def _per_s(training: Training, kind: str, step_ms: Sequence[float]) -> float | None:
    """Return the rate of the median step or, of steps of the user's own with different work, that of all together."""
    if training.own is not None and training.own.varies(kind):
        return 1e3 * (training.own.mean_work(kind) or 0.0) / statistics.fmean(step_ms)
    amount = work_of_step(training, kind)
    return None if amount is None else 1e3 * amount / statistics.median(step_ms)


def precisions_of(spec: TrainingSpec, layers: Sequence[LinearLayer], flops: float) -> Shares:
    """Return the share of each precision in the FLOPs of a step of ours, or the reason why it is unknown; `layers` are
    those of precision fp8."""
    from workers.model.float8 import fp8_flops

    if spec.precision != "fp8":
        return {spec.precision: 1.0}, ""
    if spec.code is not None or spec.model.name != type(spec.model).model_fields["name"].default:
        return {}, "the FLOPs in fp8 are known of our models only: layers of others may see fewer tokens"
    one = fp8_flops(layers, spec.fp8_recipe, backward=spec.mode != "forward")
    share = spec.accumulation_steps * one / flops
    return {name: of for name, of in (("fp8", share), ("bf16", 1 - share)) if of}, ""


def add_shares(
    values: Values,
    rate: float,
    of_products: Shares,
    device: torch.device,
    ceilings: Path,
    *,
    recipe: str = "tensorwise",
) -> list[Check]:
    """Set the shares of a rate in the device's peak and in its measured ceiling. Of products in several precisions,
    both are those of the ideal time; see `workers.model.accounting.mixed_rate`.

    Args:
        values: Get the metrics `mfu` and `ceiling_percent`.
        rate: TFLOP/s of one device.
        of_products: The share of each precision in the FLOPs, or the reason why no peak belongs to them.
        recipe: That of FP8, whose products by rows have a lower ceiling.

    Returns:
        The check that the device can reach the rate.
    """
    from workers.measure.ceilings import Ceilings
    from workers.measure.environment import device_name

    shares, why_not = of_products
    if why_not:
        values.set("mfu", None, None, why_not)
        values.set("ceiling_percent", None, None, why_not)
        return [not_judged("ceiling", why_not)]
    ceiling = {} if recipe == "tensorwise" else {"fp8": "fp8_rowwise"}
    for name, factor, known in (
        ("mfu", 1, {one: peak_tflops(device_name(device), one) for one in shares}),
        ("ceiling_percent", 100, {one: Ceilings(ceilings).tflops(device, ceiling.get(one, one)) for one in shares}),
    ):
        limit = mixed_rate(shares, {one: value for one, (value, _) in known.items()})
        why = next((source for value, source in known.values() if value is None), "")
        values.set(name, None, None if limit is None else [factor * rate / limit], why)
    return [check_rate(rate, next(one for one in FASTEST_FIRST if one in shares), device, ceilings)]


def precisions_of_own(run: Callable[[], object], device: torch.device) -> Shares:
    """Return the share of each precision in the products of one more step of the user's own, or the reason why no peak
    belongs to it."""
    from workers.measure.product_precision import precision_of_products

    shares, why_not = precision_of_products(run, device)
    if "fp64" in shares:
        return shares, f"{shares['fp64']:.0%} of the step's products are fp64, of which no peak is on record"
    return shares, why_not


def check_precision(training: Training) -> list[Check]:
    """Check the precision of a model of the user's own by one more step: see `precision_checks`."""
    from workers.measure.product_precision import precision_of_products
    from workers.measure.timing import run_step

    spec, step = training.spec, training.step
    if spec.code is None or training.graphed is not None or spec.mode == "generate" or spec.precision == "fp8":
        return []
    step.prepare()
    shares, _ = precision_of_products(lambda: run_step(step.phases, ()), training.device)
    return precision_checks(spec, shares)


def precision_checks(spec: TrainingSpec, shares: Mapping[str, float]) -> list[Check]:
    """Check that a model of the user's own computes most of its products in the job's precision: check `precision`; no
    check where nobody saw them. `shares`: the share of each precision in their FLOPs."""
    if not shares or shares.get(spec.precision, 0.0) >= 0.5:
        return []
    each = ", ".join(f"{share:.0%} {precision}" for precision, share in shares.items())
    return [Check("precision", False, f"{spec.precision} was asked for, and the model's products are {each}")]


def not_told(kind: str) -> str:
    """Return why a rate of a step of the user's own is unknown."""
    return f"the step reports no {kind}; call flopwatch.work({kind}=…)"


def no_flops(spec: TrainingSpec) -> str:
    """Return why the FLOPs of a step are unknown."""
    if spec.step_code is not None:
        return not_told("flops")
    more = "" if spec.mode == "forward" else ", or frozen linear layers, whose backward pass has fewer products"
    return f"model {name_of(spec)!r} has no forward_flops()" + more


def work_of_step(training: Training, kind: str) -> float | None:
    """Return the "flops", "tokens" or "items" of one step; None if nobody tells them."""
    from workers.model.steps import GenerateStep

    if training.own is not None:
        return training.own.work_of_step(kind)
    spec = training.spec
    if kind == "flops":
        return step_flops(spec, training.model)
    if kind == "items":
        return None
    if isinstance(training.step, GenerateStep):
        return training.step.tokens()
    return spec.accumulation_steps * spec.batch_size * spec.context_length


def step_flops(spec: TrainingSpec, model: torch.nn.Module) -> int | None:
    """Return the FLOPs of one step, all its micro-batches included; None for a model that does not report them, or
    whose backward pass lacks products, since linear layers are frozen."""
    import torch

    if spec.mode == "generate":
        tell = getattr(model, "generate_flops", None)
        told = tell and tell(spec.batch_size, spec.context_length, spec.new_tokens)
        return None if told is None else int(told)
    tell = getattr(model, "forward_flops", None)
    linear = (one for one in model.modules() if isinstance(one, torch.nn.Linear))
    told = tell and tell(spec.batch_size, spec.context_length)
    if told is None or (spec.mode != "forward" and not all(one.weight.requires_grad for one in linear)):
        return None
    forward = spec.accumulation_steps * int(told)
    return forward if spec.mode == "forward" else accounting.training_flops(forward)
