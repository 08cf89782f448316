"""The metrics of `ddp` from the results of all ranks, and the checks on them.

A step takes as long as its slowest rank.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.specs.ddp import DdpSpec
from flopwatch.intervals import FEWEST_FOR_INTERVAL, median_interval
from workers.jobs._training.metrics import NO_PARAMETERS, Shares, add_shares, no_flops, not_told
from workers.jobs._values import GPU_ONLY, Metric, Values
from workers.jobs.ddp.buckets import PREDICTED, has_buckets, predicts
from workers.jobs.ddp.replicas import check_replicas
from workers.measure.check import Check, check_cores, not_judged
from workers.measure.compilation import Compilation

if TYPE_CHECKING:
    import torch


SYNCHRONIZATION = "synchronization"
"""The phase between backward and optimizer in which our wrappers finish their communication."""
PARITY = ("gradient_error", "parameter_error")
DOES_NOT_COMMUNICATE = "strategy none does not communicate"
LEFT_OUT = "a diagnosis leaves it out: submit the step as kind ddp"
TOLERANCES = {"fp32": 1e-3, "tf32": 1e-3, "bf16": 1e-2, "fp16": 1e-2, "fp8": 1e-2}
"""Largest allowed error of a gradient (parity.gradient_errors), by precision. One process computes it from the same
parameters by the same kernels, and sums in another order. Without one of n ranks the error is 1/n or more, of 64 ranks
1.6e-2."""
NARROW_TOLERANCE = 1.4e-2
"""The same where gradients travel in bf16, so that every sum of two is rounded to 8 bits."""
PARAMETER_TOLERANCES = {"fp32": 1e-2, "tf32": 1e-2, "bf16": 0.2, "fp16": 0.2, "fp8": 0.2}
"""Largest allowed relative error of a parameter's change: Adam divides a gradient by its magnitude, so where that is
near zero a small error may change the sign of the update."""
NARROW_PARAMETER_TOLERANCE = 0.5
"""The same where parameters or gradients are in bf16, which rounds every update, or every gradient, to 8 bits."""
COMPUTATION = ("computation_step_ms", "exposed_communication_ms")
ALONE = ("alone_step_ms", "net_cost_ms")
"""Metrics of a side that takes turns with the strategy: its step, and how much longer the strategy's takes."""
OF_OUR_STRATEGIES = frozenset({*COMPUTATION, *ALONE, *PARITY, "exposed_communication_percent", "communication_mib"})
"""Metrics that a step of the user's own has not."""
EAGER = ("eager_step_ms", "eager_exposed_communication_ms", "eager_host_us")
"""Metrics of the same strategy without the CUDA graph."""
SAMPLED = 1.5
"""How many times longer than the step it may take under the profiler without a note."""
MAX_NEGATIVE = 0.01
"""Share of the step by which the step without communication may take longer in a valid case."""
MEMORY = {
    "memory_after_init_mib": "after_init_mib",
    "memory_before_optimizer_mib": "before_optimizer_mib",
    "memory_after_optimizer_mib": "after_optimizer_mib",
    "parameters_mib": "parameters_mib",
    "gradients_mib": "gradients_mib",
    "optimizer_state_mib": "optimizer_state_mib",
}
"""Metrics of memory, with the fields of `memory.Memory`."""


def metrics(spec: DdpSpec, named: Sequence[str] | None = None) -> list[Metric]:
    """Return the metrics in the order of the report. `named`: the phases that a step of the user's own has named."""
    if spec.step_code is not None:
        return [*_of_own_step(named or ())]
    phases = list(spec.step_phases())
    phases.insert(phases.index("backward") + 1, SYNCHRONIZATION)
    eager = [Metric(name, None, unit) for name, unit in zip(EAGER, ("ms", "ms", "µs"), strict=True)]
    buckets = [Metric("buckets", None, "buckets")] if has_buckets(spec) else []
    predicted = [Metric(PREDICTED, None, "ms")] if predicts(spec) else []
    return [*_metrics(phases), *(eager if spec.cuda_graph else []), *buckets, *predicted]


def _of_own_step(named: Sequence[str]) -> Iterator[Metric]:
    """Yield the metrics of a step of the user's own: nothing takes turns with it or is compared to it, and a phase that
    it calls `communication` is what tables have under this name."""
    for metric in _metrics([phase for phase in named if phase != "step"]):
        taken = metric.name in {*OF_OUR_STRATEGIES, *(f"{phase}_ms" for phase in named)}
        if metric.phase is None and taken:
            continue
        yield metric
        if metric.name == "tokens_per_s":
            yield Metric("items_per_s", None, "items/s")


def _metrics(phases: Sequence[str]) -> list[Metric]:
    return [
        Metric("step_ms", "step", "ms"),
        *(Metric(f"{phase}_ms", phase, "ms") for phase in phases),
        Metric("first_step_ms", "first_step", "ms"),
        Metric("computation_step_ms", None, "ms"),
        Metric("exposed_communication_ms", None, "ms"),
        Metric("exposed_communication_percent", None, "%"),
        Metric("alone_step_ms", None, "ms"),
        Metric("net_cost_ms", None, "ms"),
        Metric("communication_ms", None, "ms"),
        Metric("communication_percent", None, "%"),
        Metric("uncovered_communication_ms", None, "ms"),
        Metric("communication_mib", None, "MiB"),
        Metric("tokens_per_s", None, "tokens/s"),
        Metric("tflops", None, "TFLOP/s"),
        Metric("mfu", None, "fraction"),
        Metric("ceiling_percent", None, "%"),
        Metric("host_us", None, "µs"),
        Metric("peak_memory_mib", None, "MiB"),
        Metric("memory_reserved_mib", None, "MiB"),
        Metric("device_memory_mib", None, "MiB"),
        *(Metric(name, None, "MiB") for name in MEMORY),
        Metric("parameters", None, "parameters"),
        *(Metric(name, None, "relative error") for name in PARITY),
    ]


def turns_of(found: Sequence[Mapping[str, Any]], strategy: str) -> list[list[Mapping[str, Any]]]:
    """Return the turns of a strategy, each as every rank saw it."""
    each = [[turn for turn in rank["turns"] if turn["strategy"] == strategy] for rank in found]
    return [list(turn) for turn in zip(*each, strict=True)]


def slowest(samples: Sequence[Sequence[float]]) -> list[float]:
    """Return the maximum over ranks for each step."""
    return [max(step) for step in zip(*samples, strict=True)]


def steps_of(turns: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[float]]:
    """Return the steps' times of each turn, the maximum over ranks."""
    return [slowest([rank["step_ms"] for rank in turn]) for turn in turns]


def add_values(
    values: Values, spec: DdpSpec, devices: Sequence[torch.device], found: Sequence[Mapping[str, Any]], ceilings: Path
) -> list[Check]:
    """Set the values of all metrics, and return the checks of their validity."""
    from workers.measure.validity import check_gradients

    turns = turns_of(found, spec.strategy)
    step_ms = [time_ms for turn in steps_of(turns) for time_ms in turn]
    add_times(values, turns, step_ms)
    if spec.cuda_graph:
        add_eager(values, found)
    exposed = [] if spec.step_code is not None else add_exposed(values, spec, found)
    median_ms = statistics.median(step_ms)
    add_overlap(values, spec, found, median_ms)
    exposed += [*check_profiled(found, median_ms), *check_communicates(values, spec)]
    exposed += check_replicas([rank["replicas"] for rank in found])
    if has_buckets(spec):
        values.set("buckets", None, [found[0]["buckets"]])
    add_memory(values, spec, found, turns)
    sent = sum(row[2] for row in found[0]["communication"])
    values.set("communication_mib", None, [sent / 2**20])
    parameters, flops = found[0]["parameters"], found[0]["flops"]
    values.set("parameters", None, None if parameters is None else [parameters], NO_PARAMETERS)
    # Of steps with different work, the rate is that of all together.
    rated_ms = statistics.fmean(step_ms) if any(rank["varies"] for rank in found) else median_ms
    if spec.step_code is not None:
        flops = add_own_work(values, [rank["work"] for rank in found], rated_ms)
    precision = precisions_of_ranks([rank["precision"] for rank in found])
    rates = add_rates(values, spec, devices[0], flops, precision, rated_ms, ceilings)
    parity = [] if spec.step_code is not None else [check_parity(values, spec, found[0]["parity"])]
    parity += check_gradients(found[0].get("without_gradient"))
    return [*parity, check_host(spec, found), *check_times(spec, devices[0], found, step_ms), *exposed, *rates]


def add_own_work(values: Values, ranks: Sequence[Mapping[str, float | None]], step_ms: float) -> float | None:
    """Set tokens and items per second of all ranks; return the mean FLOPs of a rank, None if no rank tells them."""
    totals = {kind: sum(work[kind] or 0 for work in ranks) for kind in ranks[0]}
    for kind in ("tokens", "items"):
        rate = [1e3 * totals[kind] / step_ms] if totals[kind] else None
        values.set(f"{kind}_per_s", None, rate, not_told(kind))
    return totals["flops"] / len(ranks) or None


def add_times(values: Values, turns: Sequence[Sequence[Mapping[str, Any]]], step_ms: Sequence[float]) -> None:
    """Set the times of the step and its phases: for each step, the maximum over ranks."""
    values.set("step_ms", "step", step_ms)
    values.set("first_step_ms", "first_step", [turns[0][0]["first_step_ms"]])
    for metric in values.metrics:
        if metric.phase is None or metric.name != f"{metric.phase}_ms" or metric.phase == "step":
            continue
        if metric.phase == "first_step":
            continue
        each = [[rank["phases_ms"].get(metric.phase, []) for rank in turn] for turn in turns]
        samples = [time_ms for turn in each for time_ms in slowest(turn)]
        why_not = "this strategy finishes within the backward pass"
        if samples and (fewest := sum(min(map(len, turn)) for turn in each)) < len(step_ms):
            samples, why_not = [], f"{fewest} of {len(step_ms)} steps have this phase"
        values.set(metric.name, metric.phase, samples or None, why_not)
    issued = [time_us for turn in turns for time_us in slowest([rank["host_us"] for rank in turn])]
    values.set("host_us", None, issued or None, "known on GPUs only: a CPU does the work itself")


def add_eager(values: Values, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Set the times of the same strategy without the CUDA graph."""
    turns = turns_of(ranks, "eager")
    steps, silent = steps_of(turns), steps_of(turns_of(ranks, "eager silent"))
    exposed = [statistics.median(own) - statistics.median(other) for own, other in zip(steps, silent, strict=False)]
    issued = [time_us for turn in turns for time_us in slowest([rank["host_us"] for rank in turn])]
    found = ([time_ms for turn in steps for time_ms in turn], exposed, issued)
    for name, samples in zip(EAGER, found, strict=True):
        values.set(name, None, samples or None, LEFT_OUT if not steps else DOES_NOT_COMMUNICATE)


def add_exposed(values: Values, spec: DdpSpec, ranks: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Set the exposed communication, which is not hidden behind computation, and the net cost, which is all that the
    step costs more than that of one process alone. Both are differences of the medians of two turns of a round.

    Returns the check that the exposed communication is known well.
    """
    steps = steps_of(turns_of(ranks, spec.strategy))
    why_not = DOES_NOT_COMMUNICATE if spec.strategy == "none" else None
    exposed = add_difference(values, steps, turns_of(ranks, "silent"), COMPUTATION, why_not)
    add_difference(values, steps, turns_of(ranks, "none"), ALONE, why_not or ranks[0]["alone"])
    share = "exposed_communication_percent"
    if not exposed:
        values.set(share, None, None, why_not or "not measured")
        return []
    step_ms = statistics.median(time_ms for turn in steps for time_ms in turn)
    values.set(share, None, [100 * statistics.median(exposed) / step_ms])
    return [check_exposed(exposed, step_ms, on_gpu=spec.backend == "nccl")]


def check_exposed(exposed: Sequence[float], step_ms: float, *, on_gpu: bool) -> Check:
    """Check that the interval of the median exposed time, of all rounds, is not below zero, and narrow: it has the
    limits of `workers.measure.validity.check_variation`, as shares of the step."""
    from workers.measure.validity import MAX_ERROR, MAX_ERROR_CPU

    interval = median_interval(exposed)
    if interval is None:
        detail = (
            f"{len(exposed)} of {FEWEST_FOR_INTERVAL} rounds, of which a median has an interval: raise measure_steps"
        )
        return Check("exposed_communication", False, detail)
    low, high = interval
    middle = statistics.median(exposed)
    error = max(high - middle, middle - low) / step_ms
    known_to = f"{100 * error:.{1 if error < 0.1 else 0}f}%"
    limit = MAX_ERROR if on_gpu else MAX_ERROR_CPU
    detail = f"exposed communication is uncertain by ±{known_to} of the step, limit {limit:.0%}"
    if high < 0 and middle < -MAX_NEGATIVE * step_ms:
        detail = f"{detail}; the step without communication takes longer: it is the host's time, or the clocks differ"
        return Check("exposed_communication", False, detail)
    is_note = MAX_ERROR < error <= limit
    return Check("exposed_communication", error <= MAX_ERROR, detail, "note" if is_note else "suspect")


def add_difference(
    values: Values,
    steps: Sequence[Sequence[float]],
    turns: Sequence[Sequence[Mapping[str, Any]]],
    names: tuple[str, str],
    why_not: str | None,
) -> list[float]:
    """Set a side's times, and by how much the strategy's steps take longer, in each round; return the latter."""
    others = [] if why_not is not None else steps_of(turns)
    differences = [statistics.median(own) - statistics.median(other) for own, other in zip(steps, others, strict=False)]
    values.set(names[0], None, [time_ms for turn in others for time_ms in turn] or None, why_not or "not measured")
    values.set(names[1], None, differences or None, why_not or "not measured")
    return differences


def add_overlap(values: Values, spec: DdpSpec, found: Sequence[Mapping[str, Any]], step_ms: float) -> None:
    """Set the profiler's results: the time of communication itself, and the part during which nothing was computed."""
    reason = next((rank["overlap"]["why_not"] for rank in found if rank["overlap"]["why_not"]), None)
    if spec.strategy == "none" and spec.step_code is None:
        reason = DOES_NOT_COMMUNICATE
    if reason is not None:
        add_operations(values, found, step_ms, reason)
        return
    # A collective kernel spins while it waits for other ranks, so the rank that arrives last shows its real duration.
    each = [rank["overlap"]["steps"] for rank in found]
    communication = [min(one["communication_ms"] for one in step) for step in zip(*each, strict=True)]
    uncovered = slowest([[step["exposed_ms"] for step in steps] for steps in each])
    some = sum(map(bool, communication))
    if spec.step_code is not None and 0 < some < len(communication):  # as of gradients that several steps add up
        for name in ("communication_ms", "communication_percent", "uncovered_communication_ms"):
            values.set(name, None, None, f"{some} of {len(communication)} profiled steps communicate")
        return
    values.set("communication_ms", None, communication)
    values.set("communication_percent", None, [100 * statistics.median(communication) / step_ms])
    values.set("uncovered_communication_ms", None, uncovered)


def check_profiled(found: Sequence[Mapping[str, Any]], step_ms: float) -> list[Check]:
    """Say that the steps under the profiler took much longer than the step; no check if not, or if there were none."""
    each = [[step["step_ms"] for step in rank["overlap"].get("steps", ())] for rank in found]
    if not all(each) or (profiled_ms := statistics.median(slowest(each))) <= SAMPLED * step_ms:
        return []
    of = f"the step takes {step_ms:.4g} ms, under the profiler {profiled_ms:.4g}, of which communication_ms and "
    return [Check("profiled", False, of + "uncovered_communication_ms are parts", "note")]


def check_communicates(values: Values, spec: DdpSpec) -> list[Check]:
    """Name a step of the user's own whose ranks exchange nothing; no check of any other, or where it is unknown."""
    communication = values.samples("communication_ms", None)
    if spec.step_code is None or spec.world_size == 1 or communication is None or any(communication):
        return []
    return [Check("communicates", False, "no profiled step communicates: unless others do, each rank trains alone")]


def add_operations(values: Values, found: Sequence[Mapping[str, Any]], step_ms: float, why_no_profiler: str) -> None:
    """Set the time of communication without a profiler, for our own strategies, which record when each operation
    ran."""
    from workers.measure.spans import merged, total_ms

    values.set("uncovered_communication_ms", None, None, why_no_profiler)
    spans = [[(round(1e6 * row[2]), round(1e6 * row[3])) for row in rank["operations"]] for rank in found]
    communication = min(total_ms(merged(one)) for one in spans) if all(spans) else None
    values.set("communication_ms", None, None if communication is None else [communication], why_no_profiler)
    share = None if communication is None else [100 * communication / step_ms]
    values.set("communication_percent", None, share, why_no_profiler)


def add_memory(
    values: Values, spec: DdpSpec, found: Sequence[Mapping[str, Any]], turns: Sequence[Sequence[Mapping[str, Any]]]
) -> None:
    """Set peaks and categories, those of the rank with the most memory."""
    peaks = [rank["peak_mib"] for turn in turns for rank in turn]
    known = [peak for peak in peaks if peak is not None]
    values.set("peak_memory_mib", None, [max(known)] if known else None, turns[0][0]["peak_how"])
    reserved = [rank["reserved_mib"] for turn in turns for rank in turn if rank["reserved_mib"] is not None]
    values.set("memory_reserved_mib", None, [max(reserved)] if reserved else None, GPU_ONLY)
    for metric, name in MEMORY.items():
        amounts = [rank["memory"][name] for rank in found if rank["memory"][name] is not None]
        why_not = f"mode {spec.mode} has no optimizer"
        if spec.step_code is not None:
            why_not = "the code has made no optimizer that is known"
        if spec.cuda_graph and spec.mode == "train_step":
            why_not = "a CUDA graph makes and frees gradients within its own memory"
        if spec.backend == "gloo" and "memory" in metric and spec.mode == "train_step":
            why_not = "it fitted into memory that the process held before"
        if spec.step_code is not None and metric in ("gradients_mib", "memory_before_optimizer_mib"):
            why_not = 'the step has no phase "optimizer" (flopwatch.phase), before which it would be read'
        values.set(metric, None, [max(amounts)] if amounts else None, why_not)


def precisions_of_ranks(ranks: Sequence[Shares]) -> Shares:
    """Return the share of each precision in the products of all ranks, or the reason why no peak belongs to them."""
    for number, (_, why_not) in enumerate(ranks):
        if why_not:
            return {}, f"rank {number}: {why_not}"
    if len(found := dict.fromkeys("/".join(sorted(shares)) for shares, _ in ranks)) > 1:
        return {}, f"the ranks' products are of several precisions: {', '.join(found)}"
    return {one: statistics.fmean(shares[one] for shares, _ in ranks) for one in ranks[0][0]}, ""


def add_rates(
    values: Values,
    spec: DdpSpec,
    device: torch.device,
    flops: float | None,
    precision: Shares,
    step_ms: float,
    ceilings: Path,
) -> list[Check]:
    """Set the rates of the median step: those of all ranks together, and their share of the peak of all devices, in the
    precision of its products, or why none belongs to them.

    Returns the check that the devices can reach them, where the FLOPs are known.
    """
    seconds, ranks = 1e-3 * step_ms, spec.world_size
    if spec.step_code is None:
        tokens = ranks * spec.accumulation_steps * spec.batch_size * spec.context_length
        values.set("tokens_per_s", None, [tokens / seconds])
    if flops is None:
        for name in ("tflops", "mfu", "ceiling_percent"):
            values.set(name, None, None, no_flops(spec))
        return []
    rate = 1e-12 * ranks * flops / seconds
    # All processes share a CPU; each GPU belongs to one rank.
    devices = ranks if spec.backend == "nccl" else 1
    values.set("tflops", None, [rate])
    return add_shares(values, rate / devices, precision, device, ceilings, recipe=spec.fp8_recipe)


def tolerance(spec: DdpSpec, name: str) -> float:
    """Return the largest allowed "gradient_error" or "parameter_error"."""
    narrow = spec.casts or spec.parameter_dtype == "bf16"
    if name == "gradient_error":
        return NARROW_TOLERANCE if narrow else TOLERANCES[spec.precision]
    return NARROW_PARAMETER_TOLERANCE if narrow else PARAMETER_TOLERANCES[spec.precision]


def check_parity(values: Values, spec: DdpSpec, parity: Mapping[str, Any] | None) -> Check:
    """Set the errors against one process on the whole batch; a strategy that is wrong has no speed."""
    if parity is None:
        reason = DOES_NOT_COMMUNICATE if spec.strategy == "none" else LEFT_OUT
        for name in PARITY:
            values.set(name, None, None, reason)
        return not_judged("parity", reason)
    wrong, details = [], []
    is_known = parity["why_not"] is None
    for name in PARITY:
        error, limit = parity[name], tolerance(spec, name)
        why_not = parity["why_not"] or f"mode {spec.mode} changes no parameters"
        if error is not None and math.isnan(error):
            is_known = is_known and spec.precision == "fp16"  # its first gradients overflow, until their scale is found
            error, why_not = None, f"one process has a {name.partition('_')[0]} that is not finite"
        known = error is not None and math.isfinite(error)
        values.set(name, None, [error] if known else None, why_not if error is None else "missing or not finite")
        if error is None:
            details.append(f"{name}: {why_not}")
            continue
        details.append(f"{name} {error:.2g}, limit {limit:g}")
        if not error <= limit:
            wrong.append(f"{name} {error:.2g} of {parity[name.removesuffix('_error')]} exceeds {limit:g}")
    if wrong:
        values.overrule(f"not equal to one process on the whole batch: {'; '.join(wrong)}", but=PARITY)
        return Check("parity", False, "; ".join(wrong), "wrong")
    return Check("parity", is_known, "; ".join(details))


def check_times(
    spec: DdpSpec, device: torch.device, found: Sequence[Mapping[str, Any]], step_ms: Sequence[float]
) -> list[Check]:
    """Return the checks of the validity of the steps' times. `device` is rank 0's."""
    from workers.measure.validity import check_kernels, check_stability, check_steady

    turns = turns_of(found, spec.strategy)
    first = [turn[0] for turn in turns]  # ranks agree on the warm-up
    drifting = [turn for turn in first if turn["steady"] is False]
    shown = (drifting or first)[0]
    checks = [
        check_steady(shown["steady"], shown["warmup"], too_slow=shown["too_slow"], hidden=shown["hidden"]),
        *check_stability(step_ms, on_gpu=spec.backend == "nccl", metric="step_ms"),
    ]
    if spec.backend == "gloo":
        checks.append(check_cores(spec.resources().devices, "ranks"))
    if spec.attention == "triton":
        checks += check_kernels(device)
    checks += check_graphs(spec, turns)
    return checks


def check_host(spec: DdpSpec, found: Sequence[Mapping[str, Any]]) -> Check:
    """Check that the devices do not wait for their hosts: in the steps without communication, whose kernels do not spin
    while they wait for another rank. If they do, say first what helps."""
    from workers.measure.busy import Busy
    from workers.measure.validity import check_waiting

    silent = turns_of(found, "none" if spec.strategy == "none" else "silent")
    issued = [time_us for turn in silent for time_us in slowest([rank["host_us"] for rank in turn])]
    step_ms = [time_ms for turn in steps_of(silent) for time_ms in turn]
    each: list[Any] = [rank["busy"] or "a step of one's own may communicate" for rank in found]
    unknown = next((one for one in each if isinstance(one, str)), None)
    least = unknown or min((Busy(**one) for one in each), key=lambda busy: busy.busy_ms)
    check = check_waiting(statistics.median(step_ms), statistics.median(issued) if issued else None, least)
    if not issued:
        return check
    detail = f"without communication, {check.detail}"
    if not check.ok and isinstance(least, Busy):
        helps = " or ".join(f"{name}=true" for name in ("cuda_graph", "compile") if not getattr(spec, name))
        issues = f"the host issues for {1e-3 * statistics.median(issued):.3g} ms a step in which"
        detail = f"{issues} the device works for {least.busy_ms:.3g}{helps and f': {helps} may help'}; {detail}"
    return replace(check, detail=detail)


def check_graphs(spec: DdpSpec, turns: Sequence[Sequence[Mapping[str, Any]]]) -> list[Check]:
    """Check for compilation in the measured steps of the turn that had the most of it; no check if nothing compiles."""
    from workers.measure.validity import check_compilation

    ranks = [rank for turn in turns for rank in turn]
    worst = max(ranks, key=lambda rank: rank["graphs_after"]["graphs"] - rank["graphs_before"]["graphs"])
    before, after = Compilation(**worst["graphs_before"]), Compilation(**worst["graphs_after"])
    own = spec.step_code is not None
    compiles = own and any((after.graphs, after.graph_breaks, after.frames_not_compiled))
    if not (spec.compile or compiles):
        return []
    return check_compilation(before, after, warmup_steps=worst["warmup"], own=own)
