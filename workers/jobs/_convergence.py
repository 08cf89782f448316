"""Trains both sides of a comparison for a few steps, from equal seeds on equal batches, and compares their losses.

A faster step that learns less is not faster. Pairs of runs differ in their seed, so that the interval of the difference
says what chance does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import torch

from app.specs.benchmark import BenchmarkSpec
from app.specs.compare import CompareSpec
from flopwatch.intervals import median_interval
from workers.jobs._training import building
from workers.jobs._training.fp8 import fp8_notes
from workers.measure import environment
from workers.measure.check import Check
from workers.measure.process_settings import set_back, settings
from workers.measure.table import Column, Scalar
from workers.measure.validity import verdict
from workers.model.batches import ChainBatches
from workers.model.steps import TrainStep
from workers.reporter import Reporter
from workers.torch_host import reset_process

SIDES = ("baseline", "candidate")
LAST = 0.1
"""Share of the steps, the last ones, whose mean is the final loss; before, the window of the running mean."""
LEARNED = 0.9
"""Largest share of the loss of guessing that a model has learned to go below."""
POSSIBLE = 0.95
"""Least share of the text's entropy that a mean loss can be by chance."""
LEAST_SEEN = 1e-6
"""Share of the largest gradient that is more than rounding, as of a causal convolution by Fourier transforms."""
UNCERTAIN = 0.05
"""Share of the baseline's loss that an interval around 0 may reach without the answer being inconclusive."""
ROUNDING = 1e-5
"""Share of the baseline's loss below which a difference is the rounding of float32."""
MOST_ROWS = 100

Losses = Sequence[float]
"""Those of one short training run, by step."""
Runs = Mapping[str, Sequence[Losses]]
"""Those of the pairs, by side."""


def run(spec: CompareSpec, report: Reporter) -> None:
    """Train the pairs, in an order that changes, and report the tables `convergence` and `losses`. Raises Unsupported,
    InvalidEnvironment: a side cannot run here."""
    sides: dict[str, BenchmarkSpec] = spec.sides()  # type: ignore[assignment]
    steps, pairs = spec.convergence_steps or 0, spec.convergence_pairs
    runs: dict[str, list[Losses]] = {side: [] for side in SIDES}
    before, changed, notes = settings(), list[Check](), list[Check]()
    del before["float32 products"]  # each side sets them
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
                if pair == 0 and sees_ahead(of_side, device, build):
                    notes.append(_ahead(side))
                found = train(of_side.model_copy(update={**fields, "cuda_graph": False}), device, build)
            runs[side].append(found)
            # Code of the user's own, which this process imports once, must not reach the other side.
            changed = set_back(before) or changed
            reset_process()
    notes += changed + [note for side in sides.values() for note in fp8_notes(side, device)]
    if len({(side.model.model_dump_json(), side.code) for side in sides.values()}) > 1:
        notes.append(Check("models", False, "the models differ, so equal seeds give other weights", "note"))
    notes.append(learned(runs, min(side.model.vocab_size for side in sides.values())))
    _report(runs, notes, report)


def train(spec: BenchmarkSpec, device: torch.device, build: building.Maker) -> list[float]:
    """Train a spec's model for `measure_steps` steps on chains of letters."""

    steps = spec.measure_steps or 0
    sequences = spec.accumulation_steps * spec.batch_size
    batches = ChainBatches(spec.model.vocab_size, sequences, spec.context_length, device, spec.seed)
    training = building.build(spec, device, build, batches=batches)
    step, losses = training.step, []
    for _ in range(steps):
        step.prepare()
        for phase in step.phases.values():  # type: ignore[union-attr]
            phase()
        losses.append(torch.stack([*step.earlier, step.loss.detach()]).mean())  # type: ignore[attr-defined]
    found: list[float] = torch.stack(losses).float().tolist()
    return found


def sees_ahead(spec: BenchmarkSpec, device: torch.device, build: building.Maker) -> bool:
    """Return True if a token changes the logits before it, as in attention without its mask; False, too, where a model
    computes its loss itself or takes no single sequence.

    The gradients of these logits tell, by the embedding of a token that stands at the end alone: what a mask hides has
    none.
    """
    if spec.model_has_loss:
        return False
    vocab_size = spec.model.vocab_size
    training = building.build(spec.model_copy(update={"cuda_graph": False, "compile": False}), device, build)
    step: TrainStep = training.step  # type: ignore[assignment]
    tables = [one.weight for one in training.modules.modules() if isinstance(one, torch.nn.Embedding)]
    tokens = torch.zeros((1, spec.context_length), dtype=torch.int64, device=device)
    tokens[:, -1] = vocab_size - 1
    try:
        with step.precision.autocast(device.type):
            logits = step.model(tokens)[:, :-1, :-1]
        # Differences: where the table is the output's, too, a softmax would bring in the last letter's logit.
        (logits - logits[..., :1]).float().square().sum().backward()  # type: ignore[no-untyped-call]
    except (RuntimeError, IndexError):  # as of memory, or of another shape
        return False
    known = [one.grad.nan_to_num(nan=0.0).abs() for one in tables if len(one) == vocab_size and one.grad is not None]
    return any(bool(one[-1].max() > LEAST_SEEN * one.max()) for one in known)


def _ahead(side: str) -> Check:
    detail = f"the {side}'s model sees the letters that it predicts, so its loss says nothing: a token changes the "
    return Check("causal", False, detail + "logits before it", "suspect")


def _report(runs: Runs, notes: Sequence[Check], report: Reporter) -> None:
    columns = (
        "step: integer, baseline_loss: number, candidate_loss: number, difference: number, low: number, high: number"
    )
    rows = loss_rows(runs)
    report.table("losses", Column.parse(columns), rows)
    lines = sentences(runs)
    for check in notes:
        if check.name in ("causal", "learned"):
            lines.insert(len(lines) if check.ok else 0, check.detail)
    report.table("convergence", Column.parse("convergence"), [[line] for line in lines])
    infinite = [side for side in SIDES if not all(math.isfinite(loss) for losses in runs[side] for loss in losses)]
    detail = f"the losses of the {' and '.join(infinite)} are not finite" if infinite else "all losses are finite"
    report.validity(verdict([Check("finite", not infinite, detail, "suspect"), *notes]), title="convergence")


def loss_rows(runs: Runs) -> list[list[Scalar]]:
    """Return the mean losses of both sides, and the difference with its interval, by step; of many steps some."""
    steps = len(runs["baseline"][0])
    shown = sorted({round(1 + at * (steps - 1) / (MOST_ROWS - 1)) for at in range(MOST_ROWS)}) if steps > 1 else [1]
    rows: list[list[Scalar]] = []
    for step in shown:
        before, after = ([losses[step - 1] for losses in runs[side]] for side in SIDES)
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


def learned(runs: Runs, vocab_size: int) -> Check:
    """Check that the final losses are clearly below that of guessing evenly among the letters, and not below the
    entropy of the text: check `learned`."""
    last = max(1, round(LAST * len(runs["baseline"][0])))
    levels = {side: statistics.fmean(loss for losses in runs[side] for loss in losses[-last:]) for side in SIDES}
    entropy, lowest = ChainBatches.entropy(vocab_size), min(levels, key=levels.__getitem__)
    if levels[lowest] < POSSIBLE * entropy:
        detail = f"the {lowest}'s loss of {levels[lowest]:.4g} is below {entropy:.4g}, the entropy of the text"
        detail += ": its model sees the letters that it predicts, or its loss is another one"
        return Check("learned", False, detail, "suspect")
    level = max(levels.values())
    letters = min(vocab_size, ChainBatches.LETTERS)
    guess = math.log(letters)
    share = 100 * level / guess
    detail = f"{level:.4g} is {share:.0f} % of {guess:.4g}, the loss of guessing one of {letters} letters"
    if not LEARNED * guess < level < math.inf:
        return Check("learned", True, detail)
    if min(levels.values()) < LEARNED * guess:
        worse = max(levels, key=levels.__getitem__)
        return Check("learned", False, f"the {worse} has hardly learned in these steps: {detail}", "note")
    return Check("learned", False, f"not learned yet, so more steps are needed: {detail}", "note")


def sentences(runs: Runs) -> list[str]:
    """Say by how much the losses differ, and how many steps each side needs to the same loss."""
    steps, pairs = len(runs["baseline"][0]), len(runs["baseline"])
    last = max(1, round(LAST * steps))
    final = {side: [statistics.fmean(losses[-last:]) for losses in runs[side]] for side in SIDES}
    if lost := [_lost(side, runs[side], last) for side in SIDES if not all(map(math.isfinite, final[side]))]:
        return lost
    middle, low, high = difference([b - a for a, b in zip(final["baseline"], final["candidate"], strict=True)])
    if middle is None or low is None or high is None:
        return [f"{pairs} pairs of runs are too few for an interval of the difference"]
    of = f"after {steps} steps (mean of the last {last}; {pairs} pairs of runs with equal seeds and batches)"
    level = statistics.fmean(final["baseline"])
    interval = f"95 % interval {low:+.4g} to {high:+.4g}"
    if runs["baseline"] == runs["candidate"]:
        return [f"no difference of the losses at all: both sides compute the same {of}", _needed(runs, level)]
    if low <= 0 <= high or max(-low, high) < ROUNDING * level:
        few = max(-low, high) > UNCERTAIN * level
        said = f"{'inconclusive' if few else 'no difference of the losses is shown'} {of}: "
        said += f"{middle:+.4g} of {level:.4g}, {interval}" + ("; more convergence_pairs would tell" if few else "")
    else:
        than = f"{abs(middle):.4g} {'higher' if middle > 0 else 'lower'} than {level:.4g}"
        said = f"the candidate's loss is {than} {of}, {interval}"
    return [said, _needed(runs, max(statistics.fmean(final[side]) for side in SIDES))]


def _lost(side: str, runs: Sequence[Losses], last: int) -> str:
    """Say in how many runs the last losses of a side are not all finite."""
    bad = sum(not all(map(math.isfinite, losses[-last:])) for losses in runs)
    return f"the {side}'s loss is not finite in the last {last} steps of {bad} of {len(runs)} runs: it does not train"


def _needed(runs: Runs, target: float) -> str:
    """Say after how many steps each side reaches the loss that both reach in the end."""
    least = max(1, round(LAST * len(runs["baseline"][0])))
    found = (steps_to(target, runs[side]) for side in SIDES)
    baseline, candidate = (f"at most {least}" if steps == least else str(steps) for steps in found)
    return f"to a loss of {target:.4g} the candidate needs {candidate} steps, the baseline {baseline}"


def steps_to(target: float, losses: Sequence[Losses]) -> int:
    """Return the first step at which the running mean of the runs' mean loss is at most `target`. Raises StopIteration:
    it never is."""
    means = [statistics.fmean(row) for row in zip(*losses, strict=True)]
    window = max(1, round(LAST * len(means)))
    return next(
        step
        for step in range(window, len(means) + 1)
        if statistics.fmean(means[step - window : step]) <= target * (1 + 1e-9)
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
