"""Points, which figures are drawn from: one value of a metric at its coordinates.

`points_of` takes the points of one metric out of any sheet of measurements, and `axes_of` proposes which coordinate
goes along which axis. Texts that thousands of points share, such as the words of a coordinate, are made once.
"""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from app.results.sheet import Cell, Sheet
from app.specs import Scalar
from flopwatch.text.cases import in_use

LOG_X_RATIO, LOG_Y_RATIO = 8.0, 20.0
"""An axis is logarithmic by default if its largest number is at least this many times the smallest."""


@dataclass(slots=True)
class Point:
    """One value of one metric, or its outcome. It is never changed; a frozen one takes three times as long to make."""

    place: Mapping[str, Scalar]
    """Coordinates."""
    value: float | None
    spread: float | None = None
    """The number after ±: of a median, the larger distance to an end of its 95 % interval."""
    n: int | None = None
    """Number of samples or processes behind the value."""
    outcome: str | None = "ok"
    """None: not measured."""
    validity: str | None = None
    url: str | None = None
    """Page of the job that measured it."""
    low: float | None = None
    """The ends of a median's interval."""
    high: float | None = None

    @property
    def missing(self) -> str | None:
        """The outcome of a point without a value: "oom", or "unknown"; None if it was not measured."""
        return "unknown" if self.outcome == "ok" else self.outcome


def points_of(sheet: Sheet, metric: str) -> list[Point]:
    """Return the points of one metric of a sheet, or of a column that relates one to a reference; a column `job` also
    gives each point its page. Raises KeyError if there is no such metric."""
    names = sheet.names()
    if metric not in (*sheet.names("metric"), *sheet.names("gain")):
        raise KeyError(metric)
    at, coordinates = names.index(metric), [name for name in sheet.names("coordinate") if name != "job"]
    places = [names.index(name) for name in coordinates]
    verdict = names.index("validity") if "validity" in names else None
    job = names.index("job") if "job" in names else None
    points = []
    for row in sheet.rows:
        cell = row[at]
        if not isinstance(cell, Cell):
            continue
        points.append(
            Point(
                place={name: row[index] for name, index in zip(coordinates, places, strict=True)},
                value=cell.value,
                spread=cell.spread,
                low=cell.least if cell.low is None else cell.low,
                high=cell.greatest if cell.high is None else cell.high,
                n=cell.n,
                outcome=cell.outcome,
                validity=None if verdict is None else row[verdict],
                url=None if job is None or row[job] is None else f"/ui/jobs/{row[job]}",
            )
        )
    return points


@dataclass(frozen=True)
class Axes:
    """The coordinates along the axes of a figure."""

    x: str
    by: tuple[str, ...] = ()
    """Coordinates whose values make the series."""
    choices: tuple[str, ...] = ()
    """Coordinates that could be along x."""


def axes_of(
    points: Sequence[Point], x: str | None = None, values: Mapping[str, Sequence[Scalar]] | None = None
) -> Axes:
    """Return the axes of a chart: `x`, or the numeric coordinate with the most values; all others make series.
    `values`: what varies, if the caller knows it. Raises KeyError if `x` does not vary."""
    values = varying(points) if values is None else values
    if x is not None and x not in values:
        raise KeyError(x)
    if x is None:
        # Among coordinates with equally many values the last wins: kinds name the fastest-varying one last.
        ranked = sorted(
            enumerate(values), key=lambda item: (is_numeric(values[item[1]]), len(values[item[1]]), item[0])
        )
        x = ranked[-1][1] if ranked else next((name for point in points for name in reversed(list(point.place))), "")
    labels = {name.partition(".")[0] for name in values if "." in name}
    told = {name for name in values if name.startswith(f"{x}.")} if x in labels else labels
    return Axes(x=x, by=tuple(name for name in values if name != x and name not in told), choices=tuple(values))


def varying(points: Iterable[Point]) -> dict[str, list[Scalar]]:
    """Return the coordinates that have several values, each with its values in order.

    A coordinate that some cases do not use, and whose value follows from another one, is left out: `bucket_size_mb`
    where one strategy of several has buckets, all of one size; and `model.num_layers` where `model` tells more of them.
    """
    places = [point.place for point in points]
    seen = {
        name: _distinct([place[name] for place in places if name in place])
        for name in dict.fromkeys(chain.from_iterable(places))
    }
    several = {name: values for name, values in seen.items() if len(values) > 1}
    following = [
        name
        for name, values in several.items()
        if any(value is None for value in values) and any(_follows(places, name, [other]) for other in several)
    ]
    for label in several:
        fields = [name for name in several if name.startswith(f"{label}.")]
        following += [] if _follows(places, label, fields) else fields
    return {name: _ordered(values) for name, values in several.items() if name not in following}


def _follows(places: Sequence[Mapping[str, Scalar]], name: str, others: Sequence[str]) -> bool:
    """Return True if the values of `others` decide that of `name`, and are always in use themselves."""
    if name in others:
        return False
    decided: dict[tuple[str, ...], str] = {}
    for place in places:
        if any(place.get(other) is None for other in others):
            return False
        value = key_of(place.get(name))
        if decided.setdefault(tuple(key_of(place.get(other)) for other in others), value) != value:
            return False
    return True


def values_along(points: Iterable[Point], name: str) -> list[Scalar]:
    """Return the values of one coordinate in order."""
    return _ordered(_distinct(values_of(points, name)))


MAX_CACHED_VALUES = 20_000
"""Number of coordinates' values whose keys and words are cached: more than the largest sweep has."""


def values_of(points: Iterable[Point], name: str) -> list[Scalar]:
    return [point.place.get(name) for point in points]


def ranks_of(points: Iterable[Point], name: str, values: Sequence[Scalar]) -> list[int]:
    """Return for each point the index of its value among `values`, the list of all values of the coordinate."""
    order = {key: index for index, key in enumerate(keys_of(values))}
    return [order[key] for key in keys_of(values_of(points, name))]


def _distinct(values: Sequence[Scalar]) -> Collection[Scalar]:
    return dict(zip(keys_of(values), map(in_use, values), strict=True)).values()


def keys_of(values: Iterable[Scalar]) -> list[str]:
    return list(map(key_of, values))


@functools.lru_cache(maxsize=MAX_CACHED_VALUES, typed=True)
def key_of(value: Scalar) -> str:
    # In Python 1 equals True.
    return repr(in_use(value))


def _ordered(values: Iterable[Scalar]) -> list[Scalar]:
    """Return numbers in ascending order, and texts in their original order: `tiny` comes before `small`."""
    listed = list(values)
    numbers = [value for value in listed if isinstance(value, int | float) and not isinstance(value, bool)]
    others = [value for value in listed if value is not None]
    if len(numbers) != len(others):
        return listed
    return [*([None] * (len(listed) - len(numbers))), *sorted(numbers)]


def is_numeric(values: Collection[Scalar]) -> bool:
    return bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def is_positive(values: Collection[Any]) -> bool:
    return is_numeric(values) and min(values) > 0


def is_wide(values: Collection[Any], ratio: float) -> bool:
    """Return True if the values are positive and span so wide a range that a logarithmic axis shows them better."""
    return is_positive(values) and max(values) >= ratio * min(values)
