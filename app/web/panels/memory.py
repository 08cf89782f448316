"""`memory`: what grows, use by category over the history, the categories at each phase's peak, the largest allocations,
the snapshots."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from app.web.panels._bars import bars_of
from app.web.panels._panel import Panel
from app.web.panels._results import JobResults, Row
from app.web.plots.drawing import Figure, escaped
from flopwatch.text.numbers import number

CATEGORIES = {
    "parameter": "var(--plot-1)",
    "gradient": "var(--plot-2)",
    "optimizer_state": "var(--plot-3)",
    "activation": "var(--plot-4)",
    "input": "var(--plot-6)",
    "temporary": "var(--plot-5)",
    "unknown": "var(--plot-8)",
}
"""Categories from the bottom of the stacked areas to the top, with their colours: the longest-lived lowest."""
HEAD = "categories-"
SHARE_OF_A_LETTER = 0.008
"""Share of the history that a phase must have for each letter of its name above it, in a picture as wide as a page."""
CAUSE = ("change_mib", "category", "name", "stack")
"""Columns of what an entry allocated or released."""
MEMORY_VIZ = "https://pytorch.org/memory_viz"


def panels(results: JobResults) -> Iterator[Panel]:
    if results.has("growth") and results.rows("growth"):
        yield Panel(
            "growth",
            "What grows from step to step",
            "Alive after the last of the chosen steps, and not after the first, by the line that made it.",
            template="explorer.html",
            values={"table": "growth", "sort": "-per_step_mib"},
        )
    if results.has("timeline"):
        yield Panel(
            "timeline",
            "Memory over the recorded steps, by category (MiB)",
            "One point for each entry of the allocator's history, thinned out; peaks stay. Point at the curve to "
            "see what was allocated or released there, and by which lines of code.",
            lambda: draw_timeline(results.rows("timeline")),
        )
    phases = [name.removeprefix(HEAD) for name in results.tables if name.startswith(HEAD)]
    if phases:
        yield Panel(
            "peaks",
            "What fills the peak of each phase (MiB)",
            "The allocations alive when the phase needs the most memory. Categories count the bytes that were "
            "asked for.",
            lambda: draw_peaks({phase: results.rows(f"{HEAD}{phase}") for phase in as_they_begin(phases, results)}),
        )
    if results.has("allocations"):
        yield Panel(
            "allocations",
            "Largest allocations",
            "Alive at the peak of a phase; equal ones are in one row.",
            template="explorer.html",
            values={"table": "allocations", "sort": "-size_mib"},
        )
    if results.has("snapshots"):
        yield Panel(
            "snapshots",
            "Snapshots",
            template="snapshots.html",
            values={"viewer": MEMORY_VIZ, "snapshots": snapshots(results.rows("snapshots"), results.artifacts)},
        )


def snapshots(rows: Sequence[Row], artifacts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the table `snapshots` whose files are still there, each with its file as `file`."""
    return [{**row, "file": artifacts[str(row["snapshot"])]} for row in rows if row["snapshot"] in artifacts]


def draw_timeline(rows: Sequence[Row]) -> Figure:
    """Draw the table `timeline`: memory by category as stacked areas, over the number of the history's entry."""
    entries = [row["entry"] for row in rows]
    shown = [name for name in CATEGORIES if any(row[f"{name}_mib"] for row in rows)]
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": in_words(name),
            "x": entries,
            "y": [row[f"{name}_mib"] for row in rows],
            "stackgroup": "memory",
            "line": {"width": 0, "shape": "hv"},
            "fillcolor": CATEGORIES[name],
            "hovertemplate": "%{y:,.4~r} MiB",
        }
        for name in shown
    ]
    if rows:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "total",
                "x": entries,
                "y": [row["total_mib"] for row in rows],
                "line": {"width": 1.2, "color": "var(--text)", "shape": "hv"},
                "customdata": [entry_text(row) for row in rows],
                "hovertemplate": "%{y:,.4~r} MiB<br>%{customdata}<extra>total</extra>",
            }
        )
    stretches = [
        (key, [row["entry"] for row in group])
        for key, group in groupby(rows, key=lambda row: (row["step"], row["phase"]))
    ]
    columns = ["entry", "step", "phase", "total_mib", *(f"{name}_mib" for name in shown), *CAUSE]
    return {
        "data": traces,
        "layout": {
            "height": 420,
            "hovermode": "x unified",
            "xaxis": {"title": {"text": "Entry of the history"}, "showgrid": False},
            "yaxis": {"title": {"text": "Memory (MiB)"}, "rangemode": "tozero"},
            "shapes": [boundary(stretch[0]) for _, stretch in stretches[1:]],
            "annotations": [
                label(phase, stretch[0]) for (_, phase), stretch in stretches if is_wide(phase, stretch, entries)
            ],
            "margin": {"l": 56, "r": 16, "t": 34, "b": 44},
            "legend": {"orientation": "h", "y": 1.1, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        },
        "table": {"columns": columns, "rows": [[row[name] for name in columns] for row in rows]},
        "empty": "The history is empty.",
    }


def boundary(entry: Any) -> dict[str, Any]:
    """Return the line where a phase begins."""
    line = {"color": "var(--quiet)", "width": 1, "dash": "dot"}
    return {"type": "line", "xref": "x", "yref": "paper", "x0": entry, "x1": entry, "y0": 0, "y1": 1, "line": line}


def is_wide(phase: Any, stretch: Sequence[Any], entries: Sequence[Any]) -> bool:
    """Return True if a stretch of the history has room for the name of its phase, and a space behind it."""
    share = SHARE_OF_A_LETTER * (len(str(phase)) + 1)
    return bool(stretch[-1] - stretch[0] > share * (entries[-1] - entries[0]))


def label(phase: Any, entry: Any) -> dict[str, Any]:
    """Return a phase's name, above the place where it begins."""
    place = {"x": entry, "xref": "x", "xanchor": "left", "y": 1, "yref": "paper", "yanchor": "bottom"}
    return {**place, "text": escaped(phase), "showarrow": False, "font": {"size": 11, "color": "var(--quiet)"}}


def entry_text(row: Row) -> str:
    """Return what an entry allocated or released, and by which lines of code, the innermost first."""
    change = row["change_mib"]
    if change is None:
        return escaped(row["phase"])
    what = f"{'+' if float(change) >= 0 else '−'}{number(abs(float(change)))} MiB {row['category']}".replace("_", " ")
    name = row["name"]
    stack = str(row["stack"]).split(" < ") if row["stack"] else ["no line of code outside torch"]
    lines = [f"{row['phase']}: {what}" + (f", {name}" if name else ""), *stack]
    return "<br>".join(map(escaped, lines))


def draw_peaks(tables: Mapping[str, Sequence[Row]]) -> Figure:
    """Draw a bar for each phase: MiB of each category at its peak, from the tables `categories-…`. A peak that was lost
    has no values."""
    bars = {
        phase: {in_words(row["category"]): float(row["peak_mib"]) for row in rows if row["peak_mib"]}
        for phase, rows in tables.items()
    }
    colours = {in_words(name): colour for name, colour in CATEGORIES.items()}
    parts = [name for name in colours if any(name in bar for bar in bars.values())]
    return bars_of(parts, bars, "Memory at the peak (MiB)", "MiB", colours=colours)


def as_they_begin(phases: Sequence[str], results: JobResults) -> list[str]:
    """Return phases in the order in which they first begin: the model's initialisation, and those of the history."""
    rows = results.rows("timeline") if results.has("timeline") else []
    begin = {phase: place for place, phase in enumerate(dict.fromkeys(["initialisation", *(r["phase"] for r in rows)]))}
    return sorted(phases, key=lambda phase: begin.get(phase, len(begin)))


def in_words(category: Any) -> str:
    """Return a category as a legend has it: "optimizer state"."""
    return str(category).replace("_", " ")
