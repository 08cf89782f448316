"""What a diagnosis does next, decided by the agent from the tables so far. Imports neither torch nor changes.

The stages: `look` profiles the step; `screen` runs each change once;
`turn` measures the step as it is and the changes that helped again, in an order that is drawn, by processes that decide
the answer; `join` adds those that are better for certain to each other, the best one first, and keeps each that helps
further, since gains do not add up: these have turns, too; `conclude` writes the answer.
"""

import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from app.specs.diagnosis import DiagnosisSpec
from workers.jobs._base import SoFar, Unit
from workers.jobs.diagnosis.turn import JOINED, TURNS

if TYPE_CHECKING:
    from app.results.inference import Estimate

GAIN = 0.01
"""A change that shortens a step by less is not worth a line."""
FEWEST, MOST = 4, 8
"""Turns of each side: fewer have no interval, more are for a comparison of its own."""
TURN_MS, LEAST_STEPS = 3000.0, 3
"""How long the measured steps of a turn take, at least so many of them: slow steps are measured less often."""
WARMUP_OF_SLOW = 2
WARM_MS, FEWEST_TO_WARM_UP = 1000.0, 5
"""How long the steps take that warm up a turn on a GPU, at least so many of them."""
START_S, SHOW = 3.0, 2
"""About how long the interpreter of a turn takes to start, and how many turns of each side show how long a turn takes
on this host. Screening needs none: it is coarse, so its processes are forks. Nor do ranks, which are fresh processes
anyway."""
TOGETHER = 2
"""Turns of each side in the same ranks; a factor of SHOW, FEWEST and MOST."""
SURELY = 3
"""How many times the turns have to fit, by the time that screening took, to be planned without such a round."""
CLEAR = 0.1
"""A change that gains more than this share of the step takes its turns before others are screened, if the budget is too
small for both."""
CLOSE = 0.05
"""A change that was further off when it was screened needs no interval."""
FOR_SCREENING = 0.5
"""The largest part of the budget after which no further change is screened while turns have a use for the rest."""
DISTURBED, SAMPLED = 1.25, 1.5
"""How many times longer than later ones the profiled steps may take: others on the host lengthen some parts of a step
more than others, so its shares are not those of a calm host. And by how much sampling itself may lengthen them."""
FOR_ONE, LEAST_LIMIT_S = 0.25, 20.0
"""The largest part of the budget for a process with changes, and how long it may take at least: one that hangs is
ended."""
STEP = "the step as it is"
TOO_LONG = "it took longer than"
"""In the reason of a change whose process was ended."""
DRAWN = 0.01
"""A returned number that differs by more between processes of the step as it is tells nothing of a change."""
NOT_FINITE = "a number that the step returns becomes infinite or NaN"
TITLES = {"screen": "does it help", "join": "do they help together", "turn": "by how much"}

Names = tuple[str, ...]


def further(spec: DiagnosisSpec, so_far: SoFar) -> list[Unit]:
    """Return the units that follow; none at the end."""
    progress = _Progress(spec, so_far)
    stage = so_far.units[-1].params["stage"]
    if stage == "conclude":
        return []
    if stage in ("look", "screen") and (units := progress.screening()):
        return units
    if units := progress.turns() or progress.screening(left_over=True):
        return units
    return [Unit("the answer", {"stage": "conclude", **progress.findings()})]


class _Progress:
    """What the tables so far say."""

    def __init__(self, spec: DiagnosisSpec, so_far: SoFar) -> None:
        self.spec, self.so_far = spec, so_far
        self.rows = so_far.tables.get(TURNS, ())
        self.look = next((row for row in self.rows if row["stage"] == "look"), None)
        self.candidates = so_far.tables.get("candidates", ())
        self.differences = self._differences()
        self.left_s = spec.budget_s - sum(so_far.seconds)
        self._of_ranks = spec.step.kind == "ddp"

    def value(self, row: Mapping[str, Any]) -> float | None:
        """Return the time by which a process counts; None if it has none, or returns NaN where the step does not."""
        return None if self.differences.get(row["changes"]) == math.inf else row["step_ms"]

    def of(self, names: Names, stages: Iterable[str]) -> list[float]:
        """Return the values of all processes with these changes, in the order in which they ran."""
        found = [self.value(row) for row in self.rows if _names(row) == names and row["stage"] in stages]
        return [one for one in found if one is not None]

    def _before(self) -> list[float]:
        """Return what the step took in the processes that looked and screened, without a look that was disturbed."""
        screened, looked = self.of((), ["screen"]), self.of((), ["look"])
        return [*screened, *(ms for ms in looked if not screened or ms <= DISTURBED * statistics.median(screened))]

    def screening(self, *, left_over: bool = False) -> list[Unit]:
        """Plan the first run of the next change for which there is time, by how long such runs took so far or, at
        first, by the look at the step, which takes longer. After turns, and if none follow (`left_over`), all of
        the time that is left is for it."""
        tried = {_names(row) for row in self.rows if row["stage"] == "screen"}
        possible = [(row["change"],) for row in self.candidates if row["why_not"] is None]
        left = [names for names in possible if names not in tried and names[0] not in self.too_slow]
        if not left or self.left_s <= 0:
            return []
        if not tried:
            return self._units("screen", [(), left[0]])
        had_turns = any(row["stage"] == "turn" for row in self.rows)
        limit_s = min(self._limit_s(), self.left_s) if had_turns else self._limit_s()
        for_turns = self.left_s - self._reserved_s()
        if self._clear() and for_turns < limit_s and (for_turns >= 0 or not had_turns):
            return []
        kept_s = 0.0 if left_over or had_turns else (1 - FOR_SCREENING) * self.spec.budget_s
        return self._units("screen", left[:1], limit_s) if self.left_s - kept_s >= self._turn_s() else []

    def _clear(self) -> bool:
        """Return True if the change that has helped most has clearly done so, and has had no turns."""
        before = max(self._before(), default=0.0)
        best = self.winners[:1]
        return any(min(self.of(one, ["screen"])) < (1 - CLEAR) * before and not self.of(one, ["turn"]) for one in best)

    def _reserved_s(self) -> float:
        """Return about how long the turns of one change take."""
        if self._of_ranks:
            return FEWEST / TOGETHER * self._launch_s(2)
        return 2 * FEWEST * (self._turn_s() + START_S)

    @property
    def winners(self) -> list[Names]:
        """The changes with which the step was faster than in the slowest of its own runs, the best one first: one run
        each tells little on a busy host, and the turns decide."""
        before = max(self._before(), default=0.0) or 1.0
        gains = {names: value / before for names, value in self._screened()}
        return sorted((names for names, ratio in gains.items() if ratio < 1 - GAIN), key=lambda names: gains[names])

    def _screened(self) -> Iterator[tuple[Names, float]]:
        """Yield the changes that were screened and remove no work, each with what the step took."""
        removing = {row["change"] for row in self.candidates if row["removes"]}
        for row in self.rows:
            names, value = _names(row), self.value(row)
            if row["stage"] == "screen" and names and names[0] not in removing and value is not None:
                yield names, value

    def joined(self) -> tuple[Names, Names | None]:
        """Return the changes that help together, as far as it is known, and those that are to be tried next."""
        winners = [names for names in self.winners if self._helps(names)]
        kept: Names = winners[0] if winners else ()
        for one in winners[1:]:
            both = (*kept, *one)
            if self._fields(kept).keys() & self._fields(one).keys() or self._ways(kept) & self._ways(one):
                continue  # the later one would undo the earlier, or do the same again
            if not any(_names(row) == both for row in self.rows):
                return kept, both
            now, before = self.of(both, ["join"]), self.of(kept, ["screen", "join"])
            if now and min(now) < (1 - GAIN) * min(before):
                kept = both
        return kept, None

    @property
    def too_slow(self) -> dict[str, str]:
        """Why changes need not be tried: one that does the same in another way has taken too long."""
        refused = {row["changes"]: row["reason"] for row in self.rows if row.get("outcome") == "refused"}
        late = {name: reason for name, reason in refused.items() if TOO_LONG in reason}
        return {
            row["change"]: f"{name}, which does the same in another way, was tried: {reason}"
            for row in self.candidates
            for name, reason in late.items()
            if row["change"] != name and self._ways((row["change"],)) & self._ways((name,))
        }

    def _ways(self, names: Names) -> set[str]:
        return {way for row in self.candidates if row["change"] in names and (way := row.get("way"))}

    def _fields(self, names: Names) -> dict[str, Any]:
        """Return the fields that these changes set."""
        of = {row["change"]: json.loads(row["fields"]) for row in self.candidates}
        return {field: value for name in names for field, value in of[name].items()}

    def _helps(self, names: Names) -> bool | None:
        """Return whether a change is better by its turns; None: they are too few."""
        from app.results.inference import interval  # with the database, which every rank would import

        before, after = self.of((), ["turn"]), self.of(names, ["turn"])
        return is_better(interval(before, after)) if min(len(before), len(after)) >= FEWEST else None

    def turns(self) -> list[Unit]:
        """Plan a round of turns: of those that have had some and may or may not help; then of the changes that help,
        the best one first, as many as there is time for; then those of them that are better are joined, and have turns
        with the bounds; then those that brought nothing, the closest first, since without an interval nobody knows
        that."""
        done = Counter(_names(row) for row in self.rows if row["stage"] == "turn")
        joined, following = self.joined()
        sides = [*([joined] if len(joined) > 1 else []), *self.winners]
        removing = [names for row in self.candidates if row["removes"] and (names := (row["change"],))]
        sides += [names for names in removing if self.of(names, ["screen"])]
        begun = [side for side in sides if 0 < done[side] < MOST and not self._decided(side)]
        had = max((done[side] for side in begun), default=0)
        may_help = [names for names in self.winners if self._helps(names) is not False]
        kept_free = 2 if len(may_help) > 1 and not any(len(names) > 1 for names in done) else 0
        begun, number = self._fitting(begun, max(1, FEWEST - had), kept_free if had >= FEWEST else 0)
        if begun and number >= max(1, FEWEST - had):
            return self._round(begun, min(number, (FEWEST if had < FEWEST else MOST) - had), had)
        new, number = self._fitting([side for side in self.winners if not done[side]], FEWEST, kept_free)
        number = number if done or not new else self._turns_that_fit(1 + len(new))
        if not (new and number >= (FEWEST if done else 1)):
            if following is not None and self._turns_that_fit(2) >= FEWEST:
                return self._units("join", [following])
            new, number = self._fitting([side for side in sides if not done[side]], FEWEST)
        if new and number >= (FEWEST if done else 1):
            return self._round(new, min(number, SHOW if not done and number < SURELY * FEWEST else FEWEST), len(done))
        losers, number = self._fitting([names for names in self._losers() if names not in done], FEWEST)
        return self._round(losers, FEWEST, sum(done.values())) if number >= FEWEST else []

    def _fitting(self, sides: list[Names], number: int, kept_free: int = 0) -> tuple[list[Names], int]:
        """Return as many of the sides, at least the first one, as have time for so many turns each, and for how many
        they have. The time of `kept_free` further sides is for those joined, and the step as it is beside them."""
        while len(sides) > 1 and self._turns_that_fit(1 + len(sides) + kept_free) < number:
            sides = sides[:-1]
        return sides, self._turns_that_fit(1 + len(sides) + kept_free) if sides else 0

    def _decided(self, side: Names) -> bool:
        """Return True if all turns of a side say whether it saves more than GAIN. (With FEWEST turns the interval of
        the ratio is about that of all pairs of turns.)"""
        before, after = self.of((), ["turn"]), self.of(side, ["turn"])
        known = min(len(before), len(after)) >= FEWEST
        return known and not min(after) / max(before) < 1 - GAIN < max(after) / min(before)

    def _round(self, sides: Sequence[Names], number: int, salt: int) -> list[Unit]:
        draw = random.Random((self.spec.seed or 0) + salt)
        if self._of_ranks:
            return [self._in_the_same_ranks([(), *sides], draw) for _ in range(number // TOGETHER)]
        order = [side for side in [(), *sides] for _ in range(number)]
        draw.shuffle(order)
        return self._units("turn", order)

    def _in_the_same_ranks(self, sides: Sequence[Names], draw: random.Random) -> Unit:
        """Plan some turns of each side in the same ranks, whose start takes longer than their steps."""
        (unit,) = self._units("turn", [()])
        order = [names for _ in range(TOGETHER) for names in draw.sample(sides, len(sides))]
        each = [{"changes": list(names), "fields": self._fields(names)} for names in order]
        return replace(
            unit, title=f"{TITLES['turn']}: {TOGETHER} rounds", params={**unit.params, "rounds": each}, start="fork"
        )

    def _losers(self) -> list[Names]:
        """Return the changes with which the step was about as fast, the closest first."""
        before = statistics.median(self._before() or [1.0])
        winners = self.winners
        off = {names: abs(value / before - 1) for names, value in self._screened() if names not in winners}
        return sorted((names for names, one in off.items() if one < CLOSE), key=lambda names: off[names])

    def _seconds(self) -> list[float]:
        """Return the seconds of the turns so far or, before them, of the screening or of the look."""
        taken: dict[str, list[float]] = {}
        for unit, seconds in zip(self.so_far.units, self.so_far.seconds, strict=True):
            stage = unit.params["stage"]
            taken.setdefault("screen" if stage == "join" else stage, []).append(
                seconds / len(unit.params.get("rounds", [()]))
            )
        return taken.get("turn") or taken.get("screen") or taken["look"]

    def _turn_s(self) -> float:
        """Return how long a turn takes."""
        return max(1e-3, statistics.fmean(self._seconds()))

    def _turns_that_fit(self, sides: int) -> int:
        has_turns = any(unit.params["stage"] == "turn" for unit in self.so_far.units)
        if self._of_ranks and not has_turns:
            return TOGETHER * int(self.left_s / self._launch_s(sides))
        # The first turn of a round may have waited for all interpreters of the round.
        turn_s = statistics.median(self._seconds()) if has_turns else self._turn_s() + START_S * (not self._of_ranks)
        start_s = max(self._seconds()) - turn_s if has_turns else 0.0
        return int(max(0.0, self.left_s - start_s) / (sides * max(turn_s, 1e-3)))

    def _launch_s(self, sides: int) -> float:
        """Return how long ranks take that have turns of so many sides, by how long their screening took."""
        screened, params = self._turn_s(), self.so_far.units[-1].params
        look = self.look or {}
        steps = params["warmup_steps"] and params["warmup_steps"] + params["measure_steps"]
        # A model is built for about as long as it runs.
        turn_s = min(screened, 2e-3 * steps * look["step_ms"]) if steps else screened
        return screened - turn_s + TOGETHER * sides * turn_s

    def _limit_s(self) -> float:
        """Return how long a process with changes may take."""
        return max(FOR_ONE * self.spec.budget_s, LEAST_LIMIT_S, 2 * self.so_far.seconds[0])

    def _units(self, stage: str, sides: Sequence[Names], limit_s: float | None = None) -> list[Unit]:
        look = self.look or {}
        fitting = round(TURN_MS / max(look["step_ms"], 1e-3))
        numbers = {
            "measure_steps": min(look["samples"], max(LEAST_STEPS, fitting)),
            "warmup_steps": self._warmup_steps(look, slow=fitting <= LEAST_STEPS),
        }
        common = {**numbers, "limit_s": limit_s or self._limit_s(), "kept_kernels": look.get("kept_kernels")}
        return [
            Unit(
                title=f"{TITLES[stage]}: {' + '.join(names) or STEP}",
                params={"stage": stage, "changes": list(names), "fields": self._fields(names), **common},
                start="exec" if stage == "turn" else "fork",
            )
            for names in sides
        ]

    def _warmup_steps(self, look: Mapping[str, Any], *, slow: bool) -> int | None:
        """Return how many steps warm a turn up; None: until times are steady, which takes long on a GPU."""
        given: int | None = self.spec.step.warmup_steps  # type: ignore[attr-defined]
        if given is not None:
            return given
        if slow:
            return WARMUP_OF_SLOW
        if look["device"] != "cuda":
            return None
        fitting: int = round(WARM_MS / max(look["step_ms"], 1e-3))
        return max(FEWEST_TO_WARM_UP, fitting)

    def findings(self) -> dict[str, Any]:
        """Return what the concluding unit needs: the values of each side, and what is known of each change."""
        joined, _ = self.joined() if self.of((), ["screen"]) else ((), None)
        refused = {JOINED.join(_names(row)): row["reason"] for row in self.rows if row["outcome"] == "refused"}
        refused = {name: why for name, why in self.too_slow.items() if not self.of((name,), ["screen"])} | refused
        refused |= {key: NOT_FINITE for key, difference in self.differences.items() if difference == math.inf}
        sides = {JOINED.join(_names(row)): _names(row) for row in self.rows}
        return {
            "seen": [dict(row) for row in self.so_far.tables.get("seen", ())],
            "candidates": [dict(row) for row in self.candidates],
            "turns": {key: self.of(names, ["turn"]) for key, names in sides.items()},
            "screened": {key: self.of(names, ["screen", "join"]) for key, names in sides.items()},
            "looked": [ms for row in [self.look] if row and (ms := self.value(row)) is not None],
            "profiled_ms": self.look and _looked_ms(self.look),
            "beside": self.look and self.look["reason"],
            "refused": refused,
            "others": [row["reason"] for row in self.rows if row["stage"] == "turn" and row["outcome"] == "ok"],
            "differences": {key: one for key, one in self.differences.items() if one < math.inf},
            "joined": list(joined),
            "device_key": next((row["device_key"] for row in self.rows), None),
            "busy_percent": self.look and self.look.get("busy_percent"),
        }

    def _differences(self) -> dict[str, float]:
        """Return the largest relative difference of the numbers that changed steps return from those of the step as it
        is, in the first steps; infinite where one has become infinite or NaN. Numbers that no seed decides, such as
        rates, which differ between processes of the step as it is, are left out."""
        from app.results.agreement import FIRST, relative  # with the database, which every rank would import

        returned: dict[int, dict[tuple[int, str], float]] = {}
        for row in self.so_far.tables.get("values", ()):
            if row["what"] == "returned" and row["step"] <= FIRST:
                value = float(row["not_finite"] or "nan") if row["value"] is None else row["value"]
                returned.setdefault(row["unit_index"], {})[row["step"], row["name"]] = value
        plain = {one: value for one, value in returned.get(0, {}).items() if math.isfinite(value)}
        others = [returned.get(row["unit_index"], {}) for row in self.rows if not row["changes"]]
        drawn = {one[1] for one in plain for its in others if relative(plain[one], its.get(one, plain[one])) > DRAWN}
        if drawn:  # what else is the same, such as a learning rate, does not say that losses are
            plain = {one: plain[one] for one in plain if one[1] not in drawn and "loss" in one[1].lower()}
        found: dict[str, float] = {}
        for row in self.rows:
            key, its = JOINED.join(_names(row)), returned.get(row["unit_index"], {})
            if key and (common := plain.keys() & its.keys()):
                found[key] = max(found.get(key, 0.0), *(relative(plain[one], its[one]) for one in common))
        return found


def is_better(estimate: "Estimate") -> bool:
    """Return True if a changed step is faster for certain, by more than GAIN."""
    ratio, high = estimate.ratio, estimate.high
    return ratio is not None and high is not None and high < 1 and ratio < 1 - GAIN


def _looked_ms(row: Mapping[str, Any]) -> float:
    """Return about what a step took while it was looked at."""
    return float(max(row["step_ms"] or 0.0, (row.get("profiled_ms") or 0.0) / SAMPLED))


def _names(row: Mapping[str, Any]) -> Names:
    return tuple(row["changes"].split(JOINED)) if row["changes"] else ()
