"""`profile`: the step by classes of kernels, what a GPU waits for, the roofline, kernels, flame graph and trace."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.web.panels._bars import bars_of
from app.web.panels._panel import Panel
from app.web.panels._results import JobResults, Row
from app.web.plots.drawing import PALETTE, SYMBOLS, Figure, escaped
from app.web.stacks import MAX_BYTES, draw_flames, tree
from flopwatch.text.numbers import number

CLASSES = {
    "matmul": "var(--plot-1)",
    "attention": "var(--plot-6)",
    "softmax": "var(--plot-2)",
    "normalisation": "var(--plot-5)",
    "elementwise": "var(--plot-3)",
    "copy": "var(--plot-7)",
    "reduction": "var(--plot-4)",
    "communication": "var(--bad)",
    "optimizer": "var(--plot-11)",
    "other": "var(--plot-8)",
}
SCOPES: Mapping[str, tuple[str, str | None]] = {
    "forward": ("forward", None),
    "forward_backward": ("backward", "forward"),
    "prefill": ("prefill", None),
    "decode": ("decode", None),
}
"""The scopes of the table `classes`, with the phase that each adds to the scope before it."""
MAX_LINES = 20
"""Most lines that are drawn; the table has all."""
TOO_LOW = "too low"
"""In the source of a ceiling that work has exceeded."""
PYTHON, OTHER = "Python", "operators and waits"
SAMPLED, STEPS = "sampled steps", ("profiled step", "unprofiled step")
"""Rows of the table `summary`."""
STACKS, FLAME_GRAPH = "stacks.txt", "flamegraph.svg"
MAX_PRODUCTS = 300
"""Most points of the roofline: the products that take the most time."""
MIN_SIZE, MAX_SIZE = 6.0, 30.0
"""Sizes of the roofline's points, in pixels."""


def panels(results: JobResults) -> Iterator[Panel]:
    summary = {row["what"]: row for row in results.rows("summary")} if results.has("summary") else {}
    if results.has("lines"):
        # The note says how long the sampled steps took where that is longer.
        how = summary.get(SAMPLED, {}).get("note") or "sampled without a profiler"
        yield Panel(
            "lines",
            "Lines of your code: where a step's time goes",
            f"{str(how)[:1].upper()}{str(how)[1:]}. The own times (self) add up to an unprofiled step; a line's "
            "total includes your functions that it calls.",
            lambda: draw_lines(results.rows("lines")),
        )
    if results.has("classes"):
        yield Panel(
            "classes",
            "Where the time of a profiled step goes, by class (ms)",
            "Times of kernels, copies and fills, added up; on a CPU, the operators' own times. The profiler makes "
            "steps longer: take the shares, not the times.",
            lambda: draw_classes(results.rows("classes")),
        )
    if results.has("waits"):
        yield Panel(
            "waits",
            "What the GPU waits for in a step (ms)",
            "All of an unprofiled step: `running` is the time in which a kernel runs; of the other classes "
            "`flopwatch why` finds the line and tries what helps. The table has the largest gap of each.",
            lambda: draw_waits(results.rows("waits")),
        )
    if results.has("products") or results.has("attention"):
        ceilings = results.rows("ceilings")
        yield Panel(
            "roofline",
            "Roofline: what limits matrix products and the parts of attention",
            roofline_text(ceilings),
            (lambda: draw_roofline(results.rows("products"), results.rows("attention"), ceilings))
            if limits_of(ceilings)
            else None,
            log="x y",
        )
    kernels = next((name for name in results.tables if name.startswith("kernels-") and results.has(name)), None)
    if kernels is not None:
        yield Panel("kernels", "Kernels and operators", template="explorer.html", values={"table": kernels})
    if STACKS in results.artifacts:
        values: dict[str, Any] = {"stacks": results.artifacts[STACKS], "drawn": results.artifacts.get(FLAME_GRAPH)}
        profiled, unprofiled = (summary.get(step, {}).get("value") for step in STEPS)
        text = "A frame is as wide as its share of the time; below it are the functions that it calls. Drag to widen."
        if profiled and unprofiled:
            text += f" A step took {number(profiled)} ms under the profiler instead of {number(unprofiled)} ms: take "
            text += "the shares, not the times."
        yield Panel(
            "flame-graph",
            "Flame graph",
            text,
            lambda: draw_flames(tree(results.head(STACKS, MAX_BYTES))),
            template="flame_graph.html",
            values=values,
        )


def draw_lines(rows: Sequence[Row]) -> Figure:
    """Draw a bar for each of the lines that take the most time: ms of Python itself, and of operators and waits."""
    names = {
        str(row["function"] if row["file"] is None else f"{row['file']}:{row['line']} {row['function']}"): row
        for row in rows[:MAX_LINES]
    }
    bars = {}
    for name, row in names.items():
        own, python = float(row["self_ms"] or 0.0), row["python_ms"]
        bars[name] = {"self": own} if python is None else {PYTHON: float(python), OTHER: own - float(python)}
    parts = [part for part in ("self", PYTHON, OTHER) if any(part in bar for bar in bars.values())]
    figure = bars_of(parts, bars, "Own time per step (ms)", "ms")
    columns = ["file", "line", "function", "self_ms", "self_percent", "total_ms", "python_ms", "device_self_ms"]
    columns += ["device_total_ms", "calls", "code"]
    if rows and "self_margin_percent" in rows[0]:  # profiles of earlier versions have none
        columns.insert(columns.index("self_percent") + 1, "self_margin_percent")
    figure["table"] = {"columns": columns, "rows": [[row[name] for name in columns] for row in rows]}
    return figure


def phase_times(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return the ms of each class in each phase, from the table `classes`.

    Of our model, scopes include the phases before them. A step of the user's own has a scope for each of its phases,
    beside `step`.
    """
    scopes: dict[str, dict[str, float]] = {}
    for row in rows:
        scopes.setdefault(str(row["scope"]), {})[str(row["class"])] = float(row["total_ms"] or 0.0)
    if scopes.keys() - {"step", *SCOPES}:
        return {scope: times for scope, times in scopes.items() if scope != "step"}
    phases: dict[str, dict[str, float]] = {}
    known: dict[str, float] = {}
    for scope, times in scopes.items():
        if scope == "step" and scopes.keys() <= {"step"}:
            phases["step"] = times
        elif scope == "step" and "prefill" in scopes:
            continue  # its phases are there
        else:
            phase, _ = SCOPES.get(scope, ("optimizer" if scope == "step" else scope, None))
            before = known if phase in ("backward", "optimizer") else {}
            phases[phase] = {name: max(0.0, time - before.get(name, 0.0)) for name, time in times.items()}
            known = times
    return phases


def draw_classes(rows: Sequence[Row]) -> Figure:
    """Draw a bar for each phase: ms of each class of kernels in one step."""
    times = {
        phase: {name: time for name, time in classes.items() if time > 0}
        for phase, classes in phase_times(rows).items()
    }
    order = [*CLASSES, *(name for classes in times.values() for name in classes if name not in CLASSES)]
    parts = [name for name in dict.fromkeys(order) if any(name in classes for classes in times.values())]
    return bars_of(parts, times, "Time per step (ms)", "ms", colours=CLASSES)


def draw_waits(rows: Sequence[Row]) -> Figure:
    """Draw the step, parted into what the GPU does or waits for."""
    times = {str(row["class"]): float(row["total_ms"] or 0.0) for row in rows}
    figure = bars_of(list(times), {"step": times}, "Time per step (ms)", "ms")
    columns = ["class", "total_ms", "share_percent", "largest_ms", "operator", "kernel"]
    figure["table"] = {"columns": columns, "rows": [[row[name] for name in columns] for row in rows]}
    return figure


def limits_of(rows: Sequence[Row]) -> dict[str, Row]:
    """Return the rows of the table `ceilings` that have a value, by what they limit."""
    return {str(row["limit"]): row for row in rows if row["value"] is not None}


def roofline_text(ceilings: Sequence[Row]) -> str:
    """Return how to read the roofline, and which of its limits are not known; only these if there is no roof."""
    missing = [f"{row['limit']}: {row['source']}" for row in ceilings if row["value"] is None]
    unknown = f"Not known of this device: {'; '.join(missing)}."
    if not limits_of(ceilings):
        return unknown
    text = (
        "A point is a matrix product of one shape, or a part of attention: the larger, the more of the step it takes. "
        "Left of the corner of its roof, memory bandwidth limits it; right of the corner, arithmetic does. "
        "Bytes are those of inputs and outputs, each once. "
        "Other operators have no point, since what they compute and move is not known."
    )
    low = [f"{row['limit']}: {row['source']}" for row in ceilings if TOO_LOW in str(row["source"])]
    above = f"Points above a roof say that it is too low. {'; '.join(low)}." if low else ""
    return " ".join(filter(None, [text, unknown if missing else "", above]))


def draw_roofline(products: Sequence[Row], attention: Sequence[Row], ceilings: Sequence[Row]) -> Figure:
    """Draw rates over FLOPs per byte, with the rates that the device reaches; parts of `attention` without a known cost
    are left out."""
    points = [("products", row, escaped(f"{row['operator']} {row['product']}, {row['dtype']}")) for row in products]
    points += [("attention", row, escaped(row["part"])) for row in attention]
    points = [point for point in points if point[1]["tflops"] and point[1]["intensity"]]
    points = sorted(points, key=lambda point: -float(point[1]["total_ms"] or 0.0))[:MAX_PRODUCTS]
    longest = max((float(row["total_ms"] or 0.0) for _, row, _ in points), default=0.0)
    traces: list[dict[str, Any]] = []
    phases = list(dict.fromkeys(str(row["phase"]) for _, row, _ in points))
    for group, symbol in (("products", SYMBOLS[0]), ("attention", SYMBOLS[2])):
        for index, phase in enumerate(phases):
            own = [(row, words) for of, row, words in points if of == group and row["phase"] == phase]
            if own:
                colour = PALETTE[index % len(PALETTE)]
                traces.append(cloud(escaped(f"{group}, {phase}"), own, longest, symbol=symbol, colour=colour))
    if traces:
        intensities = [float(row["intensity"] or 1.0) for _, row, _ in points]
        traces += roofs(limits_of(ceilings), min(intensities), max(intensities))
    return {
        "data": traces,
        "layout": {
            "height": 460,
            "hovermode": "closest",
            "xaxis": {"type": "log", "title": {"text": "FLOPs per byte"}},
            "yaxis": {"type": "log", "title": {"text": "TFLOP/s"}},
        },
        "table": {
            "columns": ["what", "phase", "FLOP/byte", "TFLOP/s", "ms per step", "of the limit (%)", "bound"],
            "rows": [
                [words, *(row[name] for name in ("phase", "intensity", "tflops", "total_ms", "limit_percent", "bound"))]
                for _, row, words in points
            ],
        },
        "empty": "No operator's FLOPs and bytes are known: a CUDA graph and what a compiler fused have no shapes.",
    }


def cloud(
    name: str, points: Sequence[tuple[Row, str]], longest_ms: float, *, symbol: str, colour: str
) -> dict[str, Any]:
    """Return the trace of some points of the roofline; the area of a point grows with its time."""
    sizes = [
        MIN_SIZE + (MAX_SIZE - MIN_SIZE) * math.sqrt(float(row["total_ms"] or 0.0) / (longest_ms or 1.0))
        for row, _ in points
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [row["intensity"] for row, _ in points],
        "y": [row["tflops"] for row, _ in points],
        "marker": {"size": sizes, "symbol": symbol, "color": colour, "opacity": 0.7},
        "customdata": [
            f"{words}<br>{escaped(row['phase'])}: {float(row['total_ms'] or 0.0):.4g} ms per step"
            + (
                f"<br>{row['limit_percent']:.3g} % of its limit, {escaped(row['bound'])}"
                + (", so the roof is too low" if float(row["limit_percent"]) > 100 else "")
                if row["limit_percent"]
                else ""
            )
            for row, words in points
        ],
        "hovertemplate": "%{customdata}<br>%{x:.3g} FLOP/byte, %{y:.4g} TFLOP/s<extra></extra>",
    }


def roofs(limits: Mapping[str, Row], least: float, most: float) -> list[dict[str, Any]]:
    """Return the lines of the rates that the device reaches, over the points' intensities; none if unknown."""
    compute, copy, peak = (limits.get(name) for name in ("products", "copies", "vendor's peak"))
    lines: list[dict[str, Any]] = []
    left, right = least / 2, most * 2
    if compute is not None and copy is not None:
        rate, bandwidth = float(compute["value"] or 0), float(copy["value"] or 0)
        ridge = 1e3 * rate / bandwidth
        left, right = min(left, ridge / 2), max(right, ridge * 2)
        x = [left, ridge, right]
        y = [1e-3 * left * bandwidth, rate, rate]
        name = f"measured: {bandwidth:.4g} GB/s, {rate:.4g} TFLOP/s in {compute['precision']}"
        lines.append(roof(name, x, y, "solid"))
    elif compute is not None:
        rate = float(compute["value"] or 0)
        lines.append(
            roof(f"measured: {rate:.4g} TFLOP/s in {compute['precision']}", [left, right], [rate, rate], "solid")
        )
    elif copy is not None:
        bandwidth = float(copy["value"] or 0)
        y = [1e-3 * left * bandwidth, 1e-3 * right * bandwidth]
        lines.append(roof(f"measured: {bandwidth:.4g} GB/s", [left, right], y, "solid"))
    if peak is not None:
        rate = float(peak["value"] or 0)
        name = f"vendor's peak: {rate:.4g} TFLOP/s in {peak['precision']}"
        lines.append(roof(name, [left, right], [rate, rate], "dash"))
    return lines


def roof(name: str, x: Sequence[float], y: Sequence[float], dash: str) -> dict[str, Any]:
    """Return one line of the roofline."""
    line = {"color": "var(--text)", "width": 1.5, "dash": dash}
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "line": line, "hoverinfo": "name"}
