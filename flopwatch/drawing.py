"""Draws figures of results as SVG, PDF or PNG, for print: light, with title and caption. Needs matplotlib.

A figure is what `GET /jobs/{id}/plots/{name}` answers: traces and layout in Plotly's terms, which the pages draw, too.
Every kind of trace is translated here, and no plot has a second version: scatter (lines, markers, texts, areas,
blocks), bar, box and heatmap. A trace that this module does not know is an error, not a hole. It runs where the command
runs, because a server is often on the host that measures; Plotly's own way to a file needs a browser.
"""

from __future__ import annotations

import html
import io
import itertools
import math
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from flopwatch.connection import ClientError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Picture = Literal["svg", "png", "pdf"]
WIDTH_IN = 6.5
"""Width of a picture in inches: that of the text of a page."""
TALLEST_IN = 8.5
"""Largest height of the axes: they fit on a page, with what is above and below."""
PIXELS = 720
"""Width in pixels of the page's plot that a picture of that width stands for: it scales heights and markers."""
POINTS_PER_PIXEL = 72 * WIDTH_IN / PIXELS
DPI = 200
TEXT, QUIET, LINE = "#1c2128", "#596270", "#dce0e6"
MAX_CELLS = 1500
"""A heat map with more cells is an image inside the SVG, and so are areas and blocks of more corners."""
LINE_OF_NAME = 44
"""Characters of a line of a name beside an axis: longer ones have several lines, so that the axes keep their room."""
MAX_NAME = 90
"""Characters of a name in the legend."""
LETTERS_OF_LEGEND = 110
"""Characters of a row of the legend, 6 of them for each entry's sign."""
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
HATCHES = {"": None, "/": "////", "-": "---", ".": "...", "x": "xxx"}
SYMBOLS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "triangle-down": "v",
    "pentagon": "p",
    "star": "*",
    "hexagon": "h",
    "x": "X",
}
UNSEEN = {"type", "customdata", "hoverinfo", "hoveron", "hovertemplate", "legendgroup", "hoverongaps", "cliponaxis"}
"""Fields of traces that do not change a picture on paper."""
SEEN = {
    "bar": "name x y orientation marker error_y base width showlegend "
    "text textposition insidetextanchor textangle textfont",
    "box": "name x y boxpoints jitter pointpos marker line fillcolor",
    "heatmap": "name x y z colorscale zmin zmax colorbar showscale showlegend xgap ygap text texttemplate textfont",
    "scatter": "name x y yaxis mode line marker error_x error_y fill fillcolor stackgroup text textposition showlegend",
}
"""The fields of each type of trace that this module knows."""
NO_MATPLOTLIB = (
    "Pictures are drawn by matplotlib, which is not installed here: pip install 'flopwatch[plots]'. "
    "The format html needs nothing."
)
STYLE = {
    "font.size": 8.5,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": TEXT,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.5,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "text.color": TEXT,
    "hatch.linewidth": 0.5,
    "hatch.color": "#ffffff",
    "legend.fontsize": 8,
    "svg.fonttype": "path",  # looks the same wherever it is shown, and LaTeX's converters take it
    "svg.hashsalt": "flopwatch",  # the same figure gives the same file
}


def draw(figure: Mapping[str, Any], picture: Picture) -> bytes:
    """Draw a figure.

    Args:
        figure: traces (`data`), `layout`, `title` and `caption`.
        picture: "svg", "pdf", or "png" of 200 dots per inch.

    Raises:
        ClientError: matplotlib is not installed, there is nothing to draw, or the figure has a trace that this version
            does not know, or with values that it cannot draw.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise ClientError(NO_MATPLOTLIB) from None
    if not figure["data"]:
        raise ClientError(f"{figure.get('title', 'The plot')}: {figure.get('empty', 'there is nothing to draw.')}")
    layout = figure["layout"]
    height_in = min(max(1.4, layout.get("height", 340) / PIXELS * WIDTH_IN), TALLEST_IN)
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a box stands for a letter that the font lacks
        paper = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        axes = paper.add_subplot()
        drawing = _Drawing(axes, layout)
        try:
            drawing.draw(figure["data"])
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            what = f"{figure.get('title', 'This plot')}: this version of Flopwatch cannot draw these values"
            raise ClientError(f"{what} ({type(error).__name__}: {error}); the format html may.") from error
        entries = [*zip(*axes.get_legend_handles_labels(), strict=True), *drawing.entries]
        caption = " ".join(filter(None, [figure.get("caption"), *drawing.left_out()]))
        around = _frame(paper, entries, {**figure, "caption": caption})
        written = io.BytesIO()
        undated: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(picture, {})
        about = {
            "Title": figure.get("title", ""),
            "Creator" if picture != "png" else "Software": "Flopwatch",
            **undated,
        }
        paper.savefig(
            written,
            format=picture,
            dpi=DPI,
            bbox_inches="tight",
            bbox_extra_artists=around,
            metadata=about,
            pad_inches=0.04,
        )
    return written.getvalue()


def words(text: Any) -> str:
    """Return a text of a figure, which has HTML's escapes and line breaks, as matplotlib takes it."""
    return html.unescape(str(text).replace("<br>", "\n")).replace("$", r"\$")


def in_lines(text: str) -> str:
    """Return a text with line breaks, so that no line is longer than LINE_OF_NAME."""
    return "\n".join(part for line in text.splitlines() for part in textwrap.wrap(line, LINE_OF_NAME) or [""])


def si(value: float) -> str:
    """Write the number at a tick: 0.05, 200, 20k, 5M."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(factor, 1e4):
            return f"{value / factor:g}{prefix}"
    return f"{value:g}"


@dataclass
class _Drawing:
    """Axes with the traces of one figure."""

    axes: Axes
    layout: Mapping[str, Any]
    places: dict[str, list[str]] = field(default_factory=dict)
    """The texts along each axis that has texts, "x" or "y", in order."""
    entries: list[tuple[Any, str]] = field(default_factory=list)
    """Entries of the legend whose traces have no artist to stand for them."""
    no_place: dict[tuple[str, int], int] = field(default_factory=dict)
    """How many numbers of each list have no place on an axis: infinite ones, and on a logarithmic axis those not above
    zero. A list that is drawn twice counts once."""
    whole: set[str] = field(default_factory=set)
    """The axes whose numbers are whole, such as those of steps: they have no ticks between."""

    def draw(self, traces: Sequence[Mapping[str, Any]]) -> None:
        for letter in "xy":
            self._find_places(letter, traces)
        known: dict[str, Callable[[Sequence[Mapping[str, Any]]], None]] = {
            "bar": self._bars,
            "box": self._boxes,
            "heatmap": self._heat_maps,
            "scatter": self._scatter,
        }
        traces = [self._colored(trace, number) for number, trace in enumerate(traces)]
        by_kind: dict[str, list[Mapping[str, Any]]] = {}
        for trace in traces:
            by_kind.setdefault(trace["type"], []).append(trace)
        for kind, own in by_kind.items():
            unknown = set().union(*own) - UNSEEN - set(SEEN.get(kind, "").split())
            if kind not in known or unknown:
                what = f"{', '.join(sorted(unknown))} of {kind}" if kind in known else f"traces of type {kind!r}"
                raise ClientError(f"This version of Flopwatch does not draw {what}; the format html does.")
            known[kind](own)
        self._set_axis("x")
        self._set_axis("y")
        for shape in self.layout.get("shapes", ()):
            self._line(shape)
        for note in self.layout.get("annotations", ()):
            self._annotation(note)

    def _colored(self, trace: Mapping[str, Any], number: int) -> Mapping[str, Any]:
        """Return a line or markers without a colour with the one that is theirs by their place among the traces."""
        if trace["type"] != "scatter":
            return trace
        colors = self.layout.get("colorway") or [QUIET]
        color = colors[number % len(colors)]
        own = {name: {"color": color, **trace.get(name, {})} for name in ("line", "marker")}
        return {"mode": "lines+markers", **trace, **own}

    # Coordinates

    def _axis(self, letter: str) -> Mapping[str, Any]:
        return self.layout.get(f"{letter}axis", {})  # type: ignore[no-any-return]

    def _find_places(self, letter: str, traces: Sequence[Mapping[str, Any]]) -> None:
        axis = self._axis(letter)
        if axis.get("type") == "category" or any(trace["type"] == "heatmap" for trace in traces):
            found = [*axis.get("categoryarray", ()), *itertools.chain(*(trace.get(letter) or () for trace in traces))]
            self.places[letter] = list(dict.fromkeys(str(value) for value in found if value is not None))
        elif all(isinstance(value, int | None) for trace in traces for value in trace.get(letter) or ()):
            self.whole.add(letter)

    def at(self, letter: str, values: Iterable[Any]) -> list[float]:
        """Return numbers for places along an axis: those of texts are counted from 0, those of times are days."""
        if letter in self.places:
            order = {name: float(number) for number, name in enumerate(self.places[letter])}
            return [math.nan if value is None else order[str(value)] for value in values]
        if self._axis(letter).get("type") == "date":
            from matplotlib.dates import date2num

            return [math.nan if value is None else float(date2num(datetime.fromisoformat(value))) for value in values]
        least = 0.0 if self._axis(letter).get("type") == "log" else -math.inf
        numbers = [math.nan if value is None else float(value) for value in values]
        self.no_place[letter, id(values)] = sum(number <= least or number == math.inf for number in numbers)
        return [number if least < number < math.inf else math.nan for number in numbers]

    def left_out(self) -> list[str]:
        """Return a sentence for each axis that some numbers have no place on."""
        counts = {letter: sum(n for (one, _), n in self.no_place.items() if one == letter) for letter in "xy"}
        return [
            f"Values along {letter} that are {'not above zero, or ' if self._axis(letter).get('type') == 'log' else ''}"
            f"infinite, and left out: {count}."
            for letter, count in counts.items()
            if count
        ]

    def _set_axis(self, letter: str) -> None:
        axis, axes = self._axis(letter), self.axes
        mine = axes.xaxis if letter == "x" else axes.yaxis
        mine.set_label_text(words((axis.get("title") or {}).get("text", "")))
        set_limits = axes.set_xlim if letter == "x" else axes.set_ylim
        if letter in self.places:
            names = self.places[letter]
            room = 40 if letter == "x" else int(axes.figure.get_figheight() * 72 * 0.8 / 10)
            step = max(1, math.ceil(len(names) / room))
            texts = [in_lines(words(name)) for name in names[::step]]
            mine.set_ticks(range(0, len(names), step), texts)
            if any(len(text) > LINE_OF_NAME for text in texts):
                axes.tick_params(axis=letter, labelsize=6.5)
            if letter == "y":
                lines = len(names) * max((text.count("\n") + 1 for text in texts), default=1) / step
                axes.figure.set_figheight(max(axes.figure.get_figheight(), 0.12 * lines + 0.9))
            if letter == "x" and sum(map(len, names[::step])) > 85:
                axes.tick_params(axis="x", labelrotation=35)
                for tick in axes.get_xticklabels():
                    tick.set(horizontalalignment="right", rotation_mode="anchor")
            beside = max(0.6, 1.5 - len(names) / 2)  # one bar alone is not as wide as the plot
            set_limits(-beside, len(names) - 1 + beside)
        elif axis.get("type") == "date":
            self._set_dates(mine)
        elif axis.get("type") == "log":
            self._set_log(letter)
        else:
            mine.set_major_formatter(lambda value, _: si(value))
            least = axes.dataLim.x0 if letter == "x" else axes.dataLim.y0
            if axis.get("rangemode") == "tozero" and "range" not in axis and least >= 0:
                set_limits(0.0, None)
        if axis.get("tickvals") is not None and letter not in self.places:
            mine.set_ticks(axis["tickvals"], [words(text) for text in axis.get("ticktext", axis["tickvals"])])
            mine.set_minor_locator(_no_ticks())
        elif letter in self.whole and axis.get("type") in (None, "linear"):
            from matplotlib.ticker import MaxNLocator

            mine.set_major_locator(MaxNLocator(integer=True))
        if "range" in axis and axis.get("type") != "date":
            ends = [10**end for end in axis["range"]] if axis.get("type") == "log" else axis["range"]
            set_limits(*ends)
        if axis.get("autorange") == "reversed":
            mine.set_inverted(True)
        if axis.get("showgrid") is False or letter in self.places:
            mine.grid(visible=False)
        if axis.get("showticklabels") is False:
            mine.set_ticks([])

    def _set_dates(self, mine: Any) -> None:
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

        low, high = mine.get_data_interval()
        if high - low < 1 / 24:
            mine.axes.set_xlim((low + high) / 2 - 0.25, (low + high) / 2 + 0.25)
        locator = AutoDateLocator(maxticks=8)
        mine.set_major_locator(locator)
        mine.set_major_formatter(ConciseDateFormatter(locator))

    def _set_log(self, letter: str) -> None:
        from matplotlib.ticker import LogLocator

        (self.axes.set_xscale if letter == "x" else self.axes.set_yscale)("log")
        mine = self.axes.xaxis if letter == "x" else self.axes.yaxis
        low, high = self.axes.get_xlim() if letter == "x" else self.axes.get_ylim()
        if low <= 0:  # no value has a place
            low, high = (self.axes.set_xlim if letter == "x" else self.axes.set_ylim)(1, 10)
        decades = math.log10(high / low)
        mine.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,), numticks=12))
        mine.set_major_formatter(lambda value, _: si(value))
        mine.set_minor_locator(_no_ticks())

    # Scatter

    def _scatter(self, traces: Sequence[Mapping[str, Any]]) -> None:
        sums: dict[str, list[float]] = {}
        for number, trace in enumerate(traces):
            if trace.get("fill") == "toself":
                self._blocks(trace)
            elif trace.get("fill") == "tonexty" and number and traces[number - 1]["x"] == trace["x"]:
                color = trace.get("fillcolor") or trace["line"]["color"]
                low, high = (self.at("y", edge["y"]) for edge in (traces[number - 1], trace))
                self.axes.fill_between(self.at("x", trace["x"]), low, high, color=color, alpha=0.25, linewidth=0)
            elif "fill" in trace:
                raise ClientError(f"This version of Flopwatch does not draw fill {trace['fill']!r}.")
            elif (group := trace.get("stackgroup")) is not None:
                below = sums.get(group, [0.0] * len(trace["x"]))
                sums[group] = [one + float(other or 0) for one, other in zip(below, trace["y"], strict=True)]
                self._area(trace, below, sums[group])
            else:
                self._line_or_markers(trace)

    def _area(self, trace: Mapping[str, Any], below: Sequence[float], above: Sequence[float]) -> None:
        step: Any = "post" if trace["line"].get("shape") == "hv" else None
        style = {"color": trace["fillcolor"], "linewidth": 0, "rasterized": len(above) > MAX_CELLS}
        self.axes.fill_between(self.at("x", trace["x"]), below, above, step=step, label=self._label(trace), **style)

    def _blocks(self, trace: Mapping[str, Any]) -> None:
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path

        corners = list(zip(trace["x"], trace["y"], strict=True))
        boxes = [list(group) for is_gap, group in itertools.groupby(corners, lambda one: one[0] is None) if not is_gap]
        paths = [Path([*box, box[0]], closed=True) for box in boxes]
        if paths:
            style = {"facecolor": trace["fillcolor"], "edgecolor": trace["line"]["color"], "linewidth": 0.3}
            many = len(corners) > MAX_CELLS
            whole = Path.make_compound_path(*paths)
            self.axes.add_patch(PathPatch(whole, label=self._label(trace), rasterized=many, **style))
            self.axes.autoscale_view()

    def _line_or_markers(self, trace: Mapping[str, Any]) -> None:
        mode = trace["mode"]
        x, y = self.at("x", trace["x"]), self.at("y", trace["y"])
        on_top = trace.get("yaxis") == "y2"
        style: dict[str, Any] = {"zorder": 3}
        if on_top:
            style |= {"transform": self.axes.get_xaxis_transform(), "clip_on": False}
        line, marker = trace.get("line", {}), trace.get("marker", {})
        label = self._label(trace)
        if "lines" in mode and line.get("width") != 0:
            drawstyle = "steps-post" if line.get("shape") == "hv" else "default"
            self.axes.plot(
                x,
                y,
                color=line.get("color"),
                linewidth=max(0.7, 0.75 * float(line.get("width", 2))),
                linestyle=DASHES[line.get("dash", "solid")],
                drawstyle=drawstyle,
                label="_nolegend_" if "markers" in mode else label,
                **style,
            )
        if "markers" in mode:
            self._markers(x, y, marker, label, line if "lines" in mode else None, style)
        for name in ("x", "y"):
            if f"error_{name}" in trace:
                self._errors(x, y, name, {"color": marker.get("color"), **trace[f"error_{name}"]})
        if "text" in mode:
            for left, height, text in zip(x, y, trace["text"], strict=True):
                self.axes.annotate(
                    words(text), (left, height), (0, 6), textcoords="offset points", ha="center", fontsize=7
                )

    def _markers(
        self,
        x: Sequence[float],
        y: Sequence[float],
        marker: Mapping[str, Any],
        label: str,
        line: Mapping[str, Any] | None,
        style: Mapping[str, Any],
    ) -> None:
        from matplotlib.lines import Line2D

        color = marker.get("color")
        symbols, sizes = (
            value if isinstance(value, list) else [value] * len(x)
            for value in (marker.get("symbol", "circle"), marker.get("size", 8))
        )
        for symbol in dict.fromkeys(symbols):
            own = [index for index, one in enumerate(symbols) if one == symbol]
            self.axes.scatter(
                [x[index] for index in own],
                [y[index] for index in own],
                [max(2.5, POINTS_PER_PIXEL * sizes[index]) ** 2 for index in own],
                marker=SYMBOLS[symbol.removesuffix("-open")],
                facecolors="#ffffff" if symbol.endswith("-open") else color,
                edgecolors=color,
                linewidths=0.9 if symbol.endswith("-open") else 0.2,
                alpha=marker.get("opacity"),
                **style,
            )
        if symbols and not label.startswith("_"):
            # The legend shows a series with a usual marker, and its line.
            usual: dict[str, Any] = {
                "color": color,
                "marker": SYMBOLS[symbols[0].removesuffix("-open")],
                "markersize": 4.5,
            }
            face = "#ffffff" if symbols[0].endswith("-open") and line is None else color
            dash = "none" if line is None else DASHES[line.get("dash", "solid")]
            self.entries.append((Line2D([], [], markerfacecolor=face, linestyle=dash, **usual), label))

    def _errors(self, x: Sequence[float], y: Sequence[float], name: str, error: Mapping[str, Any]) -> None:
        color = error.get("color") or QUIET
        lengths = [error.get("arrayminus", error["array"]), error["array"]]
        bars: dict[str, Any] = {f"{name}err": [[max(0.0, float(one or 0)) for one in side] for side in lengths]}
        self.axes.errorbar(x, y, fmt="none", ecolor=color, elinewidth=0.8, capsize=2, zorder=4, **bars)

    # Bars

    def _bars(self, traces: Sequence[Mapping[str, Any]]) -> None:
        from matplotlib.patches import Patch

        shown = [trace for trace in traces if any(value is not None for value in (trace.get("y") or ()))]
        grouped = [trace for trace in shown if "base" not in trace]
        is_stack = self.layout.get("barmode") == "stack"
        ends: dict[float, float] = {}
        for number, trace in enumerate(shown):
            across = trace.get("orientation") == "h"
            along, lengths = (trace["y"], trace["x"]) if across else (trace["x"], trace["y"])
            places = self.at("y" if across else "x", along)
            sizes = [0.0 if value is None else float(value) for value in lengths]
            thickness, starts = float(trace.get("width", 0.8)), list(trace.get("base") or [0.0] * len(sizes))
            if is_stack:
                starts = [ends.get(place, 0.0) for place in places]
                ends.update({place: start + size for place, start, size in zip(places, starts, sizes, strict=True)})
            elif len(grouped) > 1 and "base" not in trace:
                thickness = 0.8 / len(grouped)
                places = [place + (number - (len(grouped) - 1) / 2) * thickness for place in places]
            self._rectangles(trace, places, starts, sizes, thickness, across=across)
            if "error_y" in trace:
                self._errors(places, sizes, "y", trace["error_y"])
        for trace in traces:
            if trace not in shown:  # an entry of the legend alone
                shape = trace["marker"].get("pattern", {}).get("shape", "")  # of a series without values a list
                hatch = HATCHES[shape] if isinstance(shape, str) else None
                patch = Patch(facecolor=trace["marker"]["color"], hatch=hatch, edgecolor="#ffffff", linewidth=0.3)
                self.entries.append((patch, self._label(trace)))

    def _rectangles(
        self,
        trace: Mapping[str, Any],
        places: Sequence[float],
        starts: Sequence[float],
        sizes: Sequence[float],
        thickness: float,
        *,
        across: bool,
    ) -> None:
        """Draw the bars of a trace: those of one colour and pattern are one path."""
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path

        marker = trace["marker"]
        colors = marker["color"] if isinstance(marker["color"], list) else [marker["color"]] * len(places)
        shapes = marker.get("pattern", {}).get("shape", "")
        shapes = shapes if isinstance(shapes, list) else [shapes] * len(places)
        groups: dict[tuple[str, str], list[Any]] = {}
        for place, start, size, color, shape in zip(places, starts, sizes, colors, shapes, strict=True):
            low, high = place - thickness / 2, place + thickness / 2
            corners = [(low, start), (high, start), (high, start + size), (low, start + size), (low, start)]
            path = Path([(y, x) for x, y in corners] if across else corners, closed=True)
            groups.setdefault((color, shape), []).append(path)
        edge = {"edgecolor": "#ffffff", "linewidth": 0.3}
        for number, ((color, shape), paths) in enumerate(groups.items()):
            label = self._label(trace) if number == 0 else "_nolegend_"
            patch = PathPatch(
                Path.make_compound_path(*paths), facecolor=color, hatch=HATCHES[shape], label=label, **edge
            )
            self.axes.add_patch(patch)
        self.axes.autoscale_view()
        if "text" in trace:
            self._texts_inside(trace["text"], places, starts, sizes)

    def _texts_inside(
        self, texts: Sequence[str], places: Sequence[float], starts: Sequence[float], sizes: Sequence[float]
    ) -> None:
        low, high = self._axis("x").get("range", self.axes.get_xlim())
        row = 72 * self.axes.figure.get_figheight() * 0.8 / (max(places, default=0) + 1)
        size_pt = min(6.0, 0.75 * row)
        letters_per_unit = 72 * WIDTH_IN * 0.95 / (high - low) / (0.6 * size_pt)
        for text, place, start, size in zip(texts, places, starts, sizes, strict=True):
            room = int(size * letters_per_unit) - 1
            if room >= 3:
                shown = html.unescape(text)
                shown = shown if len(shown) <= room else shown[: room - 1] + "…"
                inside = {"va": "center_baseline", "fontsize": size_pt, "color": "#ffffff", "clip_on": True}
                self.axes.text(start + 1 / letters_per_unit / 2, place, words(html.escape(shown)), **inside)

    # Boxes and heat maps

    def _boxes(self, traces: Sequence[Mapping[str, Any]]) -> None:
        from matplotlib.patches import Patch

        for number, trace in enumerate(traces):
            groups: dict[float, list[float]] = {}
            for place, value in zip(self.at("x", trace["x"]), trace["y"], strict=True):
                if value is not None:
                    groups.setdefault(place, []).append(float(value))
            thickness, color = 0.7 / len(traces), trace["line"]["color"]
            offset = (number - (len(traces) - 1) / 2) * thickness
            lines = {"color": color, "linewidth": 1.0}
            places = [place + offset for place in groups]
            if groups:
                self.axes.boxplot(
                    list(groups.values()),
                    positions=places,
                    widths=0.8 * thickness,
                    showfliers=False,
                    manage_ticks=False,
                    **{f"{part}props": lines for part in ("box", "median", "whisker", "cap")},
                )
            for place, values in zip(places, groups.values(), strict=True):
                # Dots beside each other, always in the same way.
                spread = [place + thickness * 0.25 * math.sin(2.4 * index) for index in range(len(values))]
                self.axes.plot(spread, values, "o", color=color, markersize=2.5, alpha=0.6, markeredgewidth=0)
            self.entries.append((Patch(facecolor=color), self._label(trace)))

    def _heat_maps(self, traces: Sequence[Mapping[str, Any]]) -> None:
        import numpy as np
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch

        for trace in traces:
            cells = np.array([[math.nan if z is None else float(z) for z in row] for row in trace["z"]])
            scale = trace["colorscale"]
            colors: Any = scale.lower() if isinstance(scale, str) else ListedColormap([scale[0][1]])
            down, across = ([place - 0.5 for place in range(number + 1)] for number in cells.shape)
            mesh = self.axes.pcolormesh(
                across,
                down,
                np.ma.masked_invalid(cells),
                cmap=colors,
                vmin=trace.get("zmin"),
                vmax=trace.get("zmax"),
                edgecolors="#ffffff" if cells.size <= MAX_CELLS else "none",
                linewidth=0.8 if cells.size <= MAX_CELLS else 0,
                rasterized=cells.size > MAX_CELLS,
            )
            if trace.get("showscale", True):
                bar = trace["colorbar"]
                legend = self.axes.figure.colorbar(mesh, ax=self.axes, pad=0.02, aspect=25)
                legend.set_label(words(bar["title"]["text"]))
                legend.outline.set_visible(False)
                if "tickvals" in bar:
                    legend.set_ticks(bar["tickvals"], labels=[words(text) for text in bar["ticktext"]])
            elif cells.size > MAX_CELLS or "text" not in trace:
                self.entries.append((Patch(facecolor=scale[0][1]), self._label(trace)))
            if "text" in trace:
                self._texts_of_cells(trace, cells, mesh)

    def _texts_of_cells(self, trace: Mapping[str, Any], cells: Any, mesh: Any) -> None:
        longest = max((len(text) for row in trace["text"] for text in row), default=0)
        if (longest + 1) * 4.2 > 72 * WIDTH_IN * 0.75 / cells.shape[1]:
            return
        for row, texts in enumerate(trace["text"]):
            for column, text in enumerate(texts):
                red, green, blue, _ = mesh.cmap(mesh.norm(cells[row, column]))
                is_dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.55
                style = {"ha": "center", "va": "center", "fontsize": 7, "color": "#ffffff" if is_dark else TEXT}
                self.axes.text(column, row, words(text), **style)

    # Lines and texts across the plot

    def _line(self, shape: Mapping[str, Any]) -> None:
        style = {
            "color": shape["line"]["color"],
            "linewidth": 0.8,
            "linestyle": DASHES[shape["line"].get("dash", "solid")],
        }
        if shape.get("xref") == "paper":
            self.axes.axhline(shape["y0"], **style)
        else:
            self.axes.axvline(self.at("x", [shape["x0"]])[0], **style)

    def _annotation(self, note: Mapping[str, Any]) -> None:
        style = {
            "fontsize": 7.5,
            "color": note.get("font", {}).get("color", QUIET),
            "ha": note.get("xanchor", "center"),
        }
        place = (self.at("x", [note["x"]])[0], note["y"])
        self.axes.annotate(
            words(note["text"]),
            place,
            (1, 3),
            xycoords=self.axes.get_xaxis_transform(),
            textcoords="offset points",
            **style,
        )

    def _label(self, trace: Mapping[str, Any]) -> str:
        name = str(trace.get("name") or "")
        if not name or trace.get("showlegend") is False:
            return "_nolegend_"
        return textwrap.shorten(words(name), MAX_NAME, placeholder="…").lstrip("_")


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _frame(paper: Figure, entries: Sequence[tuple[Any, str]], figure: Mapping[str, Any]) -> list[Any]:
    """Put the legend and the title above the axes, and the caption below; return these, which the picture includes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(paper)
    height = paper.get_figheight() * 72
    around: list[Any] = []
    top = 4.0
    order = {words(trace.get("name") or ""): number for number, trace in enumerate(figure["data"])}
    entries = sorted(entries, key=lambda entry: order.get(entry[1], 0))
    labels = [label for _, label in entries]
    if labels and (len(labels) > 1 or figure["layout"].get("showlegend", False)):
        columns = max(1, min(len(labels), 6, LETTERS_OF_LEGEND // (max(map(len, labels)) + 6)))
        legend = paper.legend(
            # matplotlib fills its columns one after the other, and people read rows.
            *zip(*(entry for column in range(columns) for entry in entries[column::columns]), strict=True),
            loc="lower left",
            bbox_to_anchor=(0, 1 + top / height),
            ncols=columns,
            frameon=False,
            borderpad=0,
            borderaxespad=0,
            columnspacing=1.4,
            handlelength=1.8,
        )
        legend.set_in_layout(False)
        around.append(legend)
        top += legend.get_window_extent(canvas.get_renderer()).height * 72 / paper.dpi + 6
    for text, place, style in (
        (figure.get("title"), 1 + top / height, {"va": "bottom", "fontsize": 10, "fontweight": "bold"}),
        (figure.get("caption"), -8 / height, {"va": "top", "fontsize": 7, "color": QUIET}),
    ):
        if text:
            width = 88 if style["va"] == "bottom" else 140
            written = paper.text(0.005, place, "\n".join(textwrap.wrap(words(text), width)), **style)
            written.set_in_layout(False)
            around.append(written)
    return around
