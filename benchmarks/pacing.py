"""Compares the rate of `pacing: loop` with a plain training loop, and both with isolated steps.

    python -m benchmarks.pacing [--sizes small,xl] [--rounds N] [--steps N]

In one process, a job's step and a plain loop over the same model, optimizer and batches take turns. The plain loop is
written as people write it: no phases, no events, one synchronisation before and after. The table has medians over the
rounds, in ms per step, and the median of the rounds' ratios with its 95 % interval: of the median of the job's samples,
from which it computes rates, and of their mean, which interrupted steps move as they move the plain loop.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import cast

import torch

from app.specs.benchmark import BenchmarkSpec
from app.summaries import median_interval
from workers.jobs._training import building
from workers.measure.timing import make_clock, make_marks, time_loop, time_steps
from workers.model.loss import cross_entropy
from workers.model.steps import TrainStep

WARMUP_STEPS = 10


def plain_loop(step: TrainStep) -> Callable[[int], float]:
    """Return a function that trains for so many steps in bf16, and returns the milliseconds per step."""
    model, optimizer, batches = step.model, step.optimizer, step.batches
    device = batches.device

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def train(steps: int) -> float:
        synchronize()
        begun = time.perf_counter()
        for _ in range(steps):
            inputs, targets = batches.next()
            with torch.autocast(device.type, torch.bfloat16):
                loss = cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        synchronize()
        return 1e3 * (time.perf_counter() - begun) / steps

    return train


def row(spec: BenchmarkSpec, rounds: int, steps: int) -> list[str]:
    """Measure one spec and return its row of the table."""
    device, build_model = building.prepare(spec)
    step = cast("TrainStep", building.build(spec, device, build_model).step)
    train, clock, marks = plain_loop(step), make_clock(device), make_marks(device)
    isolated: list[float] = []
    looped: list[float] = []
    means: list[float] = []
    plain: list[float] = []

    def loop() -> None:
        times = time_loop(step.phases, marks, prepare=step.prepare, measure_steps=steps)
        looped.append(statistics.median(times))
        means.append(statistics.fmean(times))

    for index in range(rounds):
        warmup = WARMUP_STEPS if index == 0 else 1
        isolated += time_steps(step.phases, clock, prepare=step.prepare, warmup_steps=warmup, measure_steps=steps).step
        for turn in (loop, lambda: plain.append(train(steps)))[:: -1 if index % 2 else 1]:
            turn()
    in_loop, in_plain = statistics.median(looped), statistics.median(plain)
    numbers = [f"{statistics.median(isolated):.2f}", f"{in_loop:.2f}", f"{in_plain:.2f}"]
    for each in (looped, means):
        ratios = [one / other for one, other in zip(each, plain, strict=True)]
        low, high = median_interval(ratios) or (min(ratios), max(ratios))
        numbers.append(f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")
    return [str(spec.model.size), "blocks" if spec.compile else "no", *numbers]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="small,xl", help="presets of models, with commas")
    parser.add_argument("--context-length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of each turn")
    options = parser.parse_args()
    print(f"torch {torch.__version__}; {options}\n")
    print("| size | compiled | isolated | loop | plain loop | loop ÷ plain | its mean ÷ plain |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for size in options.sizes.split(","):
        for compiled in (False, True):
            fields = {
                "model": {"size": size},
                "context_length": options.context_length,
                "precision": "bf16",
                "optimizer": "torch_fused_adamw",
                "compile": compiled,
            }
            spec = BenchmarkSpec.model_validate(fields)
            print(f"| {' | '.join(row(spec, options.rounds, options.steps))} |", flush=True)
            torch.compiler.reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
