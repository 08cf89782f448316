"""Draws figures as SVG, for pages that leave the server: viewing them needs no script, no font and no network.

The figures are those of plots.py and of the panels, in Plotly's form. This draws the kinds of traces that they use:
scatter (lines, markers, error bars, stacked areas, filled outlines), bar, box and heat map, on linear, logarithmic and
category axes, which may run downwards. Unknown kinds of traces are named below the plot. Colours are CSS variables of
the surrounding page.
"""

from __future__ import annotations

import html
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Figure = Mapping[str, Any]
Trace = Mapping[str, Any]

WIDTH, HEIGHT = 860, 380
LEFT, RIGHT, TOP, BOTTOM = 78, 24, 16, 56
LEGEND_ROW, LETTER = 20, 6.6
"""Height of a row of the legend, and about the width of a letter of 12 px."""
MAX_CATEGORY_LABEL = 22
ROW = 24
LINE = 14
"""Least height of a row with a name, and what each further line of the name adds."""
MAX_MARKERS = 400
"""Of more points, those on a line are drawn without markers."""
KNOWN = ("scatter", "bar", "box", "heatmap")
DASHES = {"dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}
CIVIDIS = ("#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838")
"""Ten steps of the colour map of that name, by Nuñez, Anderton and Renslow (2018)."""


def drawn(figure: Figure, title: str) -> str:
    """Return a figure as an `svg` element, or a sentence where there is nothing to draw.

    Args:
        figure: {"data": traces, "layout": …}.
        title: what it shows, for those who cannot see it.
    """
    traces = [trace for trace in figure.get("data", ()) if trace.get("type", "scatter") in KNOWN]
    if not any(_has_points(trace) for trace in traces):
        return f"<p>{html.escape(str(figure.get('empty') or 'There is nothing to draw.'))}</p>"
    plot = _Plot.of(traces, figure.get("layout", {}))
    parts = [*plot.axes(), *plot.shapes(), *plot.annotations()]
    for trace in traces:
        parts += _DRAW[trace.get("type", "scatter")](plot, trace)
    parts += plot.legend()
    body = "\n".join(parts)
    left_out = sorted({str(trace.get("type")) for trace in figure.get("data", ())} - {*KNOWN, "None"})
    told = [figure.get("note"), f"Not drawn here: {', '.join(left_out)}" if left_out else None]
    below = "".join(f"<p>{html.escape(text)}.</p>" for text in told if text)
    return (
        f'<svg viewBox="0 0 {WIDTH} {plot.height}" role="img" aria-label="{html.escape(title)}" class="plot">\n'
        f"{body}\n</svg>{below}"
    )


def _has_points(trace: Trace) -> bool:
    return bool(trace.get("z") if trace.get("type") == "heatmap" else trace.get("x") or trace.get("y"))


@dataclass
class _Axis:
    """One axis: from values to pixels."""

    type: str
    low: float
    high: float
    """The range of values, of their logarithms, or of the numbers of categories; `high` is the lower one where values
    fall along the axis."""
    start: float
    end: float
    """The pixels of the range's ends."""
    categories: Sequence[str] = ()
    title: str = ""
    given: Sequence[tuple[Any, str]] = ()
    """Ticks that the figure names: value and text."""

    def at(self, value: Any) -> float | None:
        """Return the pixel of a value; None if it has no place on this axis."""
        if value is None:
            return None
        if self.type == "category":
            text = _text(value)
            if text not in self.categories:
                return None
            number = self.categories.index(text) + 0.5
        elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
        elif self.type == "log":
            if value <= 0:
                return None
            number = math.log10(value)
        else:
            number = float(value)
        share = (number - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    @property
    def step(self) -> float:
        """The width of a category in pixels."""
        return abs(self.end - self.start) / max(len(self.categories), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Return pixel and text of each tick."""
        names: list[tuple[Any, str]]
        if self.type == "category":
            most = max(MAX_CATEGORY_LABEL, int(self.step / LETTER))
            names = [(name, "\n".join(_cut(line, most) for line in name.split("\n"))) for name in self.categories]
        elif self.given:
            names = [(value, _cut(text)) for value, text in self.given]
        elif self.type == "log":
            names = [(value, _number(value)) for value in _log_ticks(*sorted((self.low, self.high)))]
        else:
            names = [(value, _number(value)) for value in _linear_ticks(*sorted((self.low, self.high)))]
        found = [(self.at(value), text) for value, text in names]
        low, high = min(self.start, self.end), max(self.start, self.end)
        return [(at, text) for at, text in found if at is not None and low - 0.5 <= at <= high + 0.5]


def _linear_ticks(low: float, high: float) -> list[float]:
    size = 10 ** math.floor(math.log10((high - low) / 5))
    step = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= 7)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    factors = (1, 2, 5) if high - low < 3 else (1,)
    every = max(1, math.ceil((high - low) / 8))
    powers = range(math.floor(low), math.ceil(high) + 1)
    return [factor * 10.0**power for power in powers if power % every == 0 for factor in factors]


def _number(value: float) -> str:
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:.3g}"


@dataclass
class _Plot:
    """The place where traces are drawn."""

    traces: Sequence[Trace]
    layout: Mapping[str, Any]
    x: _Axis
    y: _Axis
    above: _Axis
    """An axis from 0 to 1 over the whole height, for marks without a value."""
    height: float
    top: float
    rows: Sequence[Sequence[tuple[str, Trace]]]
    """The legend."""
    stacked: dict[Any, float] = field(default_factory=dict)
    """The present height of stacked bars or areas, at each place."""

    @classmethod
    def of(cls, traces: Sequence[Trace], layout: Mapping[str, Any]) -> _Plot:
        rows = _legend_rows(traces, layout)
        has_colours = any(_is_measured_heat_map(trace) for trace in traces)
        # Names of rows need room beside the plot and below each other.
        is_category = _is_category(traces, layout, "y")
        names = _categories(traces, layout, "y") if is_category else [text for _, text in _given(layout, "y")]
        lines = [name.split("\n") for name in names]
        longest = max((len(line) for several in lines for line in several), default=0)
        left = LEFT + (min(longest, MAX_CATEGORY_LABEL) * LETTER - 30 if names else 0)
        top = TOP + LEGEND_ROW * (max(len(rows), int(has_colours)) + int(_has_names_above(layout)))
        # Few rows of names need no more height than the figure has on a page.
        usual = min(HEIGHT, layout.get("height", HEIGHT)) if names else HEIGHT
        row = ROW + LINE * (max(map(len, lines), default=1) - 1)
        height = top + max(usual - TOP - BOTTOM, row * len(names)) + BOTTOM
        bottom = height - BOTTOM
        x = _axis(traces, layout, "x", left, WIDTH - RIGHT)
        y = _axis(traces, layout, "y", bottom, top)
        above = _Axis("linear", 0, 1, bottom, top)
        return cls(traces, layout, x, y, above, height, top, rows)

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM

    def y_of(self, trace: Trace) -> _Axis:
        """The vertical axis of a trace."""
        return self.above if trace.get("yaxis") == "y2" else self.y

    def axes(self) -> list[str]:
        """Draw axes, ticks and titles."""
        parts = []
        left, right = self.x.start, self.x.end
        has_grid = self.y.type != "category" and self.layout.get("yaxis", {}).get("showgrid", True)
        for at, text in self.y.ticks():
            if has_grid:
                parts.append(_line(left, at, right, at, "grid"))
            lines = text.split("\n")
            first = at + 4 - LINE * (len(lines) - 1) / 2
            parts += [_words(left - 8, first + LINE * number, line, "end") for number, line in enumerate(lines)]
        ticks = self.x.ticks()
        crowded = sum(len(text) for _, text in ticks) * LETTER > (right - left) * 0.95
        for at, text in ticks:
            parts.append(_line(at, self.bottom, at, self.bottom + 4, "axis"))
            turned = f' transform="rotate(-25 {at:.1f} {self.bottom + 16:.1f})"' if crowded else ""
            parts.append(_words(at, self.bottom + 18, text, "end" if crowded else "middle", turned))
        parts += [
            _line(left, self.bottom, right, self.bottom, "axis"),
            _line(left, self.top, left, self.bottom, "axis"),
        ]
        if self.x.title:
            parts.append(_words((left + right) / 2, self.height - 8, self.x.title, "middle"))
        if self.y.title:
            middle = (self.top + self.bottom) / 2
            parts.append(_words(14, middle, self.y.title, "middle", f' transform="rotate(-90 14 {middle:.1f})"'))
        return parts

    def shapes(self) -> list[str]:
        """Draw lines through the whole plot."""
        parts = []
        for shape in self.layout.get("shapes", ()):
            if shape.get("type") != "line":
                continue
            vertical, horizontal = shape.get("yref") == "paper", shape.get("xref") == "paper"
            x0, x1 = (self.x.start, self.x.end) if horizontal else (self.x.at(shape.get("x0")), self.x.at(shape["x1"]))
            y0, y1 = (self.bottom, self.top) if vertical else (self.y.at(shape.get("y0")), self.y.at(shape["y1"]))
            if x0 is not None and x1 is not None and y0 is not None and y1 is not None:
                parts.append(_line(x0, y0, x1, y1, "axis", _stroke(shape.get("line", {}))))
        return parts

    def annotations(self) -> list[str]:
        """Write names into the plot, and above it."""
        parts = []
        for told in self.layout.get("annotations", ()):
            x = self.x.at(told.get("x"))
            up = float(told.get("y", 0)) if told.get("yref") == "paper" else None
            y = self.y.at(told.get("y")) if up is None else self.bottom - up * (self.bottom - self.top)
            if x is not None and y is not None:
                is_above = told.get("yanchor") == "bottom" or not up
                parts.append(_words(x, y - 4 if is_above else y + 12, _text(told["text"]), "start"))
        return parts

    def legend(self) -> list[str]:
        """Draw the legend above the plot."""
        parts = []
        for row, entries in enumerate(self.rows):
            at, y = self.x.start, TOP + LEGEND_ROW * row
            for name, trace in entries:
                if trace.get("line", {}).get("dash") and "lines" in trace.get("mode", ""):
                    # As a style, since a page's CSS rules for all lines would override an attribute.
                    style = f'{_stroke({**trace["line"], "width": 2.5})} style="stroke: {_color(trace)}"'
                    parts.append(_line(at - 6, y - 2, at + 13, y - 2, "key", style))
                else:
                    parts.append(_rect(at, y - 8, 11, 11, f' rx="2" fill="{_color(trace)}"'))
                parts.append(_words(at + 17, y + 2, name, "start"))
                at += _legend_width(name)
        return parts


def _legend_width(name: str) -> float:
    return 17 + len(name) * LETTER + 16


def _legend_rows(traces: Sequence[Trace], layout: Mapping[str, Any]) -> list[list[tuple[str, Trace]]]:
    entries: dict[str, Trace] = {}
    for trace in traces:
        if trace.get("name") and trace.get("showlegend", True) and not _is_measured_heat_map(trace):
            entries.setdefault(_text(trace["name"]), trace)
    if not layout.get("showlegend", True) or len(entries) < (1 if any(t["type"] == "heatmap" for t in traces) else 2):
        return []
    rows: list[list[tuple[str, Trace]]] = [[]]
    room = float(WIDTH - LEFT - RIGHT)
    for name, trace in entries.items():
        shown = _cut(name, 60)
        if rows[-1] and room < _legend_width(shown):
            rows.append([])
            room = float(WIDTH - LEFT - RIGHT)
        rows[-1].append((shown, trace))
        room -= _legend_width(shown)
    return rows


def _is_measured_heat_map(trace: Trace) -> bool:
    return trace.get("type") == "heatmap" and isinstance(trace.get("colorscale"), str)


def _values(traces: Iterable[Trace], letter: str) -> list[Any]:
    """Return all values along an axis, without those of marks that have an axis of their own."""
    found: list[Any] = []
    for trace in traces:
        if letter == "y" and trace.get("yaxis") == "y2":
            continue
        found += trace.get(letter) or ()
    return found


def _is_category(traces: Sequence[Trace], layout: Mapping[str, Any], letter: str) -> bool:
    type_ = layout.get(f"{letter}axis", {}).get("type")
    if type_ in ("category", "linear", "log"):
        return bool(type_ == "category")
    return any(isinstance(value, str) for value in _values(traces, letter))


def _categories(traces: Sequence[Trace], layout: Mapping[str, Any], letter: str) -> list[str]:
    given = layout.get(f"{letter}axis", {}).get("categoryarray", ())
    return list(dict.fromkeys(_text(value) for value in (*given, *_values(traces, letter)) if value is not None))


def _given(layout: Mapping[str, Any], letter: str) -> list[tuple[Any, str]]:
    """Return the ticks that the figure names."""
    described = layout.get(f"{letter}axis", {})
    return list(zip(described.get("tickvals", ()), map(_text, described.get("ticktext", ())), strict=False))


def _has_names_above(layout: Mapping[str, Any]) -> bool:
    return any(told.get("yanchor") == "bottom" and told.get("y") == 1 for told in layout.get("annotations", ()))


def _axis(traces: Sequence[Trace], layout: Mapping[str, Any], letter: str, start: float, end: float) -> _Axis:
    described = layout.get(f"{letter}axis", {})
    title = _text(described.get("title", {}).get("text", ""))
    falls = described.get("autorange") == "reversed"
    if _is_category(traces, layout, letter):
        names = _categories(traces, layout, letter)
        low, high = 0.0, float(max(len(names), 1))
        return _Axis("category", *_turned(low, high, falls), start, end, names, title)
    log = described.get("type") == "log"
    low, high = _range(traces, layout, letter, log=log)
    return _Axis("log" if log else "linear", *_turned(low, high, falls), start, end, (), title, _given(layout, letter))


def _turned(low: float, high: float, falls: bool) -> tuple[float, float]:
    return (high, low) if falls else (low, high)


def _range(traces: Sequence[Trace], layout: Mapping[str, Any], letter: str, *, log: bool) -> tuple[float, float]:
    """Return both ends of an axis: those that the figure names, or room for all values. The first may be the higher."""
    described = layout.get(f"{letter}axis", {})
    given: Sequence[float] = described.get("range") or ()
    if len(given) == 2 and given[0] != given[1]:
        return float(given[0]), float(given[1])  # of a logarithmic axis they are logarithms, as in Plotly
    numbers = [value for value in _extents(traces, layout, letter) if isinstance(value, int | float)]
    numbers = [float(value) for value in numbers if math.isfinite(value) and (value > 0 or not log)]
    low, high = min(numbers, default=1.0), max(numbers, default=1.0)
    if log:
        low, high = math.log10(low), math.log10(high)
        margin = max((high - low) * 0.06, 0.05)
        return low - margin, high + margin
    if described.get("rangemode") == "tozero" or _starts_at_zero(traces, letter):
        low, high = min(low, 0.0), max(high, 0.0)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    if low == high or described.get("rangemode") != "tozero":
        return low - margin * (low != 0 or low == high), high + margin
    return (low if low == 0 else low - margin), (high if high == 0 else high + margin)


def _starts_at_zero(traces: Sequence[Trace], letter: str) -> bool:
    along = "x" if any(trace.get("orientation") == "h" for trace in traces) else "y"
    return letter == along and any(trace.get("type") == "bar" or trace.get("stackgroup") for trace in traces)


def _extents(traces: Sequence[Trace], layout: Mapping[str, Any], letter: str) -> list[Any]:
    """Return values that an axis must have room for: with error bars, and as high as what is stacked."""
    found = []
    stacks: dict[Any, float] = {}
    for trace in traces:
        seen: Counter[Any] = Counter()
        if letter == "y" and trace.get("yaxis") == "y2":
            continue
        values = list(trace.get(letter) or ())
        spreads = trace.get(f"error_{letter}", {})
        above, below = spreads.get("array", ()), spreads.get("arrayminus", spreads.get("array", ()))
        for index, value in enumerate(values):
            if not isinstance(value, int | float):
                continue
            found += [value + (above[index] if index < len(above) else 0)]
            low = value - (below[index] if index < len(below) else 0)
            found += [low] if low > 0 or value <= 0 else [value]
            if (given := trace.get("base")) is not None and letter == ("x" if trace.get("orientation") == "h" else "y"):
                found.append(value + (given[index] if isinstance(given, list | tuple) else given))
            elif _is_stacked(trace, layout) and letter == ("x" if trace.get("orientation") == "h" else "y"):
                other = trace["y" if letter == "x" else "x"][index]
                seen[other] += 1
                stacks[other, seen[other]] = stacks.get((other, seen[other]), 0.0) + value
    found += list(stacks.values())
    found += [
        shape[f"{letter}{end}"]
        for shape in layout.get("shapes", ())
        for end in "01"
        if shape.get(f"{letter}ref") != "paper"
    ]
    return found


def _is_stacked(trace: Trace, layout: Mapping[str, Any]) -> bool:
    return bool(trace.get("stackgroup")) or (
        trace.get("type") == "bar" and layout.get("barmode") in ("stack", "relative")
    )


# The kinds of traces


def _scatter(plot: _Plot, trace: Trace) -> list[str]:
    y_axis, color = plot.y_of(trace), _color(trace)
    xs, ys = list(trace.get("x") or ()), list(trace.get("y") or ())
    if trace.get("stackgroup"):
        return _area(plot, trace, xs, ys)
    points = [(plot.x.at(x), y_axis.at(y), index) for index, (x, y) in enumerate(zip(xs, ys, strict=False))]
    parts = [*_error_bars(plot, trace, xs, ys)]
    mode = trace.get("mode", "lines+markers")
    if "lines" in mode:
        style = _stroke({"color": color, "width": 2, **trace.get("line", {})})
        is_filled = trace.get("fill") == "toself"
        fill = html.escape(str(trace.get("fillcolor") or color)) if is_filled else "none"
        for run in _runs(points):
            corners = _stepped([(x, y) for x, y, _ in run], trace)
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
            shape, told = ("polygon", _hover(trace, run[0][2])) if is_filled else ("polyline", "")
            parts.append(f'<{shape} points="{path}" fill="{fill}"{style}>{told}</{shape}>')
    if "markers" in mode:
        # A line shows its points, so that many points need no markers, except isolated points and those whose open
        # marker means a verdict that is not valid.
        on_a_line = {index for run in _runs(points) for *_, index in run} if "lines" in mode else set()
        hidden = on_a_line if len(points) > MAX_MARKERS else set()
        symbols = trace.get("marker", {}).get("symbol", "circle")
        size = trace.get("marker", {}).get("size", 7)
        for x, y, index in points:
            if x is not None and y is not None:
                symbol = symbols if isinstance(symbols, str) else symbols[index]
                if index in hidden and not symbol.endswith("-open"):
                    continue
                own = size if isinstance(size, int | float) else size[index]
                parts.append(_marker(x, y, symbol, own, _color(trace, index), _hover(trace, index)))
    return parts


def _area(plot: _Plot, trace: Trace, xs: Sequence[Any], ys: Sequence[Any]) -> list[str]:
    below: list[tuple[float, float]] = []
    above: list[tuple[float, float]] = []
    seen: Counter[Any] = Counter()
    for x, y in zip(xs, ys, strict=False):
        # A place may have several values, one after the other: the last of a phase, and the first of the next one.
        seen[x] += 1
        base = plot.stacked.get((x, seen[x]), 0.0)
        plot.stacked[x, seen[x]] = top = base + (y or 0.0)
        at, low, high = plot.x.at(x), plot.y.at(base), plot.y.at(top)
        if at is not None and low is not None and high is not None:
            below.append((at, low))
            above.append((at, high))
    outline = [*_stepped(above, trace), *reversed(_stepped(below, trace))]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in outline)
    return [f'<polygon points="{path}" fill="{_color(trace)}" fill-opacity="0.75"/>']


def _error_bars(plot: _Plot, trace: Trace, xs: Sequence[Any], ys: Sequence[Any]) -> list[str]:
    parts = []
    for letter in "xy":
        spread = trace.get(f"error_{letter}")
        if not spread:
            continue
        above, below = spread.get("array", ()), spread.get("arrayminus", spread.get("array", ()))
        for index, (x, y) in enumerate(zip(xs, ys, strict=False)):
            if index >= len(above) or (not above[index] and not below[index]):
                continue
            value = x if letter == "x" else y
            if not isinstance(value, int | float):
                continue
            axis = plot.x if letter == "x" else plot.y_of(trace)
            low, high = axis.at(value - below[index]), axis.at(value + above[index])
            low = axis.start if low is None else low  # below what a logarithmic axis shows
            at = plot.y_of(trace).at(y) if letter == "x" else plot.x.at(x)
            if at is None or high is None:
                continue
            ends = (low, at, high, at) if letter == "x" else (at, low, at, high)
            parts.append(_line(*ends, "spread", f' stroke="{_color(trace, index)}"'))
    return parts


def _bar(plot: _Plot, trace: Trace) -> list[str]:
    flat = trace.get("orientation") == "h"
    places, values = (trace["y"], trace["x"]) if flat else (trace["x"], trace["y"])
    along, across = (plot.y, plot.x) if flat else (plot.x, plot.y)
    bars = [other for other in plot.traces if other.get("type") == "bar"]
    stacked = _is_stacked(trace, plot.layout)
    number, slots = (0, 1) if stacked else (bars.index(trace), len(bars))
    step = along.step if along.type == "category" else abs(along.end - along.start) / max(len(places), 1)
    width = step * 0.8 / slots
    parts = []
    for index, (place, value) in enumerate(zip(places, values, strict=False)):
        middle = along.at(place)
        if middle is None or not isinstance(value, int | float):
            continue
        given = trace.get("base")
        base = plot.stacked.get(place, 0.0) if stacked and given is None else 0.0
        if given is not None:
            base = given[index] if isinstance(given, list | tuple) else float(given)
        plot.stacked[place] = base + value
        low = across.at(base) if across.type == "linear" or base > 0 else across.start
        high = across.at(base + value)
        if low is None or high is None:
            continue
        start = middle - step * 0.4 + number * width
        x, y, w, h = (
            (min(low, high), start, abs(high - low), width) if flat else (start, min(low, high), width, abs(high - low))
        )
        parts.append(_rect(x, y, w, h, f' fill="{_color(trace, index)}"', _hover(trace, index)))
        if (spread := trace.get("error_y", {}).get("array")) and not flat:
            ends = plot.y.at(value - spread[index]), plot.y.at(value + spread[index])
            if ends[0] is not None and ends[1] is not None:
                parts.append(_line(start + width / 2, ends[0], start + width / 2, ends[1], "spread"))
    return parts


def _box(plot: _Plot, trace: Trace) -> list[str]:
    boxes = [other for other in plot.traces if other.get("type") == "box"]
    width = plot.x.step * 0.8 / len(boxes) if plot.x.type == "category" else 40.0
    groups: dict[Any, list[float]] = {}
    for place, value in zip(trace.get("x") or (), trace.get("y") or (), strict=False):
        if isinstance(value, int | float):
            groups.setdefault(place, []).append(value)
    parts = []
    for place, values in groups.items():
        middle = plot.x.at(place)
        if middle is None:
            continue
        left = middle - plot.x.step * 0.4 + boxes.index(trace) * width + width * 0.1
        parts += _one_box(plot, trace, sorted(values), left, width * 0.8)
    return parts


def _one_box(plot: _Plot, trace: Trace, values: Sequence[float], left: float, width: float) -> list[str]:
    color, middle = _color(trace), left + width / 2
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    low, first, median, third, high = (plot.y.at(value) for value in (values[0], *quartiles, values[-1]))
    if low is None or first is None or median is None or third is None or high is None:
        return []
    stroke = f' stroke="{color}" stroke-width="1.5"'
    parts = [
        _line(middle, low, middle, high, "spread", stroke),
        _rect(left, third, width, max(first - third, 0.5), f' class="box"{stroke}'),
        _line(left, median, left + width, median, "spread", f' stroke="{color}" stroke-width="2.5"'),
    ]
    for index, value in enumerate(values[:MAX_MARKERS]):
        at = plot.y.at(value)
        if at is not None:
            # Jittered by a fixed pattern, so that the same numbers make the same picture.
            offset = ((index * 7) % 11 / 10 - 0.5) * width * 0.6
            parts.append(
                f'<circle cx="{middle + offset:.1f}" cy="{at:.1f}" r="2.2" fill="{color}" fill-opacity="0.6"/>'
            )
    return parts


def _heat_map(plot: _Plot, trace: Trace) -> list[str]:
    known = [value for row in trace["z"] for value in row if isinstance(value, int | float)]
    if not known:
        return []
    # Several maps may share one scale, and the ends of a scale may be of values that are not drawn.
    low, high = trace.get("zmin", min(known)), trace.get("zmax", max(known))
    measured = _is_measured_heat_map(trace)
    texts = trace.get("text")
    parts = _colour_bar(plot, trace, low, high) if measured else []
    for row, (place_y, values) in enumerate(zip(trace["y"], trace["z"], strict=False)):
        for column, (place_x, value) in enumerate(zip(trace["x"], values, strict=False)):
            x, y = plot.x.at(place_x), plot.y.at(place_y)
            if value is None or x is None or y is None:
                continue
            share = min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.5
            fill = CIVIDIS[round(share * (len(CIVIDIS) - 1))] if measured else str(trace["colorscale"][0][1])
            width, height = plot.x.step - 1, plot.y.step - 1
            parts.append(_rect(x - width / 2, y - height / 2, width, height, f' fill="{fill}"'))
            text = texts[row][column] if texts else ""
            if text and len(text) * LETTER < width:
                ink = "#111111" if measured and share > 0.55 else "#ffffff"
                parts.append(_words(x, y + 4, _text(text), "middle", f' style="fill: {ink}"'))
    return parts


def _colour_bar(plot: _Plot, trace: Trace, low: float, high: float) -> list[str]:
    """Draw the colours in a row above the plot, with the numbers of the first and the last."""
    told = trace.get("colorbar", {}).get("ticktext") or (_number(low), _number(high))
    right, y = float(WIDTH - RIGHT), 5.0
    after = right - len(str(told[-1])) * LETTER - 6
    start = after - 14 * len(CIVIDIS)
    steps = [_rect(start + 14 * number, y, 14, 9, f' fill="{color}"') for number, color in enumerate(CIVIDIS)]
    return [_words(start - 6, y + 9, str(told[0]), "end"), *steps, _words(right, y + 9, str(told[-1]), "end")]


_DRAW: Mapping[str, Callable[[_Plot, Trace], list[str]]] = {
    "scatter": _scatter,
    "bar": _bar,
    "box": _box,
    "heatmap": _heat_map,
}


# The pieces


def _runs(points: Iterable[tuple[float | None, float | None, int]]) -> list[list[tuple[float, float, int]]]:
    """Return the parts of a line between points without a value."""
    runs: list[list[tuple[float, float, int]]] = [[]]
    for x, y, index in points:
        if x is None or y is None:
            runs.append([])
        else:
            runs[-1].append((x, y, index))
    return [run for run in runs if len(run) > 1]


def _stepped(points: Sequence[tuple[float, float]], trace: Trace) -> list[tuple[float, float]]:
    """Return a line's corners: of one with steps ("hv"), each value lasts until the next."""
    if trace.get("line", {}).get("shape") != "hv":
        return list(points)
    found = list(points[:1])
    for (_, before), (x, y) in pairwise(points):
        found += [(x, before), (x, y)]
    return found


def _marker(x: float, y: float, symbol: str, size: float, color: str, title: str) -> str:
    half = size / 2
    is_open = symbol.endswith("-open")
    paint = f'fill="var(--ground, #fff)" stroke="{color}" stroke-width="1.6"' if is_open else f'fill="{color}"'
    name = symbol.removesuffix("-open")
    if name == "square":
        return _rect(x - half, y - half, size, size, f" {paint}", title)
    if name == "x":
        path = f"M{x - half:.1f} {y - half:.1f}l{size:.1f} {size:.1f}m0 -{size:.1f}l-{size:.1f} {size:.1f}"
        return f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2">{title}</path>'
    corners = {"diamond": (4, 0.0), "triangle-up": (3, 0.0), "triangle-down": (3, 0.5), "pentagon": (5, 0.0)}
    if name in corners:
        count, turn = corners[name]
        angles = [2 * math.pi * ((index + turn) / count) - math.pi / 2 for index in range(count)]
        path = " ".join(f"{x + half * 1.2 * math.cos(a):.1f},{y + half * 1.2 * math.sin(a):.1f}" for a in angles)
        return f'<polygon points="{path}" {paint}>{title}</polygon>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{half:.1f}" {paint}>{title}</circle>'


def _hover(trace: Trace, index: int) -> str:
    """Return what a browser shows when somebody points at a mark: the words that the figure has for it."""
    told = trace.get("customdata") or ()
    if index >= len(told):
        return ""
    words = told[index][0] if isinstance(told[index], list) and told[index] else told[index]
    return f"<title>{html.escape(_text(words))}</title>" if isinstance(words, str) else ""


def _color(trace: Trace, index: int | None = None) -> str:
    """Return the colour of a trace, or of one of its marks."""
    found = trace.get("marker", {}).get("color") or trace.get("line", {}).get("color") or trace.get("fillcolor")
    if trace.get("type") == "heatmap":
        found = trace["colorscale"][0][1]
    if isinstance(found, list):
        found = found[index if index is not None and index < len(found) else 0] if found else None
    return html.escape(str(found)) if isinstance(found, str) else "var(--plot-1)"


def _stroke(line: Mapping[str, Any]) -> str:
    dash = DASHES.get(str(line.get("dash")))
    color = html.escape(str(line.get("color", "currentColor")))
    return f' stroke="{color}" stroke-width="{line.get("width", 1)}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _line(x0: float, y0: float, x1: float, y1: float, name: str, more: str = "") -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" class="{name}"{more}/>'


def _rect(x: float, y: float, width: float, height: float, more: str, inside: str = "") -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"{more}>{inside}</rect>'


def _words(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{html.escape(text)}</text>'


def _text(value: Any) -> str:
    """Return a text of a figure as people read it: Plotly takes markup, so figures have it escaped."""
    return html.unescape(str(value)).replace("<br>", "\n")


def _cut(text: str, most: int = MAX_CATEGORY_LABEL) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
