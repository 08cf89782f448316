"""Trains both sides of a comparison for a few steps, from equal weights on equal batches, and compares their losses.

A faster step that learns less is not faster. Pairs of runs differ in their seed, so that the interval of the difference
says what chance does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.specs.benchmark import BenchmarkSpec
from app.specs.compare import CompareSpec
from app.summaries import median_interval
from kernels.clock import now_s
from workers.jobs._training import building
from workers.jobs._training.fp8 import fp8_notes
from workers.reporter import Reporter
from workers.torch_host import reset_process

if TYPE_CHECKING:
    import torch

    from workers.measure.check import Check
    from workers.measure.table import Scalar

SIDES = ("baseline", "candidate")
LAST = 0.1
"""Share of the steps, the last ones, whose mean is the final loss; before, the window of the running mean."""
UNTIMED = 0.2
"""Share of the steps, the first ones, without times: they warm up, and compile."""
MOST_ROWS = 100


@dataclass(frozen=True)
class Run:
    """One short training run."""

    losses: Sequence[float]
    step_ms: float
    """Mean time of the steps that are timed."""


def run(spec: CompareSpec, report: Reporter) -> None:
    """Train the pairs, in an order that changes, and report the tables `convergence` and `losses`.

    Raises:
        Unsupported, InvalidEnvironment: a side cannot run here.
    """
    from workers.measure import environment

    sides: dict[str, BenchmarkSpec] = spec.sides()  # type: ignore[assignment]
    steps, pairs = spec.convergence_steps or 0, spec.convergence_pairs
    runs: dict[str, list[Run]] = {side: [] for side in SIDES}
    for pair in range(pairs):
        for side in SIDES if pair % 2 == 0 else SIDES[::-1]:
            done = sum(map(len, runs.values()))
            report.progress(done, 2 * pairs, f"training the {side}, pair {pair + 1} of {pairs}")
            of_side = sides[side]
            fields = {"seed": (of_side.seed + pair) % 2**63, "warmup_steps": 0, "measure_steps": steps}
            device, build = building.prepare(of_side)
            if not done:
                report.environment(environment.fingerprint(device))
            with building.known_errors():
                found = train(of_side.model_copy(update={**fields, "cuda_graph": False}), device, build)
            runs[side].append(found)
            reset_process()
    _report(runs, [note for side in sides.values() for note in fp8_notes(side, device)], report)


def train(spec: BenchmarkSpec, device: torch.device, build: building.Maker) -> Run:
    """Train a spec's model for `measure_steps` steps on chains of letters."""
    import torch

    from kernels.device_events import synchronize
    from workers.model.batches import ChainBatches

    steps = spec.measure_steps or 0
    sequences = spec.accumulation_steps * spec.batch_size
    batches = ChainBatches(spec.model.vocab_size, sequences, spec.context_length, device, spec.seed, steps)
    training = building.build(spec, device, build, batches=batches)
    step, losses = training.step, []
    untimed = max(1, int(UNTIMED * steps))
    for number in range(steps):
        if number == untimed:
            synchronize(device) if device.type == "cuda" else None
            began = now_s()
        step.prepare()
        for phase in step.phases.values():  # type: ignore[union-attr]
            phase()
        losses.append(step.loss.detach())  # type: ignore[attr-defined]
    found = torch.stack(losses).float().tolist()  # waits for the device
    return Run(found, 1e3 * (now_s() - began) / (steps - untimed))


def _report(runs: Mapping[str, Sequence[Run]], notes: Sequence[Check], report: Reporter) -> None:
    from workers.measure.check import Check
    from workers.measure.table import Column
    from workers.measure.validity import verdict

    columns = (
        "step: integer, baseline_loss: number, candidate_loss: number, difference: number, low: number, high: number"
    )
    rows = loss_rows(runs)
    report.table("losses", Column.parse(columns), rows)
    lines = sentences(runs)
    report.table("convergence", Column.parse("convergence"), [[line] for line in lines])
    infinite = [side for side in SIDES if not all(math.isfinite(loss) for run in runs[side] for loss in run.losses)]
    detail = f"the losses of the {' and '.join(infinite)} are not finite" if infinite else "all losses are finite"
    report.validity(verdict([Check("finite", not infinite, detail, "suspect"), *notes]), title="convergence")


def loss_rows(runs: Mapping[str, Sequence[Run]]) -> list[list[Scalar]]:
    """Return the mean losses of both sides, and the difference with its interval, by step; of many steps some."""
    steps = len(runs["baseline"][0].losses)
    shown = sorted({round(1 + at * (steps - 1) / (MOST_ROWS - 1)) for at in range(MOST_ROWS)}) if steps > 1 else [1]
    rows: list[list[Scalar]] = []
    for step in shown:
        before, after = ([run.losses[step - 1] for run in runs[side]] for side in SIDES)
        middle, low, high = difference([b - a for a, b in zip(before, after, strict=True)])
        rows.append([step, *(_finite(statistics.fmean(one)) for one in (before, after)), middle, low, high])
    return rows


def difference(numbers: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Return the median of the pairs' numbers with its 95 % interval; None where a number is not finite, or where
    there are too few."""
    if not all(map(math.isfinite, numbers)):
        return None, None, None
    low, high = median_interval(numbers) or (None, None)
    return statistics.median(numbers), low, high


def sentences(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Say by how much the losses differ, and how much faster the candidate is by step and to the same loss."""
    steps, pairs = len(runs["baseline"][0].losses), len(runs["baseline"])
    last = max(1, round(LAST * steps))
    final = {side: [statistics.fmean(run.losses[-last:]) for run in runs[side]] for side in SIDES}
    middle, low, high = difference([b - a for a, b in zip(final["baseline"], final["candidate"], strict=True)])
    if middle is None or low is None or high is None:
        lost = next(
            (
                step
                for step, row in enumerate(zip(*(run.losses for run in runs["candidate"]), strict=True), start=1)
                if not all(map(math.isfinite, row))
            ),
            None,
        )
        return [
            f"the candidate's loss is not finite from step {lost} on: it does not train"
            if lost
            else "the baseline's loss is not finite: there is nothing to compare with"
        ]
    of = f"after {steps} steps (mean of the last {last}; {pairs} pairs of runs with equal weights and batches)"
    level = statistics.fmean(final["baseline"])
    interval = f"95 % interval {low:+.4g} to {high:+.4g}"
    if runs_are_equal(runs):
        return [f"no difference of the losses at all: both sides compute the same {of}", _faster(runs, level)]
    if low <= 0 <= high:
        said = f"no difference of the losses is shown {of}: {middle:+.4g} of {level:.4g}, {interval}"
    else:
        than = f"{abs(middle):.4g} {'higher' if middle > 0 else 'lower'} than {level:.4g}"
        said = f"the candidate's loss is {than} {of}, {interval}"
    return [said, _faster(runs, max(statistics.fmean(final[side]) for side in SIDES))]


def runs_are_equal(runs: Mapping[str, Sequence[Run]]) -> bool:
    """Return True if each loss of each pair is the same."""
    return [run.losses for run in runs["baseline"]] == [run.losses for run in runs["candidate"]]


def _faster(runs: Mapping[str, Sequence[Run]], target: float) -> str:
    """Say how much faster the candidate is: per step, and to the loss that both reach in the end."""
    step_ms = {side: statistics.median(run.step_ms for run in runs[side]) for side in SIDES}
    ratios = [one.step_ms / other.step_ms for one, other in zip(runs["baseline"], runs["candidate"], strict=True)]
    by_step, low, high = difference(ratios)
    assert by_step is not None
    per_step = f"per step the candidate is {_by(by_step)}"
    if low is not None:
        per_step += f" (95 % interval of the speed-up {low:.3g} to {high:.3g})"
    needed = {side: steps_to(target, [run.losses for run in runs[side]]) for side in SIDES}
    if None in needed.values():
        return f"{per_step}; no loss is reached by both sides"
    by_loss = by_step * (needed["baseline"] or 1) / (needed["candidate"] or 1)
    return (
        f"{per_step}, and to a loss of {target:.4g} it is {_by(by_loss)}: it needs "
        f"{needed['candidate']} steps of {step_ms['candidate']:.4g} ms, the baseline {needed['baseline']} of "
        f"{step_ms['baseline']:.4g} ms"
    )


def steps_to(target: float, losses: Sequence[Sequence[float]]) -> int | None:
    """Return the first step at which the running mean of the runs' mean loss is at most `target`; None: never."""
    means = [statistics.fmean(row) for row in zip(*losses, strict=True)]
    window = max(1, round(LAST * len(means)))
    for step in range(window, len(means) + 1):
        if statistics.fmean(means[step - window : step]) <= target * (1 + 1e-9):
            return step
    return None


def _by(ratio: float) -> str:
    return f"{ratio:.3g}× faster" if ratio >= 1 else f"{1 / ratio:.3g}× slower"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
