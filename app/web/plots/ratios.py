"""Dots with intervals: how the candidate of a comparison relates to its baseline."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.metrics import Direction, readable
from app.web.plots.drawing import EMPTY, LEGEND, PALETTE, Figure, escaped, hover_unit
from flopwatch.text.numbers import number


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


FINDINGS = {
    "better": "var(--good)",
    "worse": "var(--bad)",
    "changed": PALETTE[0],
    "differs": PALETTE[0],
    "inconclusive": "var(--busy)",
}
"""Colours of a comparison's findings; all others are grey."""


def draw_ratios(compared: Sequence[Ratio]) -> Figure:
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
        "shapes": [{"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper", "line": LINE_AT_1}],
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
    title = f"Candidate / baseline{sides.get(directions, '<br>arrows: the better side')}"
    return {
        "title": {"text": title},
        "type": "log",
        # Room for the dots at both ends, however far apart these are.
        "range": [math.log10(low) - room, math.log10(high) + room],
        "tickvals": list(ticks),
        "ticktext": [number(tick) for tick in ticks],
    }


LINE_AT_1 = {"color": "var(--quiet)", "width": 1, "dash": "dash"}
REFERENCE = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": LINE_AT_1}
"""The line of the cases to which a chart relates all others."""


def _interval(ratio: Ratio) -> str:
    text = number(ratio.ratio)
    return text if ratio.low is None or ratio.high is None else f"{text} ({number(ratio.low)} – {number(ratio.high)})"


SIDES = {"baseline": PALETTE[0], "candidate": PALETTE[1]}


@dataclass(frozen=True)
class Processes:
    """One value of each process, such as its median, of one metric of one case on one side."""

    side: str
    """Name in the legend."""
    case: str
    """The case in words."""
    values: Sequence[float]


def draw_distributions(groups: Sequence[Processes], metric: str, unit: str | None) -> Figure:
    """Draw the distributions of both sides beside each other, case by case: a box, and every value as a dot."""
    traces = []
    for index, side in enumerate(dict.fromkeys(group.side for group in groups)):
        own = [(escaped(group.case), value) for group in groups if group.side == side for value in group.values]
        color = SIDES.get(side, PALETTE[index % len(PALETTE)])
        traces.append(
            {
                "type": "box",
                "name": escaped(side),
                "x": [case for case, _ in own],
                "y": [value for _, value in own],
                "boxpoints": "all",
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
