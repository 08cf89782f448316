"""Boxes and dots: the processes of both sides of a comparison."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.metrics import readable
from app.web.plots.drawing import LEGEND, PALETTE, Figure, escaped, hover_unit

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
        own = [(group.case, value) for group in groups if group.side == side for value in group.values]
        color = SIDES.get(side, PALETTE[index % len(PALETTE)])
        traces.append(
            {
                "type": "box",
                "name": side,
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
