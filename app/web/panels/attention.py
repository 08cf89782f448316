"""`attention`: times, rates and memory over the sequence length, an implementation a line; errors beside each other."""

from __future__ import annotations

from app.web.panels._panel import Panel
from app.web.panels._results import JobResults
from app.web.panels.cells import charts, known, measured

OUTCOMES = "Crosses at the top stand for cells without a number: out of memory, wrong, unsupported."
TIMES = ("forward_backward_ms", "forward_ms", "backward_ms")


def panels(results: JobResults) -> list[Panel]:
    """Return the charts of a job's cells."""
    sheet, x, series = results.sheet, "sequence_length", "implementation"
    names = [name for name in TIMES if known(measured(sheet, name))]
    found: list[Panel] = []
    for number, metric in enumerate(names):
        text = f"Time of one call, with its standard deviation. {OUTCOMES}" if number == 0 else ""
        found += charts(sheet, metric, x, series, text, log_y=True, folded=number > 0)
    found += charts(sheet, "tflops", x, series, "Useful FLOPs divided by the median time; the causal half counts.")
    found += charts(sheet, "peak_memory_mib", x, series, log_y=True, folded=True)
    for metric in ("output_error", "gradient_error"):
        text = "Relative error against the oracle in float64."
        found += charts(sheet, metric, x, series, text, log_y=True, folded=True)
    return found
