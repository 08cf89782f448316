"""Compares what fills the memory of two jobs of kind `memory` at the peaks of their steps, and of each phase.

Allocations (the table `allocations`) are matched by category, name, and the functions and text of the lines that made
them, in the order of LEVELS: line numbers change with any edit above. What the tables do not list is a row of its own,
so that all rows of a peak together are the difference of the peaks.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from app.results.matching import Difference, Key, Spent, amount, by_key, columns, matched, told
from app.results.sheet import Column, Sheet
from app.results.sides import SIDES, Pair, Side
from app.results.unit_tables import table_of, tables_of
from app.specs import Scalar
from app.store.database.engine import Snapshot
from flopwatch.text.cases import ARROW

ALLOCATIONS, CATEGORIES = "allocations", "categories-"
INITIALISATION, OOM = "initialisation", "oom"
IDENTITY = ("category", "name", "made_in", "site", "stack", "code")
LEVELS = ((0, 1, 2, 3, 4), (0, 1, 5), (0, 6))
"""By which parts of a row's key, as `_keyed` makes it, rows are matched: by category, name and phase with the stack's
functions and lines; then by category, name and the innermost function and line, in whatever file; and last, because
the code that makes a parameter may change, by category and name."""
LINE = re.compile(r":\d+(?= )")
NEXT = " ← "
"""Between the lines of code of a stack (workers.measure.allocations.stacks)."""
NOT_LISTED, ROUNDING = "allocations that are not listed", "rounding by the allocator"
OWNED = ("parameter", "gradient", "optimizer_state", "input")
"""Categories whose allocations the sentence sums up: a reader knows what they are."""
TINY_MIB = 1e-6
LACKS = "The {} has no complete tables of what its peaks hold: only metrics are compared."


@dataclass(frozen=True)
class Peak:
    """What both sides held at a peak."""

    phase: str
    """Of the step's peak, the phases of both sides if they are not the same."""
    whole: Difference
    categories: Sequence[Difference]
    allocations: Sequence[Difference]
    """Those that changed most first."""


@dataclass(frozen=True)
class ComparedMemory:
    """The peaks of two jobs."""

    peaks: Sequence[Peak]
    """The step's first, then that of each phase that both have; empty if a side lacks the tables."""
    lacked: Sequence[str]
    """The sides that ran out of memory."""
    notes: Sequence[str]

    unit = "MiB"
    what = "What is alive at the peak, by category and the code that made it: as wide as on the larger side"

    @classmethod
    def read(cls, snapshot: Snapshot, pair: Pair) -> ComparedMemory | None:
        """Read the tables of both sides; None if a side has several jobs or did not succeed, or if both lack them."""
        if any(len(side.jobs) != 1 or side.jobs[0].state != "succeeded" for side in pair.both):
            return None
        held = [_categories(snapshot, side) for side in pair.both]
        if not all(held):
            lacking = [side for side, phases in zip(SIDES, held, strict=True) if not phases]
            return None if len(lacking) == len(SIDES) else cls([], [], [LACKS.format(lacking[0])])
        sizes = [{phase: sum(spent.mean for spent in its.values()) for phase, its in phases.items()} for phases in held]
        highest = [OOM if OOM in its else max(its, key=lambda one: (one != INITIALISATION, its[one])) for its in sizes]
        listed = [table_of(snapshot, side.jobs[0].id, ALLOCATIONS) for side in pair.both]
        counted = [_peak(side) for side in pair.both]
        peaks = []
        for names in dict.fromkeys([(*highest,), *((name, name) for name in held[0] if name in held[1])]):
            # Rounding that is known of one side only would be a difference.
            rounded = names == (*highest,) and OOM not in names and None not in counted
            of_sides = [
                _with_rest(phases[name], _keyed(_of(sheet, name), side.units), peak if rounded else None)
                for phases, name, sheet, side, peak in zip(held, names, listed, pair.both, counted, strict=True)
            ]
            peaks.append(_compared(ARROW.join(dict.fromkeys(names)), *of_sides))
        lacked = [side for side, phases in zip(SIDES, held, strict=True) if OOM in phases]
        return cls(peaks, lacked, list(_notes(pair.both, peaks[0])))

    def sheet(self, limit: int | None) -> Sheet:
        """Return all peaks as one table; of each, at most `limit` allocations, those that changed most."""
        rows: list[list[Scalar]] = []
        cut = []
        for number, peak in enumerate(self.peaks):
            changed = [one for one in peak.allocations if abs(one.change) > TINY_MIB]
            if number and not changed:
                continue
            rows.append(["total", peak.phase, None, "all memory", *peak.whole.numbers(known=True), None, None])
            rows += [
                ["categories", peak.phase, one.key[0], None, *one.numbers(known=True), None, None]
                for one in peak.categories
            ]
            if limit is not None and len(changed) > limit:
                cut.append(f"{len(changed)} of {peak.phase}")
            for one in changed[:limit]:
                category, name, _, _, code, _, _, site, stack = one.key
                # Of a row whose sides have different code, both.
                codes = [] if code is None else str(code).split(ARROW)
                what = name or ARROW.join(dict.fromkeys(map(_innermost, codes))) or None
                rows.append([ALLOCATIONS, peak.phase, category, what, *one.numbers(known=True), site, stack])
        notes = [f"Shown are the {limit} allocations that changed most of {', '.join(cut)}."] if cut else []
        has_intervals = any(row[8] is not None for row in rows)
        place = [Column(name, "string") for name in ("table", "phase", "category", "name")]
        where = [Column("where", "string"), Column("stack", "string", in_text=False)]
        shown = [replace(one, in_text=has_intervals or "ratio_" not in one.name) for one in columns("MiB", ALLOCATIONS)]
        return Sheet([*place, *shown, *where], rows, notes=[*notes, *self.notes])

    def flames(self) -> Iterator[tuple[list[str], float, float]]:
        """Yield what was alive at the peak: the category, then the places that made it, the outermost first."""
        for one in self.peaks[0].allocations:
            category, name, _, functions, *_ = one.key
            # Of a row whose sides have different stacks, the candidate's.
            places = str(functions or "").split(ARROW)[-1].split(" + ")[0].split(" < ")[::-1]
            frames = [str(part) for part in (category, *places, name) if part]
            yield frames, *one.means

    def explained(self) -> str:
        """Return a sentence: how much more or less the candidate needs at its peak, and for what."""
        peak = self.peaks[0]
        parts: dict[str, float] = defaultdict(float)
        for one in peak.allocations:
            category, name, *_, site, _ = one.key
            where = "" if category in OWNED else f" at {site}" if site else f" of {name}" if name else ""
            parts[f"{str(category).replace('_', ' ')}{where}"] += one.change
        total = peak.whole.change
        named = told({name: change for name, change in parts.items() if abs(change) > TINY_MIB}, total, "MiB")
        if not named:
            return f"By the snapshots, both sides need the same memory at their peaks ({peak.phase})"
        if self.lacked:
            what = f"the {' and the '.join(self.lacked)} ran out of memory, and then the candidate held"
        else:
            what = "the candidate needs"
        place = f" at its peak ({peak.phase})"
        how = f"{amount(abs(total))} MiB {'more' if total > 0 else 'less'}" if abs(total) > TINY_MIB else "as much"
        return f"By the snapshots, {what} {how}{place}: {named}"


def _categories(snapshot: Snapshot, side: Side) -> dict[str, dict[Key, Spent]]:
    """Return the MiB of each category at the peak of each phase; empty if a peak or the allocations are not known."""
    reported = tables_of(snapshot, side.jobs[0].id)
    tables = {table["name"]: {column["name"] for column in table["columns"]} for table in reported}
    found = {
        name.removeprefix(CATEGORIES): by_key(
            table_of(snapshot, side.jobs[0].id, name), ("category",), "peak_mib", side.units
        )
        for name in tables
        if name.startswith(CATEGORIES)
    }
    if not found.get(INITIALISATION):
        found.pop(INITIALISATION, None)
    return found if tables.get(ALLOCATIONS, set()) >= {*IDENTITY} and all(found.values()) else {}


def _of(sheet: Sheet, phase: str) -> Sheet:
    at = sheet.names().index("at_peak_of")
    return replace(sheet, rows=[row for row in sheet.rows if row[at] == phase])


def _keyed(sheet: Sheet, units: frozenset[int] | None) -> dict[Key, Spent]:
    """Return the allocations by what LEVELS, the table and the flame graph need of them."""
    found: dict[Key, Spent] = {}
    for key, spent in by_key(sheet, IDENTITY, "total_mib", units, calls="count").items():
        category, name, made_in, site, stack, code = key
        functions = None if stack is None else LINE.sub("", str(stack))
        innermost = f"{str(site).rpartition(' ')[2]} {_innermost(str(code))}"
        found[category, name, made_in, functions, code, innermost, name or f"{made_in} {stack}", site, stack] = spent
    return found


def _innermost(code: str) -> str:
    return code.partition(NEXT)[0]


def _peak(side: Side) -> float | None:
    """Return the MiB of the step's peak, as the allocator counted them; None if unknown."""
    rows = [row for case in side.cases for row in case.processes.get("peak_memory_mib", ())]
    values = [row.value for row in rows if row.value is not None]
    return statistics.fmean(values) if values and len(values) == len(rows) else None


def _with_rest(
    categories: Mapping[Key, Spent], listed: dict[Key, Spent], peak: float | None
) -> tuple[Mapping[Key, Spent], dict[Key, Spent]]:
    """Return the categories, and the allocations with all that the table does not list."""
    sums: dict[Scalar, float] = defaultdict(float)
    for key, spent in listed.items():
        sums[key[0]] += spent.mean
    rests: dict[Key, float] = {(key[0], NOT_LISTED): spent.mean - sums[key[0]] for key, spent in categories.items()}
    if peak is not None:
        rests[ROUNDING, None] = peak - sum(spent.mean for spent in categories.values())
    for (category, name), rest in rests.items():
        if abs(rest) > TINY_MIB:
            listed[category, name, None, None, None, None, name, None, None] = Spent((rest,), None)
    return categories, listed


def _compared(
    phase: str,
    baseline: tuple[Mapping[Key, Spent], Mapping[Key, Spent]],
    candidate: tuple[Mapping[Key, Spent], Mapping[Key, Spent]],
) -> Peak:
    categories = [
        Difference(key, baseline[0].get(key), candidate[0].get(key)) for key in {**baseline[0], **candidate[0]}
    ]
    allocations = sorted(matched(baseline[1], candidate[1], LEVELS), key=lambda one: -abs(one.change))
    whole = Difference(
        (), *(Spent((sum(one.mean for one in side[1].values()),), None) for side in (baseline, candidate))
    )
    used = [one for one in categories if any(one.means)]
    return Peak(phase, whole, used, allocations)


def _notes(sides: Sequence[Side], peak: Peak) -> Iterator[str]:
    for side in sides:
        which = f"The {side.name}, job {side.jobs[0].id},"
        unlisted = [
            one.baseline if side is sides[0] else one.candidate for one in peak.allocations if one.key[1] == NOT_LISTED
        ]
        if any(unlisted):
            yield f"{which} lists only its largest allocations (largest_allocations): others seem to have come or gone."
