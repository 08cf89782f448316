"""What the two sides of a comparison spent on the same work or memory: rows of their tables, matched and subtracted."""

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from app.metrics import gain
from app.results.inference import FEWEST, interval
from app.results.sheet import Column, Sheet
from app.results.sides import SIDES
from app.results.unit_tables import UNIT_INDEX
from app.specs import Scalar
from flopwatch.text.cases import ARROW

NUMBERED = re.compile(r"(?<=[a-z])_\d+$")
"""The number that a compiler appends to the name of a kernel."""
LARGE = 0.05
"""A part of a difference is told if it is a larger share of all changes."""
MOST_TOLD = 3
MOST_RATIO = 1000.0
"""A row that is larger by more is new on the candidate's side: its ratio would be that of a remnant."""
Key = tuple[Scalar, ...]
"""The columns that identify a row."""


@dataclass(frozen=True)
class Spent:
    """What a side spent on a row."""

    values: tuple[float, ...]
    """Ms per step, or MiB, of each process that recorded it."""
    calls: float | None
    """Calls per step, or allocations."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)


@dataclass(frozen=True)
class Difference:
    """One row: what both sides spent on the same."""

    key: Key
    """Of matched rows, a part that the sides do not share is both joined by an arrow."""
    baseline: Spent | None
    candidate: Spent | None

    @property
    def means(self) -> tuple[float, float]:
        """The values of baseline and candidate; a side without the row spent nothing."""
        return self.baseline.mean if self.baseline else 0.0, self.candidate.mean if self.candidate else 0.0

    @property
    def change(self) -> float:
        """The candidate's value less the baseline's."""
        baseline, candidate = self.means
        return candidate - baseline

    def numbers(self, *, known: bool) -> list[Scalar]:
        """Return the values of `columns`. `known`: a side without this row spent nothing on it. Only rows that both
        sides have have a ratio."""
        sides = (self.baseline, self.candidate)
        baseline, candidate = (None if side is None else side.mean for side in sides)
        change, ratio = change_and_ratio(baseline, candidate)
        low = high = None
        if ratio is not None and ratio > MOST_RATIO:
            ratio = None
        elif self.baseline and self.candidate and min(len(side.values) for side in sides if side) >= FEWEST:
            found = interval(self.baseline.values, self.candidate.values)
            if found.low is not None:  # that of the means may lie outside
                ratio, low, high = found.ratio, found.low, found.high
        calls = [None if side is None else side.calls for side in sides]
        return [baseline, candidate, self.change if known else change, ratio, low, high, *calls]


def matched(
    baseline: Mapping[Key, Spent], candidate: Mapping[Key, Spent], levels: Sequence[Sequence[int]]
) -> Iterator[Difference]:
    """Yield the rows of both sides, matched by the parts of their keys that the levels name, in the levels' order."""
    left = [dict(side) for side in (baseline, candidate)]
    for level in levels:
        ones, others = (_grouped(side, level) for side in left)
        for place in [place for place in ones if place in others]:
            keys = ones[place], others[place]
            times = [added([side.pop(key) for key in its]) for side, its in zip(left, keys, strict=True)]
            yield Difference(_both(*keys), *times)
    yield from (Difference(key, times, None) for key, times in left[0].items())
    yield from (Difference(key, None, times) for key, times in left[1].items())


def _grouped(side: Mapping[Key, Spent], level: Sequence[int]) -> dict[Key, list[Key]]:
    found: dict[Key, list[Key]] = defaultdict(list)
    for key in side:
        found[tuple(_plain(key[at]) for at in level)].append(key)
    return found


def _plain(value: Scalar) -> Scalar:
    return NUMBERED.sub("", value) if isinstance(value, str) and value.startswith("triton_") else value


def _both(ones: Sequence[Key], others: Sequence[Key]) -> Key:
    """Return the key of rows that are one: of each column the common value, or those of both sides."""
    found = []
    for one, other in zip(zip(*ones, strict=True), zip(*others, strict=True), strict=True):
        names = [" + ".join(dict.fromkeys(str(value) for value in side if value is not None)) for side in (one, other)]
        same = {*one} == {*other} or [*map(_plain, one)] == [*map(_plain, other)]
        found.append(names[0] or None if same else ARROW.join(names))
    return tuple(found)


def added(times: Sequence[Spent]) -> Spent:
    calls = [each.calls for each in times if each.calls is not None]
    return Spent(tuple(map(sum, zip(*(each.values for each in times), strict=True))), sum(calls) if calls else None)


def change_and_ratio(baseline: float | None, candidate: float | None) -> tuple[float | None, float | None]:
    """Return candidate - baseline and candidate / baseline, each None if unknown; negative numbers have no ratio."""
    if baseline is None or candidate is None:
        return None, None
    return candidate - baseline, gain(baseline, candidate, None)


def by_key(
    sheet: Sheet, identity: Sequence[str], value: str, units: frozenset[int] | None, calls: str = "calls"
) -> dict[Key, Spent]:
    """Return value and calls of each row. If several processes measured them: means over the processes.

    A process whose table lacks a row did not run it.
    """
    names = sheet.names()
    at = {name: names.index(name) for name in (UNIT_INDEX, *identity, value)}
    calls_at = names.index(calls) if calls in names else None
    by_key: dict[Key, dict[int, tuple[float, float]]] = {}
    processes: dict[int, None] = {}
    for row in sheet.rows:
        unit = row[at[UNIT_INDEX]]
        if (units is not None and unit not in units) or row[at[value]] is None:
            continue
        processes[unit] = None
        number = row[calls_at] if calls_at is not None else None
        of_unit = by_key.setdefault(tuple(row[at[name]] for name in identity), {})
        before = of_unit.get(unit, (0.0, 0.0))
        of_unit[unit] = (before[0] + row[at[value]], before[1] + (number or 0.0))
    found = {}
    for key, of_unit in by_key.items():
        both = [of_unit.get(unit, (0.0, 0.0)) for unit in processes]
        mean = None if calls_at is None else _whole(statistics.fmean(number for _, number in both))
        found[key] = Spent(tuple(spent for spent, _ in both), mean)
    return found


def _whole(number: float) -> float:
    return int(number) if number.is_integer() else number


def told(parts: Mapping[str, float], total: float, unit: str) -> str:
    """Name the largest parts of a difference, and what is left of the total; empty if there is no difference."""
    whole = sum(map(abs, parts.values()))
    large = sorted((one for one in parts.items() if abs(one[1]) > LARGE * whole), key=lambda one: -abs(one[1]))
    large = large[:MOST_TOLD]
    rest = total - sum(change for _, change in large)
    named = [f"{signed(change, unit)} {name}" for name, change in large]
    if abs(rest) > LARGE * whole / 10:
        named.append(f"{signed(rest, unit)} elsewhere")
    return ", ".join(named)


def signed(change: float, unit: str) -> str:
    """Write a change with its sign: "−3 ms"."""
    sign = "\N{MINUS SIGN}" if change < 0 else "+"
    return f"{sign}{amount(abs(change))} {unit}"


def amount(value: float) -> str:
    """Write a value with three significant digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def columns(unit: str, calls: str) -> list[Column]:
    """Return the columns of `Difference.numbers`; `ratio` is candidate / baseline or, with an interval, the median of
    that of all pairs of processes. Null: that side has no such row, or could not determine the value."""
    values = [Column(f"{name}_{unit.lower()}", "number", unit) for name in ("baseline", "candidate", "change")]
    ratios = [Column(name, "number") for name in ("ratio", "ratio_low", "ratio_high")]
    return [*values, *ratios, *(Column(f"{side}_{calls}", "number", calls) for side in SIDES)]
