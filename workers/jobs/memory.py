"""Runs `memory`: the allocations of a model's steps, by phase and category, and the allocator's snapshots."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from app.specs.memory import DEFAULT_WARMUP_STEPS, MemorySpec
from workers.jobs import _reference
from workers.jobs._base import Unit
from workers.jobs._training import building
from workers.jobs._values import Metric, Values
from workers.reporter import Reporter

if TYPE_CHECKING:
    import torch

    from workers.jobs._training.building import Training
    from workers.measure.allocations.categories import Owners
    from workers.measure.allocations.growth import AfterSteps, Growth
    from workers.measure.allocations.ledger import Allocation, Point, Stretch
    from workers.measure.allocations.recording import RecordedStretch, Recording
    from workers.measure.check import Check
    from workers.measure.judging import WrongResult
    from workers.measure.saved import SavedTensor
    from workers.measure.timing import StepPosition
    from workers.model.steps import BackwardStep

INITIALISATION = "initialisation"
"""The phase in which the model is made."""
OOM = "oom"
"""Name of the snapshot and of the tables of a case that ran out of memory."""
MIB = 2**20
BYTES = {"fp32": 4, "bf16": 2}
"""Bytes per element of the residual stream, by the dtype of the parameters: autocast does not change it."""
CATEGORY_METRICS = {
    "parameter": "parameter_mib",
    "gradient": "gradient_mib",
    "optimizer_state": "optimizer_state_mib",
    "activation": "activation_mib",
    "input": "input_mib",
    "temporary": "temporary_mib",
    "unknown": "unknown_mib",
}
WHOLE = (
    ("peak_memory_mib", "MiB"),
    ("memory_reserved_mib", "MiB"),
    *((name, "MiB") for name in CATEGORY_METRICS.values()),
    ("unknown_percent", "%"),
    ("rounding_mib", "MiB"),
    ("fragmentation_mib", "MiB"),
    ("largest_free_mib", "MiB"),
    ("growth_mib_per_step", "MiB"),
    ("residual_stream_mib", "MiB"),
    ("residual_stream_seen_mib", "MiB"),
    ("residual_streams_seen", "tensors"),
    ("history_entries", "entries"),
    ("snapshot_mib", "MiB"),
    ("parameters", "parameters"),
)
"""Metrics without a phase, of the whole step, with their units."""
OF_OUR_MODEL = ("residual_stream_mib", "residual_stream_seen_mib", "residual_streams_seen")
EACH_PHASE = (
    *("peak_memory_mib", "end_memory_mib", "memory_reserved_mib", "end_reserved_mib"),
    *("fragmentation_mib", "largest_free_mib"),
)
WORK = {"forward": "inference", "forward_backward": "forward and backward pass", "train_step": "full step"}
"""The work that the snapshots of a mode's phases show."""
MAX_UNKNOWN_PERCENT = 2.0
MAX_DIFFERENCE = 1e-3
"""Largest relative difference between the peak of the history and the allocator's own count of the same."""
MAX_STUCK_SHARE, MAX_STUCK_MIB = 0.1, 64
"""More free memory between blocks in use than both, as a share of what is reserved and in MiB, is worth a setting."""
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
MAX_NAMED = 3
"""Most places that grow that are named in one sentence."""
MAX_POINTS = 1000
"""Largest number of rows of the timeline."""
NO_CACHE = "known on GPUs only: a CPU's allocator gives back what is released"
KEPT = "made before the first step"
"""Name of the tensors that a step of the user's own keeps from its beginning."""
PREPARATION = "preparation"
"""Name of all that precedes the phases of a step in a recording (workers.measure.allocations.recording)."""
PEAK_LOST = "the history's beginning is lost, and with it the peak: raise history_entries"


class MemoryRunner:
    """The runner of kind `memory`."""

    kind = "memory"

    def plan(self, spec: MemorySpec) -> list[Unit]:
        """Plan the one unit."""
        return [Unit(title=spec.title(f"context {spec.context_length}", spec.mode))]

    def run(self, spec: MemorySpec, unit: Unit, report: Reporter) -> None:
        """Record the steps and report their allocations. Running out of memory is a result."""
        from workers.measure import environment
        from workers.measure.validity import verdict

        device, build_model = building.prepare(spec)
        report.environment(environment.fingerprint(device))
        with building.known_errors():
            session = record(spec, device, build_model, report)
        values, checks = results(session)
        case = spec.case()
        report.validity(verdict(checks), case.key, unit.title)
        values.report(case, environment.device_key(device), report)
        report_tables(session, report)


RUNNER = MemoryRunner()


def metrics(spec: MemorySpec, phases: Sequence[str]) -> list[Metric]:
    """Return the metrics of a spec, whose step has these phases, in the order of the report."""
    without = {*(OF_OUR_MODEL if spec.step_code else ()), *(() if spec.snapshot_steps else ("growth_mib_per_step",))}
    whole = [(name, unit) for name, unit in WHOLE if name not in without]
    return [
        *(Metric(name, None, unit) for name, unit in whole),
        *(Metric(name, phase, "MiB") for phase in (INITIALISATION, *phases) for name in EACH_PHASE),
    ]


@dataclass
class Session:
    """The recording of a case."""

    spec: MemorySpec
    initialisation: RecordedStretch | None = None
    steps: list[list[RecordedStretch]] = field(default_factory=list)
    """The stretches of each recorded step: its preparation and its phases."""
    parts: list[Check] = field(default_factory=list)
    """The checks of what the model takes in place of plain PyTorch."""
    wrong: WrongResult | None = None
    """Why nothing was recorded: one of these is wrong."""
    lacked: RecordedStretch | None = None
    """The stretch in which memory ran out; None if it did not."""
    reason: str = ""
    """The reason why there are no values: memory ran out."""
    parameters: int | None = None
    """Number of trainable parameters."""
    streams: list[int] | None = None
    """Bytes of each block's output, as found among the allocations; None if it could not be observed."""
    saved: list[SavedTensor] = field(default_factory=list)
    """What autograd saves in a forward pass of our step."""
    moments: dict[str, RecordedStretch] = field(default_factory=dict)
    """What followed each of `snapshot_steps`, by the name of its snapshot."""
    after_steps: AfterSteps | None = None
    """What was alive after each step from the first to the last of `snapshot_steps`."""
    files: dict[str, int] = field(default_factory=dict)
    """Bytes of each snapshot, by its phase."""

    def phases(self) -> list[RecordedStretch]:
        """Return the phases of the last step, without its preparation. Of a phase that comes several times in a step of
        the user's own, it is the time with the highest peak."""
        highest: dict[str, RecordedStretch] = {}
        for recorded in self.steps[-1] if self.steps else []:
            name = recorded.stretch.phase
            if name != PREPARATION and (name not in highest or height(recorded) > height(highest[name])):
                highest[name] = recorded
        return [*highest.values()]


def record(spec: MemorySpec, device: torch.device, build_model: building.Maker, report: Reporter) -> Session:
    """Record initialisation and steps, and save the snapshots."""
    from workers.measure.allocations import make_recording
    from workers.measure.judging import WrongResult
    from workers.measure.memory import OutOfMemory
    from workers.measure.timing import StepPosition

    session = Session(spec)
    try:
        session.parts = _reference.check_parts(spec, device)
    except WrongResult as error:
        session.wrong = error
        return session
    recording, where = make_recording(device, spec.history_entries), StepPosition()
    where.phase = INITIALISATION
    owners: Callable[[], Owners] = dict
    recording.begin({})
    report.progress(0, warmup_steps(spec) + spec.measure_steps, "making the model")
    try:
        training = building.build(spec, device, build_model)
        owners = owners_in(training)
        gc.collect()
        recording.mark(INITIALISATION, owners(), keep=True)
        (session.initialisation,) = recording.end()
        save_snapshot(session, INITIALISATION, session.initialisation, report)
        record_steps(session, training, recording, owners, where, report)
    except OutOfMemory as error:
        session.reason = str(error)
        # The error still holds the tensors of the step, so the snapshot shows them.
        recording.mark(where.phase, owners(), keep=True, failed=True)
        session.lacked = recording.end()[-1]
        save_snapshot(session, OOM, session.lacked, report)
    except BaseException:
        recording.abandon()
        raise
    return session


def warmup_steps(spec: MemorySpec) -> int:
    """Return the number of steps before those that are recorded."""
    steps = DEFAULT_WARMUP_STEPS if spec.warmup_steps is None else spec.warmup_steps
    return max(steps, *spec.snapshot_steps or (0,))


def owners_in(training: Training) -> Callable[[], Owners]:
    """Return a function that returns the present owners of storages.

    Tensors that a step of the user's own has now, before it runs, and that nothing else owns are its input.
    """
    import torch

    from workers.measure.allocations.categories import add, owners_of

    step: Any = training.step
    found = [] if training.own is None else [one for one in gc.get_objects() if type(one) is torch.Tensor]
    # Of a tensor that requires gradients the purpose is another, and is not known.
    kept = [weakref.ref(one) for one in found if one.layout is torch.strided and not one.requires_grad]
    del found

    def owners() -> Owners:
        present = [getattr(step, name, None) for name in ("inputs", "targets", "loss")]
        inputs, losses = present[:2], present[2:]
        known = owners_of(
            training.device,
            training.modules,
            [one for one in (getattr(step, "optimizer", None),) if one is not None] or getattr(step, "optimizers", ()),
            getattr(step, "scaler", None),
            [tensor for tensor in inputs if tensor is not None],
            [loss for loss in losses if loss is not None],
        )
        still = ((KEPT, tensor) for one in kept if (tensor := one()) is not None)
        add(known, training.device, "input", still)
        return known

    return owners


def record_steps(
    session: Session,
    training: Training,
    recording: Recording,
    owners: Callable[[], Owners],
    where: StepPosition,
    report: Reporter,
) -> None:
    """Warm up, record the steps, each in a history of its own, and save the snapshots of the last one's phases. The
    warm-up's steps have such histories from the first of `snapshot_steps` on.

    Raises:
        OutOfMemory: the memory did not suffice in some phase. The recording continues.
    """
    from workers.measure.allocations.recording import PhaseMarks
    from workers.measure.allocations.residual import ResidualStream
    from workers.measure.own_step import REST
    from workers.measure.timing import run_step, translate_oom_in_step

    spec, step = session.spec, training.step
    warmup, total = warmup_steps(spec), warmup_steps(spec) + spec.measure_steps
    moments = spec.snapshot_steps or [warmup]
    own, stream = training.own, ResidualStream()
    if own is not None:
        own.takes = f"{warmup} steps to warm up and {spec.measure_steps} recorded ones"
    marks = PhaseMarks(recording, owners, without=() if own is None else [REST])
    # The profiler of a CPU would keep each of the compiler's millions of calls.
    recording.begin(owners(), stacks=not spec.compile)
    recorded: list[list[RecordedStretch]] = []
    with translate_oom_in_step(where):
        for number in range(total):
            if number and number >= moments[0]:
                gc.collect()
                recorded.append(recording.end())
                keep_moment(session, number, recorded[-1], report)
                recording.begin(owners())
            if 0 < number == moments[0] - 1:
                recording.measure_workspaces()
            marks.keep = number + 1 == total
            marks.watch = spec.snapshot_steps is not None and moments[0] <= number + 1 <= moments[-1]
            marks.keep_after = number + 1 in moments
            where.preparation_begins()
            step.prepare()
            # A hook on a compiled block would cause a recompilation.
            with nullcontext() if spec.compile or own else stream.of(training.model):
                run_step(step.phases, [where, stream, marks])
            report.progress(number + 1, total, "recording" if number >= warmup else "warming up")
    session.parameters = sum(one.numel() for one in training.modules.parameters() if one.requires_grad)
    session.steps = [*recorded, recording.end()][-spec.measure_steps :]
    for phase in session.phases():
        save_snapshot(session, phase.stretch.phase, phase, report)
        if phase.stretch.phase == "forward" and not spec.compile and stream.storages:
            session.streams = stream.sizes_among(phase.stretch.made)
    if own is None and spec.mode != "forward":
        from workers.measure.saved import saved_tensors

        step.prepare()
        session.saved = saved_tensors(training.model, cast("BackwardStep", step).forward)


def keep_moment(session: Session, step: int, recorded: Sequence[RecordedStretch], report: Reporter) -> None:
    """Keep what is alive after a step that was watched."""
    from workers.measure.allocations.growth import AfterSteps

    last = recorded[-1]
    if last.alive is None:
        return
    session.after_steps = session.after_steps or AfterSteps()
    session.after_steps.add(last.alive)
    if last.snapshot is not None:
        session.moments[f"step-{step}"] = last
        save_snapshot(session, f"step-{step}", last, report)


def save_snapshot(session: Session, name: str, recorded: RecordedStretch, report: Reporter) -> None:
    """Write a snapshot as an artifact."""
    from workers.measure.allocations import snapshot

    if recorded.snapshot is None:
        return
    file = f"snapshot-{name}.pickle"
    spec, what = session.spec, recorded.snapshot
    about = {
        **what["flopwatch"],
        "mode": spec.mode if spec.step_code is None else None,
        "of": work_of(session, name),
        "model": spec.model.label() if spec.step_code is None else spec.label(),
        "precision": spec.precision,
    }
    session.files[name] = snapshot.write({**what, "flopwatch": about}, report.scratch / file)
    report.artifact(report.scratch / file, name=file, kind="snapshot", media_type="application/octet-stream")


def work_of(session: Session, name: str) -> str:
    """Return the work that a snapshot shows. If memory ran out while the model was built, there was no step."""
    if name == INITIALISATION or session.initialisation is None:
        return INITIALISATION
    return WORK["train_step" if session.spec.step_code is not None else session.spec.mode]


def results(session: Session) -> tuple[Values, list[Check]]:
    """Return the values of each metric, and the checks of the recording."""
    phases = session.phases()
    named = session.spec.step_phases() or [recorded.stretch.phase for recorded in phases]
    if session.wrong is not None:
        return _reference.not_measured(metrics(session.spec, named), session.wrong)
    values = Values(metrics(session.spec, named))
    if session.initialisation is not None:
        add_phase(values, session.initialisation, INITIALISATION)
    if session.lacked is not None:
        values.set_missing("oom", session.reason)
        return values, [*session.parts, check_history([session.lacked])]
    for recorded in phases:
        add_phase(values, recorded, recorded.stretch.phase)
    add_whole(values, session)
    if session.spec.step_code is None:
        add_residual_stream(values, session)
    everything = [recorded for step in session.steps for recorded in step]
    if session.initialisation is not None:
        everything = [session.initialisation, *everything]
    checks = [*session.parts, check_history(everything), *check_accounted(everything)]
    percent = values.samples("unknown_percent", None)
    if percent is not None:
        checks.append(check_unknown(percent[0], max(phases, key=height).stretch))
    checks += check_fragmentation(max(phases, key=height))
    if session.after_steps is not None and session.spec.snapshot_steps:
        checks.append(check_growth(values, session.after_steps, session.spec.snapshot_steps))
    return values, checks


def check_unknown(percent: float, stretch: Stretch) -> Check:
    """Check that the purpose of nearly all memory is known. The detail names the largest allocation of unknown
    purpose."""
    from workers.measure.allocations.categories import UNKNOWN
    from workers.measure.allocations.stacks import site
    from workers.measure.check import Check

    detail = f"{percent:.2f} % of the peak has no known use"
    unknown = [allocation for allocation in stretch.at_peak if allocation.category == UNKNOWN]
    if unknown:
        largest_one = max(unknown, key=lambda allocation: allocation.size)
        where = largest_one.name or site(largest_one.frames) or "made by code without a Python stack"
        detail += f"; the largest allocation has {largest_one.size / MIB:.4g} MiB: {where}"
    return Check("unknown", percent <= MAX_UNKNOWN_PERCENT, detail, "note")


def check_fragmentation(recorded: RecordedStretch) -> list[Check]:
    """Check that at the peak little of what the allocator has reserved lies between blocks in use; none on a CPU."""
    from workers.measure.check import Check

    free, reserved = fragmentation_mib(recorded)[0], recorded.stretch.reserved_at_peak
    if free is None or reserved is None or recorded.free is None:
        return []
    largest, stuck = (min(size / MIB, free[0]) for size in recorded.free)
    detail = (
        f"{free[0]:.4g} MiB of {reserved / MIB:.4g} MiB reserved are free at the peak, {stuck:.4g} MiB of them between "
        f"blocks in use; the largest free block has {largest:.4g} MiB"
    )
    settings = (recorded.snapshot or {}).get("allocator_settings", {})
    matters = stuck > max(MAX_STUCK_MIB, MAX_STUCK_SHARE * reserved / MIB)
    if matters and not settings.get("expandable_segments"):
        detail += f": a worker started with {EXPANDABLE} gives them back where memory runs out"
    return [Check("fragmentation", not matters, detail, "note")]


def check_growth(values: Values, after: AfterSteps, moments: Sequence[int]) -> Check:
    """Check that no memory grows from step to step, and set by how much it does. The detail names the lines."""
    from workers.measure.allocations.stacks import site
    from workers.measure.check import Check

    steps = moments[-1] - moments[0]
    growths = after.growths()
    growing = [one for one in growths if one.continues]
    values.set("growth_mib_per_step", None, [sum(one.size for one in growing) / steps / MIB])

    def place(one: Growth) -> str:
        return site(one.example.frames) or one.example.name or "code without a Python stack"

    named = [f"{one.size / steps / MIB:.4g} MiB a step by {place(one)}" for one in growing[:MAX_NAMED]]
    if not growing:
        detail = f"no memory is seen to keep growing from step {moments[0]} to step {moments[-1]}"
        may = next((one for one in growths if one.may_continue and one.size >= MIB), None)
        if may is not None:
            detail += f"; that of {place(may)}, which has {may.size / MIB:.4g} MiB more, may: take more steps"
        return Check("growth", True, detail, "note")
    more = f", and {len(growing) - MAX_NAMED} others" if len(growing) > MAX_NAMED else ""
    detail = f"memory grows from step {moments[0]} to step {moments[-1]}: {', '.join(named)}{more}"
    return Check("growth", False, detail, "note")


def peak_seen(recorded: RecordedStretch) -> bool:
    """Return True if the history includes the peak: it is complete, or it reaches the allocator's own peak."""
    counters, stretch = recorded.counters, recorded.stretch
    return not stretch.lost or (counters is not None and stretch.peak.total >= counters.requested_peak)


def add_phase(values: Values, recorded: RecordedStretch, phase: str) -> None:
    """Set the metrics of a phase."""
    counters = recorded.counters
    if counters is None:
        values.set("peak_memory_mib", phase, [recorded.stretch.peak.total / MIB])
        values.set("end_memory_mib", phase, [recorded.stretch.end.total / MIB])
        for name in EACH_PHASE[2:]:
            values.set(name, phase, None, NO_CACHE)
        return
    values.set("peak_memory_mib", phase, [counters.allocated_peak / MIB])
    values.set("end_memory_mib", phase, [counters.allocated_end / MIB])
    values.set("memory_reserved_mib", phase, [counters.reserved_peak / MIB])
    values.set("end_reserved_mib", phase, [counters.reserved_end / MIB])
    add_fragmentation(values, recorded, phase)


def add_fragmentation(values: Values, recorded: RecordedStretch, phase: str | None) -> None:
    """Set how much free memory the allocator held at the peak, and the largest block of it."""
    free, reason = fragmentation_mib(recorded)
    values.set("fragmentation_mib", phase, free, reason)
    # What the allocator leaves unused in a block, up to 1 MiB, counts as allocated.
    block = None if free is None or recorded.free is None else [min(recorded.free.largest / MIB, free[0])]
    values.set("largest_free_mib", phase, block, reason or NO_CACHE)


def fragmentation_mib(recorded: RecordedStretch) -> tuple[list[float] | None, str]:
    """Return the memory that the allocator held at the peak beyond the allocated memory; or None and the reason."""
    if recorded.counters is None or recorded.stretch.reserved_at_peak is None:
        return None, NO_CACHE
    if not peak_seen(recorded):
        return None, PEAK_LOST
    return [max(0, recorded.stretch.reserved_at_peak - recorded.counters.allocated_peak) / MIB], ""


def add_whole(values: Values, session: Session) -> None:
    """Set the metrics of the last step, whose snapshots are kept, at the highest of its phases' peaks."""
    from workers.measure.allocations.categories import CATEGORIES, UNKNOWN

    phases = session.phases()
    highest = max(phases, key=height)
    values.set("peak_memory_mib", None, [height(highest) / MIB])
    held = [phase.counters.reserved_peak / MIB for phase in phases if phase.counters is not None]
    values.set("memory_reserved_mib", None, [max(held)] if held else None, NO_CACHE)
    add_fragmentation(values, highest, None)
    peak = highest.stretch.peak if peak_seen(highest) else None
    for category, name in CATEGORY_METRICS.items():
        used = None if peak is None else [peak.usage[CATEGORIES.index(category)] / MIB]
        values.set(name, None, used, PEAK_LOST)
    share_unknown = None if peak is None else [100 * peak.usage[UNKNOWN] / max(1, peak.total)]
    values.set("unknown_percent", None, share_unknown, PEAK_LOST)
    if highest.counters is None:
        values.set("rounding_mib", None, None, "known on GPUs only: a CPU's allocator is asked for what it gives")
    else:
        rest = None if peak is None else [(highest.counters.allocated_peak - peak.total) / MIB]
        values.set("rounding_mib", None, rest, PEAK_LOST)
    final = session.steps[-1][-1]
    values.set("history_entries", None, [final.history])
    values.set("snapshot_mib", None, [[*session.files.values()][-1] / MIB])
    values.set("parameters", None, None if session.parameters is None else [session.parameters], "unknown")


def height(recorded: RecordedStretch) -> float:
    """Return the peak in bytes by the allocator's counters or, without these, by the history."""
    return recorded.stretch.peak.total if recorded.counters is None else recorded.counters.allocated_peak


def add_residual_stream(values: Values, session: Session) -> None:
    """Set the size of the residual stream by formula, and as measured from its tensors."""
    spec = session.spec
    formula = spec.batch_size * spec.context_length * spec.model.shape()["d_model"] * BYTES[spec.parameter_dtype]
    values.set("residual_stream_mib", None, [formula / MIB])
    if session.streams:
        values.set("residual_stream_seen_mib", None, [size / MIB for size in session.streams])
        values.set("residual_streams_seen", None, [len(session.streams)])
        return
    why = "a compiled block's output is not looked at" if spec.compile else "no block's output is among the allocations"
    values.set("residual_stream_seen_mib", None, None, why)
    values.set("residual_streams_seen", None, None, why)


def check_history(recorded: Sequence[RecordedStretch]) -> Check:
    """Check that the histories are complete: that of building the model, and that since the warm-up."""
    from workers.measure.check import Check

    held, lost = recorded[-1].history, any(step.history_lost for step in recorded)
    if not lost:
        return Check("history", True, f"complete: {held} entries")
    phases = list(dict.fromkeys(step.stretch.phase for step in recorded if step.stretch.lost))
    missing = f"; of {', '.join(phases)} the beginning was not seen" if phases else ""
    detail = f"truncated: snapshots hold the last {held} entries only{missing}: raise history_entries"
    return Check("history", False, detail)


def check_accounted(recorded: Sequence[RecordedStretch]) -> list[Check]:
    """Check that the history's peaks agree with the allocator's own counters."""
    from workers.measure.check import Check

    worst, where = 0.0, ""
    known = [(step.counters, step.stretch) for step in recorded if step.counters is not None and not step.stretch.lost]
    if not known:
        return []
    for counters, stretch in known:
        difference = abs(stretch.peak.total - counters.requested_peak) / max(1, counters.requested_peak)
        if difference >= worst:
            worst, where = difference, stretch.phase
    detail = f"the history's peak differs from the allocator's own by {worst:.3%} at most ({where})"
    return [Check("accounted", worst <= MAX_DIFFERENCE, detail)]


def report_tables(session: Session, report: Reporter) -> None:
    """Report the tables: categories of each phase, the largest allocations, the timeline, and the snapshots."""
    recorded = {phase.stretch.phase: phase for phase in session.phases()}
    if session.initialisation is not None:
        recorded = {INITIALISATION: session.initialisation, **recorded}
    if session.lacked is not None:
        recorded[OOM] = session.lacked
    for name, phase in recorded.items():
        report_categories(name, phase, report)
    report_allocations(session, recorded, report)
    report_saved(session, report)
    report_growth(session, report)
    report_snapshots(session, {**recorded, **session.moments}, report)
    if session.steps:
        report_timeline(session, report)


def report_categories(name: str, recorded: RecordedStretch, report: Reporter) -> None:
    """Report the use of memory by category, at a phase's peak and at its end."""
    from workers.measure.allocations.categories import CATEGORIES
    from workers.measure.table import Column

    peak, end = recorded.stretch.peak if peak_seen(recorded) else None, recorded.stretch.end
    columns = [Column("category", "string")]
    for moment in ("peak", "end"):
        columns += [
            Column(f"{moment}_mib", "number", "MiB"),
            Column(f"{moment}_percent", "number", "%"),
            Column(f"{moment}_bytes", "integer", "bytes"),
        ]
    rows: list[list[Any]] = [
        [category, *share(peak, index), *share(end, index)] for index, category in enumerate(CATEGORIES)
    ]
    report.table(f"categories-{name}", columns, rows)


def share(point: Point | None, index: int) -> list[float | int | None]:
    """Return the MiB, the percentage and the bytes of a category at a moment; None if that moment is missing."""
    if point is None:
        return [None, None, None]
    return [point.usage[index] / MIB, 100 * point.usage[index] / max(1, point.total), point.usage[index]]


def report_allocations(session: Session, recorded: dict[str, RecordedStretch], report: Reporter) -> None:
    """Report the largest allocations alive at each phase's peak, the step's peak first; equal ones are one row."""
    from workers.measure.table import Column

    columns = Column.parse(
        "at_peak_of, size_mib: number MiB, count: integer allocations, total_mib: number MiB, category, name, "
        "made_in, site, stack, code"
    )
    rows: list[list[Any]] = [
        [name, *row]
        for name, phase in sorted(recorded.items(), key=lambda item: (item[0] == INITIALISATION, -height(item[1])))
        if peak_seen(phase)
        for row in largest(phase.stretch, session.spec.largest_allocations)
    ]
    report.table("allocations", columns, rows)


def largest(stretch: Stretch, most: int) -> list[list[Any]]:
    """Return the largest groups of equal allocations at a peak, the largest allocation first."""
    from workers.measure.allocations.categories import CATEGORIES
    from workers.measure.allocations.growth import pattern
    from workers.measure.allocations.stacks import code, short_stack, site

    groups: dict[tuple[Any, ...], list[Allocation]] = {}
    for allocation in stretch.at_peak:
        key = (
            allocation.size,
            allocation.category,
            pattern(allocation.name),
            allocation.made_in,
            short_stack(allocation.frames),
        )
        groups.setdefault(key, []).append(allocation)
    ranked = sorted(groups.items(), key=lambda item: (-item[0][0], -len(item[1]), item[0][1]))
    return [
        [
            size / MIB,
            len(alike),
            size * len(alike) / MIB,
            CATEGORIES[category],
            name,
            made_in or "before the history",
            site(alike[0].frames),
            stack,
            code(alike[0].frames),
        ]
        for (size, category, name, made_in, stack), alike in ranked[:most]
    ]


def report_saved(session: Session, report: Reporter) -> None:
    """Report what autograd saves, the largest first; what corresponding modules save is one row."""
    from workers.measure.allocations.growth import pattern
    from workers.measure.table import Column

    if not session.saved:
        return
    groups: dict[tuple[Any, ...], list[SavedTensor]] = {}
    for one in session.saved:
        key = (pattern(one.module), one.site, one.made_by, one.dtype, "×".join(map(str, one.shape)))
        groups.setdefault(key, []).append(one)
    whole = sum(one.size for one in session.saved)
    rows: list[list[Any]] = []
    for key, alike in sorted(groups.items(), key=lambda item: -sum(one.size for one in item[1])):
        size = sum(one.size for one in alike)
        modules = len({one.module for one in alike})
        rows.append([*key, modules, size / modules / MIB, size / MIB, 100 * size / whole])
    columns = [Column(name, "string") for name in ("module", "site", "made_by", "dtype", "shape")]
    columns += [Column("modules", "integer"), Column("each_mib", "number", "MiB")]
    columns += [Column("total_mib", "number", "MiB"), Column("share_percent", "number", "%")]
    report.table("saved", columns, rows)


def report_growth(session: Session, report: Reporter) -> None:
    """Report the allocations that are more or larger after the last of `snapshot_steps` than after the first."""
    from workers.measure.allocations.categories import CATEGORIES
    from workers.measure.allocations.stacks import NEXT, code, site
    from workers.measure.table import Column

    moments = session.spec.snapshot_steps
    if session.after_steps is None or moments is None or len(session.after_steps.steps) <= moments[-1] - moments[0]:
        return
    columns = Column.parse(
        "per_step_mib: number MiB, keeps_growing: boolean, first_mib: number MiB, last_mib: number MiB, "
        "category, name, site, code, first_count: integer allocations, last_count: integer allocations, made_in, stack"
    )
    rows: list[list[Any]] = [
        [
            *(one.size / (moments[-1] - moments[0]) / MIB, one.continues, one.sizes[0] / MIB, one.sizes[-1] / MIB),
            *(CATEGORIES[one.example.category], one.place[0], site(one.example.frames)),
            (code(one.example.frames) or "").partition(NEXT)[0] or None,
            *(*one.counts, one.example.made_in, one.place[1]),
        ]
        for one in session.after_steps.growths()
    ]
    report.table("growth", columns, rows)


def report_snapshots(session: Session, recorded: dict[str, RecordedStretch], report: Reporter) -> None:
    """Report the content of each snapshot."""
    from workers.measure.table import Column

    columns = Column.parse(
        "snapshot, phase, of, history_entries: integer entries, complete: boolean, size_mib: number MiB"
    )
    rows: list[list[Any]] = [
        [
            *(f"snapshot-{name}.pickle", phase.stretch.phase, work_of(session, name)),
            *(phase.history, not phase.history_lost, session.files[name] / MIB),
        ]
        for name, phase in recorded.items()
        if name in session.files
    ]
    report.table("snapshots", columns, rows)


def report_timeline(session: Session, report: Reporter) -> None:
    """Report the use of memory by category over the recorded steps, by the number of the history's entry.

    Each row has the allocation that its entry makes or releases, and the place in the code that made it.
    """
    from workers.measure.allocations.categories import CATEGORIES
    from workers.measure.allocations.ledger import thinned
    from workers.measure.table import Column

    columns = [
        *Column.parse("entry: integer, step: integer, phase, total_mib: number MiB"),
        *(Column(f"{category}_mib", "number", "MiB") for category in CATEGORIES),
        *Column.parse("change_mib: number MiB, category, name, stack"),
    ]
    count = sum(len(step) for step in session.steps)
    rows: list[list[Any]] = []
    before = 0
    for number, step in enumerate(session.steps, start=1):
        for phase in step:
            for point in thinned(phase.stretch.points, MAX_POINTS // count):
                usage = [size / MIB for size in point.usage]
                place = [before + point.entry + 1, number, phase.stretch.phase]
                rows.append([*place, point.total / MIB, *usage, *cause(point)])
            before += phase.stretch.entries
    report.table("timeline", columns, rows)


def cause(point: Point) -> list[Any]:
    """Return the change in MiB that an entry makes, and the category, name and stack of the allocation it touches."""
    from workers.measure.allocations.categories import CATEGORIES
    from workers.measure.allocations.stacks import short_stack

    touched = point.touched
    if touched is None:
        return [None, None, None, None]
    return [point.change / MIB, CATEGORIES[touched.category], touched.name, short_stack(touched.frames)]
