"""`ceiling`: the rates that the device reaches, by data type."""

from collections.abc import Iterator
from functools import partial

from app.web.panels._panel import Panel
from app.web.panels._results import JobResults
from app.web.panels.cells import draw, known, measured, title
from app.web.plots.points import Axes

TEXTS = {
    "tflops": "Products of square matrices, with the 95 % interval of the median if there are several samples.",
    "copy_gb_per_s": "Bytes read and written, divided by the median time.",
}


def panels(results: JobResults) -> Iterator[Panel]:
    """Yield bars of the rates by data type."""
    sheet = results.sheet
    for metric, text in TEXTS.items():
        points = measured(sheet, metric)
        if known(points):
            axes = Axes(x="dtype" if metric == "tflops" else "operation")
            yield Panel(metric, title(sheet, metric), text, partial(draw, sheet, metric, points, axes))
