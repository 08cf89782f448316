"""Boxes and dots: the samples of both sides of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from app.metrics import readable
from app.web.plots.drawing import LEGEND, PALETTE, Figure, escaped, hover_unit

SIDES = {"baseline": PALETTE[0], "candidate": PALETTE[1]}
MAX_STRIP = 2000
"""Largest number of samples of one figure that are drawn as dots."""


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


def draw_distributions(
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
