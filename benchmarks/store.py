"""Submissions and claims per second, the memory and time of an agent that ends a job with many measurements, and how
long a large sweep keeps others from writing.

    python -m benchmarks.store [--folder FOLDER] [--postgresql postgresql+psycopg://user@host/postgres]

Each process opens the database itself, without a server. Every figure includes the commit, which waits for the disk
(synchronous=FULL), so run it on the disk that you will use. With --postgresql, submissions and claims are measured
there, too, in databases that it makes and drops.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import typer
from sqlalchemy import URL, make_url

from app.settings import Settings
from app.specs import spec_adapter
from app.store.database.engine import Database, open_database
from app.store.queue.transitions import Queue
from app.store.records import Finish, NewJob, Offer
from benchmarks._shared import TINY, Row, new_database, percentiles, print_table
from workers.agent.spool import Spool
from workers.measure.measurement import Measurement
from workers.messages import Measured

BUSY_TIMEOUT_S = 60.0
"""Longest wait for other writers, of which there are more than in service."""
START_TIMEOUT_S = 600.0
PAUSE_S = 0.01
"""Seconds between two writes beside a large finish: others write now and then."""
SPEC = spec_adapter.validate_python(TINY)
OFFER = Offer(frozenset({SPEC.kind}), SPEC.requirements(), total_gpus=0, free_gpus=0, idle=True)
CELL_METRICS = tuple(f"metric_{number}" for number in range(10))
"""Of each cell of a large job."""
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["benchmarks.store"])


def spooled(cases: Iterable[Mapping[str, Any]], metrics: Sequence[str]) -> Spool:
    """Return a spool as an agent has it at the end of a job: 20 random samples of each metric of each case."""
    spool = Spool()
    spool.begin_unit(0, "unit")
    for case, metric in itertools.product(cases, metrics):
        samples = [random.uniform(1, 2) for _ in range(20)]
        row = Measurement(case, json.dumps(case), "1x CPU", None, metric, "ms", samples=samples)
        spool.add(Measured(**row.to_wire()))
    return spool


def cells(number: int) -> Iterator[dict[str, Any]]:
    """Yield the cases of a large grid."""
    return ({"implementation": "eager", "head_dim": 64, "sequence_length": cell} for cell in range(number))


def main(
    folder: Path | None = None,
    submissions: int = 3000,
    claims: int = 2000,
    queued: list[int] = [10_000, 100_000],  # noqa: B006  (typer)
    measurements: list[int] = [150_000, 1_000_000],  # noqa: B006
    swept: list[int] = [10_000],  # noqa: B006
    postgresql: str | None = None,
) -> None:
    """Measure in databases below FOLDER (default: a temporary folder), and print."""
    with tempfile.TemporaryDirectory(dir=folder) as root:
        opened = (closing(_open(Path(root) / str(number))) for number in itertools.count())
        print_table(
            "The store alone, one commit a job", _rows(opened, submissions, claims, queued, measurements, swept)
        )
        if postgresql is not None:
            made = _made(make_url(postgresql), Path(root) / "postgresql")
            print_table("The store on PostgreSQL", _rates(made, submissions, claims))


def _open(folder: Path, url: URL | None = None) -> Database:
    database_url = None if url is None else url.render_as_string(hide_password=False)
    return open_database(Settings(data_dir=folder, database_url=database_url, busy_timeout_s=BUSY_TIMEOUT_S))


def _made(server: URL, folder: Path) -> Iterator[AbstractContextManager[Database]]:
    """Yield new databases on a server, which are dropped when they are left."""

    @contextmanager
    def made() -> Iterator[Database]:
        with new_database(server) as url, closing(_open(folder, url)) as database:
            yield database

    while True:
        yield made()


def _rows(
    databases: Iterator[AbstractContextManager[Database]],
    submissions: int,
    claims: int,
    queued: Sequence[int],
    measurements: Sequence[int],
    swept: Sequence[int],
) -> Iterator[Row]:
    yield from _rates(databases, submissions, claims)
    for length in queued:
        with next(databases) as database:
            latencies = _claims(database, length, 1, most=1000)[1]
            yield {"what": f"claim p50 / p99 / max, {length:,} queued", "measured": _milliseconds(latencies)}
    for number in measurements:
        with next(databases) as database:
            for what, measured in _beside_a_large_finish(database, number):
                yield {"what": f"{number:,} measurements: {what}", "measured": measured}
    for number in swept:
        with next(databases) as database:
            for what, measured in _beside_a_large_sweep(database, number):
                yield {"what": f"a sweep of {number:,} jobs: {what}", "measured": measured}


def _rates(databases: Iterator[AbstractContextManager[Database]], submissions: int, claims: int) -> Iterator[Row]:
    for threads in (1, 4):
        with next(databases) as database:
            rate = _submissions(Queue(database), submissions, threads)
            yield {"what": f"submissions/s, {_number(threads, 'thread')}", "measured": f"{rate:,.0f}"}
    for processes in (1, 4):
        with next(databases) as database:
            rate, latencies = _claims(database, claims, processes)
            name = _number(processes, "process")
            yield {"what": f"claims/s, {name}", "measured": f"{rate:,.0f}"}
            yield {"what": f"claim p50 / p99 / max, {name}", "measured": _milliseconds(latencies)}


def _number(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "es" if what.endswith("s") else "s")


def _milliseconds(seconds: Sequence[float]) -> str:
    milliseconds = [1000 * each for each in seconds]
    return " / ".join([*percentiles(milliseconds, 50, 99, digits=2), f"{max(milliseconds):.2f}"]) + " ms"


def _submissions(queue: Queue, number: int, threads: int) -> float:
    """Submit jobs one by one, each in its own transaction; returns jobs per second."""
    queue.submit(NewJob(SPEC))  # warms up
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: queue.submit(NewJob(SPEC)), range(number)))
    return number / (time.perf_counter() - start)


def _claims(database: Database, number: int, processes: int, most: int | None = None) -> tuple[float, list[float]]:
    """Let processes claim from a queue; returns claims per second of all, and the seconds of each claim."""
    Queue(database).submit_sweep(None, {}, {}, {}, [], [NewJob(SPEC)] * number)
    ready = CONTEXT.Barrier(processes)
    with CONTEXT.Pool(processes, ready.wait) as pool:
        url = database.backend.engine.url.render_as_string(hide_password=False)
        told = pool.starmap(_claim, [(url, most or number)] * processes, chunksize=1)
    firsts, lasts, latencies = zip(*told, strict=True)
    seconds = list(itertools.chain(*latencies))
    return len(seconds) / (max(lasts) - min(firsts)), seconds


def _claim(url: str, most: int) -> tuple[float, float, list[float]]:
    """Claim until no job is left, at most so often; returns the first and last moment, and each claim's seconds."""
    with closing(Database(url, busy_timeout_s=BUSY_TIMEOUT_S)) as database:
        queue = Queue(database)
        latencies: list[float] = []
        queue.running()  # connects
        first = last = time.monotonic()
        while len(latencies) < most and queue.claim("worker", OFFER) is not None:
            before, last = last, time.monotonic()
            latencies.append(last - before)
    return first, last, latencies


def _beside_a_large_finish(database: Database, number: int) -> Iterator[tuple[str, str]]:
    """Submit and renew, one after the other, while an agent's process finishes a job with many measurements."""
    Queue(database).submit_sweep(None, {}, {}, {}, [], [NewJob(SPEC)] * 2)
    (before_mib, spooled_mib, peak_mib, seconds), meanwhile = _beside(database, _finish, number)
    yield "the agent before, all spooled, at most", f"{before_mib:.0f} / {spooled_mib:.0f} / {peak_mib:.0f} MiB"
    yield "the commit", f"{seconds:.2f} s"
    yield from meanwhile


def _beside_a_large_sweep(database: Database, number: int) -> Iterator[tuple[str, str]]:
    """Submit and renew, one after the other, while another process submits a sweep of so many jobs."""
    Queue(database).submit(NewJob(SPEC))
    (seconds, locked_s), meanwhile = _beside(database, _submit_sweep, number)
    yield "the submission, of which it holds the write lock", f"{seconds:.2f} / {locked_s:.2f} s"
    yield from meanwhile


def _beside(
    database: Database, work: Callable[[str, int, Barrier, SimpleQueue[tuple[float, ...]]], None], number: int
) -> tuple[tuple[float, ...], Iterator[tuple[str, str]]]:
    """Submit and renew, one after the other, while another process does `work`; returns what that sends, and rows."""
    queue = Queue(database)
    claim = queue.claim("bystander", OFFER)
    assert claim is not None
    start, told = CONTEXT.Barrier(2), CONTEXT.SimpleQueue()
    other = CONTEXT.Process(target=work, args=(database.url, number, start, told))
    other.start()
    start.wait(START_TIMEOUT_S)
    submissions: list[float] = []
    renewals: list[float] = []
    is_at_work = True
    while is_at_work or len(renewals) < 2:  # percentiles need two
        moments = [time.perf_counter()]
        queue.submit(NewJob(SPEC))
        moments.append(time.perf_counter())
        queue.renew([claim])
        moments.append(time.perf_counter())
        submissions.append(moments[1] - moments[0])
        renewals.append(moments[2] - moments[1])
        time.sleep(PAUSE_S)
        is_at_work = other.is_alive()
    other.join()
    meanwhile = (
        ("submission meanwhile, p50 / p99 / max", _milliseconds(submissions)),
        ("renewal meanwhile, p50 / p99 / max", _milliseconds(renewals)),
    )
    return told.get(), iter(meanwhile)


def _submit_sweep(url: str, number: int, start: Barrier, told: SimpleQueue[tuple[float, ...]]) -> None:
    """Submit a sweep; sends the seconds that it took, and those for which it held the write lock."""
    with closing(Database(url, busy_timeout_s=BUSY_TIMEOUT_S)) as database:
        jobs = [NewJob(SPEC, labels={"suite": "benchmarks"}, point={"seed": seed}) for seed in range(number)]
        write_lock, held = database.backend.write_lock, []

        @contextmanager
        def timed_lock() -> Iterator[None]:
            with write_lock():
                begun = time.perf_counter()
                yield
                held.append(time.perf_counter() - begun)

        database.backend.write_lock = timed_lock  # type: ignore[method-assign]
        start.wait(START_TIMEOUT_S)
        begun = time.perf_counter()
        Queue(database).submit_sweep(None, jobs[0].labels, TINY, {"seed": list(range(number))}, [], jobs)
        told.put((time.perf_counter() - begun, sum(held)))


def _finish(url: str, number: int, start: Barrier, told: SimpleQueue[tuple[float, ...]]) -> None:
    """Claim a job, spool so many measurements and finish it; sends its memory in MiB and the seconds of the commit."""
    with closing(Database(url, busy_timeout_s=BUSY_TIMEOUT_S)) as database:
        queue = Queue(database)
        claim = queue.claim("agent", OFFER)
        assert claim is not None
        memory = [_peak_mib()]
        spool = spooled(cells(number // len(CELL_METRICS)), CELL_METRICS)
        memory.append(_peak_mib())
        start.wait(START_TIMEOUT_S)
        begun = time.perf_counter()
        queue.finish(claim, Finish("succeeded", measurements=spool.measurements, units=spool.units))
        told.put((*memory, _peak_mib(), time.perf_counter() - begun))


def _peak_mib() -> float:
    """Return the greatest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    typer.run(main)
