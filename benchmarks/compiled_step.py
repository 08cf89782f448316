"""Compares xl's compiled step with our attention and with each of torch's backends, by processes that take turns.

    python -m benchmarks.compiled_step [--pairs N] [--rounds N] [--steps N] [--cuda-graph]

Without a CUDA graph the step is limited by the host, whose speed drifts by more than the attentions differ, within the
time of one job. So two processes, each with a model of its own, take turns of a few steps. The process that ended a
round begins the next one, so each two rounds give one ratio: the geometric mean of both rounds' ratios of our time to
the backend's. A pair of processes has the median of its ratios; the table has the median over the pairs with its 95 %
confidence interval. On an H200 a pair takes 20 to 60 s to start, and 70 GiB of the GPU's memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from scipy import stats

from app.specs.benchmark import BenchmarkSpec
from benchmarks.run import SPECS
from workers.jobs._training import building
from workers.measure.timing import run_step

OURS = "triton"
BACKENDS = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
WARMUP_STEPS = 10
CONFIDENCE = 0.95
END_TIMEOUT_S = 10.0

Round = tuple[float, float]
"""The time of a step of the first spec, and of the second, in ms."""


def by_turns(one: Mapping[str, Any], other: Mapping[str, Any], rounds: int, steps: int) -> list[Round]:
    """Return the times of the two specs' processes in each round.

    Raises:
        RuntimeError: a process failed or ended.
    """
    found: list[Round] = []
    try:
        with _started(one) as first, _started(other) as second:
            for process in (first, second):
                _answer_of(process)  # it is warm
            for round_ in range(rounds):
                taken: dict[Connection, float] = {}
                for process in (first, second) if round_ % 2 else (second, first):
                    process.send(steps)
                    taken[process] = _answer_of(process)
                found.append((taken[first], taken[second]))
    except (EOFError, OSError) as error:
        raise RuntimeError("a process ended") from error
    return found


def _answer_of(process: Connection) -> float:
    """Return the time that a process has measured next. Raises RuntimeError if it failed."""
    milliseconds, failure = process.recv()
    if failure:
        raise RuntimeError(f"a process failed: {failure}")
    return float(milliseconds)


@contextmanager
def _started(spec: Mapping[str, Any]) -> Iterator[Connection]:
    """Start a process that measures steps of a spec; yields the connection to it, and ends it with the block."""
    here, there = multiprocessing.Pipe()
    # What has been imported may have touched a GPU, which does not survive a fork.
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    process = context.Process(target=_serve, args=(spec, there), daemon=True)
    process.start()
    there.close()  # so that the connection ends if the process dies
    try:
        with here:
            yield here
    finally:
        process.join(END_TIMEOUT_S)
        process.kill()


def _serve(spec: Mapping[str, Any], connection: Connection) -> None:
    """Take turns with a spec's step, or send why that failed."""
    try:
        _take_turns(spec, connection)
    except Exception as error:
        connection.send((None, f"{type(error).__name__}: {error}"))
        raise


def _take_turns(spec: Mapping[str, Any], connection: Connection) -> None:
    """Build a spec's step and warm it up, then measure as many steps as each message asks for, in ms per step."""
    checked = BenchmarkSpec.model_validate(spec)
    device, build_model = building.prepare(checked)
    training = building.build(checked, device, build_model)

    def run(steps: int) -> None:
        for _ in range(steps):
            training.step.prepare()
            run_step(training.step.phases, ())
        if device.type == "cuda":
            torch.cuda.synchronize()

    run(WARMUP_STEPS)
    gc.collect()
    gc.freeze()  # as jobs do: the collector need not traverse long-lived objects in the middle of a step
    connection.send((0.0, ""))
    with suppress(EOFError):  # the other end is closed
        while steps := connection.recv():
            run(1)  # the other process has used the caches and clocks meanwhile
            begun = time.perf_counter()
            run(steps)
            connection.send((1e3 * (time.perf_counter() - begun) / steps, ""))


def ratio(rounds: Sequence[Round]) -> float:
    """Return the ratio of the first process's time to the second's: the median over each two rounds."""
    ratios = [first / second for first, second in rounds]
    return statistics.median(math.sqrt(one * next_) for one, next_ in zip(ratios[::2], ratios[1::2], strict=True))


def row(name: str, pairs: Sequence[Sequence[Round]]) -> list[str]:
    """Return a row of the table: our attention beside this one, in some pairs of processes.

    The interval is that of order statistics (scipy.stats.quantile_test), which assumes nothing about the distribution.
    It takes six pairs; with fewer the row has none.
    """
    ratios = [ratio(rounds) for rounds in pairs]
    tested: Any = stats.quantile_test(ratios, p=0.5)
    low, high = tested.confidence_interval(CONFIDENCE)
    times = zip(*(one for rounds in pairs for one in rounds), strict=True)
    interval = "" if math.isnan(low) else f" ({low:.3f} to {high:.3f})"
    medians = [f"{statistics.median(side):.1f}" for side in times]
    return [name, *medians, f"{statistics.median(ratios):.3f}{interval}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6, help="pairs of processes beside each backend")
    parser.add_argument("--rounds", type=int, default=8, help="of each pair, an even number")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a turn")
    parser.add_argument("--cuda-graph", action="store_true", help="the step is one CUDA graph: only the device counts")
    options = parser.parse_args()
    if options.rounds % 2:
        parser.error("--rounds must be even")
    base = json.loads((SPECS / "compiled-step.json").read_text())["base"]
    ours, *others = ({**base, "attention": name, "cuda_graph": options.cuda_graph} for name in (OURS, *BACKENDS))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {options}\n")
    print(f"| beside | {OURS}, ms | this, ms | {OURS} ÷ this |\n|---|---:|---:|---|")
    for other in others:
        pairs = [by_turns(ours, other, options.rounds, options.steps) for _ in range(options.pairs)]
        print(f"| {' | '.join(row(other['attention'], pairs))} |", flush=True)


if __name__ == "__main__":
    main()
