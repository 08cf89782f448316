"""The table `lines` of a profile: what each line of the user's own code takes.

Its host times come from samples of steps without a profiler; its calls, operators and device times from one step that
torch's profiler records while Python's own tracing follows the lines.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.specs.profile import ProfileSpec
from workers import uploaded

if TYPE_CHECKING:
    from workers.jobs._training import Training
    from workers.measure.profiling.lines import LineTrace, OwnCode, Use
    from workers.measure.profiling.sampling import Samples
    from workers.reporter import Reporter

SAMPLED_MS = 1000.0
"""For how long steps are sampled."""
MAX_LATE = 0.05
"""Largest share of the time by which samples may be late without a note."""
MAX_SAMPLED_STEPS = 100
"""Most steps that are sampled: a step of the user's own may not have batches for very many."""


def own_code(spec: ProfileSpec) -> OwnCode | None:
    """Return what tells the user's own code from all other; None if the job has none."""
    from workers.measure.profiling.lines import OwnCode

    codes = [code for code in (spec.step_code, spec.code, spec.attention_code) if code is not None]
    if not codes:
        return None
    return OwnCode(lambda file: uploaded.own_name(file, codes), linecache.getlines)


def sample(training: Training, step_ms: float, report: Reporter) -> Samples:
    """Sample about a second of steps, at least one, without a profiler.

    Raises:
        OutOfMemory: the memory did not suffice.
    """
    from workers.measure.memory import translate_oom
    from workers.measure.profiling.sampling import Sampler
    from workers.measure.timing import make_clock, run_step

    steps = max(1, min(MAX_SAMPLED_STEPS, math.ceil(SAMPLED_MS / max(step_ms, 1e-3))))
    sampler, clock = Sampler(), make_clock(training.device)
    with translate_oom("the sampled steps"), sampler.running():
        for number in range(steps):
            training.step.prepare()
            run_step(training.step.phases, [sampler, clock])
            if number in (0, steps - 1):
                report.progress(number + 1, steps, "sampling")
    return sampler.samples


def summary_of(samples: Samples, found: Sequence[Use], trace: LineTrace) -> list[list[str | int | float | bool | None]]:
    """Return the rows of the table `summary` about the lines."""
    from workers.measure.profiling.lines import MAX_EVENTS

    note = "sampled without a profiler; lines have their shares of an unprofiled step"
    late = samples.late_ns / (sum(sample.wall_ns for sample in samples.stacks.values()) or 1)
    if late > MAX_LATE and not samples.prompt:
        note += (
            f"; the host is busy and samples came late, by {late:.0%} of the time: lines may have some of the time of "
        )
        note += "lines before them"
    if not trace.complete:
        note += f"; calls are unknown, since a step runs more than {MAX_EVENTS} lines"
    rows: list[list[str | int | float | bool | None]] = [["sampled steps", samples.steps, "steps", note]]
    if found and found[0].python_ms is not None:
        python_ms = sum(use.python_ms or 0.0 for use in found)
        rows.append(["Python itself", python_ms, "ms", "about, per step: time in which no operator ran, nor a wait"])
    return rows
