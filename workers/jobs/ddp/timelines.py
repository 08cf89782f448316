"""Puts every moment of each rank's profiled steps into one class, and tells which rank the others wait for.

The rank in which a collective takes the least time came last, and that time is the transfer's; what another rank spends
in it beyond that is waiting. The clocks of ranks are aligned at the ends of their collectives, which all ranks leave
together. A rank whose step began earlier than that of another waits for as long, and nobody is late.
"""

from __future__ import annotations

import bisect
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workers.measure.table import Column, Scalar

if TYPE_CHECKING:
    from workers.measure.profiling.attribution import Interval
    from workers.measure.profiling.idle import Stretch
    from workers.measure.profiling.overlap import OverlapRecording

WAITS = "waits"
COLUMNS = Column.parse("rank: integer, cause, where, time_ms: number ms, share_percent: number %")
WAITING, EARLY = "collectives that another rank enters later", "the first collective, because its step began earlier"
"""Places of the two parts of a collective that are no transfer."""
COMMUNICATION = "communication"
CAUSES = {"attention": "attention", "softmax": "attention", "optimizer": "optimizer"}
"""The causes of classes of kernels (workers.measure.profiling.classes); of all others it is `kernels`."""
UPDATE = "Optimizer.step#"
"""Head of the range that torch opens around an optimizer's step, which is a phase of its own."""
KIND = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|broadcast|send_?recv|barrier", re.IGNORECASE)
LONGEST = 10
"""Stretches of a rank's step that are kept one by one."""
Places = defaultdict[tuple[str, str], float]
"""ms by (cause, where)."""
Layers = defaultdict[tuple[str, str, str], float]
"""ms by (cause, where, layer)."""


def of_rank(profiled: OverlapRecording) -> list[dict[str, Any]]:
    """Return what each step of a rank says, JSON-ready.

    Returns:
        "begin_ms" and "ms", when it began by this rank's clock, and its length; "places", rows of cause, where, layer
        and ms, without communication; "collectives", rows of operation, beginning and end in ms since the step's
        beginning, and phase; "exposed", rows of a collective's number, a beginning, an end, phase
        and layer; "longest", rows of beginning, length, cause, the work that follows, and where. A gap is where the
        work is that ends it.
    """
    return [_of_step(profiled, window, stretches) for window, stretches in profiled.stretches]


def _of_step(profiled: OverlapRecording, window: Interval, stretches: Sequence[Stretch]) -> dict[str, Any]:
    from workers.measure.profiling.classes import COMMUNICATION as MOVING
    from workers.measure.profiling.classes import classify
    from workers.measure.profiling.idle import RUNNING

    def ms(time_ns: int) -> float:
        return 1e-6 * (time_ns - window.begin_ns)

    work = [one for one in profiled.work if one.step == window.step and classify(one) != MOVING]
    work.sort(key=lambda one: one.begin_ns)
    begins = [one.begin_ns for one in work]
    end_ns = max((one.end_ns for one in stretches), default=window.end_ns)  # a GPU may work longer than its host
    collectives = [one for one in profiled.collectives if window.begin_ns <= one[1][0] < end_ns]
    places: Layers = defaultdict(float)
    exposed: list[list[Any]] = []
    longest: list[list[Any]] = []
    for one in stretches:
        after = bisect.bisect_left(begins, one.end_ns)
        layer = [one for one in work[after].ranges[:1] if not one.startswith(UPDATE)] if after < len(work) else []
        where = (f"before {work[after].phase}", "".join(layer)) if after < len(work) else ("at the end", "")
        if one.cause == COMMUNICATION:
            running = [at for at, (_, (begin, end)) in enumerate(collectives) if begin <= one.begin_ns < end]
            exposed.append([running[0] if running else None, ms(one.begin_ns), ms(one.end_ns), *where])
        elif one.cause != RUNNING:
            places[one.cause, *where] += 1e-6 * one.ns
        if one.cause != RUNNING:
            longest.append([ms(one.begin_ns), 1e-6 * one.ns, one.cause, one.next, " ".join(where).strip()])
    shares: Layers = defaultdict(float)
    for piece in work:
        cause = CAUSES.get(name := classify(piece), "kernels")
        shares[cause, name if cause == "kernels" else "", ""] += piece.time_ns
    running_ms = 1e-6 * sum(one.ns for one in stretches if one.cause == RUNNING)
    total = sum(shares.values())
    for place, ns in (shares if total else {("kernels", "", ""): 1.0}).items():
        places[place] += running_ms * ns / (total or 1.0)
    phases = {one.begin_ns: one.phase for one in profiled.work if one.step == window.step and classify(one) == MOVING}
    return {
        "begin_ms": 1e-6 * window.begin_ns,
        "ms": ms(end_ns),
        "places": [[*place, time_ms] for place, time_ms in places.items()],
        "collectives": [
            [_operation(name), ms(begin), ms(end), phases.get(begin, "")] for name, (begin, end) in collectives
        ],
        "exposed": exposed,
        "longest": sorted(longest, key=lambda one: -one[1])[:LONGEST],
    }


def _operation(name: str) -> str:
    match = KIND.search(name)
    return "collective" if match is None else re.sub(r"(?<=[a-z])(?=[A-Z])", "_", match[0]).lower()


def ranks_of(found: Sequence[Mapping[str, Any]]) -> Ranks:
    """Return what the profiled steps say, from the results of all ranks."""
    timelines = [rank["overlap"].get("timeline", []) for rank in found]
    profiled = Counter(kind for kind, *_ in timelines[0][0]["collectives"]) if timelines[0] else Counter()
    of_kind: dict[str, list[int]] = defaultdict(list)
    for operation, size, *_ in found[0]["operations"]:
        of_kind[operation].append(size)
    # gloo makes all-reduces of what is called reduce-scatter.
    return Ranks(timelines, {kind: max(sizes) for kind, sizes in of_kind.items() if len(sizes) == profiled[kind]})


@dataclass(frozen=True)
class ProfiledCollective:
    """One collective of a profiled step."""

    step: int
    operation: str
    phase: str
    moving_ms: float
    """The time that data moved: that of the rank in which it took the least time."""
    last: int
    """That rank."""
    waiting: list[tuple[float, float]]
    """For each rank from when until when it waited for a later one, in ms since its step's beginning. Where it waited
    in several collectives at once, the first has that time."""

    def waiting_ms(self, rank: int) -> float:
        begin, end = self.waiting[rank]
        return end - begin

    def late_ms(self, rank: int) -> float:
        """Return by how much a rank came later than the others, most of which waited for longer (their median)."""
        return max(0.0, later([self.waiting_ms(one) for one in range(len(self.waiting))])[rank])


def later(waits_ms: Sequence[float]) -> list[float]:
    """Return by how much longer than each rank the others wait: their median, of two middle ones the shorter, so that
    the slower half of the ranks is late, and of more than that nobody."""
    others = ([*waits_ms[:rank], *waits_ms[rank + 1 :]] for rank in range(len(waits_ms)))
    return [statistics.median_low(each or [own]) - own for each, own in zip(others, waits_ms, strict=True)]


class Ranks:
    """What the profiled steps of all ranks say together. `found`: for each rank what `of_rank` returned. `sizes`: the
    bytes of the largest collective, by operation, where they are known."""

    def __init__(self, found: Sequence[Sequence[Mapping[str, Any]]], sizes: Mapping[str, int]) -> None:
        self.steps = max(1, min(map(len, found), default=0))
        self.seen = [[rank[at] for rank in found] for at in range(self.steps if found and all(found) else 0)]
        """Each step, as each rank saw it."""
        self.ahead_ms, self.residual_ms = aligned(self.seen)
        """By how much each rank's clock is ahead of rank 0's; and how far the ends of one collective lie apart on one
        clock, of nine in ten: alignment is no better. None: there were no collectives."""
        self.early_ms = [self._early(step) for step in self.seen]
        """By how much each rank began a step earlier than the last one."""
        self.collectives: list[ProfiledCollective] = []
        self.differ = False
        """Whether ranks ran different collectives in some step: then nobody knows who waits for whom."""
        layers: list[Layers] = [defaultdict(float) for _ in found]
        for number, step in enumerate(self.seen):
            self._add(layers, step, self._met(number, step))
        kinds = [kind for kind, *_ in found[0][0]["collectives"]] if found and found[0] else []
        notes = {
            kind: f"{kinds.count(kind)} a step" + (f", up to {sizes[kind] / 2**20:.3g} MB" if kind in sizes else "")
            for kind in kinds
        }
        self.places = [joined(one, notes) for one in layers]
        """For each rank the mean ms of a step by cause and place; they add up to its step."""

    @property
    def critical(self) -> int:
        """The rank that waits least: its time is the step's."""
        return min(range(len(self.places)), key=lambda rank: self.places[rank][COMMUNICATION, WAITING])

    def _early(self, step: Sequence[Mapping[str, Any]]) -> list[float]:
        begins = [seen["begin_ms"] - ahead for seen, ahead in zip(step, self.ahead_ms, strict=True)]
        return [max(begins) - begin for begin in begins]

    def _met(self, number: int, step: Sequence[Mapping[str, Any]]) -> list[dict[int, tuple[float, float]]]:
        """Note the collectives of a step; return for each rank, by the number of a collective, until when it waits: as
        long as its step had begun earlier, and after that for a rank that comes later."""
        found: list[dict[int, tuple[float, float]]] = [{} for _ in step]
        if not alike(step):
            self.differ = True
            return found
        early, waited = list(self.early_ms[number]), [0.0] * len(step)
        for at, each in enumerate(zip(*(seen["collectives"] for seen in step), strict=True)):
            lengths = [end - begin for _, begin, end, _ in each]
            waiting = []
            for rank, (_, begin, _, _) in enumerate(each):
                wait = lengths[rank] - min(lengths)
                before = min(early[rank], wait)
                early[rank] -= before
                found[rank][at] = begin + before, begin + wait
                since = min(max(begin + before, waited[rank]), begin + wait)
                waited[rank] = max(waited[rank], begin + wait)
                waiting.append((since, begin + wait))
            last = lengths.index(min(lengths))
            operation, _, _, phase = each[last]
            self.collectives.append(ProfiledCollective(number, operation, phase, min(lengths), last, waiting))
        return found

    def _add(
        self,
        layers: Sequence[Layers],
        step: Sequence[Mapping[str, Any]],
        waits: Sequence[Mapping[int, tuple[float, float]]],
    ) -> None:
        for places, seen, waiting in zip(layers, step, waits, strict=True):
            for *place, ms in seen["places"]:
                places[tuple(place)] += ms / self.steps
            for number, begin, end, *where in seen["exposed"]:
                first, second = (min(max(at, begin), end) for at in waiting.get(number, (begin, begin)))
                kind = "a collective" if number is None else seen["collectives"][number][0]
                places["unexplained", EARLY, ""] += (first - begin) / self.steps
                places[COMMUNICATION, WAITING, ""] += (second - first) / self.steps
                places[COMMUNICATION, f"{kind} {where[0]}", where[1]] += (end - second) / self.steps

    def rows(self) -> list[list[Scalar]]:
        rows: list[list[Scalar]] = []
        for rank, places in enumerate(self.places):
            total = sum(places.values()) or 1.0
            ordered = sorted(places.items(), key=lambda one: -one[1])
            rows += [[rank, *place, ms, 100 * ms / total] for place, ms in ordered if ms > 0]
        return rows


def alike(step: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether all ranks ran the same collectives in a step, in the same order."""
    kinds = [[one[0] for one in seen["collectives"]] for seen in step]
    return all(one == kinds[0] for one in kinds)


def aligned(steps: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[list[float], float | None]:
    """Return by how many ms each rank's clock is ahead of rank 0's, and the residual (see `Ranks`)."""
    ends: list[list[float]] = []
    for step in steps:
        if alike(step):
            each = ([seen["begin_ms"] + one[2] for one in seen["collectives"]] for seen in step)
            ends += [list(of_ranks) for of_ranks in zip(*each, strict=True)]
    if not ends:
        return [0.0] * max(map(len, steps), default=0), None
    ahead = [statistics.median(of_ranks[rank] - of_ranks[0] for of_ranks in ends) for rank in range(len(ends[0]))]
    spread = []
    for of_ranks in ends:
        left = [end - by for end, by in zip(of_ranks, ahead, strict=True)]
        spread.append(max(left) - min(left))
    return ahead, sorted(spread)[math.ceil(0.9 * len(spread)) - 1]


def joined(layers: Layers, notes: Mapping[str, str]) -> Places:
    """Return the ms without layers; a layer that has most of them is named, and what is known of a collective."""
    found: Places = defaultdict(float)
    totals: Places = defaultdict(float)
    for (cause, where, _), ms in layers.items():
        totals[cause, where] += ms
    for (cause, where), total in totals.items():
        most, layer = max((ms, key[2]) for key, ms in layers.items() if key[:2] == (cause, where))
        note = notes.get(where.partition(" ")[0], "") if cause == COMMUNICATION else ""
        parts = (where, layer if 2 * most > total else "", note and f"({note})")
        found[cause, " ".join(filter(None, parts))] += total
    return found
