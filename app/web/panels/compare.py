"""`compare`: the losses of both sides, if it trained them."""

from collections.abc import Iterator, Sequence

from app.web.panels import cells
from app.web.panels._panel import Panel
from app.web.panels._results import JobResults, Row
from app.web.plots.drawing import LEGEND, PALETTE, Figure


def panels(results: JobResults) -> Iterator[Panel]:
    """Yield the losses of training runs, and then what jobs of any kind have."""
    if results.has("losses"):
        yield Panel(
            "losses",
            "Loss over the steps",
            "Of runs that train both sides: the mean over the pairs of runs.",
            lambda: draw_losses(results.rows("losses")),
        )
    yield from cells.panels(results)


def draw_losses(rows: Sequence[Row]) -> Figure:
    """Draw a line of each side's losses, from the table `losses`. The figure's table has their differences, too."""
    columns = list(rows[0]) if rows else []
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines",
                "name": side,
                "x": [row["step"] for row in rows],
                "y": [row[f"{side}_loss"] for row in rows],
                "line": {"color": colour, "dash": dash},
                "hovertemplate": "%{y:.5g}",
            }
            for side, colour, dash in zip(("baseline", "candidate"), PALETTE, ("solid", "dash"), strict=False)
        ],
        "layout": {
            "hovermode": "x unified",
            "xaxis": {"title": {"text": "Step"}},
            "yaxis": {"title": {"text": "Loss"}},
            **LEGEND,
        },
        "table": {"columns": columns, "rows": [[row[name] for name in columns] for row in rows]},
        "empty": "No step was trained.",
    }
