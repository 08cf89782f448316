"""Latency of every page and of everything that can be read, with a full database.

    python -m benchmarks.latencies [--only PATTERN] [--budget SECONDS] [--filled FOLDER]

The database has 100 000 finished jobs, of which 1 in 20 has failed and has a label of its own, 5 000 queued ones, a
sweep of 10 000 jobs, a job of 150 000 measurements, and jobs whose tables have 1 000, 10 000 and 100 000 numbers: more
than a million measurements. It takes minutes to fill; with --filled it stays in that folder for the next time. Then one
client with one connection sends requests to the server, without a worker: to every route that reads, with the ids of
these jobs, and the requests of `REQUESTS` and `TABLES`.
"""

import importlib.metadata
import itertools
import json
import os
import platform
import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import typer
from fastapi import FastAPI
from sqlalchemy import insert, literal, select
from tabulate import tabulate

from app.errors import job_problem
from app.main import ROUTERS, create_app
from app.settings import Settings
from app.specs import spec_adapter
from app.store import tables
from app.store.database.engine import Database, open_database
from app.store.database.sqlite import driver
from app.store.queue.transitions import Queue
from app.store.records import Finish, Offer
from app.web import pages
from tools.service import Service, submit
from workers.agent.spool import Spool
from workers.measure.measurement import Measurement
from workers.messages import Measured

METRICS = ("forward_ms", "backward_ms", "optimizer_ms", "step_ms", "tokens_per_s", "tflops", "mfu", "peak_memory_mib")
TINY: dict[str, Any] = {
    "kind": "benchmark", "model": {"size": "tiny"}, "batch_size": 1, "context_length": 16, "mode": "forward",
    "warmup_steps": 0, "measure_steps": 1,
}  # fmt: skip
SPEC = spec_adapter.validate_python(TINY)
OFFER = Offer(frozenset({SPEC.kind}), SPEC.requirements(), total_gpus=0, free_gpus=0, idle=True)
CELL_METRICS = tuple(f"metric_{number}" for number in range(10))
"""Of each cell of a large job."""
NUMBERS = (1_000, 10_000, 100_000)
BATCH = 1000
"""Jobs copied in one transaction."""


@dataclass(frozen=True)
class Size:
    finished: int = 100_000
    queued: int = 5_000
    side: int = 100
    """The sweep has as many jobs as this number squared."""
    large: int = 150_000
    """Measurements of the large job."""


REQUESTS = (
    "GET /jobs?after={middle}",
    "GET /jobs?sweep={sweep_id}",
    "GET /jobs?kind=benchmark&state=failed",
    "GET /jobs?label=suite:nightly",
    "GET /jobs?label=suite:nightly&state=failed",
    "GET /jobs?label=team:some",
    "GET /jobs?limit=500",
    "GET /jobs/{large}/measurements",
    "GET /compare?baseline={large}&candidate={large}",
    "GET /history?job={job_id}",
    "GET /queue/places?job={queued}",
    "GET /tables?sweep={sweep_id}",
    "GET /tables?sweep={sweep_id}&sort=step_ms&limit=50",
    "GET /tables?job={large}",
    "GET /ui?sweep={sweep_id}",
    "GET /ui?text=nightly",
    "GET /ui?text=nobody",
    "GET /ui?since=7d&state=failed",
    "GET /ui/jobs/{large}",
    "GET /ui/jobs/{queued}",
    "GET /ui/jobs/{large}/samples",
    "GET /ui/jobs/{large}/panels",
    "GET /ui/sweeps/{sweep_id}?sort=-context_length&page=50",
    "GET /ui/sweeps/{sweep_id}?sort=step_ms",
    "GET /ui/plots?sweep={sweep_id}{fresh}",
    "GET /ui/plots?job={large}{fresh}",
    "GET /ui/history?job={job_id}",
    "GET /ui/history?job={large}",
    "GET /ui/tables?sweep={sweep_id}",
    "GET /ui/compare?job={job_id}&job={other}",
    "POST /sweeps/{sweep_id}/resume",
)
"""Requests beside one to every route. `{fresh}` makes a new address in each round, for answers that are cached."""
TABLES = (
    *("format=json", "format=csv", "format=markdown", "format=latex", "format=html"),
    "format=json&sort=-metric_0&limit=50",
    "format=json&pivot=head_dim&columns=all",
    "format=json&relative_to=head_dim=64&columns=metric_0",
)
"""Tables of each of the jobs with NUMBERS."""


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
    return ({"implementation": "eager", "head_dim": 64, "sequence_length": cell} for cell in range(number))


def routes_of(app: FastAPI) -> set[str]:
    """Return every route as "METHOD /path", without HEAD, which follows from GET."""
    routes = [("", route) for route in [*app.routes, *(route for module in ROUTERS for route in module.router.routes)]]
    routes += [(pages.PREFIX, route) for module in pages.MODULES for route in module.router.routes]
    found = set()
    for prefix, route in routes:
        path = prefix + re.sub(r":\w+}", "}", getattr(route, "path", ""))  # {name:path}
        found |= {f"{method} {path}" for method in getattr(route, "methods", None) or ()}
    return {route for route in found if not route.startswith(("HEAD", "OPTIONS"))}


def requests_of(app: FastAPI) -> list[str]:
    """Return every request as "METHOD PATH"."""
    reading = sorted(route for route in routes_of(app) if route.startswith("GET"))
    return [*reading, *REQUESTS, *(f"GET /tables?job={{{number}}}&{query}" for number in NUMBERS for query in TABLES)]


def fill(database: Database, client: httpx.Client, size: Size) -> dict[str, Any]:
    """Write the jobs; returns the parameters of paths."""
    queue, labels = Queue(database), {"suite": "nightly"}
    template = {"spec": TINY, "name": "latency", "labels": labels}
    timeout = job_problem("timeout", "the job ran longer than its timeout_s, 60 s", log_head="", log_tail="")
    done, failed = submit(client, template), submit(client, {**template, "labels": {**labels, "team": "some"}})
    _finish_next(queue)
    _finish_next(queue, finish=Finish("failed", timeout))
    ids: dict[str, Any] = {"job_id": done, "kind": "benchmark", "fresh": "{fresh}"}
    for name, count in {"large": size.large, **{str(number): number for number in NUMBERS}}.items():
        ids[name] = submit(client, template)
        _finish_next(queue, cells(count // len(CELL_METRICS)), CELL_METRICS)
    axis = range(size.side)
    grid = {"seed": list(axis), "context_length": [8 * (step + 1) for step in axis]}
    ids["sweep_id"] = client.post("/sweeps", json={"base": TINY, "grid": grid}).raise_for_status().json()["id"]
    for _ in range(size.side**2):
        _finish_next(queue)
    ids["queued"] = last = submit(client, template)
    copied = [failed if number % 20 == 0 else done for number in range(size.finished)]
    copied += [ids["queued"]] * (size.queued - 1)
    for start in range(0, len(copied), BATCH):
        last = _copy(database, copied[start : start + BATCH], last + 1)
    database.checkpoint()
    return {**ids, "other": ids["queued"] + 2, "middle": (ids["queued"] + last) // 2}


def _finish_next(
    queue: Queue,
    cases: Iterable[Mapping[str, Any]] | None = None,
    metrics: Sequence[str] = METRICS,
    finish: Finish = Finish("succeeded"),  # noqa: B008  (frozen)
) -> None:
    """Claim the next job, and finish it with measurements of these cases, or of its own."""
    large = None if cases is None else spooled(cases, metrics)  # which may take as long as a lease
    claim = queue.claim("worker", OFFER)
    assert claim is not None
    own = {"model": "tiny", "context_length": claim.spec["context_length"], "precision": "fp32"}
    spool = large or spooled([own], metrics)
    queue.finish(claim, replace(finish, measurements=spool.measurements, units=spool.units, log="step\n" * 200))


def _copy(database: Database, copied: Sequence[int], first: int) -> int:
    """Copy jobs, with all that belongs to them, to ids from `first` on; returns the last id."""
    with database.write() as connection:
        for source in set(copied):
            ids = [first + place for place, job in enumerate(copied) if job == source]
            (row,) = connection.execute(select(tables.job).where(tables.job.c.id == source)).mappings()
            connection.execute(insert(tables.job), [{**row, "id": job} for job in ids])
            for table in tables.job.metadata.tables.values():
                if "job_id" in table.c:
                    names = [column.name for column in table.c if column.name not in ("id", "job_id")]
                    pairs = tables.job.join(table, literal(value=True))
                    rows = select(tables.job.c.id, *(table.c[name] for name in names)).select_from(pairs)
                    rows = rows.where(table.c.job_id == source, tables.job.c.id.in_(ids))
                    connection.execute(insert(table).from_select(["job_id", *names], rows))
    return first + len(copied) - 1


def measure(
    connection: HTTPConnection,
    request: str,
    ids: Mapping[str, Any],
    rounds: int,
    budget_s: float,
) -> dict[str, str]:
    """Send a request once to warm up, then `rounds` times, or as often as the budget allows, at least twice.

    A parameter of the path that has no id is "none", which mostly does not exist. Raises RuntimeError: the server met a
    fault.
    """
    filled = re.sub(r"{(\w+)}", lambda parameter: str(ids.get(parameter[1], "none")), request)
    method, _, path = filled.partition(" ")
    fresh = itertools.cycle("&only=" * number for number in range(20))

    def send() -> tuple[float, int]:
        start = time.perf_counter()
        connection.request(method, path.replace("{fresh}", next(fresh)), headers={"Content-Type": "application/json"})
        with connection.getresponse() as response:
            content = response.read()
        if response.status >= 500:
            raise RuntimeError(f"{method} {path}: {response.status}: {content.decode(errors='replace')[:500]}")
        return 1000 * (time.perf_counter() - start), response.status

    connection.close()  # the server may have done so while another one was asked
    send()
    begin = time.perf_counter()
    samples: list[float] = []
    while len(samples) < 2 or (len(samples) < rounds and time.perf_counter() - begin < budget_s):
        took_ms, status = send()
        samples.append(took_ms)
    percentiles = statistics.quantiles(samples, n=100, method="inclusive")
    return {
        "request": f"`{request}`",
        "p50, ms": f"{percentiles[49]:.1f}",
        "p99, ms": f"{percentiles[98]:.1f}",
        "times": str(len(samples)),
        "status": str(status),
    }


def measure_all(size: Size, rounds: int, budget_s: float, only: str, filled: Path | None) -> Iterator[dict[str, str]]:
    """Fill a database, and measure every request that matches the pattern."""
    with ExitStack() as stack:
        folder = filled or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flopwatch-")))
        service = stack.enter_context(Service(folder))
        client = service.start_server()
        ids = _filled(service, size)
        # It costs less processor time than httpx.
        connection = stack.enter_context(closing(HTTPConnection(client.base_url.netloc.decode(), timeout=600)))
        for request in requests_of(create_app(Settings(data_dir=folder / "unused"))):
            if re.search(only, request):
                yield measure(connection, request, ids, rounds, budget_s)


def _filled(service: Service, size: Size) -> dict[str, Any]:
    """Fill the service's database, unless it is; returns the parameters of paths."""
    kept = service.folder / "parameters.json"
    if not kept.exists():
        with closing(open_database(service.settings())) as database:
            kept.write_text(json.dumps(fill(database, service.client(), size)))
    return dict(json.loads(kept.read_text()))


def main(only: str = "", rounds: int = 100, budget: float = 2.0, filled: Path | None = None) -> None:
    """Measure the requests that match ONLY, each ROUNDS times or, if that takes longer, BUDGET seconds."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("fastapi", "torch")]
    versions += [f"Python {platform.python_version()}", f"SQLite {driver().sqlite_version}"]
    models = re.findall("model name\\s+: (.*)", Path("/proc/cpuinfo").read_text()) or [platform.machine()]
    print(f"{Size()}. {os.cpu_count()} × {models[0]}; {', '.join(versions)}\n")
    rows = list(measure_all(Size(), rounds, budget, only, filled))
    print(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    typer.run(main)
