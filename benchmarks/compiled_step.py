"""Compares the compiled step of xl with our attention with that of each of torch's backends, on one GPU.

    python -m benchmarks.compiled_step turns [--pairs N] [--rounds N] [--steps N] [--cuda-graph]
    python -m benchmarks.compiled_step jobs [--rounds N] [--cuda-graph]

Without a CUDA graph the step is limited by the host, and a host's speed drifts by more than the attentions differ. So
the attentions alternate, in one of two ways.

`turns` makes pairs of processes, one for our attention and one for a backend, each of which builds its model once. In
each round each process takes a turn: after a step that is not measured, it runs a few steps one after the other, as
training does, while the other process waits. The process that ended a round begins the next one, so each two rounds
give one ratio: the geometric mean of both rounds' ratios of our time to the backend's. A pair of processes has the
median of its ratios. The table has the median over the pairs, with the 95 % confidence interval of that median.

`jobs` submits in each round a `benchmark` of each attention to a server and a worker of this checkout, and prints after
each round what Flopwatch says when it compares the jobs so far. Each job is a process of its own.

The step is that of `python -m benchmarks.gpu_tables --tables compiled-step --list`. On an H200, a pair of processes
takes 20 to 60 s to start, and 70 GiB of the GPU's memory; `jobs` takes 6 minutes.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
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
from tabulate import tabulate

from app.specs.benchmark import BenchmarkSpec
from benchmarks._shared import started_service, wait_for_success
from benchmarks.gpu_tables import Spec, compiled_step
from tools.service import submit
from workers.jobs import _training
from workers.measure.timing import run_step

WAYS = ("turns", "jobs")
OURS = "triton"
BACKENDS = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
WARMUP_STEPS = 10
CONFIDENCE = 0.95
JOB_TIMEOUT_S = 1800.0
END_TIMEOUT_S = 10.0

Round = tuple[float, float]
"""The time of a step of the first spec, and of the second, in ms."""


def by_jobs(specs: Mapping[str, Spec], rounds: int) -> Iterator[str]:
    """Measure each spec by a job in each round; yield after each round how Flopwatch compares `OURS` with the others.

    Raises:
        RuntimeError: a job failed.
    """
    names = list(specs)
    with started_service() as service:
        service.start_worker()
        client = service.client()
        submitted: list[dict[str, int]] = []
        for round_ in range(rounds):
            order = [names[(round_ + place) % len(names)] for place in range(len(names))]
            submitted.append({name: submit(client, {"spec": specs[name]}) for name in order})
        for count, jobs in enumerate(submitted, start=1):
            for job_id in jobs.values():
                wait_for_success(client, job_id, timeout_s=JOB_TIMEOUT_S)
            for name in (one for one in names if one != OURS):
                asked: list[tuple[str, str | int | float | bool | None]] = [("format", "markdown")]
                asked += [("metric", metric) for metric in ("step_ms", "host_us")]
                for one in submitted[:count]:
                    asked += [("baseline", one[name]), ("candidate", one[OURS])]
                yield client.get("/compare", params=asked).raise_for_status().text


def by_turns(one: Spec, other: Spec, rounds: int, steps: int) -> tuple[str, list[Round]]:
    """Return the device's name, and what the two specs' processes measured in each round.

    Raises:
        RuntimeError: a process ended; it has written why to standard error.
    """
    try:
        with _started(one) as first, _started(other) as second:
            device: str = first.recv()
            second.recv()
            found: list[Round] = []
            for round_ in range(rounds):
                taken: dict[Connection, float] = {}
                for process in (first, second) if round_ % 2 else (second, first):
                    process.send(steps)
                    taken[process] = process.recv()
                found.append((taken[first], taken[second]))
    except (EOFError, OSError) as error:
        raise RuntimeError("a process ended, and has written why to standard error") from error
    return device, found


@contextmanager
def _started(spec: Spec) -> Iterator[Connection]:
    """A process that serves a spec; the connection to it. It ends with the block."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(spec, there), daemon=True)
    process.start()
    there.close()  # so that the connection ends if the process dies
    try:
        with here:
            yield here
    finally:
        process.join(END_TIMEOUT_S)
        process.kill()


def _serve(spec: Spec, connection: Connection) -> None:
    """Build a spec's step and warm it up, then measure as many steps as each message asks for, in ms per step."""
    checked = BenchmarkSpec.model_validate(spec)
    device, build_model = _training.prepare(checked)
    training = _training.build(checked, device, build_model)

    def run(steps: int) -> None:
        for _ in range(steps):
            training.step.prepare()
            run_step(training.step.phases, ())
        if device.type == "cuda":
            torch.cuda.synchronize()

    run(WARMUP_STEPS)
    gc.collect()
    gc.freeze()  # as jobs do: the collector need not look in the middle of a step at what will live on
    connection.send(torch.cuda.get_device_name() if device.type == "cuda" else device.type)
    with suppress(EOFError):  # the other end is closed
        while steps := connection.recv():
            run(1)  # wakes the host's and the device's caches and clocks, which the other process has used meanwhile
            begun = time.perf_counter()
            run(steps)
            connection.send(1e3 * (time.perf_counter() - begun) / steps)


def ratio(rounds: Sequence[Round]) -> float:
    """Return the ratio of the first process's time to the second's: the median over each two rounds."""
    ratios = [first / second for first, second in rounds]
    return statistics.median(math.sqrt(one * next_) for one, next_ in zip(ratios[::2], ratios[1::2], strict=True))


def row(name: str, pairs: Sequence[Sequence[Round]]) -> list[str]:
    """Return a row of the table: our attention beside this one, in some pairs of processes.

    The interval is that of order statistics (scipy.stats.quantile_test), which assumes nothing about the distribution.
    """
    ratios = [ratio(rounds) for rounds in pairs]
    tested: Any = stats.quantile_test(ratios, p=0.5)
    low, high = tested.confidence_interval(CONFIDENCE)
    times = zip(*(one for rounds in pairs for one in rounds), strict=True)
    interval = "" if math.isnan(low) else f" ({low:.3f} to {high:.3f})"
    return [
        name,
        *(f"{statistics.median(side):.1f}" for side in times),
        f"{statistics.median(ratios):.3f}{interval}",
        " ".join(f"{one:.3f}" for one in ratios),
    ]


def even(text: str) -> int:
    """Read an even number of rounds."""
    number = int(text)
    if number % 2 or number < 2:
        raise argparse.ArgumentTypeError(f"{number} is not an even number of rounds")
    return number


def main() -> None:
    """Print the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="way", required=True)
    turns, jobs = (ways.add_parser(way, formatter_class=argparse.ArgumentDefaultsHelpFormatter) for way in WAYS)
    turns.add_argument("--pairs", type=int, default=6, help="pairs of processes; fewer than six have no interval")
    turns.add_argument("--rounds", type=even, default=8, help="of each pair, an even number")
    turns.add_argument("--steps", type=int, default=5, help="measured steps of a turn")
    jobs.add_argument("--rounds", type=int, default=8, help="jobs of each attention")
    for way in (turns, jobs):
        way.add_argument("--cuda-graph", action="store_true", help="the step is one CUDA graph: only the device counts")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this measures steps on a GPU: run it on a host with a GPU")
    specs = {
        spec["attention"]: {**spec, "cuda_graph": options.cuda_graph}
        for spec in compiled_step()
        if spec["attention"] in {OURS, *BACKENDS}
    }
    if options.way == "jobs":
        for told in by_jobs(specs, options.rounds):
            print(told, flush=True)
        return
    rows, device = [], ""
    for name in BACKENDS:
        pairs = []
        for _ in range(options.pairs):
            device, rounds = by_turns(specs[OURS], specs[name], options.rounds, options.steps)
            print(name, *(f"{ours:.1f}/{theirs:.1f}" for ours, theirs in rounds), flush=True)
            pairs.append(rounds)
        rows.append(row(name, pairs))
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("torch", "triton"))
    print(f"\n{device}, {versions}; {options.pairs} pairs, {options.rounds} rounds of {options.steps} steps\n")
    headings = ("beside", f"{OURS}, ms", "this, ms", f"{OURS} ÷ this", "of each pair of processes")
    print(tabulate(rows, headers=headings, tablefmt="pipe", disable_numparse=True))


if __name__ == "__main__":
    main()
