"""Figures of results, as Plotly's JSON: {"data": [traces], "layout": {…}}. Pure functions of points; standard library.

A point is one value at its coordinates. `points_of` takes the points of one metric out of any sheet of measurements,
`axes_of` proposes which coordinate goes along which axis, and `chart`, `heat_map`, `distributions` and `ratios` draw. A
value that was not measured ("oom", "wrong", …) is never drawn as a number: a line has a cross above its place, a heat
map the outcome's own colour. Cases whose verdict is not valid have open markers.

Figures name no colour of text, grid or ground: the page sets those by its theme (dark or light), and resolves the
colours of series, which are written as CSS variables. `table` has the numbers of the figure, for those who cannot see
it; `empty` says why there is nothing to draw.

A figure has no more points than pixels (see `thinning`), and no more bars than a phone can show; its `note` says what
is left out. Texts that thousands of points share, such as the words of a coordinate, are made once.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import chain
from operator import itemgetter
from typing import Any, Literal, Protocol

from app.metrics import Direction, in_a_sentence, readable
from app.results.sheet import Cell, Sheet
from app.specs import Scalar
from app.states import VERDICTS
from app.web import thinning
from flopwatch.text.cases import case_text, in_use
from flopwatch.text.numbers import number
from flopwatch.text.values import value_text

Figure = dict[str, Any]

PALETTE = tuple(f"var(--plot-{number})" for number in range(1, 13))
"""Colours of series: the theme's own; the first eight are distinguishable with any colour vision."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "pentagon", "star", "hexagon")
DASHES = ("solid", "dash", "dot", "dashdot")
BAR_PATTERNS = ("", "/", "-", ".")
OUTCOMES = {"oom": "#d1495b", "wrong": "#8e44ad", "unsupported": "#8d99a6", "timeout": "#c77f1a", "crashed": "#6b2737"}
"""Colours of outcomes without a number."""
OTHER_OUTCOME = "#5c6770"
SIDES = {"baseline": PALETTE[0], "candidate": PALETTE[1]}
LEGEND: Mapping[str, Any] = {"legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}}
"""Where the legend stands: above the plot."""
SCALE = "Cividis"
"""Colours of a heat map; readable with any colour vision."""

MAX_SERIES = 24
"""Largest number of series of one figure: a longer legend is unreadable."""
MAX_BARS = 60
"""Largest number of bars of one figure: on a phone, which is 300 pixels wide, more would run together."""
MIN_PLACES = 4
"""Number of values along x whose bars are drawn however many series there are."""
MAX_TICKS = 12
"""Largest number of values of an axis that each have a tick."""
MAX_TEXTS = 400
"""Largest number of cells of a heat map with their values inside."""
MAX_STRIP = 2000
"""Largest number of samples of one figure that are drawn as dots."""
LOG_X_RATIO = 8.0
"""The x axis is logarithmic by default if the largest coordinate is at least this many times the smallest."""
LOG_Y_RATIO = 20.0
"""The same for the values and the y axis."""
MAX_TABLE = 2000
"""Largest number of rows of the table of a figure's numbers; /tables has all."""
EMPTY = "Nothing is measured yet that could be drawn."


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


class Judged(Protocol):
    """A value with the verdict on its case."""

    @property
    def value(self) -> float | None: ...
    @property
    def validity(self) -> str | None: ...


@dataclass(frozen=True)
class Axes:
    """The coordinates along the axes of a figure."""

    x: str
    by: tuple[str, ...] = ()
    """Coordinates whose values make the series."""
    choices: tuple[str, ...] = ()
    """Coordinates that could be along x."""


@dataclass(frozen=True)
class Samples:
    """The samples of one metric of one case on one side."""

    side: str
    """Name in the legend."""
    case: str
    """The case in words."""
    values: Sequence[float]
    processes: Sequence[float] = ()
    """One value per process, such as its median."""


@dataclass(frozen=True)
class Ratio:
    """A metric of a candidate related to its baseline."""

    label: str
    ratio: float
    low: float | None
    """Lower end of the confidence interval; None if it is unknown."""
    high: float | None
    finding: str
    """better | worse | changed | no_difference | …"""
    better: Direction | None = None
    """Whether less or more is better; None if neither is."""


def points_of(sheet: Sheet, metric: str) -> list[Point]:
    """Return the points of one metric of a sheet, or of a column that relates one to a reference; a sheet with a column
    `job` also gives each point its page.

    Raises:
        KeyError: the sheet has no such metric.
    """
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
                low=cell.low,
                high=cell.high,
                n=cell.n,
                outcome=cell.outcome,
                validity=None if verdict is None else row[verdict],
                url=None if job is None or row[job] is None else f"/ui/jobs/{row[job]}",
            )
        )
    return points


def varying(points: Iterable[Point]) -> dict[str, list[Scalar]]:
    """Return the coordinates that have several values, each with its values in order.

    A coordinate that some cases do not use, and whose value follows from another one, is left out: `bucket_size_mb`
    where one strategy of several has buckets, all of one size.
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
        if any(value is None for value in values) and any(_follows(places, name, other) for other in several)
    ]
    return {name: _ordered(values) for name, values in several.items() if name not in following}


def _follows(places: Sequence[Mapping[str, Scalar]], name: str, other: str) -> bool:
    """Return True if the value of `other` decides that of `name`, and is always in use itself."""
    if name == other:
        return False
    decided: dict[str, str] = {}
    for place in places:
        if place.get(other) is None:
            return False
        value = _key(place.get(name))
        if decided.setdefault(_key(place.get(other)), value) != value:
            return False
    return True


def values_along(points: Iterable[Point], name: str) -> list[Scalar]:
    """Return the values of one coordinate in order."""
    return _ordered(_distinct(_along(points, name)))


def axes_of(
    points: Sequence[Point], x: str | None = None, values: Mapping[str, Sequence[Scalar]] | None = None
) -> Axes:
    """Return the axes of a chart: `x`, or the numeric coordinate with the most values; all others make series.

    values: what varies, if the caller knows it.

    Raises:
        KeyError: `x` is no coordinate that varies.
    """
    values = varying(points) if values is None else values
    if x is not None and x not in values:
        raise KeyError(x)
    if x is None:
        # Among coordinates with equally many values the last wins: kinds name the fastest-varying one last.
        ranked = sorted(
            enumerate(values), key=lambda item: (_is_numeric(values[item[1]]), len(values[item[1]]), item[0])
        )
        x = ranked[-1][1] if ranked else next((name for point in points for name in reversed(list(point.place))), "")
    return Axes(x=x, by=tuple(name for name in values if name != x), choices=tuple(values))


def chart(
    points: Sequence[Point],
    axes: Axes,
    metric: str,
    unit: str | None,
    *,
    log_x: bool | None = None,
    log_y: bool | None = None,
) -> Figure:
    """Draw a metric along one coordinate, with the 95 % interval of each median as error bars.

    Numbers along x make lines, everything else bars. `log_x` and `log_y` set the axes; None: logarithmic where values
    span a wide range. Marks at the top show cases with an outcome but no number.
    """
    series = _series(points, axes)
    places = values_along(points, axes.x)
    numeric = _is_numeric(places)
    log_x = _is_wide(places, LOG_X_RATIO) if log_x is None else log_x and _positive(places)
    every = list(series.items())[:MAX_SERIES]
    if numeric:
        fitting, shown = len(places), _thinned(every, axes.x, log=log_x)
    else:
        fitting = _number_of_places(every, axes.x, places)
        shown = _at_places(every, axes.x, places[:fitting])
    notes = [f"{len(shown)} of {len(series)} series"] if len(shown) < len(series) else []
    if fitting < len(places):
        notes.append(f"the first {fitting} of {len(places)} values of {in_a_sentence(axes.x)}")
        places = places[:fitting]
    counts = [sum(len(group) for _, group in groups) for groups in (shown, every)]
    if numeric and counts[0] < counts[1]:
        notes.append(f"{counts[0]} of {counts[1]} points: the least and greatest of each stretch")
    styles = _styles([group[0] for _, group in shown], axes.by)
    traces = [
        _trace(name, group, axes.x, style, lines=numeric) for (name, group), style in zip(shown, styles, strict=True)
    ]
    of_shown = [point for _, group in shown for point in group]
    traces += [*legend_of_doubt(of_shown, lines=numeric), *_outcome_marks(of_shown, axes.x, numeric=numeric)]
    values = [point.value for point in of_shown if point.value is not None]
    layout = {
        "xaxis": _x_axis(axes.x, places, log=log_x),
        "yaxis": {
            "title": {"text": readable(metric, unit)},
            **_y_scale(
                values,
                log=_is_wide(values, LOG_Y_RATIO) if log_y is None else log_y and _positive(values),
                bars=not numeric,
            ),
        },
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
        "barmode": "group",
        "hovermode": "closest",
        "showlegend": len(traces) > 1,
        **LEGEND,
    }
    names = (*axes.by, axes.x)
    table = _table(names, [point for _, group in every for point in group])
    note = f"Drawn: {'; '.join(notes)}" if notes else ""
    return {"data": traces, "layout": layout, "table": table, "note": note, "empty": EMPTY}


def heat_map(
    points: Sequence[Point], x: str, y: str, metric: str, unit: str | None, among: Sequence[Point] | None = None
) -> Figure:
    """Draw a metric over two coordinates. Where several points share a place, the last one counts.

    `among`: all points of the maps beside this one, so that one colour means one value in all of them.

    Cells without a number have the colour of their outcome, and its word inside.
    """
    columns, rows = values_along(points, x), values_along(points, y)
    grid: list[list[Point | None]] = [[None] * len(columns) for _ in rows]
    for row, column, point in zip(_ranks(points, y, rows), _ranks(points, x, columns), points, strict=True):
        grid[row][column] = point
    table = _table((x, y), [point for row in grid for point in row if point is not None])
    across, down = thinning.heat_map_steps(len(columns), len(rows))
    columns, rows, grid = columns[::across], rows[::down], [row[::across] for row in grid[::down]]
    texts = len(columns) * len(rows) <= MAX_TEXTS
    names = {"x": [_label(value) for value in columns], "y": [_label(value) for value in rows]}
    values = [[None if point is None else point.value for point in row] for row in grid]
    known = [point.value for point in (points if among is None else among) if point.value is not None]
    log = _is_wide(known, LOG_Y_RATIO)
    ends = [math.log10(end) if log else end for end in (min(known), max(known))] if known else [0, 1]
    hover = _Hover(metric, unit)
    measured: dict[str, Any] = {
        "type": "heatmap",
        "name": metric,
        **names,
        "z": [[None if value is None else math.log10(value) if log else value for value in row] for row in values],
        "customdata": [[hover(point) for point in row] for row in grid],
        "hovertemplate": "%{customdata[0]}<extra></extra>",
        "hoverongaps": False,
        "colorscale": SCALE,
        "zmin": ends[0],
        "zmax": ends[1],
        "colorbar": {"title": {"text": readable(metric, unit)}, "thickness": 14, **_log_ticks(known, log=log)},
        "xgap": 1,
        "ygap": 1,
    }
    if texts:
        measured |= {"text": [[_cell_text(point) for point in row] for row in grid], "texttemplate": "%{text}"}
    layout: dict[str, Any] = {
        "xaxis": {"type": "category", "title": {"text": readable(x)}},
        "yaxis": {"type": "category", "title": {"text": readable(y), "standoff": 12}},
        "hovermode": "closest",
        **LEGEND,
    }
    left_out = [f"1 in {step} values of {readable(name)}" for name, step in ((x, across), (y, down)) if step > 1]
    note = "Drawn: " + ", ".join(left_out) if left_out else ""
    traces = [measured, *_outcome_cells(grid, names, texts=texts)] if points else []
    return {"data": traces, "layout": layout, "table": table, "note": note, "empty": EMPTY}


def distributions(
    groups: Sequence[Samples], metric: str, unit: str | None, *, of: Literal["processes", "samples"]
) -> Figure:
    """Draw the distributions of both sides beside each other, case by case: a box, and every value as a dot.

    `of`: the processes' values, which comparisons count, or every sample of all processes.
    """
    chosen = [(group, list(group.processes if of == "processes" else group.values)) for group in groups]
    is_strip = sum(len(values) for _, values in chosen) <= MAX_STRIP
    traces = []
    for index, side in enumerate(dict.fromkeys(group.side for group in groups)):
        own = [(group.case, value) for group, values in chosen if group.side == side for value in values]
        color = SIDES.get(side, PALETTE[index % len(PALETTE)])
        traces.append(
            {
                "type": "box",
                "name": side,
                "x": [case for case, _ in own],
                "y": [value for _, value in own],
                "boxpoints": "all" if is_strip else "suspectedoutliers",
                "jitter": 0.5,
                "pointpos": 0,
                "marker": {"color": color, "size": 5, "opacity": 0.65},
                "line": {"width": 1.5, "color": color},
                "fillcolor": "rgba(127, 127, 127, 0.12)",
                "hovertemplate": f"%{{x}}: %{{y:.5g}}{hover_unit(unit)}<extra>{escaped(side)}</extra>",
            }
        )
    layout = {
        "boxmode": "group",
        "xaxis": {"type": "category", "title": {"text": ""}},
        "yaxis": {"title": {"text": readable(metric, unit)}},
        **LEGEND,
    }
    return {"data": traces, "layout": layout}


FINDINGS = {
    "better": "var(--good)",
    "worse": "var(--bad)",
    "changed": PALETTE[0],
    "differs": PALETTE[0],
    "inconclusive": "var(--busy)",
}
"""Colours of a comparison's findings; all others are grey."""


def ratios(compared: Sequence[Ratio]) -> Figure:
    """Draw the ratios of candidate to baseline, one per row, with their confidence intervals and a line at 1."""
    traces = []
    mixed = len({ratio.better for ratio in compared}) > 1
    compared = [replace(ratio, label=ratio.label + _ARROWS[ratio.better]) for ratio in compared] if mixed else compared
    for finding in dict.fromkeys(ratio.finding for ratio in compared):
        own = [ratio for ratio in compared if ratio.finding == finding]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": escaped(finding.replace("_", " ")),
                "x": [ratio.ratio for ratio in own],
                "y": [escaped(ratio.label) for ratio in own],
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": [0 if ratio.high is None else ratio.high - ratio.ratio for ratio in own],
                    "arrayminus": [0 if ratio.low is None else ratio.ratio - ratio.low for ratio in own],
                    "thickness": 1.5,
                    "width": 4,
                },
                "marker": {"color": FINDINGS.get(finding, "var(--quiet)"), "size": 9},
                "customdata": [_interval(ratio) for ratio in own],
                "hovertemplate": "%{y}<br>%{customdata}<extra></extra>",
            }
        )
    layout = {
        "height": 140 + 26 * len(compared),
        "xaxis": _ratio_axis(compared),
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [escaped(ratio.label) for ratio in reversed(compared)],
        },
        "shapes": [{"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper", "line": _LINE_AT_1}],
        "hovermode": "closest",
        "showlegend": len(traces) > 1,
        **LEGEND,
    }
    table = {
        "columns": ["metric and case", "ratio", "low", "high", "finding"],
        "rows": [[ratio.label, ratio.ratio, ratio.low, ratio.high, ratio.finding] for ratio in compared],
    }
    return {"data": traces, "layout": layout, "table": table, "empty": EMPTY}


_ARROWS: Mapping[Direction | None, str] = {"less": " ←", "more": " →", None: ""}
"""The better side of each row, where rows differ in it."""
RATIO_TICKS = (
    (0.95, 0.98, 1, 1.02, 1.05),
    (0.9, 0.95, 1, 1.05, 1.1),
    (0.8, 0.9, 1, 1.1, 1.25),
    (0.5, 0.8, 1, 1.25, 2),
    (0.2, 0.5, 0.7, 1, 1.4, 2, 5),
    (0.01, 0.1, 1, 10, 100),
)
"""Places of ticks, for ratios near 1 and further from it, as many as a phone has room for: a ratio and its inverse are
equally far from 1."""


def _ratio_axis(compared: Sequence[Ratio]) -> dict[str, Any]:
    """Return a logarithmic axis, on which a half is as far from 1 as a double, with the better side named."""
    ends = [
        end for ratio in compared for end in (ratio.ratio, ratio.low, ratio.high, 1.0) if end is not None and end > 0
    ]
    low, high = min(ends), max(ends)
    ticks = next((each for each in RATIO_TICKS if each[0] <= low and high <= each[-1]), RATIO_TICKS[-1])
    # The ticks beside 1 are always in sight, so that the scale can be read.
    low = min(low, max(tick for tick in ticks if tick < 1))
    high = max(high, min(tick for tick in ticks if tick > 1))
    room = 0.06 * math.log10(high / low)
    directions = frozenset(ratio.better for ratio in compared)
    sides: dict[frozenset[Direction | None], str] = {
        frozenset({"less"}): "<br>left of 1 is better",
        frozenset({"more"}): "<br>right of 1 is better",
        frozenset({None}): "",
    }
    title = f"Candidate / baseline{sides.get(directions, '<br>arrows point to the better side of 1')}"
    return {
        "title": {"text": title},
        "type": "log",
        # Room for the dots at both ends, however far apart these are.
        "range": [math.log10(low) - room, math.log10(high) + room],
        "tickvals": list(ticks),
        "ticktext": [number(tick) for tick in ticks],
    }


_LINE_AT_1 = {"color": "var(--quiet)", "width": 1, "dash": "dash"}
REFERENCE = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": _LINE_AT_1}
"""The line of the cases to which a chart relates all others."""


def _interval(ratio: Ratio) -> str:
    text = number(ratio.ratio)
    return text if ratio.low is None or ratio.high is None else f"{text} ({number(ratio.low)} – {number(ratio.high)})"


def _series(points: Sequence[Point], axes: Axes) -> dict[str, list[Point]]:
    """Return the points of each series, in order of its values, by its name."""
    ranks = {name: _ranks(points, name, values_along(points, name)) for name in (*axes.by, axes.x)}
    series = zip(*(ranks[name] for name in axes.by), strict=True) if axes.by else [()] * len(points)
    groups: dict[tuple[int, ...], list[tuple[int, Point]]] = {}
    for place, along, point in zip(series, ranks[axes.x], points, strict=True):
        groups.setdefault(place, []).append((along, point))
    return {
        _name(group[0][1], axes.by): [point for _, point in sorted(group, key=itemgetter(0))]
        for _, group in sorted(groups.items())
    }


def _number_of_places(series: Sequence[tuple[str, list[Point]]], x: str, places: Sequence[Scalar]) -> int:
    """Return how many values along x have room for their bars: at each, every series that is drawn takes some."""
    begin = {key: at for at, key in reversed(list(enumerate(_keys(places))))}
    begins = sorted(min(begin.get(_key(point.place.get(x)), 0) for point in group) for _, group in series)
    fitting = MIN_PLACES
    while fitting < len(places) and bisect.bisect_right(begins, fitting) * (fitting + 1) <= MAX_BARS:
        fitting += 1
    return min(fitting, len(places))


def _at_places(
    series: Sequence[tuple[str, list[Point]]], x: str, places: Sequence[Scalar]
) -> list[tuple[str, list[Point]]]:
    """Return the series' points with these values along x, without the series that have none there."""
    keys = set(_keys(places))
    cut = [(name, [point for point in group if _key(point.place.get(x)) in keys]) for name, group in series]
    return [(name, group) for name, group in cut if group]


def _thinned(series: Sequence[tuple[str, list[Point]]], x: str, *, log: bool) -> list[tuple[str, list[Point]]]:
    """Return series without the points that others hide. Those without a value along x are always drawn."""
    number_of_points = sum(len(group) for _, group in series)
    thinned = []
    for name, group in series:
        kept = thinning.drawn_indexes(
            [float(place) if isinstance(place, int | float) else None for place in map(in_use, _along(group, x))],
            [point.value for point in group],
            [point.outcome for point in group],
            [point.validity if point.validity in VERDICTS[1:] else None for point in group],
            share=len(group) / max(1, number_of_points),
            number_of_points=number_of_points,
            log=log,
        )
        thinned.append((name, [group[index] for index in kept]))
    return thinned


def _name(point: Point, by: Sequence[str]) -> str:
    """Return a series' name, made of its values. None and False are written with the coordinate's name: `not
    compiled`."""
    words = []
    for name in by:
        value = point.place.get(name)
        words.append(f"no {name.replace('_', ' ')}" if in_use(value) is None else case_text({name: value}))
    return ", ".join(words)


def _styles(firsts: Sequence[Point], by: Sequence[str]) -> list[tuple[int, int]]:
    """Return the numbers of colour and dash of each series, given by its first point.

    The last coordinate, if it has few values, makes the dash, so that the two precisions of one model have one colour.
    """
    apart = [(index, index // len(PALETTE)) for index in range(len(firsts))]
    last = values_along(firsts, by[-1]) if len(by) > 1 else []
    if not 1 < len(last) <= len(DASHES):
        return apart
    dashes = {_key(value): index for index, value in enumerate(last)}
    colours: dict[tuple[str, ...], int] = {}
    styles = []
    for point in firsts:
        colour = colours.setdefault(tuple(_key(point.place.get(name)) for name in by[:-1]), len(colours))
        styles.append((colour, dashes[_key(point.place.get(by[-1]))]))
    # Beyond the palette's end the colours begin anew: then the dash tells those series apart.
    return styles if len(colours) <= len(PALETTE) else apart


def _error(point: Point) -> tuple[float, float]:
    """Return how far the error bar of a point with a value reaches up and down: no time is drawn below zero."""
    if point.value is None or point.low is None or point.high is None:
        return point.spread or 0.0, point.spread or 0.0
    return point.high - point.value, point.value - point.low


def _trace(name: str, points: Sequence[Point], x: str, style: tuple[int, int], *, lines: bool) -> dict[str, Any]:
    measured = [point for point in points if point.value is not None]
    places = [in_use(point.place.get(x)) for point in measured]
    hover = _Hover()
    index, dash = style
    color = PALETTE[index % len(PALETTE)]
    doubtful = [point.validity in VERDICTS[1:] for point in measured]
    trace: dict[str, Any] = {
        "name": escaped(name),
        "x": places if lines else [_label(place) for place in places],
        "y": [point.value for point in measured],
        "customdata": [hover(point) for point in measured],
        "hovertemplate": "%{customdata[0]}<extra></extra>",
    }
    if not name:  # the only series; the legend is for the marks of cells without a number
        trace["showlegend"] = False
    if any(point.spread or point.low is not None for point in measured):
        above, below = zip(*map(_error, measured), strict=True)
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": list(above),
            "arrayminus": list(below),
            "thickness": 1.2,
            "width": 4,
            "color": "var(--text)",
        }
    if not lines:
        shape = BAR_PATTERNS[dash % len(BAR_PATTERNS)]
        pattern = {"shape": ["x" if doubt else shape for doubt in doubtful]}
        return {**trace, "type": "bar", "marker": {"color": color, "pattern": pattern}}
    symbol = SYMBOLS[index % len(SYMBOLS)]
    # Two values at one place, as of two jobs with the same case, have no line through them.
    mode = "lines+markers" if len(set(places)) == len(places) else "markers"
    return {
        **trace,
        "type": "scatter",
        "mode": mode,
        "line": {"color": color, "width": 2, "dash": DASHES[dash % len(DASHES)]},
        "marker": {"color": color, "size": 8, "symbol": [f"{symbol}-open" if doubt else symbol for doubt in doubtful]},
    }


def legend_of_doubt(points: Iterable[Judged], *, lines: bool) -> list[dict[str, Any]]:
    """Return the legend's entry for open markers or hatched bars: the verdicts that they stand for."""
    verdicts = [
        verdict for verdict in VERDICTS[1:] if any(p.validity == verdict and p.value is not None for p in points)
    ]
    if not verdicts:
        return []
    entry: dict[str, Any] = {"name": " or ".join(verdicts), "x": [None], "y": [None], "hoverinfo": "skip"}
    if lines:
        marker = {"symbol": "circle-open", "size": 8, "color": "var(--quiet)"}
        return [{**entry, "type": "scatter", "mode": "markers", "marker": marker}]
    return [{**entry, "type": "bar", "marker": {"color": "var(--quiet)", "pattern": {"shape": "x"}}}]


def _outcome_marks(points: Sequence[Point], x: str, *, numeric: bool) -> list[dict[str, Any]]:
    """Return a trace for each outcome without a number: crosses along the top of the figure."""
    by_outcome: dict[str, list[Point]] = {}
    for point in points:
        if point.value is None and point.missing is not None:
            by_outcome.setdefault(point.missing, []).append(point)
    hover = _Hover()
    traces = []
    for index, (outcome, group) in enumerate(by_outcome.items()):
        places = [in_use(point.place.get(x)) for point in group]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": escaped(outcome),
                "yaxis": "y2",
                "x": places if numeric else [_label(place) for place in places],
                "y": [max(0.97 - 0.05 * index, 0.5)] * len(group),
                "marker": {"symbol": "x", "size": 10, "color": OUTCOMES.get(outcome, OTHER_OUTCOME)},
                "customdata": [hover(point) for point in group],
                "hovertemplate": "%{customdata[0]}<extra></extra>",
                "cliponaxis": False,
            }
        )
    return traces


def _outcome_cells(
    grid: Sequence[Sequence[Point | None]], names: Mapping[str, list[str]], *, texts: bool
) -> list[dict[str, Any]]:
    """Return a trace for each outcome without a number, with its cells in its colour."""
    missing = [[None if point is None or point.value is not None else point.missing for point in row] for row in grid]
    traces = []
    hover = _Hover()
    for outcome in dict.fromkeys(chain.from_iterable(missing)):
        if outcome is None:
            continue
        color = OUTCOMES.get(outcome, OTHER_OUTCOME)
        is_here = [[value == outcome for value in row] for row in missing]
        hovers = [
            [hover(point) if here else [] for point, here in zip(row, flags, strict=True)]
            for row, flags in zip(grid, is_here, strict=True)
        ]
        trace: dict[str, Any] = {
            "type": "heatmap",
            "name": escaped(outcome),
            **names,
            "z": [[1 if here else None for here in row] for row in is_here],
            "customdata": hovers,
            "hovertemplate": "%{customdata[0]}<extra></extra>",
            "hoverongaps": False,
            "colorscale": [[0, color], [1, color]],
            "showscale": False,
            "showlegend": True,  # where cells have no words
            "xgap": 1,
            "ygap": 1,
        }
        if texts:
            trace |= {"text": [[outcome if here else "" for here in row] for row in is_here]}
            trace |= {"texttemplate": "%{text}", "textfont": {"color": "#ffffff"}}
        traces.append(trace)
    return traces


MAX_CACHED_VALUES = 20_000
"""Number of coordinates' values whose keys and words are cached: more than the largest sweep has."""
_NUMBERS_OF_A_POINT = ("value", "± 95 % interval", "n", "outcome", "validity")


def _table(names: Sequence[str], points: Sequence[Point]) -> dict[str, Any]:
    """Return the numbers of a figure's first points, by these coordinates, and how many points there are."""
    rows = [
        [
            *(in_use(point.place.get(name)) for name in names),
            *(point.value, point.spread, point.n, point.outcome, point.validity),
        ]
        for point in points[:MAX_TABLE]
    ]
    return {"columns": [*map(readable, names), *_NUMBERS_OF_A_POINT], "rows": rows, "number": len(points)}


class _Hover:
    """Makes the hover text of a point, and the address that a click opens."""

    def __init__(self, metric: str | None = None, unit: str | None = None) -> None:
        self._lead = "" if metric is None else f"{readable(metric)}: "
        self._unit = hover_unit(unit)

    def __call__(self, point: Point | None) -> list[str | None]:
        return [] if point is None else [self._text(point), point.url]

    def _text(self, point: Point) -> str:
        if point.value is None:
            value = point.missing or "not measured"
        else:
            spread = "" if point.spread is None else f" ± {number(point.spread)}"
            value = f"{number(point.value)}{spread}{self._unit}"
            value += "" if point.n is None or point.n < 2 else f" (n = {point.n})"
        place = ", ".join(filter(None, [_words(name, value) for name, value in point.place.items()]))
        doubt = f"<br>{point.validity}" if point.validity in VERDICTS[1:] else ""
        return f"{place}{'<br>' if place else ''}{self._lead}{value}{doubt}"


@functools.lru_cache(maxsize=MAX_CACHED_VALUES, typed=True)
def _words(name: str, value: Scalar) -> str:
    return escaped(case_text({name: in_use(value)}))


def _cell_text(point: Point | None) -> str:
    return "" if point is None or point.value is None else number(point.value)


def _x_axis(name: str, places: Sequence[Scalar], *, log: bool) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": readable(name)}}
    if not _is_numeric(places):
        return {
            **axis,
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [_label(value) for value in places],
        }
    axis["type"] = "log" if log else "linear"
    if len(places) <= MAX_TICKS:
        axis |= {"tickmode": "array", "tickvals": list(places), "ticktext": [_label(value) for value in places]}
    return axis


def _y_scale(values: Sequence[float], *, log: bool, bars: bool) -> dict[str, Any]:
    if not values:
        return {"type": "linear"}
    if log:
        return {"type": "log", "dtick": "D2" if max(values) / min(values) < 1000 else 1}
    # A bar that does not start at 0 would mislead about the value.
    return {"type": "linear", "rangemode": "tozero" if bars or min(values) >= 0 else "normal"}


def _log_ticks(values: Sequence[float], *, log: bool) -> dict[str, Any]:
    """Return the ticks of a colour bar whose values are logarithms: whole powers of ten and their halves."""
    if not log:
        return {}
    low, high = math.log10(min(values)), math.log10(max(values))
    step = (high - low) / 4
    ticks = [low + step * index for index in range(5)]
    return {"tickvals": ticks, "ticktext": [number(10**tick) for tick in ticks]}


def hover_unit(unit: str | None) -> str:
    """Return the unit behind a number of a hover text."""
    return "" if unit in (None, "", "1") else f" {unit}"


def escaped(text: object) -> str:
    """Return a text as Plotly shows it unchanged: it would interpret markup."""
    return escape(str(text), quote=False)


def _label(value: Scalar) -> str:
    return escaped(value_text(in_use(value)))


def _along(points: Iterable[Point], name: str) -> list[Scalar]:
    return [point.place.get(name) for point in points]


def _ranks(points: Iterable[Point], name: str, values: Sequence[Scalar]) -> list[int]:
    """Return for each point the index of its value among `values`, the list of all values of the coordinate."""
    order = {key: index for index, key in enumerate(_keys(values))}
    return [order[key] for key in _keys(_along(points, name))]


def _distinct(values: Sequence[Scalar]) -> Collection[Scalar]:
    """Return each value once, in the order of first occurrence."""
    return dict(zip(_keys(values), map(in_use, values), strict=True)).values()


def _keys(values: Iterable[Scalar]) -> list[str]:
    return list(map(_key, values))


@functools.lru_cache(maxsize=MAX_CACHED_VALUES, typed=True)
def _key(value: Scalar) -> str:
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


def _is_numeric(values: Collection[Scalar]) -> bool:
    return bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _positive(values: Collection[Any]) -> bool:
    return _is_numeric(values) and min(values) > 0


def _is_wide(values: Collection[Any], ratio: float) -> bool:
    """Return True if the values are positive and span so wide a range that a logarithmic axis shows them better."""
    return _positive(values) and max(values) >= ratio * min(values)
