"""Horizontal bars made of parts: phases of a step, classes of kernels, categories of memory."""

from collections.abc import Mapping, Sequence

from app.web.plots.drawing import PALETTE, Figure, escaped

BAR = 34
"""Height of a bar with its gap, in pixels."""
LINE = 18
"""Height of a line of a bar's name."""
LONG = 24
"""A bar's name with more characters is broken at its commas: on a phone it would leave no room for the bar."""
AROUND = 120
"""Height of legend and axis, above and below the bars, in pixels."""


def bars_of(
    parts: Sequence[str],
    bars: Mapping[str, Mapping[str, float]],
    title: str,
    unit: str,
    *,
    colours: Mapping[str, str] | None = None,
) -> Figure:
    """Draw horizontal bars of parts: the parts in the order of the legend, and the value of each in each bar by the
    bar's name, the first at the top. `colours`: by default those of the palette in turn."""
    names = list(bars)
    labels = [label(name) for name in names]
    lines = max((text.count("<br>") + 1 for text in labels), default=1)
    traces = []
    for index, part in enumerate(parts):
        values = [bars[name].get(part) for name in names]
        shares = [
            "" if value is None else f", {100 * value / (sum(bars[name].values()) or 1):.1f} %"
            for name, value in zip(names, values, strict=True)
        ]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": escaped(part),
                "y": labels,
                "x": values,
                "marker": {"color": (colours or {}).get(part, PALETTE[index % len(PALETTE)])},
                "customdata": shares,
                "hovertemplate": f"%{{y}}<br>{escaped(part)}: %{{x:,.4~r}} {unit}%{{customdata}}<extra></extra>",
            }
        )
    layout = {
        "barmode": "stack",
        "height": AROUND + max(BAR, LINE * lines) * len(names),
        "xaxis": {"title": {"text": title}, "rangemode": "tozero"},
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
        "showlegend": True,
        "legend": {"traceorder": "normal", "orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    }
    table = {
        "columns": ["bar", *(f"{part} ({unit})" for part in parts)],
        "rows": [[name, *(bars[name].get(part) for part in parts)] for name in names],
    }
    return {"data": traces, "layout": layout, "table": table, "empty": "Nothing was measured."}


def label(name: str) -> str:
    """Return a bar's name as Plotly shows it."""
    text = escaped(name)
    return text.replace(", ", ",<br>") if len(name) > LONG else text
