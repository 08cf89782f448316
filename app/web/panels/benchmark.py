"""`benchmark`: the phases of a step for each process."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from app.web.panels._bars import bars_of
from app.web.panels._panel import Panel
from app.web.panels._results import JobResults
from app.web.plots.drawing import Figure

PHASES = ("accumulation", "forward", "backward", "optimizer", "prefill")
"""Phases in the order of a step; those that the user's own code names follow them."""
WHOLES = frozenset({"step", "isolated_step", "first_step", "rest"})
"""Phases that are no parts of a step, or what its parts leave."""
REST, DECODING = "rest of the step", "decoding"
MAX_PROCESSES = 64
"""Largest number of processes that are drawn; the table has all of them."""

Measurement = Mapping[str, Any]


def panels(results: JobResults) -> Iterator[Panel]:
    """Yield the phases of a step by process."""
    processes = by_process(results.measurements)
    every = len({row["unit_index"] for row in results.measurements})
    cut = f" Drawn: the first {len(processes)} of {every} processes." if len(processes) < every else ""
    if any(medians(rows) for rows in processes.values()):
        yield Panel(
            "phases",
            "Where a step's time goes (ms)",
            "Median time of each phase, a bar for each fresh process. The rest is what the table has, or the "
            f"median step minus its phases.{cut}",
            partial(draw_phases, processes),
        )


def by_process(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """Return the measurements of each process, by its name; a job of one process has the name of its unit."""
    units: dict[int, list[Measurement]] = {}
    for row in measurements:
        units.setdefault(row["unit_index"], []).append(row)
    if len(units) == 1:
        return dict(zip(["one process"], units.values(), strict=True))
    return {f"process {index + 1}": rows for index, rows in list(units.items())[:MAX_PROCESSES]}


def medians(rows: Sequence[Measurement]) -> dict[str, float]:
    """Return the median time in ms of each phase, and the rest of the step.

    A step of the user's own has a phase `rest`, whose time was measured: medians of phases need not add up to that of
    the step. Of our own steps it is what the phases leave of the median (isolated) step.
    """
    times = {
        row["phase"]: row["median"]
        for row in rows
        if row["outcome"] == "ok" and row["metric"] == f"{row['phase']}_ms" and row["median"] is not None
    }
    parts = {phase: times[phase] for phase in (*PHASES, *times) if phase in times and phase not in WHOLES}
    step = times.get("isolated_step", times.get("step"))
    if parts and "rest" in times:
        parts[REST] = times["rest"]
    elif step is not None and parts and (rest := step - sum(parts.values())) > 0:
        parts[DECODING if "prefill" in parts else REST] = rest
    return parts


def draw_phases(processes: Mapping[str, Sequence[Measurement]]) -> Figure:
    """Draw a stacked bar for each process: ms of each phase."""
    times = {name: medians(rows) for name, rows in processes.items()}
    named = {phase: None for parts in times.values() for phase in parts if phase not in (DECODING, REST)}
    rest = [name for name in (DECODING, REST) if any(name in parts for parts in times.values())]
    return bars_of([*sorted(named, key=_rank), *rest], times, "Median time (ms)", "ms")


def _rank(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else len(PHASES)
