"""Figures of results, as Plotly's JSON: {"data": [traces], "layout": {…}}. Pure functions of points; standard library.

A point is one value at its coordinates. `points_of` takes the points of one metric out of any sheet of measurements,
`axes_of` proposes which coordinate goes along which axis, and `chart`, `heat_map`, `distributions` and
`over_steps` draw. A value that was not measured ("oom", "wrong", …) is never drawn as a number: a line has a cross
above its place, a heat map the outcome's own colour. Cases that a verdict doubts have open markers.

Figures name no colour of text, grid or ground: the page sets those by its theme (dark or light), and resolves the
colours of series, which are written as CSS variables. `table` has the numbers of the figure, for those who cannot see
it; `empty` says why there is nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from app.layout import case_text, in_use, number
from app.specs import Scalar
from app.states import VERDICTS
from app.store.results.sheet import Cell, Sheet

Figure = dict[str, Any]

PALETTE = tuple(f"var(--plot-{number})" for number in range(1, 9))
"""Colours of series: the theme's own, which people with any colour vision tell apart."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "pentagon", "star", "hexagon")
DASHES = ("solid", "dash", "dot", "dashdot")
OUTCOMES = {"oom": "#d1495b", "wrong": "#8e44ad", "unsupported": "#8d99a6", "timeout": "#c77f1a", "crashed": "#6b2737"}
"""Colours of outcomes without a number."""
OTHER_OUTCOME = "#5c6770"
SIDES = {"baseline": PALETTE[0], "candidate": PALETTE[1]}
SCALE = "Cividis"
"""Colours of a heat map; readable with any colour vision."""

MAX_SERIES = 24
"""Most series of one figure; a legend with more is a wall."""
MAX_TICKS = 12
"""Most values of an axis that all have a tick of their own."""
MAX_TEXTS = 400
"""Most cells of a heat map whose values are written inside."""
MAX_STRIP = 2000
"""Most samples of one figure that are drawn one by one."""
WIDE = 8.0
"""Ratio of the largest to the least coordinate from which on an axis is logarithmic by itself."""
TALL = 20.0
"""The same of values."""
NOTHING = "Nothing is measured yet that could be drawn."


@dataclass(frozen=True)
class Point:
    """One value of one metric, or its outcome."""

    place: Mapping[str, Scalar]
    """Coordinates."""
    value: float | None
    spread: float | None = None
    """Standard deviation."""
    n: int | None = None
    """Number of samples or processes behind the value."""
    outcome: str | None = "ok"
    """None: not measured."""
    validity: str | None = None
    url: str | None = None
    """Page of the job that measured it."""


@dataclass(frozen=True)
class Axes:
    """Which coordinate a figure has along which axis."""

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
    phase: str | None = None
    warmup: Sequence[float] = field(default=())
    """Values of the steps before measuring started, which no statistic has."""


def points_of(sheet: Sheet, metric: str) -> list[Point]:
    """Return the points of one metric of a sheet; a sheet with a column `job` also gives each point its page.

    Raises:
        KeyError: the sheet has no such metric.
    """
    names = sheet.names()
    if metric not in sheet.names("metric"):
        raise KeyError(metric)
    at, coordinates = names.index(metric), [name for name in sheet.names("coordinate") if name != "job"]
    places = [names.index(name) for name in coordinates]
    verdict = names.index("validity") if "validity" in names else None
    job = names.index("job") if "job" in names else None
    found = []
    for row in sheet.rows:
        cell = row[at]
        if not isinstance(cell, Cell):
            continue
        found.append(
            Point(
                place={name: row[index] for name, index in zip(coordinates, places, strict=True)},
                value=cell.value,
                spread=cell.spread,
                n=cell.n,
                outcome=cell.outcome,
                validity=None if verdict is None else row[verdict],
                url=None if job is None or row[job] is None else f"/ui/jobs/{row[job]}",
            )
        )
    return found


def varying(points: Iterable[Point]) -> dict[str, list[Scalar]]:
    """Return the coordinates that have several values, each with its values in order."""
    seen: dict[str, dict[str, Scalar]] = {}
    for point in points:
        for name, value in point.place.items():
            seen.setdefault(name, {}).setdefault(_key(value), in_use(value))
    return {name: _ordered(values.values()) for name, values in seen.items() if len(values) > 1}


def values_along(points: Iterable[Point], name: str) -> list[Scalar]:
    """Return the values of one coordinate in order."""
    return _ordered({_key(point.place.get(name)): in_use(point.place.get(name)) for point in points}.values())


def axes_of(points: Sequence[Point], x: str | None = None) -> Axes:
    """Return the axes of a chart: `x`, or the numeric coordinate with the most values; all others make series.

    Raises:
        KeyError: `x` is no coordinate that varies.
    """
    values = varying(points)
    if x is not None and x not in values:
        raise KeyError(x)
    if x is None:
        # Of as many values the last coordinate wins: kinds name the one that varies fastest last.
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
    """Draw a metric along one coordinate, with the standard deviation as error bars.

    Numbers along x make lines, everything else bars. `log_x` and `log_y` set the axes; None: logarithmic where values
    span a wide range. Marks at the top stand where a case has an outcome and no number.
    """
    series = _series(points, axes)
    places = values_along(points, axes.x)
    numeric = _is_numeric(places)
    shown = list(series.items())[:MAX_SERIES]
    traces = [_trace(name, group, axes.x, index, lines=numeric) for index, (name, group) in enumerate(shown)]
    traces += _marks([point for _, group in shown for point in group], axes)
    values = [point.value for point in points if point.value is not None]
    layout = {
        "xaxis": _x_axis(axes.x, places, log=_spans(places, WIDE) if log_x is None else log_x and _positive(places)),
        "yaxis": {
            "title": {"text": metric_title(metric, unit)},
            **_y_scale(
                values, log=_spans(values, TALL) if log_y is None else log_y and _positive(values), bars=not numeric
            ),
        },
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
        "barmode": "group",
        "hovermode": "closest",
        "showlegend": len(traces) > 1,
        **_legend(),
    }
    table = {
        "columns": [*map(title_of, axes.by), title_of(axes.x), *_NUMBERS_OF_A_POINT],
        "rows": [
            [*(in_use(point.place.get(name)) for name in (*axes.by, axes.x)), *_numbers(point)]
            for group in series.values()
            for point in group
        ],
    }
    if len(series) > MAX_SERIES:
        layout["annotations"] = [_note(f"The first {MAX_SERIES} of {len(series)} series")]
    return {"data": traces, "layout": layout, "table": table, "empty": NOTHING}


def heat_map(points: Sequence[Point], x: str, y: str, metric: str, unit: str | None) -> Figure:
    """Draw a metric over two coordinates. Where several points share a place, the last one counts.

    Cells without a number have the colour of their outcome, and its word inside.
    """
    columns, rows = values_along(points, x), values_along(points, y)
    at_column, at_row = ({_key(value): index for index, value in enumerate(axis)} for axis in (columns, rows))
    grid: list[list[Point | None]] = [[None] * len(columns) for _ in rows]
    for point in points:
        grid[at_row[_key(point.place.get(y))]][at_column[_key(point.place.get(x))]] = point
    texts = len(columns) * len(rows) <= MAX_TEXTS
    names = {"x": [_label(value) for value in columns], "y": [_label(value) for value in rows]}
    values = [[None if point is None else point.value for point in row] for row in grid]
    known = [value for row in values for value in row if value is not None]
    log = _spans(known, TALL)
    measured: dict[str, Any] = {
        "type": "heatmap",
        "name": metric,
        **names,
        "z": [[None if value is None else math.log10(value) if log else value for value in row] for row in values],
        "customdata": [[_hover(point, metric, unit) for point in row] for row in grid],
        "hovertemplate": "%{customdata}<extra></extra>",
        "hoverongaps": False,
        "colorscale": SCALE,
        "colorbar": {"title": {"text": metric_title(metric, unit)}, "thickness": 14, **_log_ticks(known, log=log)},
        "xgap": 1,
        "ygap": 1,
    }
    if texts:
        measured |= {"text": [[_written(point) for point in row] for row in grid], "texttemplate": "%{text}"}
    layout = {
        "xaxis": {"type": "category", "title": {"text": title_of(x)}},
        "yaxis": {"type": "category", "title": {"text": title_of(y)}},
        "hovermode": "closest",
    }
    table = {
        "columns": [title_of(x), title_of(y), *_NUMBERS_OF_A_POINT],
        "rows": [
            [in_use(point.place.get(x)), in_use(point.place.get(y)), *_numbers(point)]
            for row in grid
            for point in row
            if point is not None
        ],
    }
    traces = [measured, *_outcome_cells(grid, names, texts=texts)] if points else []
    return {"data": traces, "layout": layout, "table": table, "empty": NOTHING}


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
                "hovertemplate": f"%{{x}}: %{{y:.5g}}{_unit(unit)}<extra>{_plain(side)}</extra>",
            }
        )
    layout = {
        "boxmode": "group",
        "xaxis": {"type": "category", "title": {"text": ""}},
        "yaxis": {"title": {"text": metric_title(metric, unit)}},
        **_legend(),
    }
    return {"data": traces, "layout": layout}


def over_steps(groups: Sequence[Samples], metric: str, unit: str | None) -> Figure:
    """Draw samples over the index of their step, so that a warm-up that was too short and a drift are seen at once.

    Steps of the warm-up have negative indexes and open markers.
    """
    traces = []
    for index, group in enumerate(groups[:MAX_SERIES]):
        color = PALETTE[index % len(PALETTE)]
        name = ", ".join(filter(None, (group.side, group.case, group.phase)))
        for values, start, symbol in ((group.warmup, -len(group.warmup), "circle-open"), (group.values, 0, "circle")):
            if not values:
                continue
            steps = list(range(start, start + len(values)))
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers" if len(values) <= MAX_STRIP else "lines",
                    "name": name if symbol == "circle" else f"{name}, warm-up",
                    "legendgroup": name,
                    "x": steps,
                    "y": list(values),
                    "line": {"width": 1, "color": color},
                    "marker": {"size": 5, "symbol": symbol, "color": color},
                    "hovertemplate": f"step %{{x}}: %{{y:.5g}}{_unit(unit)}<extra>{_plain(name)}</extra>",
                }
            )
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": metric_title(metric, unit)}, "rangemode": "tozero"},
        "hovermode": "closest",
        "showlegend": len(traces) > 1,
        **_legend(),
    }
    return {"data": traces, "layout": layout}


SUFFIXES = {"ms": "_ms", "MiB": "_mib", "us": "_us", "µs": "_us", "%": "_percent", "s": "_s", "GB/s": "_gb_per_s"}
"""How names of metrics end when they tell their unit."""


def metric_title(metric: str, unit: str | None) -> str:
    """Return a metric's name for an axis, with its unit in brackets: "step (ms)", "peak memory (MiB)"."""
    if unit in (None, "", "1"):
        return title_of(metric)
    name = metric.removesuffix(SUFFIXES.get(unit, ""))
    words = title_of(name or metric)
    return words if words.replace(" per ", "/") == unit else f"{words} ({unit})"


def title_of(coordinate: str) -> str:
    """Return a coordinate's name in words: "context length"."""
    return coordinate.replace("_", " ")


def _series(points: Sequence[Point], axes: Axes) -> dict[str, list[Point]]:
    """Return the points of each series, in order of its values, by its name."""
    order = {
        name: {_key(value): at for at, value in enumerate(values_along(points, name))} for name in (*axes.by, axes.x)
    }

    def rank(point: Point, name: str) -> int:
        return order[name][_key(point.place.get(name))]

    groups: dict[tuple[int, ...], list[Point]] = {}
    for point in points:
        groups.setdefault(tuple(rank(point, name) for name in axes.by), []).append(point)
    return {
        _name(group[0], axes.by): sorted(group, key=lambda point: rank(point, axes.x))
        for _, group in sorted(groups.items())
    }


def _name(point: Point, by: Sequence[str]) -> str:
    """Return a series' name: its values. None and False are told by name, as `not compiled` differs from `compiled`."""
    words = []
    for name in by:
        value = point.place.get(name)
        words.append(f"no {title_of(name)}" if in_use(value) is None else case_text({name: value}))
    return ", ".join(words)


def _trace(name: str, points: Sequence[Point], x: str, index: int, *, lines: bool) -> dict[str, Any]:
    measured = [point for point in points if point.value is not None]
    places = [in_use(point.place.get(x)) for point in measured]
    color = PALETTE[index % len(PALETTE)]
    doubtful = [point.validity in VERDICTS[1:] for point in measured]
    trace: dict[str, Any] = {
        "name": _plain(name),
        "x": places if lines else [_label(place) for place in places],
        "y": [point.value for point in measured],
        "customdata": [[_hover(point), point.url] for point in measured],
        "hovertemplate": "%{customdata[0]}<extra></extra>",
    }
    if any(point.spread for point in measured):
        spreads = [point.spread or 0.0 for point in measured]
        trace["error_y"] = {"type": "data", "array": spreads, "thickness": 1.2, "width": 4}
    if not lines:
        pattern = {"shape": ["/" if doubt else "" for doubt in doubtful]}
        return {**trace, "type": "bar", "marker": {"color": color, "pattern": pattern}}
    symbol = SYMBOLS[index % len(SYMBOLS)]
    # Two values at one place, as of two jobs with the same case, have no line through them.
    mode = "lines+markers" if len(set(places)) == len(places) else "markers"
    return {
        **trace,
        "type": "scatter",
        "mode": mode,
        "line": {"color": color, "width": 2, "dash": DASHES[index // len(PALETTE) % len(DASHES)]},
        "marker": {"color": color, "size": 8, "symbol": [f"{symbol}-open" if doubt else symbol for doubt in doubtful]},
    }


def _marks(points: Sequence[Point], axes: Axes) -> list[dict[str, Any]]:
    """Return a trace for each outcome without a number: crosses along the top of the figure."""
    found: dict[str, list[Point]] = {}
    for point in points:
        if point.value is None and point.outcome is not None:
            found.setdefault("unknown" if point.outcome == "ok" else point.outcome, []).append(point)
    numeric = _is_numeric([in_use(point.place.get(axes.x)) for point in points])
    traces = []
    for index, (outcome, group) in enumerate(found.items()):
        places = [in_use(point.place.get(axes.x)) for point in group]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": _plain(outcome),
                "yaxis": "y2",
                "x": places if numeric else [_label(place) for place in places],
                "y": [max(0.97 - 0.05 * index, 0.5)] * len(group),
                "marker": {"symbol": "x", "size": 10, "color": OUTCOMES.get(outcome, OTHER_OUTCOME)},
                "customdata": [[_hover(point), point.url] for point in group],
                "hovertemplate": "%{customdata[0]}<extra></extra>",
                "cliponaxis": False,
            }
        )
    return traces


def _outcome_cells(
    grid: Sequence[Sequence[Point | None]], names: Mapping[str, list[str]], *, texts: bool
) -> list[dict[str, Any]]:
    """Return a trace for each outcome without a number, with its cells in its colour."""
    outcomes = dict.fromkeys(
        "unknown" if point.outcome == "ok" else point.outcome
        for row in grid
        for point in row
        if point is not None and point.value is None and point.outcome is not None
    )
    traces = []
    for outcome in outcomes:
        color = OUTCOMES.get(outcome, OTHER_OUTCOME)

        def is_here(point: Point | None, outcome: str = outcome) -> bool:
            return (
                point is not None
                and point.value is None
                and (outcome == ("unknown" if point.outcome == "ok" else point.outcome))
            )

        trace: dict[str, Any] = {
            "type": "heatmap",
            "name": _plain(outcome),
            **names,
            "z": [[1 if is_here(point) else None for point in row] for row in grid],
            "customdata": [[_hover(point) if is_here(point) else "" for point in row] for row in grid],
            "hovertemplate": "%{customdata}<extra></extra>",
            "hoverongaps": False,
            "colorscale": [[0, color], [1, color]],
            "showscale": False,
            "xgap": 1,
            "ygap": 1,
        }
        if texts:
            trace |= {"text": [[outcome if is_here(point) else "" for point in row] for row in grid]}
            trace |= {"texttemplate": "%{text}", "textfont": {"color": "#ffffff"}}
        traces.append(trace)
    return traces


_NUMBERS_OF_A_POINT = ("value", "standard deviation", "n", "outcome", "validity")


def _numbers(point: Point) -> Sequence[Scalar]:
    return [point.value, point.spread, point.n, point.outcome, point.validity]


def _hover(point: Point | None, metric: str | None = None, unit: str | None = None) -> str:
    """Return the lines that a point shows when somebody points at it."""
    if point is None:
        return ""
    place = _plain(case_text({name: in_use(value) for name, value in point.place.items()}))
    if point.value is None:
        told = "unknown" if point.outcome == "ok" else point.outcome or "not measured"
    else:
        told = number(point.value) + ("" if point.spread is None else f" ± {number(point.spread)}") + _unit(unit)
        told += "" if point.n is None or point.n < 2 else f" (n = {point.n})"
    lines = [place, f"{title_of(metric)}: {told}" if metric else told]
    if point.validity in VERDICTS[1:]:
        lines.append(str(point.validity))
    return "<br>".join(line for line in lines if line)


def _written(point: Point | None) -> str:
    return "" if point is None or point.value is None else number(point.value)


def _x_axis(name: str, places: Sequence[Scalar], *, log: bool) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": title_of(name)}}
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
    # A bar that does not start at 0 lies about its length.
    return {"type": "linear", "rangemode": "tozero" if bars or min(values) >= 0 else "normal"}


def _log_ticks(values: Sequence[float], *, log: bool) -> dict[str, Any]:
    """Return the ticks of a colour bar whose values are logarithms: whole powers of ten and their halves."""
    if not log:
        return {}
    low, high = math.log10(min(values)), math.log10(max(values))
    step = (high - low) / 4
    ticks = [low + step * index for index in range(5)]
    return {"tickvals": ticks, "ticktext": [number(10**tick) for tick in ticks]}


def _legend() -> dict[str, Any]:
    return {"legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}}


def _note(text: str) -> dict[str, Any]:
    return {"text": text, "xref": "paper", "yref": "paper", "x": 1, "y": 0, "showarrow": False}


def _unit(unit: str | None) -> str:
    return "" if unit in (None, "", "1") else f" {unit}"


def _plain(text: str) -> str:
    """Escape what Plotly would take for markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _label(value: Scalar) -> str:
    value = in_use(value)
    if value is None:
        return "none"
    return _plain("true" if value is True else str(value))


def _key(value: Scalar) -> str:
    # Python takes 1 and True for equal.
    return repr(in_use(value))


def _ordered(values: Iterable[Scalar]) -> list[Scalar]:
    """Return numbers in their order, and texts in that in which they came: `tiny` comes before `small`."""
    found = list(values)
    numbers = [value for value in found if isinstance(value, int | float) and not isinstance(value, bool)]
    others = [value for value in found if value is not None]
    if len(numbers) != len(others):
        return found
    return [None] * (len(found) - len(numbers)) + sorted(numbers)


def _is_numeric(values: Collection[Scalar]) -> bool:
    return bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _positive(values: Collection[Any]) -> bool:
    return _is_numeric(values) and min(values) > 0


def _spans(values: Collection[Any], ratio: float) -> bool:
    """Return True if the values are positive and span so wide a range that a logarithmic axis shows them better."""
    return _positive(values) and max(values) >= ratio * min(values)
