"""Lines or bars: a metric along one coordinate, in series by the others."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from app.metrics import readable
from app.specs import Scalar
from app.states import VERDICTS
from app.web.plots.drawing import (
    EMPTY,
    LEGEND,
    OTHER_OUTCOME,
    OUTCOMES,
    PALETTE,
    SYMBOLS,
    Figure,
    Hover,
    escaped,
    label_of,
    legend_of_doubt,
    table_of,
)
from app.web.plots.points import (
    LOG_X_RATIO,
    LOG_Y_RATIO,
    Axes,
    Point,
    is_numeric,
    is_positive,
    is_wide,
    key_of,
    ranks_of,
    values_along,
)
from flopwatch.text.cases import case_text, in_use

DASHES = ("solid", "dash", "dot", "dashdot")
BAR_PATTERNS = ("", "/", "-", ".")
MAX_SERIES = 24
"""Largest number of series of one figure: a longer legend is unreadable."""
MAX_TICKS = 12
"""Largest number of values of an axis that each have a tick."""


def draw_chart(
    points: Sequence[Point],
    axes: Axes,
    metric: str,
    unit: str | None,
    *,
    log_x: bool | None = None,
    log_y: bool | None = None,
) -> Figure:
    """Draw a metric along one coordinate, with the 95 % interval of each median as error bars.

    Numbers along x make lines, everything else bars, or dots where a series has several values at a place. `log_x` and
    `log_y` set the axes; None: logarithmic where values span a wide range. Marks at the top show cases with an outcome
    but no number.
    """
    series = _series(points, axes)
    places = values_along(points, axes.x)
    numeric = is_numeric(places)
    log_x = is_wide(places, LOG_X_RATIO) if log_x is None else log_x and is_positive(places)
    shown = list(series.items())[:MAX_SERIES]
    note = f"Drawn: {len(shown)} of {len(series)} series" if len(shown) < len(series) else ""
    styles = _styles([group[0] for _, group in shown], axes.by)
    traces = [
        _trace(name, group, axes.x, style, lines=numeric) for (name, group), style in zip(shown, styles, strict=True)
    ]
    of_shown = [point for _, group in shown for point in group]
    values = [point.value for point in of_shown if point.value is not None]
    traces += legend_of_doubt(of_shown, lines=numeric)
    # Plotly cannot draw an axis over one that has nothing.
    traces += _outcome_marks(of_shown, axes.x, "y2" if values else "y", numeric=numeric)
    layout = {
        "xaxis": _x_axis(axes.x, places, log=log_x),
        "yaxis": {
            "title": {"text": readable(metric, unit)},
            **_y_scale(
                values,
                log=is_wide(values, LOG_Y_RATIO) if log_y is None else log_y and is_positive(values),
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
    table = table_of(names, [point for _, group in shown for point in group])
    return {"data": traces, "layout": layout, "table": table, "note": note, "empty": EMPTY}


def _series(points: Sequence[Point], axes: Axes) -> dict[str, list[Point]]:
    ranks = {name: ranks_of(points, name, values_along(points, name)) for name in (*axes.by, axes.x)}
    series = zip(*(ranks[name] for name in axes.by), strict=True) if axes.by else [()] * len(points)
    groups: dict[tuple[int, ...], list[tuple[int, Point]]] = {}
    for place, along, point in zip(series, ranks[axes.x], points, strict=True):
        groups.setdefault(place, []).append((along, point))
    named: dict[str, list[Point]] = {}
    for _, group in sorted(groups.items()):  # values of other types may have one name, as 1 and "1"
        named.setdefault(_name(group[0][1], axes.by), []).extend(point for _, point in sorted(group, key=itemgetter(0)))
    return named


def _name(point: Point, by: Sequence[str]) -> str:
    """Return a series' name, made of its values. None and False are written with the coordinate: `not compiled`."""
    words = []
    for name in by:
        value = point.place.get(name)
        words.append(f"no {name.replace('_', ' ')}" if in_use(value) is None else case_text({name: value}))
    return ", ".join(words)


def _styles(firsts: Sequence[Point], by: Sequence[str]) -> list[tuple[int, int]]:
    """Return the numbers of colour and dash of each series, given by its first point. The last coordinate, if it has
    few values, makes the dash, so that the two precisions of one model have one colour."""
    apart = [(index, index // len(PALETTE)) for index in range(len(firsts))]
    last = values_along(firsts, by[-1]) if len(by) > 1 else []
    if not 1 < len(last) <= len(DASHES):
        return apart
    dashes = {key_of(value): index for index, value in enumerate(last)}
    colours: dict[tuple[str, ...], int] = {}
    styles = []
    for point in firsts:
        colour = colours.setdefault(tuple(key_of(point.place.get(name)) for name in by[:-1]), len(colours))
        styles.append((colour, dashes[key_of(point.place.get(by[-1]))]))
    # Beyond the palette's end the colours begin anew: then the dash tells those series apart.
    return styles if len(colours) <= len(PALETTE) else apart


def _error(point: Point) -> tuple[float, float]:
    """Return how far the error bar of a point with a value reaches up and down: no time is drawn below zero."""
    if point.value is None or point.low is None or point.high is None:
        return 0.0, 0.0
    return point.high - point.value, point.value - point.low


def _trace(name: str, points: Sequence[Point], x: str, style: tuple[int, int], *, lines: bool) -> dict[str, Any]:
    measured = [point for point in points if point.value is not None]
    places = [in_use(point.place.get(x)) for point in measured]
    hover = Hover()
    index, dash = style
    color = PALETTE[index % len(PALETTE)]
    doubtful = [point.validity in VERDICTS[1:] for point in measured]
    trace: dict[str, Any] = {
        "name": escaped(name),
        "x": places if lines else [label_of(place) for place in places],
        "y": [point.value for point in measured],
        "customdata": [hover(point) for point in measured],
        "hovertemplate": "%{customdata[0]}<extra></extra>",
    }
    if not name:  # the only series; the legend is for the marks of cells without a number
        trace["showlegend"] = False
    if any(point.low is not None for point in measured):
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
    is_one_each = len(set(places)) == len(places)
    if not lines and is_one_each:  # of bars at one place the tallest would hide the others
        shape = BAR_PATTERNS[dash % len(BAR_PATTERNS)]
        pattern = {"shape": ["x" if doubt else shape for doubt in doubtful]}
        return {**trace, "type": "bar", "marker": {"color": color, "pattern": pattern}}
    symbol = SYMBOLS[index % len(SYMBOLS)]
    # Two values at one place, as of two jobs with the same case, have no line through them.
    mode = "lines+markers" if is_one_each else "markers"
    return {
        **trace,
        "type": "scatter",
        "mode": mode,
        "line": {"color": color, "width": 2, "dash": DASHES[dash % len(DASHES)]},
        "marker": {"color": color, "size": 8, "symbol": [f"{symbol}-open" if doubt else symbol for doubt in doubtful]},
    }


def _outcome_marks(points: Sequence[Point], x: str, axis: str, *, numeric: bool) -> list[dict[str, Any]]:
    """Return a trace for each outcome without a number: crosses along the top of the figure, on an axis from 0 to 1."""
    by_outcome: dict[str, list[Point]] = {}
    for point in points:
        if point.value is None and point.missing is not None:
            by_outcome.setdefault(point.missing, []).append(point)
    hover = Hover()
    traces = []
    for index, (outcome, group) in enumerate(by_outcome.items()):
        places = [in_use(point.place.get(x)) for point in group]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": escaped(outcome),
                "yaxis": axis,
                "x": places if numeric else [label_of(place) for place in places],
                "y": [max(0.97 - 0.05 * index, 0.5)] * len(group),
                "marker": {"symbol": "x", "size": 10, "color": OUTCOMES.get(outcome, OTHER_OUTCOME)},
                "customdata": [hover(point) for point in group],
                "hovertemplate": "%{customdata[0]}<extra></extra>",
                "cliponaxis": False,
            }
        )
    return traces


def _x_axis(name: str, places: Sequence[Scalar], *, log: bool) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": readable(name)}}
    if not is_numeric(places):
        return {
            **axis,
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [label_of(value) for value in places],
        }
    axis["type"] = "log" if log else "linear"
    if len(places) <= MAX_TICKS:
        axis |= {"tickmode": "array", "tickvals": list(places), "ticktext": [label_of(value) for value in places]}
    return axis


def _y_scale(values: Sequence[float], *, log: bool, bars: bool) -> dict[str, Any]:
    if not values:  # the marks of outcomes are on it
        return {"type": "linear", "range": [0, 1], "showticklabels": False, "zeroline": False}
    if log:
        return {"type": "log"}
    # A bar that does not start at 0 would mislead about the value.
    return {"type": "linear", "rangemode": "tozero" if bars or min(values) >= 0 else "normal"}
