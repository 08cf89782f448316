"""The figure of a history, as Plotly's JSON; see plots.py."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from app.metrics import readable
from app.results.history import History, HistoryPoint
from app.states import VERDICTS
from app.web.plots.drawing import LEGEND, OTHER_OUTCOME, OUTCOMES, PALETTE, SYMBOLS, Figure, escaped, legend_of_doubt
from flopwatch.text.numbers import number
from flopwatch.text.times import moment, parsed_time

UNKNOWN = "unknown"
"""Name of the version of results whose version was not recorded."""
LEAST_SPAN = timedelta(minutes=10)


def figure(history: History) -> Figure:
    """Draw a metric with its intervals over time: a line for each device, stars for points in baselines, open markers
    for points that are not valid, and crosses at the top for outcomes without a number."""
    traces: list[dict[str, Any]] = []
    for index, device in enumerate(history.devices):
        own = [point for point in history.points if point.device_key == device]
        name = device if len(history.devices) > 1 else "median and its 95 % interval"
        traces.append(_line(name, [point for point in own if point.value is not None], index, history.unit))
    kept = [point for point in history.points if point.baselines and point.value is not None]
    traces += [_marks(kept, history.unit)] if kept else []
    traces += [*legend_of_doubt(history.points, lines=True), *_outcomes(history)]
    layout = {
        "xaxis": {"type": "date", "title": {"text": "Finished (UTC)"}, **_span(history.points)},
        "yaxis": {"title": {"text": readable(history.metric, history.unit)}, "rangemode": "normal"},
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
        "hovermode": "closest",
        "showlegend": True,
        **LEGEND,
    }
    columns = ["Finished", "Version", "Device", "Job", readable(history.metric, history.unit), "From", "To", "Outcome"]
    names = ("finished_at", "version", "device_key", "job", "value", "low", "high", "outcome")
    rows = [[getattr(point, name) for name in names] for point in history.points]
    return {
        "data": traces,
        "layout": layout,
        "table": {"columns": columns, "rows": rows, "number": len(rows)},
        "note": f"Drawn: the newest {len(rows)} points" if history.is_cut else "",
        "empty": "Nothing was measured.",
    }


def _span(points: Sequence[HistoryPoint]) -> dict[str, Any]:
    """Return the range of an axis of at least LEAST_SPAN around points that are closer together: of a single one it
    would be a millisecond."""
    times = [parsed_time(point.finished_at) for point in points if point.finished_at]
    missing = LEAST_SPAN - (max(times) - min(times)) if times else timedelta()
    if missing <= timedelta():
        return {}
    return {"range": [(min(times) - missing / 2).isoformat(), (max(times) + missing / 2).isoformat()]}


def _line(name: str, points: Sequence[HistoryPoint], index: int, unit: str | None) -> dict[str, Any]:
    values = [(point, point.value) for point in points if point.value is not None]
    symbol, color = SYMBOLS[index % len(SYMBOLS)], PALETTE[index % len(PALETTE)]
    symbols = [f"{symbol}-open" if point.validity in VERDICTS[1:] else symbol for point in points]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": escaped(name),
        "x": [point.finished_at for point in points],
        "y": [value for _, value in values],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [0.0 if point.high is None else point.high - value for point, value in values],
            "arrayminus": [0.0 if point.low is None else value - point.low for point, value in values],
            "thickness": 1,
            "width": 2,
            "color": color,
        },
        "line": {"color": color, "width": 1.5},
        "marker": {"color": color, "symbol": symbols, "size": 7},
        **_hovers(points, unit),
    }


def _marks(points: Sequence[HistoryPoint], unit: str | None) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": "in a baseline",
        "x": [point.finished_at for point in points],
        "y": [point.value for point in points],
        "text": [escaped(", ".join(point.baselines)) for point in points],
        "textposition": "top center",
        "cliponaxis": False,
        "marker": {"symbol": "star", "size": 14, "color": "var(--text)"},
        **_hovers(points, unit),
    }


def _outcomes(history: History) -> list[dict[str, Any]]:
    by_outcome: dict[str, list[HistoryPoint]] = {}
    for point in history.points:
        if point.value is None:
            by_outcome.setdefault(point.outcome if point.outcome not in (None, "ok") else UNKNOWN, []).append(point)
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": escaped(outcome),
            "yaxis": "y2",
            "x": [point.finished_at for point in points],
            "y": [0.97] * len(points),
            "marker": {"symbol": "x", "size": 10, "color": OUTCOMES.get(outcome, OTHER_OUTCOME)},
            "cliponaxis": False,
            **_hovers(points, history.unit),
        }
        for outcome, points in by_outcome.items()
    ]


def _hovers(points: Sequence[HistoryPoint], unit: str | None) -> dict[str, Any]:
    return {
        "customdata": [[_text(point, unit), f"/ui/jobs/{point.job}"] for point in points],
        "hovertemplate": "%{customdata[0]}<extra></extra>",
    }


def _text(point: HistoryPoint, unit: str | None) -> str:
    ends = "" if point.low is None or point.high is None else f" ({number(point.low)} – {number(point.high)})"
    value = f"{number(point.value)} {unit or ''}{ends}" if point.value is not None else point.outcome or UNKNOWN
    side = f", {point.side}" if point.side else ""
    doubt = point.validity if point.validity in VERDICTS[1:] else None
    baseline = f"baseline {', '.join(point.baselines)}" if point.baselines else None
    lines = [
        value,
        f"job {point.job}{side}" + (f" on {point.host}" if point.host else ""),
        f"version {point.short_version or UNKNOWN}",
        moment(point.finished_at),
        baseline,
        doubt,
    ]
    return "<br>".join(escaped(line) for line in lines if line)
