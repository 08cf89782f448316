"""Charts of a job's cases, for kinds that measure a grid of cells or have no panels of their own.

A chart has one metric along one coordinate, with a series for each value of another one. The remaining coordinates
split a metric into several charts, of which the first is open. A chart draws all cells, even ten thousand.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from app.metrics import readable
from app.results.sheet import Sheet
from app.specs import Scalar
from app.web.panels._panel import Panel
from app.web.panels._results import JobResults
from app.web.plots.chart import draw_chart
from app.web.plots.drawing import Figure
from app.web.plots.points import Axes, Point, axes_of, points_of
from flopwatch.text.cases import case_text

Place = Mapping[str, Scalar]

MAX_METRICS = 4
"""Largest number of charts for a kind without panels of its own."""
MAX_CHARTS = 24


def panels(results: JobResults) -> Iterator[Panel]:
    """Yield a chart for each of the first metrics of the kind's default table that have several cases."""
    metrics = [name for name in results.table_columns if known(measured(results.sheet, name))]
    for metric in metrics[:MAX_METRICS]:
        sheet = results.metric(metric)
        points = measured(sheet, metric)
        if len(points) > 1:
            yield Panel(metric, title(sheet, metric), draw=partial(draw, sheet, metric, points, axes_of(points)))


@dataclass(frozen=True)
class Lines:
    """The layout of a grid's charts: a coordinate along a logarithmic axis, and another that makes lines."""

    x: str
    x_title: str
    series: str
    of_series: tuple[str, ...] = ()
    """Coordinates that only some series have, such as block sizes: their values make lines, too."""


def charts(
    results: JobResults,
    lines: Lines,
    metric: str,
    words: str,
    text: str = "",
    *,
    log_y: bool = True,
    folded: bool = False,
) -> list[Panel]:
    """Return the panel of a metric, with a chart for each combination of the coordinates that vary besides the lines;
    none if it has no value. Charts are derived from the job's spec, so that ten thousand cells are read only when a
    plot is drawn. `words`: the metric's name for people, without its unit; `text`: how to read it."""
    sheet = results.sheet
    if metric not in sheet.names("metric") or not (sheet.is_cut or known(measured(sheet, metric))):
        return []
    grid = {name: values for name, values in results.grid.items() if len(values) > 1}
    by = (lines.series, *(name for name in lines.of_series if name in grid))
    splits = [name for name in grid if name not in (lines.x, *by)]
    places = [dict(zip(splits, values, strict=True)) for values in product(*(grid[name] for name in splits))]
    heading = f"{words} ({unit_of(sheet, metric)})"
    axes, titles = Axes(x=lines.x, by=by), (lines.x_title, heading)
    panels = [
        Panel(
            metric if number == 0 else f"{metric}-{number + 1}",
            f"{heading}: {split_name(place)}" if place else heading,
            draw=partial(draw_lines, results, metric, place, axes, titles, log_y=log_y),
            log="x y",
            folded=folded or number > 0,
        )
        for number, place in enumerate(places[:MAX_CHARTS])
    ]
    if len(places) > len(panels):
        text = f"{text} The first {len(panels)} of {len(places)} charts; the table has all cells.".strip()
    return [replace(panels[0], text=text, more=panels[1:])]


def draw(sheet: Sheet, metric: str, points: Sequence[Point], axes: Axes) -> Figure:
    return draw_chart(points, axes, metric, unit_of(sheet, metric))


def draw_lines(
    results: JobResults, metric: str, place: Place, axes: Axes, titles: tuple[str, str], *, log_y: bool
) -> Figure:
    """Draw one chart of lines, of the cells at `place`, with the titles of its axes; bars if x has one value only."""
    sheet = results.metric(metric)
    points = [
        point
        for point in measured(sheet, metric)
        if all(point.place.get(name) == value for name, value in place.items())
    ]
    unit = unit_of(sheet, metric)
    first, *others = axes.by
    if len({point.place.get(axes.x) for point in points}) == 1 < len({point.place.get(first) for point in points}):
        figure, titles = draw_chart(points, Axes(first, tuple(others)), metric, unit), (readable(first), titles[1])
    else:
        figure = draw_chart(points, axes, metric, unit, log_x=True, log_y=log_y)
    for axis, title in zip(("xaxis", "yaxis"), titles, strict=True):
        figure["layout"][axis]["title"] = {"text": title}
    return figure


def measured(sheet: Sheet, metric: str) -> list[Point]:
    """Return the points of a metric that apply to their cell: a copy, for example, has no rate of matrix products."""
    if metric not in sheet.names("metric"):
        return []
    return [point for point in points_of(sheet, metric) if point.outcome is not None]


def known(points: Sequence[Point]) -> list[float]:
    return [point.value for point in points if point.value is not None]


def unit_of(sheet: Sheet, metric: str) -> str | None:
    return next(column.unit for column in sheet.columns if column.name == metric)


def title(sheet: Sheet, metric: str) -> str:
    """Return a metric's name as a heading: "Forward backward (ms)"."""
    return readable(metric, unit_of(sheet, metric))


def split_name(place: Place) -> str:
    """Return the words that distinguish one chart of a metric from the others: "bf16, causal, head_dim=64"."""
    words = []
    for name, value in place.items():
        words.append(f"not {name.replace('_', ' ')}" if value is False else case_text({name: value}))
    return ", ".join(words)
