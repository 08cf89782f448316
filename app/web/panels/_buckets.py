"""What buckets of gradients leave exposed, by their size: predicted, and measured in this job and in its sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from app.results.sheet import Cell
from app.web.panels._panel import Panel
from app.web.panels._results import JobResults, Row
from app.web.plots.drawing import Figure

TABLE = "bucket-size"
OF_BUCKET, OF_ROW = "bucket_size_mb", "size_mb"
PREDICTED, EXPOSED = "predicted_exposed_ms", "exposed_communication_ms"


def bucket_panels(results: JobResults) -> list[Panel]:
    """Return the plot of a job whose strategy has buckets."""
    if not results.has(TABLE):
        return []
    text = (
        "The line follows from latency and bandwidth of all-reduces, which the ranks timed after the steps, and from "
        "the time of the backward pass, with the 95 % intervals of their fit. Points are measured: this job's, and "
        "those of its sweep that differ by the size of their buckets only."
    )
    return [
        Panel(
            TABLE,
            "Exposed communication by the size of buckets",
            text,
            lambda: draw(results.rows(TABLE), measured(results)),
            log="x y",
        )
    ]


def measured(results: JobResults) -> dict[float, Cell]:
    """Return the exposed communication by MB of a bucket, of this job and of those of its sweep that differ in nothing
    else."""
    names = [name for name in results.sheet.names("coordinate") if name != "job"]
    own: dict[str, Any] | None = None
    found: dict[float, Cell] = {}
    for sheet in (results.sheet, results.sweep_sheet([EXPOSED], names)):
        if sheet is None or EXPOSED not in sheet.names("metric"):
            continue
        for row in sheet.rows:
            cells = dict(zip(sheet.names(), row, strict=True))
            place = {name: cells.get(name) for name in names if name != OF_BUCKET}
            own = own or place
            size, value = cells.get(OF_BUCKET), cells[EXPOSED]
            if place == own and size is not None and isinstance(value, Cell) and value.value is not None:
                found[float(size)] = value
    return found


def draw(rows: list[Row], cells: Mapping[float, Cell]) -> Figure:
    """Draw the prediction with its interval, the best size with its own, and what was measured."""
    points = {size: cell.value or 0.0 for size, cell in cells.items()}
    curve, (best,) = [row for row in rows if row["what"] == "curve"], [row for row in rows if row["what"] == "best"]
    x = [row[OF_ROW] for row in curve]
    around = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False, "type": "scatter"}
    hidden = {size: ms for size, ms in points.items() if ms <= 0}
    zero = [f"Measured and not above zero, so not on this axis: {listed(hidden)}"] if hidden else []
    at_best, low, high = (float(best[name] or 0) for name in (OF_ROW, "low_mb", "high_mb"))
    return {
        "data": [
            {**around, "x": x, "y": [row["predicted_low_ms"] for row in curve]},
            {**around, "x": x, "y": [row["predicted_high_ms"] for row in curve], "fill": "tonexty"},
            {
                "type": "scatter",
                "mode": "lines",
                "name": "predicted",
                "x": x,
                "y": [row[PREDICTED] for row in curve],
                "hovertemplate": "%{x:.4g} MB: %{y:.4g} ms<extra>predicted</extra>",
            },
            {
                "type": "scatter",
                "mode": "markers",
                "name": "predicted best",
                "x": [at_best],
                "y": [best[PREDICTED]],
                "error_x": {"type": "data", "array": [high - at_best], "arrayminus": [at_best - low]},
                "hovertemplate": "best: %{x:.4g} MB, %{y:.4g} ms<extra></extra>",
            },
            {
                "type": "scatter",
                "mode": "markers",
                "name": "measured",
                "x": sorted(points),
                "y": [points[size] for size in sorted(points)],
                "hovertemplate": "%{x:.4g} MB: %{y:.4g} ms<extra>measured</extra>",
            },
        ],
        "layout": {
            "xaxis": {"title": {"text": "Size of a bucket (MB of 2²⁰ bytes)"}, "type": "log"},
            "yaxis": {"title": {"text": "Exposed communication (ms)"}, "type": "log"},
            "showlegend": True,
        },
        "note": ". ".join([*doubts(best, curve, cells), *zero]),
        "table": {
            "columns": [OF_ROW, PREDICTED, EXPOSED],
            "rows": [
                *([row[OF_ROW], row[PREDICTED], None] for row in [best, *curve]),
                *([size, None, points[size]] for size in sorted(points)),
            ],
        },
    }


def doubts(best: Row, curve: Sequence[Row], cells: Mapping[float, Cell]) -> list[str]:
    """Return why the prediction may be wrong: its own note, and that measured steps certainly prefer another size."""
    found = [f"The prediction may be wrong: {best['note']}"] if best.get("note") else []
    points = {size: cell.value or 0.0 for size, cell in cells.items()}
    if len(points) > 1 and curve:

        def predicted(size: float) -> float:
            return float(min(curve, key=lambda row: abs(math.log(float(row[OF_ROW] or 0) / size)))[PREDICTED] or 0)

        measured_best, expected = min(points, key=points.__getitem__), min(points, key=predicted)
        if not cells[measured_best].overlaps(cells[expected]):
            found.append(
                f"Prediction and measurement disagree: of the measured sizes {measured_best:g} MB is best "
                f"({points[measured_best]:.3g} ms), not {expected:g} MB ({points[expected]:.3g} ms). "
                "Take the measured one: the prediction leaves out the host's work"
            )
    return found


def listed(points: Mapping[float, float]) -> str:
    """Write points for people."""
    return ", ".join(f"{ms:.3g} ms at {size:g} MB" for size, ms in sorted(points.items()))
