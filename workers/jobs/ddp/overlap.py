"""Records when a rank communicates, and how much of that its computation hides."""

import base64
import tempfile
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from parallel.collectives import recorded
from workers.jobs.ddp.context import RankContext
from workers.jobs.ddp.strategies import Trained
from workers.jobs.ddp.timelines import of_rank
from workers.jobs.ddp.timing import StepTimer
from workers.measure.allocations import snapshot
from workers.measure.busy import NOTHING_SEEN
from workers.measure.memory import short_message
from workers.measure.profiling import tables, usage
from workers.measure.profiling.overlap import OverlapRecording, StepOverlap, record_overlap
from workers.measure.ranges import Ranges, named_layers
from workers.measure.spans import at_most, total_ms
from workers.measure.timing import Observer

PROFILED_STEPS, MANY = 2, 6
SHORT_MS = 300.0
"""So many steps are profiled; of shorter ones without a trace `MANY`, in which ranks may take turns in being late."""
KERNELS_PER_RANK = 200
"""Most kernels of one rank in the table: those that take the most time."""
MAX_ENTRIES = 500_000
"""Most allocations and releases in a snapshot's history, the last ones."""
SPANS_PER_STEP = 300
"""Largest number of spans of one step, rank and stream in the timeline."""


class OperationsRecorder(Observer):
    """An observer that records when the operations of our own strategies ran in a step; it does not see torch's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open = ExitStack()
        self.rows: list[list[Any]] = []
        """(operation, bytes, start in ms since the step's beginning, end)."""

    def step_begins(self) -> None:
        self._timeline = self._open.enter_context(recorded(self._device))

    def step_ends(self) -> None:
        self._open.close()
        self.rows = [[one.operation, one.size_bytes, one.start_ms, one.end_ms] for one in self._timeline.intervals()]


def record_operations(context: RankContext, trained: Trained) -> list[list[Any]]:
    """Record when the operations of one more step ran, by events on a GPU; without a profiler. A CUDA graph starts them
    itself, unseen."""
    if trained.graphed is not None:
        return []
    recorder = OperationsRecorder(context.device)
    StepTimer(context, trained, [recorder]).step()
    return recorder.rows


def record_step_overlap(context: RankContext, trained: Trained, step_ms: float, folder: Path) -> dict[str, Any]:
    """Run some steps, which took this rank `step_ms` without it, under the profiler; each rank saves its trace in
    `folder` if the spec asks for one.

    Returns:
        {"why_not": …}, or for each step its "step_ms", "communication_ms", "exposed_ms" and "spans" by stream; also
        rows of "kernels" and "classes", per step, its "timeline" (as `of_rank`), and the "trace", a file.
    """
    why_not = why_no_profiler(context)
    if why_not is not None:
        return {"why_not": why_not}
    short = max(context.exchange(step_ms)) < SHORT_MS and not context.spec.trace
    steps = MANY if short else PROFILED_STEPS
    names = [f"step_{number + 1}" for number in range(steps)]
    ranges = Ranges()
    timer = StepTimer(context, trained, [ranges])

    def run() -> None:
        for number in range(1 + steps):
            ranges.counting = number > 0  # the first one includes the profiler's start-up
            timer.step()

    compiled_whole = trained.own is not None or (context.spec.compile and context.spec.compile_scope == "model")
    try:
        with named_layers(trained.model, compiled=compiled_whole):
            phases = trained.own.phase_names if trained.own is not None else list(trained.repeated.phases)
            profiled = record_overlap(run, names, phases, on_gpu=context.on_gpu)
    except RuntimeError as error:
        return {"why_not": f"the profiler failed: {short_message(error)}"}
    if context.on_gpu and not any(step.compute for step in profiled.steps):
        return {"why_not": NOTHING_SEEN}
    return {
        "why_not": None,
        "steps": [_as_json(step, shown=at < PROFILED_STEPS) for at, step in enumerate(profiled.steps)],
        "kernels": tables.kernel_rows(usage.kernels(profiled.work, steps)[:KERNELS_PER_RANK]),
        "classes": [row[1:] for row in tables.class_rows({"": usage.classes(profiled.work, steps)}) if row[-1]],
        "timeline": of_rank(profiled),
        "trace": _save(context, profiled, folder),
    }


def record_snapshot(context: RankContext, trained: Trained, folder: Path) -> str | None:
    """Record the GPU's allocations in one more step, if the spec asks for it; returns the snapshot as `written`."""
    if not context.spec.snapshot:
        return None
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=MAX_ENTRIES)
    try:
        StepTimer(context, trained).step()
        name, taken = f"snapshot-{context.rank.index}.pickle", torch.cuda.memory._snapshot()
        return written(context, folder / name, lambda path: snapshot.write(taken, path))
    finally:
        torch.cuda.memory._record_memory_history(None)


def why_no_profiler(context: RankContext) -> str | None:
    """Return why some rank has no profiler; None if all have one. If it failed in the middle, the others would wait
    for that rank."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            failure = None
    except RuntimeError as error:
        failure = short_message(error)
    failed = [rank for rank, flag in enumerate(context.exchange(failure is not None)) if flag]
    if not failed:
        return None
    return f"the profiler of rank {failed[0]} failed" + ("" if failure is None else f": {failure}")


def _as_json(step: StepOverlap, *, shown: bool) -> dict[str, Any]:
    return {
        "step_ms": 1e-6 * step.length_ns,
        "communication_ms": total_ms(step.communication),
        "exposed_ms": total_ms(step.exposed),
        "spans": {name: at_most(spans, SPANS_PER_STEP) for name, spans in step.streams().items() if shown},
    }


def _save(context: RankContext, profiled: OverlapRecording, folder: Path) -> str | None:
    if not context.spec.trace:
        return None
    return written(context, folder / f"trace-{context.rank.index}.json", profiled.save)


def written(context: RankContext, path: Path, write: Callable[[Path], object]) -> str:
    """Write a file of this rank; return its path or, with several nodes, which share no folder, its content as text for
    `tables.file_of`."""
    if context.spec.nodes == 1:
        write(path)
        return str(path)
    with tempfile.TemporaryDirectory() as own:
        write(Path(own) / path.name)
        return base64.b64encode(zlib.compress((Path(own) / path.name).read_bytes(), 1)).decode()
