"""Runs a few steps under torch's profiler.

The steps are timed without a profiler first, as `benchmark` times them, and reported at once. So the profiler's
overhead is known, and if profiling fails, the times remain. Profiled times have their own metric names and never mix
with those of benchmarks.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from app.specs._training import Precision
from app.specs.ceiling import CeilingSpec
from app.specs.profile import ProfileSpec
from workers.jobs import _reference
from workers.jobs._base import Unit
from workers.jobs._grid import Trial
from workers.jobs._profiled import GRAPH, phases_of, profile_steps
from workers.jobs._training import building, measuring, metrics
from workers.jobs._values import GPU_ONLY, Metric, Values
from workers.jobs.ceiling import RUNNER as CEILING
from workers.jobs.profile import own_lines
from workers.measure import environment
from workers.measure.busy import NOTHING_SEEN, Busy
from workers.measure.ceilings import Ceilings
from workers.measure.check import Check
from workers.measure.compilation import compilation
from workers.measure.environment import device_key, device_name
from workers.measure.errors import NotMeasured
from workers.measure.memory import OutOfMemory
from workers.measure.profiling import classes, flame_graph, stacks, tables, trace, usage
from workers.measure.profiling.attention import Part, Roofline, roofline
from workers.measure.profiling.attribution import Attribution, RecordedWork
from workers.measure.profiling.classes import CLASSES, MATMUL, NORMALISATION, OPTIMIZER
from workers.measure.profiling.idle import of_steps
from workers.measure.profiling.lines import LineTrace, OwnCode, uses
from workers.measure.profiling.recording import AnotherProfiler, Profile
from workers.measure.profiling.sampling import Samples
from workers.measure.profiling.timeline import step_uses
from workers.measure.profiling.usage import ClassUsage, in_phases, time_of, work_in
from workers.measure.ranges import modules_by_name
from workers.measure.table import Scalar
from workers.measure.validity import Monitor
from workers.model.accounting import ATTENTION_PARTS, Cost, attention_part, peak_tflops, visible_share
from workers.model.precision import PRECISIONS
from workers.outcome import InvalidEnvironment, RunnerError
from workers.reporter import Reporter
from workers.torch_host import reset_process
from workers.uploaded import BrokenCode

WHOLE_STEP = "step"
"""The scope of all phases, and the only phase of a step of the user's own that names none."""
NO_PHASES = "a CUDA graph replays all its kernels in one launch: to a profiler it is one phase"
NOT_IN_EVERY_STEP = "not every step has this phase"
NO_NORMS = (
    "norms that are written out have no kernels of their own, and a CUDA graph has no ranges that tell them: "
    "their time is under elementwise and reduction"
)
NO_PRODUCTS = "no operator multiplied matrices: a CUDA graph and what a compiler fused have none"
CONVOLUTIONS = "and recurrent layers, per step: not in table products, but by shape in table work"
EAGER = "eager"
"""The attention for which `accounting.attention_part` gives the cost of its parts."""
CEILING_STEPS = 5
"""Samples of a ceiling that is measured for the roofline."""
SLOW_STEP_MS = 100.0
"""A slower step is recorded once alone, which tells how many events it has."""
MAX_EVENTS = 200_000
"""Most events of a step that is profiled several times, with shapes and stacks: each event costs about 20 µs."""
NO_SHAPES = f"a step has more than {MAX_EVENTS} events, so the shapes of inputs are not recorded"
MAX_UNSEEN = 0.05
"""Largest share of a step for which other threads may use the processor without a note."""
UNSEEN = (
    "of the processor, per step: torch's profiler does not see operators of threads that the step starts, so no table "
    "has them; the flame graph has their stacks"
)
MAX_PROFILED_S = 10.0
"""If all profiled steps would take longer, one is profiled."""
TRACE, STACKS, FLAME_GRAPH = "trace.json.gz", "stacks.txt", "flamegraph.svg"


def run(spec: ProfileSpec, unit: Unit, report: Reporter) -> None:
    """Profile the steps under torch's profiler and report them. Running out of memory is a result. Raises
    InvalidEnvironment: another profiler uses CUPTI, so that torch's sees no kernels; BrokenCode: the step uses torch's
    profiler itself."""
    device, build_model = building.prepare(spec)
    report.environment(environment.fingerprint(device))
    refused = measure_missing_ceilings(spec, device, report) if has_roofline(spec) else {}
    case = spec.case()
    with building.known_errors():
        timed = time_unprofiled(spec, unit, device, build_model, report)
        values = Values(profile_metrics(spec, timed.training.phases if isinstance(timed, Timed) else ()))
        if isinstance(timed, Timed):
            try:
                Profiling(timed, values, report, refused).run()
            except OutOfMemory as error:
                values.set_missing("oom", str(error))
            except AnotherProfiler as error:
                raise BrokenCode(str(error)) from error
        else:
            values, _ = _reference.not_measured(values.metrics, timed)
    values.report(case, environment.device_key(device), report)  # the user's code may have changed the threads


def scopes_of(spec: ProfileSpec, phases: Sequence[str]) -> dict[str, tuple[str, ...] | None]:
    """Return the scopes of the shares of classes, each with its phases; None for a scope whose phases are unknown."""
    if spec.step_code is not None:
        return {**{phase: (phase,) for phase in phases}, WHOLE_STEP: tuple(phases)}
    forward, backward, optimizer = ("forward",), ("forward", "backward"), ("forward", "backward", "optimizer")
    scopes: dict[str, tuple[str, ...] | None]
    match spec.mode:
        case "forward":
            scopes = {"forward": forward}
        case "forward_backward":
            scopes = {"forward": forward, "forward_backward": backward}
        case "train_step":
            scopes = {"forward": forward, "forward_backward": backward, "step": optimizer}
        case "generate":
            scopes = {"prefill": ("prefill",), "decode": ("decode",), "step": ("prefill", "decode")}
    if spec.cuda_graph:
        whole = list(scopes)[-1]
        return {scope: (GRAPH,) if scope == whole else None for scope in scopes}
    return scopes


def timing_metrics(phases: Sequence[str]) -> list[Metric]:
    """Return the metrics that are measured before the profiler starts, of a step with these phases."""
    return [
        Metric("unprofiled_step_ms", None, "ms"),
        *(Metric("unprofiled_ms", phase, "ms") for phase in phases if phase != WHOLE_STEP),
        Metric("host_bound", None, "boolean"),
    ]


def profile_metrics(spec: ProfileSpec, named: Sequence[str] = ()) -> list[Metric]:
    """Return the metrics of the profiled steps, in the order of the report. `named`: the phases that a step of the
    user's own has named."""
    of_step = spec.step_phases() or named
    known = phases_of(spec, of_step)
    metrics = [Metric("profiled_step_ms", None, "ms"), Metric("profiler_overhead_percent", None, "%")]
    phases = list(dict.fromkeys([*of_step, *known]))
    for phase in phases:
        metrics += [Metric("profiled_ms", phase, "ms"), Metric("work_ms", phase, "ms")]
    metrics += [
        Metric("gpu_busy_percent", None, "%"),
        Metric("profiled_idle_ms", None, "ms"),
        Metric("largest_gap_ms", None, "ms"),
        Metric("launches", None, "launches"),
        *(Metric("top_kernel_calls", phase, "calls") for phase in known[:1]),
        *(Metric(f"{name}_share_percent", scope, "%") for scope in scopes_of(spec, of_step) for name in CLASSES),
    ]
    for phase in spec.step_phases():
        if phase != "optimizer":
            for part in ATTENTION_PARTS:
                metrics += [
                    Metric(f"{part}_ms", phase, "ms"),
                    Metric(f"{part}_tflops", phase, "TFLOP/s"),
                    Metric(f"{part}_gb_per_s", phase, "GB/s"),
                ]
            metrics += [Metric(f"softmax_to_products_{what}", phase, "ratio") for what in ("time", "flops")]
    if spec.compile:
        metrics += [
            Metric("graphs_compiled", None, "graphs"),
            Metric("graph_breaks", None, "breaks"),
            Metric("recompiles", None, "graphs"),
        ]
    return [*metrics, Metric("trace_steps", None, "steps")]


def has_roofline(spec: ProfileSpec) -> bool:
    """Return True if matrix products, and with them the parts of attention, can be compared with the roofline."""
    return not spec.cuda_graph


def dtypes_of(precision: Precision) -> Sequence[Precision]:
    """Return the data types of the matrix products that a precision has, the narrowest first."""
    return ["fp8", "bf16"] if precision == "fp8" else [precision]


def measure_missing_ceilings(spec: ProfileSpec, device: torch.device, report: Reporter) -> dict[str | None, str]:
    """Measure the ceilings that the roofline needs and this host's record lacks, and record them as `ceiling` does.
    Returns why rates were not recorded, by the product's data type; None is the copy."""
    known = Ceilings(report.ceilings).read(device)
    refused: dict[str | None, str] = {}
    measured = CeilingSpec(dtypes=[*dtypes_of(spec.precision)], measure_steps=CEILING_STEPS, seed=spec.seed)
    for cell in measured.cells():
        if known and (known.copy_gb_per_s is not None if cell.dtype is None else cell.dtype in known.tflops):
            continue
        report.progress(0, spec.measure_steps or building.STEPS, f"measuring this device's ceiling: {cell.title}")
        trial = Trial(Values(CEILING.metrics(measured, cell)), Monitor(device), tell=lambda _line: None)
        try:
            context = CEILING.open(measured, [device], report)
            CEILING.measure(measured, cell, context, trial)
            refused |= context.refused
        except (OutOfMemory, RunnerError) as error:  # the profile continues without a roofline
            refused[cell.dtype] = str(error)
            sys.stderr.write(f"ceiling, {cell.title}: {error}\n")
        reset_process()
    return refused


@dataclass
class Timed:
    """A model and its step, with the measurements before the profiler started."""

    spec: ProfileSpec
    training: building.Training
    step_ms: float
    """Median wall time of a step."""
    host_bound: Check


def time_unprofiled(
    spec: ProfileSpec, unit: Unit, device: torch.device, build_model: building.Maker, report: Reporter
) -> Timed | NotMeasured:
    """Build the model, time its steps without a profiler, and report their times and the verdict on them. Returns the
    timed model, or why there is none: memory did not suffice, or a part of it is wrong."""
    monitor, case = Monitor(device), spec.case()
    report.progress(0, spec.measure_steps or building.STEPS, "making the model")
    timed: Timed | NotMeasured
    try:
        parts = _reference.check_parts(spec, device)
        training = building.build(spec, device, build_model)
        times, checks = measuring.measure(training, monitor, report)
    except NotMeasured as error:
        monitor.watch(last=True)
        timed = error.with_traceback(None)  # its frames hold the model
        values, checks = _reference.not_measured(timing_metrics(spec.step_phases()), error)
    else:
        checks += parts + metrics.check_precision(training)
        samples = times.samples("step_ms", "step") or ()
        values = Values(timing_metrics(training.phases))
        for phase in training.phases:
            values.set("unprofiled_ms", phase, *unprofiled(training, phase, times))
        (host_bound,) = [check for check in checks if check.name == "host_bound"]
        timed = Timed(spec, training, statistics.median(samples), host_bound)
        values.set("unprofiled_step_ms", None, samples)
        on_gpu = device.type == "cuda"
        values.set("host_bound", None, [float(not host_bound.ok)] if on_gpu else None, GPU_ONLY)
    report.validity(monitor.conclude(checks), case.key, unit.title)
    values.report(case, device_key(device), report)
    return timed


def unprofiled(training: building.Training, phase: str, times: Values) -> tuple[Sequence[float] | None, str]:
    """Return a phase's times in ms without a profiler, or None and the reason why they are unknown."""
    found = times.samples(metrics.phase_metric(training.spec, phase), phase)
    if found is not None and phase == "decode" and training.own is None:
        found = [sample * (training.spec.new_tokens - 1) for sample in found]  # profiled times are not per token
    return found, NOT_IN_EVERY_STEP


@dataclass
class Alone:
    """One step that was profiled alone."""

    profile: Profile
    laps_ms: list[float]
    phases_ms: dict[str, list[float]]
    trace: LineTrace | None
    """Follows the lines of the user's own code; None if the job has none."""
    suffices: bool
    """Whether it has so many events that no further step is profiled."""


@dataclass
class Profiling:
    """Profiles the timed steps; it reports everything except the values, which it only sets."""

    timed: Timed
    values: Values
    report: Reporter
    refused: Mapping[str | None, str] = field(default_factory=dict)
    """Why this job has not recorded a ceiling, by the product's data type; None is the copy."""
    summary: list[list[Scalar]] = field(default_factory=list)
    """Rows of the table `summary`."""
    attention: list[list[Scalar]] = field(default_factory=list)
    """Rows of the table `attention`."""
    steps: int = 1
    """How many steps are profiled."""
    samples: Samples | None = None
    """Of steps without a profiler, if they were sampled."""
    sparing: bool = False
    """True if a step is so slow, or has so many events, that one alone is profiled."""
    shapes: bool = True
    """Whether the shapes of operators' inputs are recorded."""

    def run(self) -> None:
        """Profile the steps, then once more with Python's stacks. Raises InvalidEnvironment: the profiler sees no
        kernels; OutOfMemory: the memory did not suffice."""
        own = own_lines.own_code(self.spec)
        alone = self._record_alone(own)
        slow = 1e-3 * self.timed.step_ms * (1 + self.spec.profile_steps) > MAX_PROFILED_S
        self.sparing = slow or (alone is not None and alone.suffices)
        self.steps = 1 if self.sparing else self.spec.profile_steps
        profile = self._record(alone)
        modules = {name for name, _ in modules_by_name(self.timed.training.modules)}
        attribution = Attribution(profile.recording, self.phases, on_gpu=self.on_gpu, modules=modules)
        # A step on a CPU may do all its work in NumPy.
        if len(attribution.steps) != self.steps or (self.on_gpu and not attribution.work):
            seen, work = len(attribution.steps), len(attribution.work)
            raise RuntimeError(f"the profiler saw {seen} of {self.steps} steps, and {work} kernels in them")
        self.report.progress(self.steps, self.steps, "summing up")
        self._add_times(attribution)
        if self.on_gpu:
            waits, times_ms = of_steps(profile.recording, attribution.windows, self.timed.step_ms)
            self.report.table("waits", tables.WAITS, tables.wait_rows(waits, times_ms, profile.recording.host))
        self._add_kernels(attribution)
        self._add_classes(attribution.work)
        self._add_ranges(attribution)
        if self.spec.step_code is None:
            self._add_attention(attribution)
        self._add_products(attribution)
        self._add_trace(profile)
        del profile, attribution
        with_stacks: Profile | None = None
        if self.spec.stacks and not self.sparing:
            try:
                with_stacks, _, _ = profile_steps(self.timed.training, 1, self.report, python=True, warm=True)
            except OutOfMemory as error:
                self._tell("stacks", None, None, str(error))
        # Last, since it may take the batches that an iterator in the step has left.
        if own is not None or (self.sparing and self.spec.stacks):
            self._sample(own, alone)
        if self.spec.stacks and (self.sparing or with_stacks is not None):
            self._add_stacks(with_stacks)
        if self.on_gpu:
            check = self.timed.host_bound
            self._tell("host-bound", float(not check.ok), "boolean", check.detail)
        self.report.table("summary", tables.SUMMARY, self.summary)

    @property
    def spec(self) -> ProfileSpec:
        return self.timed.spec

    @property
    def of_step(self) -> tuple[str, ...]:
        return self.spec.step_phases() or self.timed.training.phases

    @property
    def phases(self) -> tuple[str, ...]:
        """Those of them that the profiler can distinguish."""
        return phases_of(self.spec, self.of_step)

    @property
    def on_gpu(self) -> bool:
        return self.timed.training.device.type == "cuda"

    def _record_alone(self, own: OwnCode | None) -> Alone | None:
        """Record one step alone, if the job has code of the user's own, whose lines are followed in it, or if the step
        is slow. Raises OutOfMemory: the memory did not suffice."""
        if own is None and self.timed.step_ms < SLOW_STEP_MS:
            return None
        trace = None if own is None else LineTrace(own)
        profiled = profile_steps(self.timed.training, 1, self.report, warm=True, shapes=False, trace=trace)
        return Alone(*profiled, trace, suffices=len(profiled[0].recording.host) > MAX_EVENTS)

    def _sample(self, own: OwnCode | None, alone: Alone | None) -> None:
        """Sample steps without a profiler, and report what the lines of the user's own code take. Raises OutOfMemory:
        the memory did not suffice."""
        self.samples, ended = own_lines.sample(self.timed.training, self.report)
        others_ms = 1e-6 * sum(stacks.other_threads(self.samples).values())
        if not self.on_gpu and others_ms > MAX_UNSEEN * self.timed.step_ms:
            self._tell(stacks.OTHERS, others_ms, "ms", UNSEEN)
        if own is None or alone is None or alone.trace is None:
            return
        begun = Attribution(alone.profile.recording, self.phases, on_gpu=self.on_gpu).steps[0].begin_ns
        launched = alone.trace.launched(alone.profile.recording, begun)
        found = uses(self.samples, own, self.timed.step_ms, alone.trace, launched, on_gpu=self.on_gpu)
        if any(use.place is not None for use in found):
            self.report.table("lines", tables.LINES, tables.line_rows(found, self.timed.step_ms))
            step_ms = self.timed.step_ms
            self.summary += own_lines.summary_of(self.samples, found, step_ms, alone.trace, ended=ended)

    def _record(self, alone: Alone | None) -> Profile:
        """Run the steps under the profiler, after a warm-up step, and set their times. A step that was recorded alone
        may suffice."""
        before = compilation()
        if alone is not None and alone.suffices:
            profile, laps_ms, phases_ms, self.shapes = alone.profile, alone.laps_ms, alone.phases_ms, False
        else:
            # The step that was recorded alone has absorbed the profiler's start-up; the rest is little of a slow step.
            warm = self.sparing or (alone is not None and self.timed.step_ms >= SLOW_STEP_MS)
            profile, laps_ms, phases_ms = profile_steps(self.timed.training, self.steps, self.report, warm=warm)
        if self.on_gpu and not profile.recording.device:
            raise InvalidEnvironment(NOTHING_SEEN)
        after = compilation()
        overhead = 100 * (statistics.median(laps_ms) / self.timed.step_ms - 1)
        self.values.set("profiled_step_ms", None, laps_ms)
        self.values.set("profiler_overhead_percent", None, [overhead])
        for phase in {*self.of_step, *self.phases}:
            found = phases_ms.get(phase)
            every = found is None or len(found) == len(laps_ms)
            why_not = NO_PHASES if self.spec.cuda_graph else NOT_IN_EVERY_STEP
            self.values.set("profiled_ms", phase, found if every else None, why_not)
        self.values.set("graphs_compiled", None, [after.graphs])
        self.values.set("graph_breaks", None, [after.graph_breaks])
        self.values.set("recompiles", None, [after.graphs - before.graphs])
        self.summary.insert(0, ["unprofiled step", self.timed.step_ms, "ms", "median"])
        self._tell("profiled step", statistics.median(laps_ms), "ms", "median")
        self._tell("profiler's overhead", overhead, "%", "profiled times are for shares, not for speed")
        return profile

    def _add_times(self, attribution: Attribution) -> None:
        work, steps = attribution.work, len(attribution.steps)
        for phase in {*self.of_step, *self.phases}:
            of_phase = in_phases(work, [phase])
            times = [1e-6 * time_of(each for each in of_phase if each.step == step.step) for step in attribution.steps]
            self.values.set("work_ms", phase, times if phase in self.phases else None, NO_PHASES)
        uses = step_uses(work, attribution.windows) if self.on_gpu else []
        self.values.set("profiled_idle_ms", None, [use.idle_ms for use in uses] or None, GPU_ONLY)
        self.values.set("largest_gap_ms", None, [use.largest_gap_ms for use in uses] or None, GPU_ONLY)
        self.values.set("launches", None, [use.launches for use in uses] or None, GPU_ONLY)
        busy: Busy | str = GPU_ONLY
        if uses:
            busy = Busy(statistics.median(use.busy_ms for use in uses), uses[-1].launches)
        metrics.add_busy(self.values, self.timed.step_ms, busy)
        self._tell("profiled steps", steps, "steps", self._why_sparing())

    def _why_sparing(self) -> str | None:
        if not self.sparing:
            return None
        slow = "a step is slow, so one is profiled, without a warm-up, and stacks are sampled"
        return slow if self.shapes else f"{slow}; it has more than {MAX_EVENTS} events, so shapes are not recorded"

    def _add_kernels(self, attribution: Attribution) -> None:
        steps = len(attribution.steps)
        phases = self.spec.phases or self.phases
        for phase in phases:
            class_of = (lambda _name: classes.OPTIMIZER) if phase == classes.OPTIMIZER else classes.class_of_operator
            kernels = usage.kernels(usage.in_phases(attribution.work, [phase]), steps)
            calls = [call for call in attribution.calls if call.phase == phase]
            operators = usage.operators(calls, steps, class_of, on_gpu=self.on_gpu)
            self.report.table(f"kernels-{phase}", tables.KERNELS, tables.kernel_rows(kernels))
            self.report.table(f"operators-{phase}", tables.OPERATORS, tables.operator_rows(operators))
            self._tell_cut(f"kernels-{phase}", [kernel.total_ms for kernel in kernels])
            times_ms = [
                operator.host_ms if operator.device_ms is None else operator.device_ms for operator in operators
            ]
            self._tell_cut(f"operators-{phase}", times_ms)
        work = usage.in_phases(attribution.work, phases)
        if len(phases) > 1:
            kernels = usage.kernels(work, steps)
            self.report.table(f"kernels-{WHOLE_STEP}", tables.KERNELS, tables.kernel_rows(kernels))
            self._tell_cut(f"kernels-{WHOLE_STEP}", [kernel.total_ms for kernel in kernels])
        in_ranges = usage.by_range_and_name(work, steps)
        self.report.table("kernels", tables.KERNELS_BY_RANGE, tables.kernel_rows_by_range(in_ranges))
        self._tell_cut("kernels", [one.total_ms for _, _, one in in_ranges])
        placed = usage.by_place(work, steps)
        self.report.table("work", tables.WORK, tables.work_rows(placed))
        self._tell_cut("work", [one.total_ms for *_, one in placed])
        if not self.on_gpu:
            self._tell("kernels", None, None, "a CPU has none: operators play their part, each with its own time")
        first = self.phases[0]
        top = usage.top_calls(attribution.work, first, steps)
        self.values.set("top_kernel_calls", first, None if top is None else [top[1]], "the phase has no work")
        if top is not None:
            self._tell(f"calls of the top kernel in {first}", top[1], "calls", tables.short(top[0]))

    def _add_classes(self, work: Sequence[RecordedWork]) -> None:
        usages: dict[str, list[ClassUsage]] = {}
        for scope, phases in scopes_of(self.spec, self.of_step).items():
            if phases is None:
                for name in CLASSES:
                    self.values.set(f"{name}_share_percent", scope, None, NO_PHASES)
                continue
            usages[scope] = usage.classes(usage.in_phases(work, phases), self.steps)
            for class_usage in usages[scope]:
                share = None if class_usage.share_percent is None else [class_usage.share_percent]
                self.values.set(f"{class_usage.class_name}_share_percent", scope, share, "the phases have no work")
        if self.spec.cuda_graph:
            self._leave_out_what_a_graph_hides(usages)
        elif self.spec.step_code is not None and OPTIMIZER not in self.of_step:
            self._leave_out(usages, OPTIMIZER, "only by a phase named optimizer")
        self.report.table("classes", tables.CLASS_SHARES, tables.class_rows(usages))

    def _leave_out_what_a_graph_hides(self, usages: dict[str, list[ClassUsage]]) -> None:
        """Remove the classes that follow from phases and ranges, since a graph has neither."""
        (scope,) = usages
        if self.spec.mode == "train_step":
            self._leave_out(usages, OPTIMIZER, f"only by kernels' own names: {NO_PHASES}")
        if not any(class_usage.calls for class_usage in usages[scope] if class_usage.class_name == NORMALISATION):
            self._leave_out(usages, NORMALISATION, NO_NORMS)

    def _leave_out(self, usages: dict[str, list[ClassUsage]], name: str, why: str) -> None:
        """Remove a class, since its work is told `why`."""
        self._tell(f"class {name}", None, None, why)
        for scope, found in usages.items():
            self.values.set(f"{name}_share_percent", scope, None, why)
            usages[scope] = [class_usage for class_usage in found if class_usage.class_name != name]

    def _add_ranges(self, attribution: Attribution) -> None:
        phases = self.phases
        steps = len(attribution.steps)
        totals = {phase: 1e-6 * usage.time_of(usage.in_phases(attribution.work, [phase])) / steps for phase in phases}
        times = usage.by_range(attribution.work, phases, steps)
        self.report.table("ranges", tables.RANGES, tables.range_rows(times, totals))

    def _add_attention(self, attribution: Attribution) -> None:
        """Report the parts of attention with the roofline's limits, or the reason why there are none."""
        steps, counts = len(attribution.steps), attribution.count_ranges()
        reason = why_no_parts(self.spec, {name for _, name in counts})
        # Where linear layers are in fp8, attention is in bf16.
        of_attention = dtypes_of(self.spec.precision)[-1]
        line = roofline(Ceilings(self.report.ceilings).read(self.timed.training.device), of_attention)
        rows: list[list[Scalar]] = []
        for phase in self.of_step:
            parts: dict[str, Part] = {}
            for name in ATTENTION_PARTS if phase != "optimizer" else ():
                if reason is not None:
                    rows.append([name, phase, *[None] * (len(tables.ATTENTION) - 3), reason])
                    for metric in ("ms", "tflops", "gb_per_s"):
                        self.values.set(f"{name}_{metric}", phase, None, reason)
                    continue
                made = "forward" if phase == "backward" else phase
                calls = counts[made, name] // steps
                cost, note = cost_of(self.spec, name, phase, calls, on_gpu=self.on_gpu)
                work, per_step = work_in(attribution.work, name, phase), 1e-6 / steps
                part = Part(name, phase, per_step * time_of(work), per_step * time_of(work, MATMUL), cost)
                parts[name] = part
                rows.append(
                    self._attention_row(part, per_step * time_of(in_phases(attribution.work, [phase])), line, note)
                )
            if phase != "optimizer":
                self._add_ratios(phase, parts, reason)
        self.attention = rows
        self.report.table("attention", tables.ATTENTION, rows)

    def _add_ratios(self, phase: str, parts: Mapping[str, Part], reason: str | None) -> None:
        """Set time and FLOPs of the softmax as shares of those of the two products of attention."""
        softmax, products = parts.get("softmax"), [part for name, part in parts.items() if name != "softmax"]
        time = flops = None
        if softmax is not None:
            time_ms = sum(part.product_ms for part in products)
            time = softmax.time_ms / time_ms if time_ms else None
            if softmax.cost is not None:
                flops = softmax.cost.flops / sum(part.cost.flops for part in products if part.cost is not None)
        for what, ratio in (("time", time), ("flops", flops)):
            why = reason or "what the parts of attention compute is not known"
            self.values.set(f"softmax_to_products_{what}", phase, None if ratio is None else [ratio], why)

    def _attention_row(self, part: Part, phase_ms: float, line: Roofline | str, note: str) -> list[Scalar]:
        name, phase = part.name, part.phase
        why = note or "the phase has no such work"
        self.values.set(f"{name}_ms", phase, [part.time_ms])
        self.values.set(f"{name}_tflops", phase, None if part.tflops is None else [part.tflops], why)
        self.values.set(f"{name}_gb_per_s", phase, None if part.gb_per_s is None else [part.gb_per_s], why)
        useful = None if part.cost is None else useful_flops(self.spec, name, phase)
        share = 100 * part.time_ms / phase_ms if phase_ms else None
        return tables.attention_row(part, share, useful, line, note)

    def _add_products(self, attribution: Attribution) -> None:
        """Report the matrix products by shape with the roofline's limits, and the device's ceilings."""
        device, precision, steps = self.timed.training.device, self.spec.precision, len(attribution.steps)
        ceiling = Ceilings(self.report.ceilings).read(device)
        lines: dict[str, Roofline | str] = {one: roofline(ceiling, one) for one in dtypes_of(precision)}
        rows: list[list[Scalar]] = []
        for phase in self.phases:
            products = usage.products(attribution.calls, phase, steps, on_gpu=self.on_gpu)
            phase_ms = 1e-6 * usage.time_of(usage.in_phases(attribution.work, [phase])) / steps
            rows += tables.product_rows(products, phase_ms, lines, precision)
            self._tell_cut(f"products, {phase}", [product.part.time_ms for product in products])
        if rows:
            self.report.table("products", tables.PRODUCTS, rows)
        else:
            self._tell("products", None, None, NO_PRODUCTS if self.shapes else NO_SHAPES)
        if unlisted_ms := usage.unlisted_ms(attribution.calls, steps, on_gpu=self.on_gpu):
            self._tell("convolutions", unlisted_ms, "ms", CONVOLUTIONS)
        peak = peak_tflops(device_name(device), precision)
        reached = tables.highest_percent([(tables.PRODUCTS, rows), (tables.ATTENTION, self.attention)])
        for limit, percent in reached.items():
            if percent > 100:
                self._tell(f"ceiling of {limit}", percent, "%", tables.TOO_LOW.format(percent))
        limits = tables.ceiling_rows(ceiling, precision, peak, self.refused, reached)
        self.report.table("ceilings", tables.CEILINGS, limits)

    def _add_trace(self, profile: Profile) -> None:
        """Save the Chrome trace, unless it is larger than the spec allows."""
        steps = self.steps
        self.report.progress(steps, steps, "writing the trace")
        raw, target = self.report.scratch / "trace.json", self.report.scratch / TRACE
        profile.save(raw)
        try:
            trace.write(raw, target, self.spec.trace_max_mib << 20)
        except trace.TooLarge as error:
            self.values.set("trace_steps", None, None, str(error))
            self._tell("trace", None, None, f"not kept: {error}")
            return
        finally:
            raw.unlink(missing_ok=True)
        self.values.set("trace_steps", None, [steps])
        self._tell("steps in the trace", steps, "steps", None)
        self.report.artifact(target, name=TRACE, kind="trace", media_type="application/gzip")

    def _add_stacks(self, profile: Profile | None) -> None:
        """Save stacks, folded and as a flame graph: of one more step with Python's stacks; without a profile of it,
        since that would take too long, the sampled ones."""
        on_gpu = self.on_gpu
        if profile is None:
            assert self.samples is not None
            folded, on_gpu = stacks.sampled(self.samples, self.timed.step_ms), False
            how = "sampled without a profiler"
        else:
            self.report.progress(1, 1, "drawing the flame graph")
            folded = stacks.fold(profile.recording, self.phases, on_gpu=on_gpu)
            if self.samples is not None and not on_gpu:
                folded = {**folded, **stacks.other_threads(self.samples)}
            how = "while stacks were recorded"
        if not folded:
            self._tell("stacks", None, None, f"none: {NO_PHASES}" if self.spec.cuda_graph else "none were recorded")
            return
        if len(folded) > stacks.MAX_STACKS:
            self._tell("stacks", stacks.MAX_STACKS, "stacks", f"the top ones of {len(folded)}")
        subtitle = stacks.title_of(folded, how, on_gpu=on_gpu)
        context = f", context {self.spec.context_length}, {self.spec.mode}" if self.spec.step_code is None else ""
        label = f"{self.spec.label()}{context}"
        files = {
            STACKS: (stacks.folded(folded), "text/plain"),
            FLAME_GRAPH: (flame_graph.draw(folded, label, subtitle), "image/svg+xml"),
        }
        for name, (text, media_type) in files.items():
            path = self.report.scratch / name
            path.write_text(text, encoding="utf-8", errors="replace")
            self.report.artifact(path, name=name, kind=Path(name).stem, media_type=media_type)

    def _tell_cut(self, table: str, times_ms: Sequence[float]) -> None:
        """Note how many rows a table leaves out, and how much of their time; `times_ms` has the time of each row."""
        if (note := tables.left_out(times_ms)) is not None:
            self._tell(f"rows of {table}", tables.MAX_ROWS, "rows", note)

    def _tell(self, what: str, value: float | None, unit: str | None, note: str | None) -> None:
        self.summary.append([what, value, unit, note])


def why_no_parts(spec: ProfileSpec, names: set[str]) -> str | None:
    """Return why attention has no parts to time; None if it has."""
    if set(ATTENTION_PARTS) <= names:
        return None
    if spec.cuda_graph:
        return "a CUDA graph replays kernels without the names of their ranges"
    if spec.compile:
        return "the compiler fuses the parts of attention, and ignores their names"
    return f"attention {spec.attention!r} does not name its parts: it computes them together"


def cost_of(spec: ProfileSpec, part: str, phase: str, calls: int, *, on_gpu: bool) -> tuple[Cost | None, str]:
    """Return the cost of a part of attention ("scores", "softmax" or "values") in a phase of one step, other than the
    optimizer, and a note on it. `calls`: number of calls of the part in the forward pass. `on_gpu`: whether it ran on a
    GPU, where autocast computes the softmax in float32."""
    layers, passes = spec.model.shape()["num_layers"], spec.new_tokens - 1 if phase == "decode" else 1
    if spec.attention != EAGER:
        return None, f"what attention {spec.attention!r} computes in its parts is not known"
    if calls != layers * passes:
        return None, f"the model computes attention {calls} times in this phase, not once for each layer: cost unknown"
    width = PRECISIONS[spec.precision].compute_dtype.itemsize
    wide = 4 if on_gpu else width
    cost, note = Cost(0, 0), "FLOPs of the whole square of scores, which eager attention computes"
    key_heads = spec.model.num_kv_heads
    for shape in shapes_of(spec, phase):
        backward = phase == "backward"
        cost += attention_part(part, shape, width, softmax_bytes=wide, backward=backward, key_heads=key_heads) * layers
        if backward and (again := layers_recomputed(spec, part)):
            cost += attention_part(part, shape, width, softmax_bytes=wide, key_heads=key_heads) * again
            note += "; the recomputed forward pass is part of it"
    return cost, note if phase != "decode" else ""


def layers_recomputed(spec: ProfileSpec, part: str) -> int:
    """Return the number of layers in which the backward pass recomputes a part of attention."""
    layers = spec.model.shape()["num_layers"]
    if not spec.activation_checkpointing:
        return 0
    if spec.checkpoint_scope == "selective":
        return layers if part == "softmax" else 0
    return layers if spec.checkpoint_layers is None else spec.checkpoint_layers


def useful_flops(spec: ProfileSpec, part: str, phase: str) -> int:
    """Return the FLOPs of a part that are of visible scores, without recomputation: half of them if causal alone."""
    layers, backward = spec.model.shape()["num_layers"], phase == "backward"
    whole = sum(attention_part(part, shape, 1, backward=backward).flops for shape in shapes_of(spec, phase)) * layers
    if phase == "decode":
        return whole
    problem = building.shape_of(spec.model, spec.context_length).problem
    return int(whole * visible_share(problem, spec.context_length, spec.context_length))


def shapes_of(spec: ProfileSpec, phase: str) -> list[tuple[int, int, int, int, int]]:
    """Return (batch, heads, queries, keys, head_dim) of each pass through a layer's attention in a phase."""
    shape: Mapping[str, int] = spec.model.shape()
    heads, head_dim = shape["num_heads"], shape["d_model"] // shape["num_heads"]
    if phase != "decode":
        return [(spec.batch_size, heads, spec.context_length, spec.context_length, head_dim)]
    # The prefill yields the first new token; the i-th step after it sees the prompt and i tokens more.
    lengths = (spec.context_length + i for i in range(1, spec.new_tokens))
    return [(spec.batch_size, heads, 1, min(keys, spec.model.window or keys), head_dim) for keys in lengths]
