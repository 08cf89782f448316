"""Runs steps under torch's profiler, with the model's parts named."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from workers.measure.compilation import compilation

if TYPE_CHECKING:
    from app.specs._training import TrainingSpec
    from workers.jobs._training.building import Training
    from workers.measure.profiling.lines import LineTrace
    from workers.measure.profiling.recording import Profile
    from workers.reporter import Reporter

GRAPH = "graph"
"""The only phase of a step that is a CUDA graph."""


def phases_of(spec: TrainingSpec, phases: Sequence[str]) -> tuple[str, ...]:
    """Return those of a step's phases that the profiler can distinguish."""
    return (GRAPH,) if spec.cuda_graph else tuple(phases)


def profile_steps(
    training: Training,
    steps: int,
    report: Reporter,
    *,
    python: bool = False,
    warm: bool = False,
    shapes: bool = True,
    trace: LineTrace | None = None,
    isolated: bool = True,
) -> tuple[Profile, list[float], dict[str, list[float]]]:
    """Run steps under the profiler. Returns the profile, and the times of steps and phases in ms. Raises OutOfMemory:
    the memory did not suffice; AnotherProfiler: the step uses torch's profiler itself.

    Args:
        python: Record Python's functions, too.
        warm: Leave out the warm-up step before them, which absorbs the profiler's start-up.
        shapes: Record the shapes of operators' inputs.
        trace: Follows the lines of the user's own code.
        isolated: Let each step begin on an idle device. False: they follow each other, and no times are returned.
    """
    from workers.measure.memory import translate_oom
    from workers.measure.profiling.recording import record
    from workers.measure.ranges import Ranges
    from workers.measure.timing import make_clock, run_step

    step = training.step
    ranges, clock = Ranges(), make_clock(training.device)
    laps_ms: list[float] = []
    phases_ms: dict[str, list[float]] = {}

    def run() -> None:
        for number in range(1 if warm else 0, 1 + steps):
            ranges.counting = number > 0
            step.prepare()
            run_step(step.phases, [*([] if trace is None else [trace]), ranges, *([clock] if isolated else [])])
            if ranges.counting and isolated:
                laps_ms.append(clock.last.wall_ms)
                for phase, time_ms in clock.last.phases_ms.items():
                    phases_ms.setdefault(phase, []).append(time_ms)
            report.progress(number, steps, "recording stacks" if python else "profiling")

    on_gpu = training.device.type == "cuda"
    with translate_oom("the profiled steps"), _named_parts(training):
        return record(run, on_gpu=on_gpu, python=python, shapes=shapes), laps_ms, phases_ms


def _named_parts(training: Training) -> AbstractContextManager[None]:
    from workers.measure.ranges import named_layers, named_modules

    spec, modules = training.spec, training.modules
    if spec.step_code is None:
        return named_layers(modules, compiled=spec.compile and spec.compile_scope == "model")
    # Its modules may be compiled, in any way, and no hook may come into those.
    return named_layers(modules, compiled=True) if compilation().graphs else named_modules(modules)
