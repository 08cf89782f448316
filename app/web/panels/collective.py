"""`collective`: bandwidth and latency over the size of the tensor, with a line for each operation."""

from app.web.panels._panel import Panel
from app.web.panels._results import JobResults
from app.web.panels.cells import Lines, charts

LINES = Lines("size_mb", "Size of the full tensor (MB of 2²⁰ bytes)", "operation")
BUS = "Comparable with the links' peak, however many ranks there are. GB are 10⁹ bytes."
ALGORITHM = "The full tensor's bytes divided by the median latency."
LATENCY = "Time of a call, per step the slowest rank's."
SKEW = "The slowest rank's time less the fastest one's."


def panels(results: JobResults) -> list[Panel]:
    return [
        *charts(results, LINES, "bus_gb_per_s", "Bus bandwidth", BUS),
        *charts(results, LINES, "latency_ms", "Latency", LATENCY),
        *charts(results, LINES, "algorithm_gb_per_s", "Algorithm bandwidth", ALGORITHM, folded=True),
        *charts(results, LINES, "skew_ms", "Skew", SKEW, log_y=False, folded=True),
    ]
