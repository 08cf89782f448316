"""Tells which rank is late, how often, by how much, and why, from the profiled steps of all ranks."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from workers.jobs.ddp.timelines import Layers, ProfiledCollective, Ranks, joined, later
from workers.measure.check import Check
from workers.measure.table import Column, Scalar

STRAGGLERS = "stragglers"
COLUMNS = Column.parse(
    "operation, phase, rank: integer, collectives: number, moving_ms: number ms, waiting_ms: number ms, "
    "last_percent: number %, late_ms: number ms, early_ms: number ms, what"
)
"""Times are means of a step; `moving_ms` is the mean of a collective. Rows of `operation` "all" come first."""
ALL = "all"
LATE = 0.01
"""A rank for which the others wait for a smaller share of the step is not late."""
SAME = 0.75
"""In fewer of the steps no rank is the late one: ranks take turns."""
IN_TURNS = "ranks take turns in being late"
ON_DEVICE = ("kernels", "attention", "optimizer", "copies")
"""Causes that are the time of a device or of its work; of the others, all but `input` are the host's."""
TOLD = 3
"""Late ranks that are named in the verdict."""
DIFFERS = 0.02
"""By which share a rank's work, or its clock, differs from the others' where that may be a cause."""


@dataclass(frozen=True)
class Lateness:
    """Who is late in the profiled steps. `work`: by name, such as "tokens", the work of each rank's step, where all
    told it. `clocks_mhz`: of each rank's device, where all are of this host and they are known. `groups`: process
    groups that the step's code has made, whose collectives count as those of all ranks."""

    ranks: Ranks
    work: Mapping[str, Sequence[float]] = field(default_factory=dict)
    clocks_mhz: Sequence[float | None] = ()
    groups: int = 0

    @cached_property
    def _waits_ms(self) -> list[list[float]]:
        """How long each rank waits in each step."""
        found = [[0.0] * len(step) for step in self.ranks.seen]
        for one in self.ranks.collectives:
            for rank in range(len(one.waiting)):
                found[one.step][rank] += one.waiting_ms(rank)
        return found

    @cached_property
    def later_ms(self) -> list[list[float]]:
        """By how much longer than each rank the others wait in each step (their median): what it is late."""
        return [later(step) for step in self._waits_ms]

    @cached_property
    def least_ms(self) -> list[float]:
        """The time in each step from which on a rank is late: a small share of it, and how well clocks are aligned."""
        shares = (LATE * max(seen["ms"] for seen in step) for step in self.ranks.seen)
        return [max(share, self.ranks.residual_ms or 0.0) for share in shares]

    def steps_late(self, rank: int) -> list[int]:
        return [at for at, ms in enumerate(self.later_ms) if ms[rank] > self.least_ms[at]]

    @cached_property
    def late(self) -> list[int]:
        """The ranks that are late in nearly all steps, the latest first."""
        most = [rank for rank in self._all if len(self.steps_late(rank)) >= SAME * self.ranks.steps]
        return sorted(most, key=self.mean_ms, reverse=True)

    @property
    def in_turns(self) -> bool:
        """Whether ranks take turns in being late: somebody waits in nearly all steps, and no rank always waits for
        less than half as long."""
        waits = [max(step) > least for step, least in zip(self._waits_ms, self.least_ms, strict=True)]
        always = any(
            sum(2 * step[rank] < max(step) for step in self._waits_ms) >= SAME * self.ranks.steps for rank in self._all
        )
        return bool(self._all) and not (self.late or always) and sum(waits) >= SAME * self.ranks.steps

    def mean_ms(self, rank: int) -> float:
        """Return by how many ms of a step a rank is late."""
        return statistics.fmean(step[rank] for step in self.later_ms)

    @property
    def turns_ms(self) -> float:
        """How long a rank waits in a step, where they take turns."""
        return statistics.fmean(statistics.median(step) for step in self._waits_ms) if self.in_turns else 0.0

    @property
    def _all(self) -> range:
        compared = self.ranks.collectives and not self.ranks.differ and len(self.ranks.places) > 1
        return range(len(self.ranks.places) if compared else 0)

    def longer(self, rank: int) -> Mapping[tuple[str, str], float]:
        """Return what this rank does longer than the others where it is late, by cause and place, in ms of such a
        step."""
        found: Layers = defaultdict(float)
        steps = [self.ranks.seen[at] for at in self.steps_late(rank)]
        for step in steps:
            each = [{tuple(place): ms for *place, ms in seen["places"]} for seen in step]
            others = [places for at, places in enumerate(each) if at != rank]
            for of in {of for places in each for of in places}:
                more = each[rank].get(of, 0.0) - statistics.median(one.get(of, 0.0) for one in others)
                found[of] += more / len(steps)
        return joined(found, {})

    def why(self, rank: int) -> str:
        """Say why this rank is late, as far as it is known."""
        groups: dict[str, float] = defaultdict(float)
        longer = self.longer(rank)
        for (cause, _), ms in longer.items():
            groups[cause if cause == "input" else "work" if cause in ON_DEVICE else "host"] += ms
        group, ms = max(groups.items(), key=lambda one: one[1], default=("", 0.0))
        if ms <= 0:
            return "why is not known"
        if group == "input":
            return f"its input takes {ms:.4g} ms longer than the others'"
        if group == "host":
            cause, where = max((of for of in longer if of[0] not in (*ON_DEVICE, "input")), key=lambda of: longer[of])
            return f"its host is {ms:.4g} ms later ({cause} {where})"
        for name, amounts in self.work.items():
            usual = statistics.median(amount for at, amount in enumerate(amounts) if at != rank)
            if amounts[rank] > (1 + DIFFERS) * usual:
                return f"its work takes {ms:.4g} ms longer: {amounts[rank] / usual:.2f} times the others' {name}"
        others = [mhz for at, mhz in enumerate(self.clocks_mhz) if at != rank and mhz is not None]
        own = self.clocks_mhz[rank] if len(self.clocks_mhz) == len(self.ranks.places) else None
        if own is not None and others and own < (1 - DIFFERS) * statistics.median(others):
            clocks = f"at {own:.0f} MHz, the others at {statistics.median(others):.0f}"
            return f"its device takes {ms:.4g} ms longer ({clocks})"
        return f"its device or its work takes {ms:.4g} ms longer"

    def rows(self) -> list[list[Scalar]]:
        """Return the rows of the table `stragglers`: of each rank all collectives, and then those of each operation
        and phase."""
        groups: dict[tuple[str, str | None], list[ProfiledCollective]] = {(ALL, None): self.ranks.collectives}
        for one in self.ranks.collectives:
            groups.setdefault((one.operation, one.phase or None), []).append(one)
        rows: list[list[Scalar]] = []
        for (operation, phase), met in groups.items():
            for rank in self._all:
                early = statistics.fmean(step[rank] for step in self.ranks.early_ms)
                rows.append(
                    [
                        *(operation, phase, rank, len(met) / self.ranks.steps),
                        statistics.fmean(one.moving_ms for one in met),
                        sum(one.waiting_ms(rank) for one in met) / self.ranks.steps,
                        100 * sum(one.last == rank and one.late_ms(rank) > 0 for one in met) / len(met),
                        sum(one.late_ms(rank) for one in met) / self.ranks.steps,
                        *((early, self._what(rank)) if operation == ALL else (None, None)),
                    ]
                )
        return rows

    def _what(self, rank: int) -> str | None:
        if number := len(self.steps_late(rank)):
            turns = f"{IN_TURNS}; " if self.in_turns else ""
            return f"{turns}late in {number} of {self.ranks.steps} steps: {self.why(rank)}"
        early = statistics.fmean(step[rank] for step in self.ranks.early_ms)
        step_ms = statistics.fmean(step[rank]["ms"] for step in self.ranks.seen)
        return "its steps begin earlier, and nobody is late" if early > LATE * step_ms else None

    def check(self) -> Check | None:
        """Return the note for the verdict: who is late, and how well the ranks' clocks are aligned. None: no
        ranks met."""
        if self.ranks.differ:
            differ = "ranks ran different collectives: nobody knows who waits for whom"
            return Check(STRAGGLERS, False, differ, "note")
        if not self._all:
            return None
        said = "no rank is late in most steps"
        if self.late:
            said = "; ".join(f"rank {rank} is {self._what(rank)}" for rank in self.late[:TOLD])
            said += f"; and {len(self.late) - TOLD} more ranks" if len(self.late) > TOLD else ""
        elif self.in_turns:
            said = IN_TURNS
        said += f"; clocks aligned to {self.ranks.residual_ms:.2g} ms"
        if self.groups:
            more = f"{self.groups} process group{'s' * (self.groups > 1)} of its own"
            said += f"; the step made {more}, but ranks are compared as if all met in each collective"
        return Check(STRAGGLERS, not self.groups and not self.late and not self.in_turns, said, "note")


def work_of(found: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the work of a step of the user's own, of each rank, as far as all ranks told it."""
    each = [rank.get("work") or {} for rank in found]
    names = [name for name in ("tokens", "items", "flops") if all(work.get(name) for work in each)]
    return {name: [work[name] for work in each] for name in names}
