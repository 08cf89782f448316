"""A heat map: a metric over two coordinates."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from app.metrics import readable
from app.results.footnotes import DAGGER
from app.states import VERDICTS
from app.web.plots.drawing import EMPTY, LEGEND, OTHER_OUTCOME, OUTCOMES, Figure, Hover, escaped, label_of, table_of
from app.web.plots.points import LOG_Y_RATIO, Point, is_wide, ranks_of, values_along
from flopwatch.text.numbers import number

SCALE = "Cividis"
"""Colours of a heat map; readable with any colour vision."""
MAX_TEXTS = 400
"""Largest number of cells of a heat map with their values inside."""


def draw_heat_map(
    points: Sequence[Point], x: str, y: str, metric: str, unit: str | None, among: Sequence[Point] | None = None
) -> Figure:
    """Draw a metric over two coordinates. Where several points share a place, the last one counts, and `note` says so.

    `among`: all points of the maps beside this one, so that one colour means one value in all of them.

    Cells without a number have the colour of their outcome, and its word inside.
    """
    columns, rows = values_along(points, x), values_along(points, y)
    grid: list[list[Point | None]] = [[None] * len(columns) for _ in rows]
    for row, column, point in zip(ranks_of(points, y, rows), ranks_of(points, x, columns), points, strict=True):
        grid[row][column] = point
    placed = [point for row in grid for point in row if point is not None]
    hidden = len(points) - len(placed)
    note = f"Not drawn: {hidden} of {len(points)} cases, whose place a later one has" if hidden else ""
    table = table_of((x, y), placed)
    texts = len(columns) * len(rows) <= MAX_TEXTS
    names = {"x": [label_of(value) for value in columns], "y": [label_of(value) for value in rows]}
    values = [[None if point is None else point.value for point in row] for row in grid]
    known = [point.value for point in (points if among is None else among) if point.value is not None]
    log = is_wide(known, LOG_Y_RATIO)
    ends = [math.log10(end) if log else end for end in (min(known), max(known))] if known else [0, 1]
    hover = Hover(metric, unit)
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
        "colorbar": {
            "title": {"text": readable(metric, unit), "side": "right"},
            "xpad": 24,
            "thickness": 14,
            **_log_ticks(known, log=log),
        },
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
    traces = [measured, *_outcome_cells(grid, names, texts=texts)] if points else []
    return {"data": traces, "layout": layout, "table": table, "note": note, "empty": EMPTY}


def _outcome_cells(
    grid: Sequence[Sequence[Point | None]], names: Mapping[str, list[str]], *, texts: bool
) -> list[dict[str, Any]]:
    missing = [[None if point is None or point.value is not None else point.missing for point in row] for row in grid]
    traces = []
    hover = Hover()
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


def _cell_text(point: Point | None) -> str:
    if point is None or point.value is None:
        return ""
    return f"{number(point.value)} {DAGGER}" if point.validity in VERDICTS[1:] else number(point.value)


def _log_ticks(values: Sequence[float], *, log: bool) -> dict[str, Any]:
    """Return the ticks of a colour bar whose values are logarithms: whole powers of ten and their halves."""
    if not log:
        return {}
    low, high = math.log10(min(values)), math.log10(max(values))
    step = (high - low) / 4
    ticks = [low + step * index for index in range(5)]
    return {"tickvals": ticks, "ticktext": [number(10**tick) for tick in ticks]}
