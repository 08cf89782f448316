"""A step of several ranks: what its time is lost to, and how long a changed one takes."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from app.specs.ddp import DdpSpec
from app.specs.diagnosis import OTHERS_WAIT, DiagnosisSpec
from workers.changes._base import Look, Shared
from workers.jobs import ddp
from workers.jobs._base import Unit
from workers.jobs.ddp.stragglers import IN_TURNS, LATE, ON_DEVICE, SAME, Lateness
from workers.jobs.ddp.timelines import COMMUNICATION, EARLY, Ranks, later, ranks_of
from workers.jobs.ddp.values import turns_of
from workers.jobs.diagnosis import look, turn
from workers.measure.errors import NotMeasured
from workers.measure.profiling.idle import RUNNING, unprofiled
from workers.measure.table import Column, Scalar
from workers.reporter import Reporter

BOUND = Column("bound_ms", "number", "ms")
"""The step without the cause, if that was measured meanwhile."""


def run(spec: DiagnosisSpec, unit: Unit, report: Reporter) -> None:
    """Measure and profile the step, as a `ddp` job does."""
    step: DdpSpec = spec.step  # type: ignore[assignment]
    measured = ddp.measure(step, spec.case(), unit.title, report, extent="look")
    devices = measured.devices
    samples = measured.values.samples("step_ms", "step")
    lost: look.Lost = defaultdict(float)
    candidates: list[list[Scalar]] = []
    gaps: list[list[Scalar]] = []
    exposed = measured.values.samples("exposed_communication_ms", None)
    without = measured.values.samples("computation_step_ms", None) if exposed else None
    if samples and not isinstance(measured.ranks, NotMeasured):
        gradients = sum(row[1] for row in measured.ranks[0]["communication"] if row[0] == "all_reduce")
        shared = Shared(gradients / 2**20, measured.best_bucket_mb)
        products = Counter({step.precision: 1})
        alone = turns_of(measured.ranks, "silent")
        lost = lost_by(
            ranks_of(measured.ranks),
            statistics.median(samples),
            statistics.median(exposed) if exposed else None,
            [[ms for turn in alone for ms in turn[rank]["step_ms"]] for rank in range(step.world_size)],
        )
        known = Look(step, devices[0], None, products=products, shared=shared)  # type: ignore[arg-type]
        candidates = look.candidates(spec, known, lost)
        gaps = _gaps([rank["overlap"].get("timeline", []) for rank in measured.ranks])
    bound = {COMMUNICATION: statistics.median(without)} if without else {}
    report.table(
        look.SEEN,
        [*look.SEEN_COLUMNS, BOUND],
        [[*of, ms, bound.get(of[0])] for of, ms in sorted(lost.items(), key=lambda one: -one[1]) if ms > 0],
    )
    if samples:
        report.table(
            turn.TURNS, turn.COLUMNS, [turn.row_of("look", (), samples, devices[0], len(devices) * step.nodes)]
        )
    report.table(look.CANDIDATES, look.CANDIDATE_COLUMNS, candidates)
    report.table(look.GAPS, look.GAP_COLUMNS, gaps)


def lost_by(ranks: Ranks, step_ms: float, exposed_ms: float | None, alone: Sequence[Sequence[float]]) -> look.Lost:
    """Return what the median step is lost to: the time of the rank that is slowest where no rank waits for another.
    `ranks`: the profiled steps. `exposed_ms`: by how much the step is longer than one over a group that moves nothing;
    None: that was not measured. `alone`: the ms of each rank's steps over that group; empty: they were not measured."""
    late, turns_ms = skew(alone) if exposed_ms is not None else _seen(ranks)
    late_ms = max(late.values(), default=0.0)
    if any(ranks.places):  # what is not so in the profiled steps, too, is no rank's
        late = {rank: ms for rank, ms in late.items() if rank in Lateness(ranks).late}
        turns_ms += late_ms - max(late.values(), default=0.0)
        late_ms = max(late.values(), default=0.0)
    found: look.Lost = defaultdict(float)
    places = ranks.places[next(iter(late), ranks.critical)]
    moves = {of: ms for of, ms in places.items() if of[0] == COMMUNICATION}
    moving = sum(moves.values())
    for of, ms in (moves if moving else {(COMMUNICATION, ""): 1.0}).items():
        found[of] = min(step_ms, max(0.0, moving if exposed_ms is None else exposed_ms)) * ms / (moving or 1.0)
    # Of few steps on a busy host the parts may be more than the step.
    left = step_ms - sum(found.values())
    late_ms, turns_ms = min(late_ms, left), min(turns_ms, left)
    if turns_ms > LATE * step_ms:
        found["unexplained", IN_TURNS] = turns_ms
    if late_ms > LATE * step_ms:
        for of, share in _more(ranks, next(iter(late))).items():
            found[of] += late_ms * share
        places = ranks.places[min({*range(len(ranks.places))} - {*late, *Lateness(ranks).late})]
    rest = {of: ms for of, ms in places.items() if of[0] != COMMUNICATION and of[1] != EARLY} or {("kernels", ""): 1.0}
    totals: dict[str, float] = defaultdict(float)
    for (cause, _), ms in rest.items():
        totals[RUNNING if cause in ON_DEVICE else cause] += ms
    left = max(0.0, step_ms - sum(found.values()))
    times = unprofiled(totals, left)
    for (cause, where), ms in rest.items():
        total = RUNNING if cause in ON_DEVICE else cause
        found[cause, where] += ms * times[total] / (totals[total] or 1.0) * left / (sum(times.values()) or 1.0)
    return found


def _seen(ranks: Ranks) -> tuple[dict[int, float], float]:
    """Return what `skew` does, as far as the profiled steps show it."""
    lateness = Lateness(ranks)
    return {rank: lateness.mean_ms(rank) for rank in lateness.late}, lateness.turns_ms


def skew(alone: Sequence[Sequence[float]]) -> tuple[dict[int, float], float]:
    """Return the ranks that are late, the latest first, with by how many ms of a step they are later than the others,
    and how many ms a step loses because ranks take turns in being late. `alone`: the ms of each rank's steps in which
    it waits for no other."""
    if len(alone) < 2 or not all(alone):
        return {}, 0.0
    steps = list(zip(*alone, strict=True))
    lates = [later([max(step) - ms for ms in step]) for step in steps]
    late = {
        rank: statistics.median(ms[rank] for ms in lates)
        for rank in range(len(alone))
        if sum(ms[rank] > LATE * max(step) for ms, step in zip(lates, steps, strict=True)) >= SAME * len(steps)
    }
    if not late:
        return {}, statistics.median(max(step) - statistics.median(step) for step in steps)
    late = dict(sorted(late.items(), key=lambda one: -one[1]))
    return late, statistics.median(max(step) - step[next(iter(late))] for step in steps)


def _more(ranks: Ranks, rank: int) -> dict[tuple[str, str], float]:
    """Return the shares of what a late rank does longer than the others, by cause and place."""
    longer = {of: ms for of, ms in Lateness(ranks).longer(rank).items() if ms > 0} or {("unexplained", ""): 1.0}
    total = sum(longer.values())
    return {(cause, " ".join(filter(None, (f"rank {rank}", where, OTHERS_WAIT)))): ms / total
            for (cause, where), ms in longer.items()}  # fmt: skip


def _gaps(timelines: Sequence[Sequence[dict[str, Any]]]) -> list[list[Scalar]]:
    """Return the longest times in which a rank does not compute, in its first profiled step."""
    gaps = [
        [*row, ", ".join(filter(None, [f"rank {rank}", where]))]
        for rank, steps in enumerate(timelines)
        for *row, where in (steps[0]["longest"] if steps else ())
    ]
    return sorted(gaps, key=lambda row: -row[1])[: look.MOST_GAPS]
