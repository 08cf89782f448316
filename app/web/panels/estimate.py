"""`estimate`: the memory on each device, by strategy and category."""

from app.web.panels._bars import bars_of
from app.web.panels._panel import Panel
from app.web.panels._results import JobResults
from app.web.plots.drawing import Figure

TABLE = "per-device"
SUFFIX = "_gib"


def panels(results: JobResults) -> list[Panel]:
    """Return stacked bars of the memory, one per strategy."""
    if not results.has(TABLE):
        return []
    text = "Bytes on each device. A strategy that cannot split this model has no bar; the table says why."
    return [Panel("per-device", "Memory on each device, by strategy (GiB)", text, lambda: draw(results))]


def draw(results: JobResults) -> Figure:
    """Draw the parts of each strategy's memory; those that are zero everywhere are left out."""
    rows = [row for row in results.rows(TABLE) if row["total_gib"] is not None]
    columns = [name for name in rows[0] if name.endswith(SUFFIX) and name != "total_gib"] if rows else []
    parts = {name: name.removesuffix(SUFFIX).replace("_", " ") for name in columns if any(row[name] for row in rows)}
    bars = {
        f"{str(row['strategy']).replace('_', ' ')}, {row['devices']} devices": {
            part: float(row[name] or 0) for name, part in parts.items()
        }
        for row in rows
    }
    return bars_of([*parts.values()], bars, "Memory of a device (GiB)", "GiB")
