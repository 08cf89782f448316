"""Compares the rate of `pacing: loop` with a plain training loop, and both with isolated steps.

    python -m benchmarks.pacing [--sizes small,xl] [--rounds N] [--steps N]

In one process, a job's step and a plain loop over a model and an optimizer of its own take turns. The plain loop is
written as people write it: no phases, no events, one synchronisation before and after. The table has medians over the
rounds, in ms per step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from app.specs.benchmark import BenchmarkSpec
from workers.jobs import _training
from workers.measure.timing import make_clock, make_marks, time_loop, time_steps
from workers.model.compiled import compile_blocks
from workers.model.loss import cross_entropy
from workers.model.transformer import TransformerLM

WARMUP_STEPS = 10


def plain_loop(spec: BenchmarkSpec, device: torch.device) -> Callable[[int], float]:
    """Return a function that trains for so many steps, and returns the milliseconds per step."""
    with device:
        shape: Any = spec.model.shape()
        model = TransformerLM(spec.model.vocab_size, spec.context_length, **shape)
    if spec.compile:
        compile_blocks(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = (spec.batch_size, spec.context_length + 1)

    def train(steps: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(steps):
            tokens = torch.randint(spec.model.vocab_size, batch, device=device)
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(tokens[:, :-1])
                loss = cross_entropy(logits, tokens[:, 1:])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begun) / steps

    train(WARMUP_STEPS)
    return train


def row(spec: BenchmarkSpec, rounds: int, steps: int) -> list[str]:
    """Measure one spec and return its row of the table."""
    device, build_model = _training.prepare(spec)
    step = _training.build(spec, device, build_model).step
    train = plain_loop(spec, device)
    clock, marks = make_clock(device), make_marks(device)
    isolated: list[float] = []
    looped: list[float] = []
    plain: list[float] = []
    for _ in range(rounds):
        isolated += time_steps(
            step.phases, clock, prepare=step.prepare, warmup_steps=WARMUP_STEPS, measure_steps=steps
        ).step
        looped += time_loop(step.phases, marks, prepare=step.prepare, measure_steps=steps)
        plain.append(train(steps))
    in_loop, in_plain = statistics.median(looped), statistics.median(plain)
    numbers = [f"{statistics.median(isolated):.2f}", f"{in_loop:.2f}", f"{in_plain:.2f}", f"{in_loop / in_plain:.3f}"]
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
    print("| size | compiled | isolated | loop | plain loop | loop ÷ plain |\n|---|---|---:|---:|---:|---:|")
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
