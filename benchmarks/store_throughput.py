"""Measures submissions and claims per second, and how long others wait for a large finish:
`python -m benchmarks.store_throughput`.

Every figure includes the commit, which waits for the disk (synchronous=FULL), so run it on the disk that you will use.
Prints a table in Markdown, for docs/measurements.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from app.settings import Settings
from app.specs.benchmark import BenchmarkSpec
from app.store.database.engine import Database, open_database
from app.store.queue.transitions import Queue
from app.store.records import Finish, MeasurementRecord, NewJob, Offer
from benchmarks._shared import percentiles, print_report

Row = tuple[str, str]

START_TIMEOUT_S = 120.0
TIMEOUT_S = 60.0
"""Longest wait for other writers, of which there are more than in service."""
PAUSE_S = 0.01
"""Seconds between two writes beside a large finish: others write now and then."""
SPEC = BenchmarkSpec()
CONTEXT = multiprocessing.get_context("forkserver")
"""Workers are processes of their own, forked from one that has imported this module and done nothing else."""
CONTEXT.set_forkserver_preload(["benchmarks.store_throughput"])
OFFER = Offer(kinds=frozenset({SPEC.kind}), capabilities=SPEC.requirements(), total_gpus=0, free_gpus=0, idle=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the databases are made (default: a temporary folder)")
    parser.add_argument("--submissions", type=int, default=3000, help="jobs submitted one by one")
    parser.add_argument("--threads", type=int, default=4, help="threads of the concurrent submissions")
    parser.add_argument("--claims", type=int, default=2000, help="jobs claimed by each number of processes")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 4], help="numbers of claiming processes")
    parser.add_argument("--queued", type=int, nargs="+", default=[10_000, 100_000], help="lengths of the queue")
    parser.add_argument("--latencies", type=int, default=1000, help="claims timed at each length of the queue")
    parser.add_argument("--measurements", type=int, default=150_000, help="measurements of the large finish")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder)
        for threads in sorted({1, options.threads}):
            rows += submissions(root / f"submit-{threads}", options.submissions, threads)
        for processes in options.processes:
            rows += claims(root / f"claim-{processes}", options.claims, processes)
        for queued in options.queued:
            rows += latency(root / f"queued-{queued}", queued, options.latencies)
        rows += beside_a_large_finish(root / "finish", options.measurements)
    print_report("The store alone, one commit a job", [{"what": what, "measured": measured} for what, measured in rows])


@contextmanager
def opened(folder: Path) -> Iterator[Database]:
    database = open_database(Settings(data_dir=folder, busy_timeout_s=TIMEOUT_S))
    try:
        yield database
    finally:
        database.close()


def fill(queue: Queue, number: int) -> None:
    queue.submit_sweep(None, {}, {}, {}, [], [NewJob(SPEC)] * number)


def submissions(folder: Path, number: int, threads: int) -> list[Row]:
    """Submit jobs one by one, each in its own transaction."""
    with opened(folder) as database:
        queue = Queue(database)
        queue.submit(NewJob(SPEC))  # warms up

        def work() -> None:
            for _ in range(number // threads):
                queue.submit(NewJob(SPEC))

        seconds = timed(lambda: run_threads(work, threads))
    name = f"submissions/s, {threads} thread{'s' * (threads > 1)}"
    return [(name, f"{number // threads * threads / seconds:,.0f}")]


def run_threads(work: Callable[[], None], number: int) -> None:
    pool = [threading.Thread(target=work) for _ in range(number)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def claims(folder: Path, number: int, processes: int) -> list[Row]:
    """Let processes claim until the queue is empty; then the same with each job finished right after its claim."""
    rows = []
    name = f"{processes} process{'es' * (processes > 1)}"
    for finish, what in ((False, "claims/s"), (True, "claims and finishes/s")):
        with opened(folder / str(finish)) as database:
            fill(Queue(database), number)
            seconds, latencies = run_claimants(database.url, processes, finish)
        rows.append((f"{what}, {name}", f"{number / seconds:,.0f}"))
        if not finish:
            rows.append((f"claim p50 / p99 / max, {name}", summary(latencies)))
    return rows


def run_claimants(url: str, processes: int, finish: bool) -> tuple[float, list[float]]:
    """Return the seconds from when all processes are ready until the queue is empty, and the seconds of each claim."""
    start = CONTEXT.Barrier(processes + 1)
    results: multiprocessing.Queue[list[float]] = CONTEXT.Queue()
    workers = [CONTEXT.Process(target=claim_all, args=(url, finish, start, results)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    start.wait(START_TIMEOUT_S)
    started = time.perf_counter()
    latencies = [latency for _ in workers for latency in results.get()]
    seconds = time.perf_counter() - started
    for worker in workers:
        worker.join()
    return seconds, latencies


def claim_all(url: str, finish: bool, start: Barrier, results: multiprocessing.Queue[list[float]]) -> None:
    """Run a worker process: claim until no job is left, and send the seconds of each claim."""
    database = Database(url, busy_timeout_s=TIMEOUT_S)
    queue, name, latencies = Queue(database), f"worker-{multiprocessing.current_process().pid}", []
    queue.running()  # connects
    start.wait(START_TIMEOUT_S)
    while True:
        started = time.perf_counter()
        claim = queue.claim(name, OFFER)
        if claim is None:
            break
        latencies.append(time.perf_counter() - started)
        if finish:
            queue.finish(claim, Finish("succeeded"))
    results.put(latencies)
    database.close()


def latency(folder: Path, queued: int, number: int) -> list[Row]:
    """Let one process claim from a long queue."""
    with opened(folder) as database:
        queue = Queue(database)
        fill(queue, queued)
        for _ in range(10):
            queue.claim("worker", OFFER)
        latencies = [timed(lambda: queue.claim("worker", OFFER)) for _ in range(min(number, queued - 10))]
    return [(f"claim p50 / p99 / max, {queued:,} queued", summary(latencies))]


def beside_a_large_finish(folder: Path, number: int) -> list[Row]:
    """Submit and renew, one after the other, while another process finishes a job with many measurements."""
    with opened(folder) as database:
        queue = Queue(database)
        fill(queue, 2)
        claim = queue.claim("bystander", OFFER)
        assert claim is not None
        start, seconds = CONTEXT.Barrier(2), CONTEXT.SimpleQueue()
        finisher = CONTEXT.Process(target=finish_large, args=(database.url, number, start, seconds))
        finisher.start()
        start.wait(START_TIMEOUT_S)
        waits: dict[str, list[float]] = {"submission": [], "renewal": []}
        while finisher.is_alive():
            waits["submission"].append(timed(lambda: queue.submit(NewJob(SPEC))))
            waits["renewal"].append(timed(lambda: queue.renew([claim])))
            time.sleep(PAUSE_S)
        finisher.join()
    beside = f"beside a finish with {number:,} measurements"
    return [
        (f"finish with {number:,} measurements", f"{seconds.get():,.2f} s"),
        *((f"{what} p50 / p99 / max, {beside}", summary(found)) for what, found in waits.items()),
    ]


def finish_large(url: str, number: int, start: Barrier, seconds: SimpleQueue[float]) -> None:
    """Run a worker process: claim a job, and finish it with so many measurements."""
    database = Database(url, busy_timeout_s=TIMEOUT_S)
    queue = Queue(database)
    claim = queue.claim("finisher", OFFER)
    assert claim is not None
    values: dict[str, Any] = dict.fromkeys(("mean", "std", "median", "min", "max", "p05", "p25", "p75", "p95"), 1.0)
    values |= {"device_key": "1x CPU", "validity": "valid", "phase": "forward", "metric": "forward_ms", "unit": "ms"}
    records = [
        MeasurementRecord(
            unit_index=0,
            case={"context_length": case, "batch_size": 4, "precision": "bf16", "mode": "forward"},
            case_key=f"{case:024d}",
            outcome="ok",
            reason=None,
            n=10,
            samples=random.randbytes(80),
            **values,
        )
        for case in range(number)
    ]
    start.wait(START_TIMEOUT_S)
    seconds.put(timed(lambda: queue.finish(claim, Finish("succeeded", measurements=records))))
    database.close()


def summary(seconds: Sequence[float]) -> str:
    milliseconds = [1000 * each for each in seconds]
    return " / ".join([*percentiles(milliseconds, 50, 99, digits=2), f"{max(milliseconds):.2f}"]) + " ms"


if __name__ == "__main__":
    main()
