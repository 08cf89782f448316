"""The metrics of a recording, and the checks of it."""

from collections.abc import Sequence

from app.specs.memory import MemorySpec
from flopwatch.text.numbers import number
from workers.jobs import _reference
from workers.jobs._grid import check_measured
from workers.jobs._training.metrics import NO_PARAMETERS
from workers.jobs._values import Metric, Values
from workers.jobs.memory.recording import INITIALISATION, Session, height, peak_seen
from workers.measure.allocations.categories import CATEGORIES, FORWARD, UNKNOWN
from workers.measure.allocations.growth import AfterSteps, Growth
from workers.measure.allocations.ledger import Stretch
from workers.measure.allocations.recording import RecordedStretch
from workers.measure.allocations.stacks import is_call, site
from workers.measure.check import Check
from workers.measure.validity import check_gradients

MIB = 2**20
BYTES = {"fp32": 4, "bf16": 2}
"""Bytes per element of the residual stream, by the dtype of the parameters: autocast does not change it."""
WHOLE = (
    ("peak_memory_mib", "MiB"),
    ("memory_reserved_mib", "MiB"),
    *((f"{category}_mib", "MiB") for category in CATEGORIES),
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
MAX_UNKNOWN_PERCENT = 2.0
HIGHER = 1.02
"""How many times the last step's peak another one's must be to be told."""
MAX_DIFFERENCE = 1e-3
"""Largest relative difference between the peak of the history and the allocator's own count of the same."""
MAX_STUCK_SHARE, MAX_STUCK_MIB = 0.1, 64
"""More free memory between blocks in use than both, as a share of what is reserved and in MiB, is worth a setting."""
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
MAX_NAMED = 3
"""Most places that grow that are named in one sentence."""
NO_CACHE = "known on GPUs only: a CPU's allocator gives back what is released"
NO_PHASES = (
    "the step has no phase forward, so its gradients and activations count as temporary: put its parts under "
    'flopwatch.phase("forward"), ("backward") and ("optimizer")'
)
PEAK_LOST = "the history's beginning is lost, and with it the peak: raise history_entries"


def metrics(spec: MemorySpec, phases: Sequence[str]) -> list[Metric]:
    """Return the metrics of a spec, whose step has these phases, in the order of the report."""
    without = {*(OF_OUR_MODEL if spec.step_code else ()), *(() if spec.snapshot_steps else ("growth_mib_per_step",))}
    whole = [(name, unit) for name, unit in WHOLE if name not in without]
    return [
        *(Metric(name, None, unit) for name, unit in whole),
        *(Metric(name, phase, "MiB") for phase in (INITIALISATION, *phases) for name in EACH_PHASE),
    ]


def results(session: Session) -> tuple[Values, list[Check]]:
    phases = session.phases()
    named = session.spec.step_phases() or [recorded.stretch.phase for recorded in phases]
    if session.wrong is not None:
        return _reference.not_measured(metrics(session.spec, named), session.wrong)
    values = Values(metrics(session.spec, named))
    if session.initialisation is not None:
        add_phase(values, session.initialisation, INITIALISATION)
    if session.lacked is not None:
        values.set_missing("oom", session.reason)
        return values, [check_measured(values, alone=True), *session.parts, check_history([session.lacked])]
    for recorded in phases:
        add_phase(values, recorded, recorded.stretch.phase)
    add_whole(values, session)
    if session.spec.step_code is None:
        add_residual_stream(values, session)
    everything = [recorded for step in session.steps for recorded in step]
    if session.initialisation is not None:
        everything = [session.initialisation, *everything]
    checks = [*session.parts, *check_gradients(session.without_gradient)]
    checks += [check_history(everything), *check_accounted(everything)]
    highest = max(phases, key=height)
    if peak_seen(highest):
        checks.append(check_unknown(highest.stretch))
    checks += check_fragmentation(highest)
    if session.spec.step_code is not None and FORWARD not in {recorded.stretch.phase for recorded in phases}:
        checks.append(Check("phases", False, NO_PHASES, "note"))
    checks += check_steps(session.peaks)
    if session.after_steps is not None and session.spec.snapshot_steps:
        checks.append(check_growth(values, session.after_steps, session.spec.snapshot_steps))
    return values, checks


def check_unknown(stretch: Stretch) -> Check:
    """Check that the purpose of nearly all memory is known: its category, or that it is a library's workspace. The
    detail names the largest allocation of unknown purpose."""
    unknown = [one for one in stretch.at_peak if one.category == UNKNOWN and one.name is None]
    percent = 100 * sum(one.size for one in unknown) / max(1, stretch.peak.total)
    detail = f"{percent:.2f} % of the peak has no known use"
    if unknown:
        largest_one = max(unknown, key=lambda allocation: allocation.size)
        where = site(largest_one.frames) or "made by code without a Python stack"
        detail += f"; the largest allocation has {number(largest_one.size / MIB)} MiB: {where}"
    return Check("unknown", percent <= MAX_UNKNOWN_PERCENT, detail, "note")


def check_fragmentation(recorded: RecordedStretch) -> list[Check]:
    """Check that at the peak little of what the allocator has reserved lies between blocks in use; none on a CPU."""
    free, reserved = fragmentation_mib(recorded)[0], recorded.stretch.reserved_at_peak
    if free is None or reserved is None or recorded.free is None:
        return []
    largest, stuck = (min(size / MIB, free[0]) for size in recorded.free)
    detail = (
        f"{number(free[0])} MiB of {number(reserved / MIB)} MiB reserved are free at the peak, {number(stuck)} MiB of "
        f"them between blocks in use; the largest free block has {number(largest)} MiB"
    )
    settings = (recorded.snapshot or {}).get("allocator_settings", {})
    matters = stuck > max(MAX_STUCK_MIB, MAX_STUCK_SHARE * reserved / MIB)
    if matters and not settings.get("expandable_segments"):
        detail += f": a worker started with {EXPANDABLE} gives them back where memory runs out"
    return [Check("fragmentation", not matters, detail, "note")]


def check_steps(peaks: Sequence[float]) -> list[Check]:
    """Note that another step had a higher peak than the last, whose memory is told, as where batches have several
    lengths; no check where none had. The first step does not count: libraries and compilers try their kernels in it."""
    most = max(range(1, len(peaks)), key=peaks.__getitem__, default=0)
    if not most or peaks[most] <= HIGHER * peaks[-1]:
        return []
    detail = (
        f"step {most + 1} had a peak of {number(peaks[most] / MIB)} MiB, the recorded step {number(peaks[-1] / MIB)}: "
    )
    detail += f"record the former by warmup_steps={most} measure_steps=1"
    return [Check("steps", False, detail, "note")]


def check_growth(values: Values, after: AfterSteps, moments: Sequence[int]) -> Check:
    """Check that no memory grows from step to step, and set by how much it does. The detail names the lines."""
    steps = moments[-1] - moments[0]
    growths = after.growths()
    growing = [one for one in growths if one.continues]
    values.set("growth_mib_per_step", None, [sum(one.size for one in growing) / steps / MIB])

    def place(one: Growth) -> str:
        return site(one.example.frames) or one.example.name or "code without a Python stack"

    named = [f"{number(one.size / steps / MIB)} MiB a step by {place(one)}" for one in growing[:MAX_NAMED]]
    if not growing:
        detail = f"no memory of tensors is seen to keep growing from step {moments[0]} to step {moments[-1]}"
        may = next((one for one in growths if one.may_continue and one.size >= MIB), None)
        if may is not None:
            detail += f"; that of {place(may)}, which has {number(may.size / MIB)} MiB more, may: take more steps"
        return Check("growth", True, detail, "note")
    more = f", and {len(growing) - MAX_NAMED} others" if len(growing) > MAX_NAMED else ""
    detail = f"memory grows from step {moments[0]} to step {moments[-1]}: {', '.join(named)}{more}"
    if any(is_call(one.example.frames) for one in growing[:MAX_NAMED]):
        detail += "; these are the lines of functions, not of allocations: a CPU's stacks have calls only"
    return Check("growth", False, detail, "note")


def add_phase(values: Values, recorded: RecordedStretch, phase: str) -> None:
    counters = recorded.counters
    end = recorded.stretch.end.total if counters is None else counters.allocated_end
    values.set("peak_memory_mib", phase, [height(recorded) / MIB])
    values.set("end_memory_mib", phase, [end / MIB])
    values.set("memory_reserved_mib", phase, None if counters is None else [counters.reserved_peak / MIB], NO_CACHE)
    values.set("end_reserved_mib", phase, None if counters is None else [counters.reserved_end / MIB], NO_CACHE)
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
    phases = session.phases()
    highest = max(phases, key=height)
    values.set("peak_memory_mib", None, [height(highest) / MIB])
    held = [phase.counters.reserved_peak / MIB for phase in phases if phase.counters is not None]
    values.set("memory_reserved_mib", None, [max(held)] if held else None, NO_CACHE)
    add_fragmentation(values, highest, None)
    peak = highest.stretch.peak if peak_seen(highest) else None
    for index, category in enumerate(CATEGORIES):
        values.set(f"{category}_mib", None, None if peak is None else [peak.usage[index] / MIB], PEAK_LOST)
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
    values.set("parameters", None, None if session.parameters is None else [session.parameters], NO_PARAMETERS)


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
    held, lost = recorded[-1].history, any(step.history_lost for step in recorded)
    if not lost:
        return Check("history", True, f"complete: {held} entries")
    phases = list(dict.fromkeys(step.stretch.phase for step in recorded if step.stretch.lost))
    missing = f"; of {', '.join(phases)} the beginning was not seen" if phases else ""
    detail = f"truncated: snapshots hold the last {held} entries only{missing}: raise history_entries"
    return Check("history", False, detail)


def check_accounted(recorded: Sequence[RecordedStretch]) -> list[Check]:
    """Check that the history's peaks agree with the allocator's own counters."""
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
