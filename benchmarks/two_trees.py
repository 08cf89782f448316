"""Times README's attention rows and a training step with the stopwatches of two checkouts, which take turns.

    git worktree add .base OLD-COMMIT
    python -m benchmarks.two_trees .base . [--rounds N] [--device cpu]

Each turn is a new interpreter with that checkout on PYTHONPATH; it needs torch and Triton only. Times are medians of
the device's times in ms, both passes in bfloat16, with the checkout's own kernels and its own warm-up until steady;
"ratio" is of the medians of the turns, "spread" the largest relative difference between turns of one checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROWS: dict[str, list[tuple[int, int, int, int, bool]]] = {
    "cuda": [
        (1, 16, 16_384, 64, True),
        (1, 16, 16_384, 64, False),
        (1, 16, 16_384, 128, True),
        (2, 32, 32_768, 128, True),
        (2, 32, 8192, 256, True),
        (4, 16, 4096, 64, True),
        (4, 16, 4096, 128, False),
        (4, 32, 2048, 80, True),
        (8, 16, 1024, 64, True),
        (4, 25, 512, 64, True),
    ],
    "cpu": [(1, 2, 64, 32, True)],
}
"""(batch, heads, length, head dimension, causal): README's table; on a CPU a row that only tries this program."""
CALLS = 20
STEPS = 20


def attention_ms(device: torch.device, shape: tuple[int, int, int, int, bool]) -> Any:
    """Time both passes of one row with the checkout's stopwatch; returns its `Timing`."""
    from workers.measure.operations import Operation, time_passes
    from workers.measure.stopwatch import stopwatch

    *sizes, is_causal = shape
    q, k, v, gradient = (torch.randn(sizes, device=device, dtype=torch.bfloat16) for _ in range(4))
    inputs = tuple(tensor.requires_grad_() for tensor in (q, k, v))
    attention: Callable[..., torch.Tensor] = nn.functional.scaled_dot_product_attention
    if device.type == "cuda":
        from kernels.attention.flash_triton import flash_attention

        attention = flash_attention
    operation = Operation(lambda q, k, v: attention(q, k, v, is_causal=is_causal), inputs, gradient)
    both = time_passes(operation, stopwatch(device), ["forward_backward"], warmup=None, calls=CALLS)
    return both["forward_backward"]


def training(device: torch.device) -> Any:
    """Time training steps of a stack of torch's own layers with the checkout's clock; returns its `StepTimes`."""
    from workers.measure.timing import make_clock, time_steps

    width, layers, length = (1600, 12, 512) if device.type == "cuda" else (32, 1, 16)
    layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
    batch = torch.randn(4, length, width, device=device)
    losses: list[torch.Tensor] = []

    def forward() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            losses[:] = [model(batch).float().square().mean()]

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def backward() -> None:
        losses[0].backward()  # type: ignore[no-untyped-call]

    phases = {"forward": forward, "backward": backward, "optimizer": update}
    return time_steps(phases, make_clock(device), warmup_steps=None, window_s=0.5, measure_steps=STEPS)


def turn(device: torch.device) -> None:
    """Time everything in this process, and print JSON: by row the time in ms, warm-up calls, `steady`, and seconds."""
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for shape in ROWS[device.type]:
        began = time.perf_counter()
        timing = attention_ms(device, shape)
        name = f"{', '.join(map(str, shape[:4]))}, {'causal' if shape[4] else 'no mask'}"
        took_s = time.perf_counter() - began
        found[name] = (statistics.median(timing.samples), timing.warmup, timing.steady, took_s)
    began = time.perf_counter()
    steps = training(device)
    found["training step"] = (statistics.median(steps.step), steps.warmup, steps.steady, time.perf_counter() - began)
    for phase, samples in steps.phases.items():
        found[phase] = (statistics.median(samples), steps.warmup, steps.steady, 0.0)
    print(json.dumps(found))


def in_tree(tree: Path, device: str) -> dict[str, Any]:
    """Run a turn in a new interpreter that imports this checkout."""
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--turn", "--device", device]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Take turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, help="two checkouts: the old one, the new one")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn:
        turn(torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu"))
        return
    old, new = (tree.resolve() for tree in options.trees)
    turns: dict[Path, list[dict[str, Any]]] = {old: [], new: []}
    for number in range(options.rounds):
        for tree in (old, new) if number % 2 == 0 else (new, old):
            turns[tree].append(in_tree(tree, options.device))
    print("| row | old, ms | new, ms | ratio | spread | warm-up calls | steady | seconds |")
    print("|---|---:|---:|---:|---:|---:|---|---:|")
    for name in turns[old][0]:
        times = {tree: [one[name][0] for one in turns[tree]] for tree in (old, new)}
        medians = [statistics.median(times[tree]) for tree in (old, new)]
        spread = max(max(values) / min(values) - 1 for values in times.values())
        calls, steady = (" → ".join(str(turns[tree][0][name][i]) for tree in (old, new)) for i in (1, 2))
        seconds = " → ".join(f"{turns[tree][0][name][3]:.1f}" for tree in (old, new))
        ratio = f"{medians[1] / medians[0]:.4f} | {spread:.1%}"
        print(f"| {name} | {medians[0]:.4g} | {medians[1]:.4g} | {ratio} | {calls} | {steady} | {seconds} |")


if __name__ == "__main__":
    main()
