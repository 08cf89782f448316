"""`collective`: bandwidth and latency over the size of the tensor, an operation a line."""

from __future__ import annotations

from app.web.panels._panel import Panel
from app.web.panels._results import JobResults
from app.web.panels.cells import charts

BUS = "Bus bandwidth is comparable with the links' peak, however many ranks there are. GB are 10⁹ bytes, MB 2²⁰."


def panels(results: JobResults) -> list[Panel]:
    """Return the charts of a job's cells."""
    sheet, x, series = results.sheet, "size_mb", "operation"
    return [
        *charts(sheet, "bus_gb_per_s", x, series, BUS, log_y=True),
        *charts(sheet, "latency_ms", x, series, "Time of a call, per step the slowest rank's.", log_y=True),
        *charts(sheet, "algorithm_gb_per_s", x, series, log_y=True, folded=True),
        *charts(sheet, "skew_ms", x, series, "The slowest rank's time less the fastest one's.", folded=True),
    ]
