"""What all figures share: colours, legends, the texts of points, and the table of a figure's numbers.

A figure is Plotly's JSON, {"data": [traces], "layout": {…}}. It names no colour of text, grid or ground: the page sets
those by its theme (dark or light), and resolves the colours of series, which are written as CSS variables. `table` has
the numbers of the figure, for those who cannot see it; `note` says what is left out; `empty` says why there is nothing
to draw.

A value that was not measured ("oom", "wrong", …) is never drawn as a number: a line has a cross above its place, a heat
map the outcome's own colour. Cases whose verdict is not valid have open markers.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Protocol

from app.metrics import readable
from app.specs import Scalar
from app.states import VERDICTS
from app.web.plots.points import MAX_CACHED_VALUES, Point
from flopwatch.text.cases import case_text, in_use
from flopwatch.text.numbers import number
from flopwatch.text.values import value_text

Figure = dict[str, Any]
PALETTE = tuple(f"var(--plot-{number})" for number in range(1, 13))
"""Colours of series: the theme's own; the first eight are distinguishable with any colour vision."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "pentagon", "star", "hexagon")
OUTCOMES = {"oom": "#d1495b", "wrong": "#8e44ad", "unsupported": "#8d99a6", "timeout": "#c77f1a", "crashed": "#6b2737"}
"""Colours of outcomes without a number."""
OTHER_OUTCOME = "#5c6770"
LEGEND: Mapping[str, Any] = {"legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}}
"""Where the legend stands: above the plot."""
MAX_TABLE = 2000
"""Largest number of rows of the table of a figure's numbers; /tables has all."""
EMPTY = "No results to plot yet."


class Judged(Protocol):
    """A value with the verdict on its case."""

    @property
    def value(self) -> float | None: ...
    @property
    def validity(self) -> str | None: ...


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


_NUMBERS_OF_A_POINT = ("value", "from", "to", "n", "outcome", "validity")


def table_of(names: Sequence[str], points: Sequence[Point]) -> dict[str, Any]:
    """Return the numbers of a figure's first points, by these coordinates, and how many points there are."""
    rows = [
        [
            *(in_use(point.place.get(name)) for name in names),
            *(point.value, point.low, point.high, point.n, point.outcome, point.validity),
        ]
        for point in points[:MAX_TABLE]
    ]
    return {"columns": [*map(readable, names), *_NUMBERS_OF_A_POINT], "rows": rows, "number": len(points)}


class Hover:
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
            ends = "" if point.low is None or point.high is None else f" ({number(point.low)}–{number(point.high)})"
            spread = ends if point.spread is None else f" ± {number(point.spread)}"
            value = f"{number(point.value)}{spread}{self._unit}"
            value += "" if point.n is None or point.n < 2 else f" (n = {point.n})"
        place = ", ".join(filter(None, [_words(name, value) for name, value in point.place.items()]))
        doubt = f"<br>{point.validity}" if point.validity in VERDICTS[1:] else ""
        return f"{place}{'<br>' if place else ''}{self._lead}{value}{doubt}"


@functools.lru_cache(maxsize=MAX_CACHED_VALUES, typed=True)
def _words(name: str, value: Scalar) -> str:
    return escaped(case_text({name: in_use(value)}))


def hover_unit(unit: str | None) -> str:
    """Return the unit behind a number of a hover text."""
    return "" if unit in (None, "", "1") else f" {unit}"


def escaped(text: object) -> str:
    """Return a text as Plotly shows it unchanged: it would interpret markup."""
    return escape(str(text), quote=False)


def label_of(value: Scalar) -> str:
    """Return a coordinate's value as a tick shows it."""
    return escaped(value_text(in_use(value)))
