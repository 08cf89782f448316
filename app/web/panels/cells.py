"""Charts of a job's cases, for kinds that measure a grid of cells or have no panels of their own.

A chart has one metric along one coordinate, with a series for each value of another one. Coordinates that remain split
a metric into several charts, of which the first is open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from app.layout import case_text, in_use
from app.metrics import readable
from app.specs import Scalar
from app.store.results.sheet import Sheet
from app.web.panels._panel import Panel
from app.web.panels._results import JobResults
from app.web.plots import Axes, Figure, Point, axes_of, chart, points_of, varying

MOST_METRICS = 4
"""Metrics that a kind without panels of its own has charts of."""
MOST_CHARTS = 12
"""Most charts of one metric."""


def panels(results: JobResults) -> list[Panel]:
    """Return a chart for each of the first metrics of the kind's default table that have several cases."""
    sheet = results.sheet
    metrics = [name for name in results.table_columns if any(known(measured(sheet, name)))]
    found = []
    for metric in metrics[:MOST_METRICS]:
        points = measured(sheet, metric)
        if len(points) > 1:
            found.append(
                Panel(metric, title(sheet, metric), draw=partial(draw, sheet, metric, points, axes_of(points)))
            )
    return found


@dataclass(frozen=True)
class Lines:
    """How the charts of a grid are drawn: a coordinate along a logarithmic axis, and another that makes lines."""

    x: str
    x_title: str
    series: str


def charts(
    sheet: Sheet, lines: Lines, metric: str, words: str, text: str = "", *, log_y: bool = True, folded: bool = False
) -> list[Panel]:
    """Return the charts of a metric.

    What varies beside the two coordinates splits them, but for what goes with the lines: block sizes that only one
    implementation has.

    Args:
        sheet: The job's cases.
        lines: The coordinates.
        metric: One of its metrics; no charts if it has no value.
        words: The metric's name for people, without its unit.
        text: How to read them.
        log_y: Whether values have a logarithmic axis.
        folded: Whether the first one is closed, too.
    """
    points = measured(sheet, metric)
    if not any(known(points)):
        return []
    if sheet.is_cut:
        text = f"{text} The first {len(points)} cells are drawn; the table has all.".strip()
    x, series, heading = lines.x, lines.series, f"{words} ({unit_of(sheet, metric)})"
    others = [name for name in varying(points) if name not in (x, series)]
    splits = [name for name in others if not goes_with(points, name, series)]
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(split_name(point.place, splits), []).append(point)
    found = []
    for number, (name, group) in enumerate(list(groups.items())[:MOST_CHARTS]):
        by = (series, *(other for other in others if other not in splits and within(group, other, series)))
        found.append(
            Panel(
                metric if number == 0 else f"{metric}-{number + 1}",
                f"{heading}: {name}" if name else heading,
                text=text if number == 0 else "",
                draw=partial(draw_lines, sheet, metric, group, Axes(x=x, by=by), (lines.x_title, heading), log_y=log_y),
                log="x y",
                folded=folded or number > 0,
            )
        )
    return found


def draw(sheet: Sheet, metric: str, points: Sequence[Point], axes: Axes) -> Figure:
    """Draw one chart."""
    return chart(points, axes, metric, unit_of(sheet, metric))


def draw_lines(
    sheet: Sheet, metric: str, points: Sequence[Point], axes: Axes, titles: tuple[str, str], *, log_y: bool
) -> Figure:
    """Draw one chart of lines, with the titles of its axes."""
    figure = chart(points, axes, metric, unit_of(sheet, metric), log_x=True, log_y=log_y)
    for name, title in zip(("xaxis", "yaxis"), titles, strict=True):
        figure["layout"][name]["title"] = {"text": title}
    return figure


def measured(sheet: Sheet, metric: str) -> list[Point]:
    """Return the points of a metric that somebody tried to measure: a copy has no rate of matrix products."""
    if metric not in sheet.names("metric"):
        return []
    return [point for point in points_of(sheet, metric) if point.outcome is not None]


def known(points: Sequence[Point]) -> list[float]:
    """Return the values of those points that have one."""
    return [point.value for point in points if point.value is not None]


def unit_of(sheet: Sheet, metric: str) -> str | None:
    """Return a metric's unit."""
    return next(column.unit for column in sheet.columns if column.name == metric)


def title(sheet: Sheet, metric: str) -> str:
    """Return a metric's name as a heading: "Forward backward (ms)"."""
    return readable(metric, unit_of(sheet, metric))


def split_name(place: Mapping[str, Scalar], splits: Sequence[str]) -> str:
    """Return the words that tell one chart of a metric from the others: "bf16, causal, head_dim=64"."""
    words = []
    for name in splits:
        value = in_use(place.get(name))
        words.append(f"no {name.replace('_', ' ')}" if value is None else case_text({name: value}))
    return ", ".join(words)


def goes_with(points: Sequence[Point], name: str, series: str) -> bool:
    """Return True if a coordinate belongs to some series only, or has one value in each: it splits no chart."""
    values = values_by_series(points, name, series)
    return all(len(found) == 1 for found in values) or any(found == {None} for found in values)


def within(points: Sequence[Point], name: str, series: str) -> bool:
    """Return True if a coordinate has several values in one series, so that it makes series of its own."""
    return any(len(found) > 1 for found in values_by_series(points, name, series))


def values_by_series(points: Sequence[Point], name: str, series: str) -> list[set[Scalar]]:
    """Return the values that a coordinate has in each series."""
    found: dict[Scalar, set[Scalar]] = {}
    for point in points:
        found.setdefault(point.place.get(series), set()).add(point.place.get(name))
    return list(found.values())
