"""The table `lines` of a profile: what each line of the user's own code takes.

Its host times come from samples of steps without a profiler; its calls, operators and device times from one step that
torch's profiler records while Python's own tracing follows the lines.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence

from app.specs._training import TrainingSpec
from kernels.clock import now_s
from workers import uploaded
from workers.jobs._training.building import Training
from workers.measure.memory import translate_oom
from workers.measure.own_step import StepStopped
from workers.measure.profiling.lines import MAX_EVENTS, LineTrace, OwnCode, Use
from workers.measure.profiling.sampling import Sampler, Samples
from workers.measure.timing import make_clock, run_step
from workers.reporter import Reporter

MAX_SLOWDOWN = 1.25
"""How many times a measured step's time the sampled ones may take without a note; sampling takes some itself."""
SAMPLES = 1000
"""After so many samples no further step begins."""
MAX_SAMPLED_S = 2.0
"""Nor after so long: on a busy host samples come late."""
MAX_LATE = 0.05
"""Largest share of the time by which samples may be late without a note."""


def own_code(spec: TrainingSpec) -> OwnCode | None:
    """Return what tells the user's own code from all other; None if the job has none."""
    codes = [code for code in (spec.step_code, spec.code, spec.attention_code) if code is not None]
    if not codes:
        return None
    return OwnCode(lambda file: uploaded.own_name(file, codes), linecache.getlines)


def sample(training: Training, report: Reporter) -> tuple[Samples, bool]:
    """Sample steps without a profiler until there are about SAMPLES samples. Call it when nothing else needs steps.
    Returns the samples, and whether an iterator in the step has ended before. Raises OutOfMemory: the memory did not
    suffice."""
    sampler, clock = Sampler(), make_clock(training.device)
    report.progress(0, SAMPLES, "sampling")
    until = now_s() + MAX_SAMPLED_S
    with translate_oom("the sampled steps"), sampler.running():
        while not sampler.samples.steps or (sampler.samples.count < SAMPLES and now_s() < until):
            training.step.prepare()
            try:
                run_step(training.step.phases, [sampler, clock])
            except StepStopped:
                return sampler.samples, True
    report.progress(SAMPLES, SAMPLES, "sampling")
    return sampler.samples, False


def summary_of(
    samples: Samples, found: Sequence[Use], step_ms: float, trace: LineTrace, *, ended: bool = False
) -> list[list[str | int | float | bool | None]]:
    """Return the rows of the table `summary` about the lines. `samples`: of steps without a profiler. `step_ms`: median
    time of the steps that were measured before. `ended`: whether an iterator in the step has ended the sampling."""
    note = "sampled without a profiler; lines have their shares of an unprofiled step"
    wall_ns = sum(sample.wall_ns for sample in samples.stacks.values())
    late = samples.late_ns / (wall_ns or 1)
    if late > MAX_LATE and not samples.prompt:
        note += (
            f"; the host is busy and samples came late, by {late:.0%} of the time: lines may have some of the time of "
        )
        note += "lines before them"
    sampled_ms = 1e-6 * wall_ns / max(1, samples.steps)
    if sampled_ms > MAX_SLOWDOWN * step_ms:
        note += (
            f"; they took {sampled_ms:.4g} ms each, longer than those measured before (a busy host, or steps differ)"
        )
    if not trace.complete:
        note += f"; calls are unknown, since a step runs more than {MAX_EVENTS} lines"
    exact = "none: the lines have no times"
    if (margin := samples.margin(0.1)) is not None:
        exact = f"a line with 10 % of the step is uncertain by ± {100 * margin:.2g} % of the step (95 %)"
    if ended:
        exact += "; an iterator in the step, such as a loader, has ended: let it begin again for more samples"
    rows: list[list[str | int | float | bool | None]] = [["sampled steps", samples.steps, "steps", note]]
    rows.append(["samples", samples.count, "samples", exact])
    if found and found[0].python_ms is not None:
        python_ms = sum(use.python_ms or 0.0 for use in found)
        rows.append(["Python itself", python_ms, "ms", "about, per step: time in which no operator ran, nor a wait"])
    return rows
