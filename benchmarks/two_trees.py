"""Times README's attention rows and a training step with the stopwatches of two checkouts, which take turns.

    git worktree add .base OLD-COMMIT
    python -m benchmarks.two_trees .base . [--rounds N] [--device cpu]
    python -m benchmarks.two_trees .base . --job "ddp strategy=fsdp model.size=large"

Each turn is a new interpreter with that checkout on PYTHONPATH; it needs torch and Triton only. With `--job` a turn is
`flopwatch run` of that job instead, and the rows are its metrics. The order of the turns is drawn in each round. Times
are medians of the device's times in ms, both passes in bfloat16, with the checkout's own kernels and its own warm-up
until steady; "ratio" is of the medians of the turns, "spread" the largest relative difference between turns of one
checkout. "hot" is the ratio of a second measurement right after, with three seconds of warm-up on both sides: where it
is 1 and the ratio is not, one of the checkouts stops its warm-up before the chip has reached its power limit; where
both differ, the kernels do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
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
HOT_MS = 3000.0


def attention_ms(device: torch.device, shape: tuple[int, int, int, int, bool]) -> tuple[Any, Any]:
    """Time both passes of one row with the checkout's stopwatch, until steady and then hot; returns two `Timing`s."""
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
    passes = ["forward_backward"]
    steady = time_passes(operation, stopwatch(device), passes, warmup=None, calls=CALLS)["forward_backward"]
    calls = max(1, int(HOT_MS / statistics.median(steady.samples)))
    return steady, time_passes(operation, stopwatch(device), passes, warmup=calls, calls=CALLS)["forward_backward"]


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


def turn(device: torch.device, rows: int | None) -> None:
    """Time everything in this process, and print JSON: by row the time in ms, warm-up calls, `steady`, seconds, and the
    hot time in ms (None for steps)."""
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for shape in ROWS[device.type][:rows]:
        began = time.perf_counter()
        timing, hot = attention_ms(device, shape)
        name = f"{', '.join(map(str, shape[:4]))}, {'causal' if shape[4] else 'no mask'}"
        took_s = time.perf_counter() - began
        hot_ms = statistics.median(hot.samples)
        found[name] = (statistics.median(timing.samples), timing.warmup, timing.steady, took_s, hot_ms)
    began = time.perf_counter()
    steps = training(device)
    took_s = time.perf_counter() - began
    found["training step"] = (statistics.median(steps.step), steps.warmup, steps.steady, took_s, None)
    for phase, samples in steps.phases.items():
        found[phase] = (statistics.median(samples), steps.warmup, steps.steady, 0.0, None)
    print(json.dumps(found))


def in_tree(tree: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a turn in a new interpreter that imports this checkout."""
    job = options.job
    arguments = [str(Path(__file__).resolve()), "--turn", "--device", options.device]
    if options.rows is not None:
        arguments += ["--rows", str(options.rows)]
    if job is not None:
        arguments = ["-c", "from app.cli import main; main()", "run", *shlex.split(job), "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), *_packages()])}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", *arguments]
        done = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1] if job is None else done.stdout)
    if job is None:
        return found
    known = [one for one in found["measurements"] if one["median"] is not None]
    return {one["metric"]: (one["median"], one["n"], one["validity"], 0.0, None) for one in known}


def _packages() -> list[str]:
    """Return the folders of packages that PYTHONPATH names already."""
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def main() -> None:
    """Take turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, help="two checkouts: the old one, the new one")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=int, metavar="N", help="the first N rows of attention; default: all")
    parser.add_argument("--job", help="the arguments of `flopwatch run`")
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns")
    parser.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn:
        turn(torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu"), options.rows)
        return
    old, new = (tree.resolve() for tree in options.trees)
    turns: dict[Path, list[dict[str, Any]]] = {old: [], new: []}
    drawn = random.Random(options.seed)
    for _ in range(options.rounds):
        for tree in drawn.sample((old, new), 2):
            turns[tree].append(found := in_tree(tree, options))
            print(f"{tree}: { ({name: round(row[0], 4) for name, row in found.items()}) }", file=sys.stderr, flush=True)
    print(f"seed {options.seed}, {options.rounds} rounds")
    print("| row | old, ms | new, ms | ratio | spread | hot | warm-up calls | steady | seconds |")
    print("|---|---:|---:|---:|---:|---:|---:|---|---:|")
    for name in turns[old][0]:
        times = {tree: [one[name][0] for one in turns[tree]] for tree in (old, new)}
        medians = [statistics.median(times[tree]) for tree in (old, new)]
        spread = max(max(values) / min(values) - 1 if min(values) > 0 else math.inf for values in times.values())
        calls, steady = (" → ".join(str(turns[tree][0][name][i]) for tree in (old, new)) for i in (1, 2))
        seconds = " → ".join(f"{turns[tree][0][name][3]:.1f}" for tree in (old, new))
        hot = "–"
        if turns[old][0][name][4] is not None:
            hots = [statistics.median(one[name][4] for one in turns[tree]) for tree in (old, new)]
            hot = f"{hots[1] / hots[0]:.4f}"
        ratio = f"{medians[1] / medians[0] if medians[0] else math.nan:.4f} | {spread:.1%} | {hot}"
        print(f"| {name} | {medians[0]:.4g} | {medians[1]:.4g} | {ratio} | {calls} | {steady} | {seconds} |")


if __name__ == "__main__":
    main()
