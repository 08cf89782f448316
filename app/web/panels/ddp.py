"""`ddp`: a timeline of each rank's computation and communication, the parts of its step, and the exposed share by
strategy."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from app.results.sheet import Cell, Sheet
from app.states import UNFIT
from app.web.panels._bars import bars_of
from app.web.panels._panel import Panel
from app.web.panels._results import JobResults, Row
from app.web.plots.drawing import Figure
from flopwatch.text.cases import case_text, in_use

STREAMS = {
    "compute": "computation",
    "communication": "communication",
    "exposed": "exposed communication",
    "waiting": "waiting for a later rank",
}
"""Streams of the timeline from the top to the bottom, with their names for people."""
COLOURS = {
    "compute": "var(--plot-1)",
    "communication": "var(--plot-3)",
    "exposed": "var(--bad)",
    "waiting": "var(--plot-2)",
}
SHORT = {"exposed": "exposed", "waiting": "waiting"}
ROW = 16
"""Height of a stream, in pixels."""
AROUND = 140
MAX_SPANS = 3000
"""Largest number of blocks of one timeline; more are merged with their neighbours, and the table counts all."""
MAX_RANKS = 16
"""Largest number of ranks of a timeline; the table has all of them."""
COMPUTATION, EXPOSED = "computation", "exposed communication"
STEP, EXPOSED_MS = "step_ms", "exposed_communication_ms"
OF_A_STRATEGY = ("strategy", "bucket_size_mb", "sharded_optimizer", "reshard_after_forward", "prefetch")


def panels(results: JobResults) -> Iterator[Panel]:
    if results.has("timeline"):
        rows = results.rows("timeline")
        yield from (timeline(rows, number) for number in sorted({int(row["step"] or 0) for row in rows}))
    sheet = results.sheet
    strategies, of, note = parts_of_steps(sheet), "this job", ""
    siblings = results.sweep_sheet([STEP, EXPOSED_MS], OF_A_STRATEGY) if {STEP} & set(sheet.names("metric")) else None
    if siblings is not None and len(compared := parts_of_steps(siblings)) > 1:
        strategies, of, note = compared, f"sweep {results.job['sweep_id']}", tied(siblings)
    if strategies:
        yield Panel(
            "exposed",
            f"Exposed communication by strategy: {of}",
            "A step of each strategy: what it takes without communication, and what communication adds, measured "
            "in turns. Communication that is hidden behind computation adds nothing.",
            partial(draw_exposed, strategies, note),
        )


def timeline(rows: Sequence[Row], step: int) -> Panel:
    """Return the panel of one profiled step; the first one is open."""
    first = step == min(int(row["step"] or 0) for row in rows)
    return Panel(
        f"timeline-{step}",
        f"Computation and communication of each rank, profiled step {step}",
        "All ranks on one clock, from the beginning of the first one's step. Communication while the rank computes is "
        "hidden; exposed is what remains. A rank waits in a collective until the last one enters it: table stragglers "
        "says which, and why. Close neighbours are drawn as one."
        if first
        else "",
        lambda: draw_timeline([row for row in rows if row["step"] == step]),
        folded=not first,
    )


def parts_of_steps(sheet: Sheet) -> dict[str, dict[str, float]]:
    """Return, for each case in words, the ms of a step without communication, and the ms that communication adds.

    A case is left out if one of the two is unknown; negative times count as zero.
    """
    parts = {}
    for name, (step, exposed) in cells_of_steps(sheet).items():
        hidden = max(0.0, min(exposed.value or 0.0, step.value or 0.0))
        parts[name] = {COMPUTATION: (step.value or 0.0) - hidden, EXPOSED: hidden}
    return parts


def cells_of_steps(sheet: Sheet) -> dict[str, tuple[Cell, Cell]]:
    """Return for each case in words the step and the exposed communication, where both are known. Wrong and invalid
    cases say so."""
    if not {STEP, EXPOSED_MS} <= set(sheet.names("metric")):
        return {}
    names, found = sheet.names(), dict[str, tuple[Cell, Cell]]()
    coordinates = [name for name in sheet.names("coordinate") if name != "job"]
    for row in sheet.rows:
        step, exposed = (row[names.index(name)] for name in (STEP, EXPOSED_MS))
        if all(isinstance(cell, Cell) and cell.value is not None for cell in (step, exposed)):
            case = case_text({name: in_use(row[names.index(name)]) for name in coordinates}) or "case"
            if (verdict := row[names.index("validity")]) in UNFIT:
                case = f"{case}: {verdict}"
            found[unique_name(case, found)] = step, exposed
    return found


def tied(sheet: Sheet) -> str:
    """Name the cases whose step cannot be told from the shortest one, because their intervals overlap; "": none."""
    steps = {name: step for name, (step, _) in cells_of_steps(sheet).items()}
    shortest = min(steps, key=lambda name: steps[name].value or 0.0)
    names = [name for name, step in steps.items() if name != shortest and step.overlaps(steps[shortest])]
    return (
        f"The step of {', '.join(names)} cannot be told from the shortest, {shortest}: the intervals overlap"
        if names
        else ""
    )


def unique_name(name: str, taken: Mapping[str, Any]) -> str:
    """Return a variant of the name that is not taken, since two jobs may have measured the same case."""
    number, variant = 2, name
    while variant in taken:
        number, variant = number + 1, f"{name} ({number})"
    return variant


def draw_exposed(strategies: Mapping[str, Mapping[str, float]], note: str = "") -> Figure:
    """Draw a bar for each strategy: computation, and the time that communication adds to the step."""
    colours = {COMPUTATION: COLOURS["compute"], EXPOSED: COLOURS["exposed"]}
    figure = bars_of([COMPUTATION, EXPOSED], strategies, "Step (ms)", "ms", colours=colours)
    table = figure["table"]
    table["columns"].append("exposed share (%)")
    for row in table["rows"]:
        row.append(100 * row[2] / ((row[1] + row[2]) or 1.0))
    return {**figure, "note": note} if note else figure


def draw_timeline(rows: Sequence[Row]) -> Figure:
    """Draw the spans of one step, rows of the table `timeline`: a row for each rank and stream."""
    ranks = sorted({int(row["rank"] or 0) for row in rows})
    shown = ranks[:MAX_RANKS]
    streams = [stream for stream in STREAMS if any(row["stream"] == stream for row in rows)]
    lines = [(rank, stream) for rank in shown for stream in streams]
    traces = []
    for stream in streams:
        spans = []
        for rank in shown:
            own = [row for row in rows if row["rank"] == rank and row["stream"] == stream]
            times = [(float(row["start_ms"] or 0), float(row["end_ms"] or 0)) for row in own]
            spans += [(lines.index((rank, stream)), *span) for span in merged_spans(times, MAX_SPANS // len(lines))]
        traces.append(blocks(STREAMS[stream], COLOURS[stream], spans))
    names = [f"rank {rank}, {SHORT.get(stream) or STREAMS[stream]}" for rank, stream in lines]
    figure = rows_of_time(traces, names, "Time in the step (ms)")
    figure["table"] = {
        "columns": ["rank", "stream", "busy (ms)", "spans"],
        "rows": [[rank, STREAMS[stream], *busy_time(rows, rank, stream)] for rank, stream in lines],
    }
    if len(ranks) > len(shown):
        figure["note"] = f"The first {len(shown)} of {len(ranks)} ranks"
    return figure


def merged_spans(spans: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return at most `most` of these spans, which are in order: those with the least gaps between them become one."""
    gaps = sorted(after[0] - before[1] for before, after in pairwise(spans))
    widest = gaps[len(spans) - most - 1] if len(spans) > most else None
    merged: list[tuple[float, float]] = []
    for begin, end in spans:
        if merged and widest is not None and begin - merged[-1][1] <= widest:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def busy_time(rows: Sequence[Row], rank: int, stream: str) -> tuple[float, int]:
    """Return the ms that a rank's stream was at work, and the number of its spans."""
    spans = [row for row in rows if row["rank"] == rank and row["stream"] == stream]
    return sum(float(row["end_ms"] or 0) - float(row["start_ms"] or 0) for row in spans), len(spans)


def blocks(name: str, colour: str, spans: Sequence[tuple[int, float, float]]) -> dict[str, Any]:
    """Return one trace with a block for each (row, begin, end): one path is drawn faster than a thousand bars."""
    x: list[float | None] = []
    y: list[float | None] = []
    for row, begin, end in spans:
        x += [begin, end, end, begin, begin, None]
        y += [row - 0.36, row - 0.36, row + 0.36, row + 0.36, row - 0.36, None]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": x,
        "y": y,
        "fill": "toself",
        "fillcolor": colour,
        "line": {"width": 0.5, "color": colour},
        "hoveron": "points",
        "hovertemplate": f"{name}: %{{x:,.4~r}} ms<extra></extra>",
    }


def rows_of_time(traces: Sequence[Mapping[str, Any]], names: Sequence[str], title: str) -> Figure:
    """Return a figure with time along x and a named row for each number along y, the first at the top."""
    return {
        "data": list(traces) if names else [],
        "layout": {
            "height": AROUND + ROW * len(names),
            "hovermode": "closest",
            "xaxis": {"title": {"text": title}, "rangemode": "tozero"},
            "yaxis": {
                "tickmode": "array",
                "tickvals": list(range(len(names))),
                "ticktext": list(names),
                "range": [len(names) - 0.5, -0.5],
                "showgrid": False,
                "zeroline": False,
            },
            "showlegend": len(traces) > 1,
        },
        "empty": "Nothing was recorded.",
    }
