"""Compares the compiled step of xl with our attention with that of each of torch's backends, on one GPU.

    python -m benchmarks.compiled_step turns [--rounds 40] [--steps 5] [--cuda-graph]
    python -m benchmarks.compiled_step jobs [--rounds 8] [--cuda-graph]

Without a CUDA graph the step is limited by the host, and a host's speed drifts by more than the attentions differ. So
both ways alternate. `jobs` submits a `benchmark` of each attention in each round to a server and a worker of this
checkout, and prints after each round what Flopwatch says when it compares the jobs so far. `turns` alternates more
often: ours and one backend have a process each, which makes its model once; in each round, each process measures a few
steps while the other waits, and in the next round the other begins. Its table gives medians over the rounds in ms: of
the time of a step, and of the time in which the host issues it. The ratio is that of the two steps of a round: its
median, with the 95 % confidence interval of the median.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from scipy import stats
from tabulate import tabulate

from app.specs.benchmark import BenchmarkSpec
from benchmarks._shared import started_service
from benchmarks.gpu_tables import Spec, compiled_step
from tools.service import submit, wait_for_job

OURS = "triton"
BACKENDS = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
WARMUP_STEPS = 10
CONFIDENCE = 0.95
JOB_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Turn:
    """What one process measured in one round: ms per step."""

    step_ms: float
    """Until the device was done."""
    host_ms: float
    """Until the host had issued it."""


def by_jobs(ours: Spec, others: Sequence[Spec], rounds: int) -> Iterator[str]:
    """Measure each spec by a job in each round; yield after each round how Flopwatch compares ours with the others.

    Raises:
        RuntimeError: a job failed.
    """
    with started_service() as service:
        service.start_worker()
        client = service.client()
        submitted = [[submit(client, {"spec": spec}) for spec in (ours, *others)] for _ in range(rounds)]
        for count, jobs in enumerate(submitted, start=1):
            for job_id in jobs:
                job = wait_for_job(client, job_id, timeout_s=JOB_TIMEOUT_S)
                if job["state"] != "succeeded":
                    raise RuntimeError(f"job {job_id}: {job['state']}: {job['error']}")
            candidate, *baselines = zip(*submitted[:count], strict=True)
            for baseline in baselines:
                sides = {"baseline": baseline, "candidate": candidate}
                asked = {**sides, "metric": ["step_ms", "host_us"], "format": "markdown"}
                yield client.get("/compare", params=asked).raise_for_status().text


def by_turns(one: Spec, other: Spec, rounds: int, steps: int) -> tuple[str, list[tuple[Turn, Turn]]]:
    """Return the device's name, and the turns of both specs in each round.

    Raises:
        EOFError: a process failed; it has written why to standard error.
    """
    with _started(one) as first, _started(other) as second:
        device: str = first.recv()
        second.recv()
        turns: list[tuple[Turn, Turn]] = []
        for round_ in range(rounds):
            taken: dict[Connection, Turn] = {}
            for process in (first, second) if round_ % 2 else (second, first):
                process.send(steps)
                taken[process] = process.recv()
            turns.append((taken[first], taken[second]))
    return device, turns


@contextmanager
def _started(spec: Spec) -> Iterator[Connection]:
    """A process that serves a spec; the connection to it. It ends with the block."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(spec, there), daemon=True)
    process.start()
    there.close()  # so that the connection ends if the process dies
    try:
        yield here
    finally:
        process.kill()
        process.join()


def _serve(spec: Spec, connection: Connection) -> None:
    """Build a spec's step and warm it up, then measure as many steps as each message asks for."""
    import torch

    from workers.jobs import _training
    from workers.measure.timing import run_step

    checked = BenchmarkSpec.model_validate(spec)
    device, build_model = _training.prepare(checked)
    training = _training.build(checked, device, build_model)

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def run(steps: int) -> Turn:
        synchronize()
        issued, begun = [], time.perf_counter()
        for _ in range(steps):
            before = time.perf_counter()
            training.step.prepare()
            run_step(training.step.phases, ())
            issued.append(time.perf_counter() - before)
        synchronize()
        return Turn(1e3 * (time.perf_counter() - begun) / steps, 1e3 * statistics.median(issued))

    run(WARMUP_STEPS)
    connection.send(torch.cuda.get_device_name() if device.type == "cuda" else device.type)
    while True:
        connection.send(run(connection.recv()))


def row(other: str, turns: Sequence[tuple[Turn, Turn]]) -> list[str]:
    """Return a row of the table: our attention beside another."""
    ratios = [ours.step_ms / theirs.step_ms for ours, theirs in turns]
    tested: Any = stats.quantile_test(ratios, p=0.5)
    low, high = tested.confidence_interval(CONFIDENCE)
    sides = list(zip(*turns, strict=True))
    return [
        other,
        *(f"{statistics.median(turn.step_ms for turn in side):.1f}" for side in sides),
        *(f"{statistics.median(turn.host_ms for turn in side):.1f}" for side in sides),
        f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})",
    ]


def main() -> None:
    """Print the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=("turns", "jobs"))
    parser.add_argument("--rounds", type=int, help="by default 40 turns, or 8 jobs of each attention")
    parser.add_argument("--steps", type=int, default=5, help="of each attention in a round")
    parser.add_argument("--cuda-graph", action="store_true", help="the step is one CUDA graph: only the device counts")
    options = parser.parse_args()
    specs = {spec["attention"]: {**spec, "cuda_graph": options.cuda_graph} for spec in compiled_step()}
    if options.way == "jobs":
        for told in by_jobs(specs[OURS], [specs[name] for name in BACKENDS], options.rounds or 8):
            print(told, flush=True)
        return
    rows, device, rounds = [], "", options.rounds or 40
    for name in BACKENDS:
        device, turns = by_turns(specs[OURS], specs[name], rounds, options.steps)
        rows.append(row(name, turns))
        print(*rows[-1], sep=", ", flush=True)
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("torch", "triton"))
    print(f"\n{device}, {versions}; {rounds} rounds of {options.steps} steps\n")
    headings = ("beside", f"step: {OURS}, ms", "this", f"issued: {OURS}, ms", "this", f"{OURS} ÷ this")
    print(tabulate(rows, headers=headings, tablefmt="pipe", disable_numparse=True))


if __name__ == "__main__":
    main()
