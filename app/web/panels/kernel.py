"""`kernel`: kernels against their plain PyTorch, over the number of rows."""

from collections.abc import Iterator
from functools import partial

from app.web.panels._panel import Panel
from app.web.panels._results import JobResults
from app.web.panels.cells import draw, known, measured, title
from app.web.plots.points import Axes, varying

METRICS = {
    "forward_backward_ms": "Time of one call of both passes, with its 95 % interval.",
    "forward_ms": "Time of one call of the forward pass.",
    "backward_ms": "Time of one call of the backward pass.",
    "gb_per_s": "Bytes that have to be read and written, divided by the median time.",
}
SIZES = ("rows", "columns")


def panels(results: JobResults) -> Iterator[Panel]:
    """Yield a chart of each metric: over sizes if they vary, else bars by implementation."""
    for metric, text in METRICS.items():
        if not known(measured(results.sheet, metric)):
            continue
        sheet = results.metric(metric)
        points = measured(sheet, metric)
        differing = varying(points)
        x = next((size for size in SIZES if size in differing), "implementation")
        axes = Axes(x=x, by=tuple(name for name in differing if name != x))
        folded = metric in ("forward_ms", "backward_ms")
        shown = partial(draw, sheet, metric, points, axes)
        yield Panel(metric, title(sheet, metric), text, shown, log="x y", folded=folded)
