"""Draws every sample of a job's case over the index of its step, with a line for each phase of each process.

Times that fall only at the beginning show that the warm-up was too short; times that change all along show a drift."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

from app.metrics import readable
from app.web.plots.chart import DASHES
from app.web.plots.drawing import LEGEND, PALETTE, Figure, escaped, hover_unit

MAX_POINTS = 4000
"""A figure with at most this many points, about three for each pixel of its width, draws all of them."""
MIN_STRETCHES = 50
"""Smallest number of stretches of a line, however many lines the figure has."""
MAX_MARKERS = 2000
"""Largest number of points of a line that are drawn with markers."""
MAX_TICKS = 12
"""Largest number of steps that have a tick each. Between fewer ticks Plotly would put fractions of steps."""


def over_steps(rows: Sequence[Mapping[str, Any]], number_of_processes: int) -> Figure:
    """Draw everything that was sampled in milliseconds or, if nothing was, in the first unit that occurs. `rows` are
    measurements of one case with `metric`, `phase`, `unit`, `unit_index` and `samples`; a note says if they are of
    fewer than `number_of_processes`."""
    units = [row["unit"] for row in rows]
    unit = "ms" if "ms" in units else next(iter(units), None)
    lines = sorted((row for row in rows if row["unit"] == unit), key=lambda row: row["unit_index"])
    processes = sorted({row["unit_index"] for row in lines})
    names = line_names({(row["metric"], row["phase"]) for row in lines})
    phases = list(dict.fromkeys(names[row["metric"], row["phase"]] for row in lines))
    number_of_points = sum(len(row["samples"]) for row in lines)
    traces = []
    for row in lines:
        phase, process = names[row["metric"], row["phase"]], processes.index(row["unit_index"])
        name = phase if len(processes) == 1 else f"{phase}, process {process + 1}"
        trace = _line(row["samples"], phase, PALETTE[phases.index(phase) % len(PALETTE)], number_of_points)
        trace["line"]["dash"] = DASHES[phases.index(phase) // len(PALETTE) % len(DASHES)]
        trace["name"] = name if process else phase
        trace["hovertemplate"] = f"step %{{x}}: %{{y:.5g}}{hover_unit(unit)}<extra>{escaped(name)}</extra>"
        if len(processes) > 1:
            # A phase has one colour and one entry in the legend, however many processes measured it.
            trace |= {"showlegend": process == 0, "text": f"process {process + 1}"}
        traces.append(trace)
    longest = max((len(row["samples"]) for row in lines), default=0)
    title = readable("time_ms" if unit == "ms" else lines[0]["metric"] if lines else "", unit)
    layout = {
        "xaxis": {"title": {"text": "Step"}, **({"dtick": 1} if longest <= MAX_TICKS else {})},
        "yaxis": {"title": {"text": title}, "rangemode": "tozero"},
        "hovermode": "closest",
        "showlegend": len(traces) > 1,
        **LEGEND,
    }
    read = len({row["unit_index"] for row in rows})
    note = f"Drawn: the first {read} of {number_of_processes} processes" if read < number_of_processes else ""
    return {"data": traces, "layout": layout, "note": note, "empty": "Nothing was sampled repeatedly."}


def _line(samples: Sequence[float], phase: str, colour: str, number_of_points: int) -> dict[str, Any]:
    """Return the trace of one phase of one process, thinned if the figure has too many points."""
    steps = list(range(len(samples))) if number_of_points <= MAX_POINTS else thinned(samples, number_of_points)
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(steps) == len(samples) <= MAX_MARKERS else "lines",
        "legendgroup": phase,
        "x": steps,
        "y": [samples[step] for step in steps],
        "line": {"width": 1, "color": colour},
        "marker": {"size": 5, "symbol": "circle", "color": colour},
    }


def thinned(samples: Sequence[float | None], number_of_points: int) -> list[int]:
    """Return the steps of a line that are drawn, in order: its ends and, of each stretch, a pixel wide, the least and
    the greatest sample, so that no peak is lost. The line shares the pixels with all points of the figure."""
    stretches = max(MIN_STRETCHES, MAX_POINTS * len(samples) // (2 * number_of_points))
    width = -(-len(samples) // stretches)
    steps = {0, len(samples) - 1}
    known = [(sample, step) for step, sample in enumerate(samples) if sample is not None]
    for _, stretch in groupby(known, key=lambda place: place[1] // width):
        ordered = sorted(stretch)
        steps |= {ordered[0][1], ordered[-1][1]}
    return sorted(steps)


def line_names(measured: Collection[tuple[str, str | None]]) -> dict[tuple[str, str | None], str]:
    """Return the names of lines by metric and phase: the phase, if only one metric has it."""
    phases = Counter(phase for _, phase in measured)
    names = {}
    for metric, phase in measured:
        name = readable(metric).partition(" (")[0].lower()
        names[metric, phase] = name if phase is None else phase if phases[phase] == 1 else f"{phase}: {name}"
    return names
