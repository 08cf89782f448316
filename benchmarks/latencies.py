"""Latency of every route and page, with a full database: `python -m benchmarks.latencies`.

The database has 100 000 finished and 5 000 queued jobs, with a million measurements: a sweep of 10 000 jobs, a job of
150 000 measurements, and jobs with a few each, of which 1 in 20 has failed and has a label of its own. Then one client
with one connection sends requests to the server, without a worker. A route that has no request here ends the script
with an error, so that none is forgotten. Each row is printed as it is measured, and all of them at the end; `--only`
measures some. Tables that are streamed are measured by `python -m benchmarks.tables`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import itertools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from fastapi import FastAPI

from app.main import ROUTERS, create_app
from app.settings import Settings
from app.store.database.engine import open_database
from app.web import pages
from benchmarks._filling import BODY, TIMEOUT_S, TINY, Filled, Size, fill
from benchmarks._shared import percentiles, print_now, print_report, started_service

SOURCE = b"def attention(q, k, v, is_causal=False):\n    return v\n"
SWEEP = {"base": TINY, "grid": {"seed": list(range(2)), "context_length": [64, 128]}}
SIDE = 100
"""Values on each of the two axes of the large sweep."""
MOST_LOG = 5000
"""Characters of the server's log that are printed after a fault."""
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@dataclass(frozen=True)
class Request:
    """A request to time. `path` is asked for each round; `prepare` makes what it needs, untimed."""

    route: str
    path: Callable[[], str]
    title: str = ""
    body: Any = None
    """JSON, or a text, which is sent as it is."""
    headers: Mapping[str, str] = field(default_factory=dict)
    revalidates: bool = False
    """True to send the ETag of the round before."""

    @property
    def name(self) -> str:
        return f"`{self.route}`" + (f", {self.title}" if self.title else "")


def at(path: str) -> Callable[[], str]:
    """Return what asks for the same path in every round."""
    return lambda: path


def drawn_anew(path: str) -> Callable[[], str]:
    """Return what asks for the same plots in each round by another address, so that none of them is kept."""
    rounds = itertools.cycle(range(20))
    return lambda: path + "&only=" * next(rounds)


PLAIN = ("/healthz", "/readyz", "/metrics", "/specs", "/workers", "/docs", "/openapi.json", "/queue/paused")
LISTS = ("/", "/ui", "/ui/workers", "/jobs", "/sweeps")
PARTS = ("", "/events", "/logs", "/units", "/tables", "/attempts", "/artifacts", "/measurements")


def reads(filled: Filled) -> list[Request]:
    """Return the requests that read, by route."""
    return [*reads_of_data(filled), *reads_of_pages(filled)]


def reads_of_data(filled: Filled) -> list[Request]:
    """Return the requests that read JSON, tables and files."""
    done, large, sweep = filled.done, filled.large, filled.sweep
    of_job = [f"/jobs/{{job_id}}{part}" for part in PARTS]
    return [
        *(Request(f"GET {route}", at(route.format(job_id=done))) for route in of_job),
        *(Request(f"GET {route}", at(route)) for route in (*PLAIN, *LISTS)),
        Request("GET /specs/{kind}", at("/specs/benchmark")),
        Request("GET /jobs", at(f"/jobs?after={(done + filled.queued) * 5}"), title="in the middle"),
        Request("GET /jobs", at("/jobs?state=queued"), title="queued"),
        Request("GET /jobs", at(f"/jobs?sweep={sweep}"), title="of the sweep"),
        Request("GET /jobs", at("/jobs?state=running"), title="running: none"),
        Request("GET /jobs", at("/jobs?kind=benchmark&state=failed"), title="of a kind, failed"),
        Request("GET /jobs", at("/jobs?label=suite:nightly"), title="by a label that all have"),
        Request("GET /jobs", at("/jobs?label=suite:nightly&state=failed"), title="by a label that all have, failed"),
        Request("GET /jobs", at("/jobs?label=team:some"), title="by a label that 1 in 20 has"),
        Request("GET /jobs", at("/jobs?label=run:alone"), title="by a label that one old job has"),
        Request("GET /jobs", at("/jobs?limit=500"), title="500"),
        Request("GET /jobs/{job_id}/measurements", at(f"/jobs/{large}/measurements"), title="first page of the large"),
        Request("GET /jobs/{job_id}/measurements", at(f"/jobs/{large}/measurements?limit=200"), title="200 of large"),
        Request("GET /jobs/{job_id}/tables/{name}", at(f"/jobs/{done}/tables/none"), title="none: 404"),
        Request("GET /jobs/{job_id}/artifacts/{name}", at(f"/jobs/{done}/artifacts/none"), title="none: 404"),
        Request("GET /sweeps/{sweep_id}", at(f"/sweeps/{sweep}")),
        Request("GET /jobs/{job_id}/export", at(f"/jobs/{done}/export")),
        Request("GET /sweeps/{sweep_id}/export", at(f"/sweeps/{sweep}/export")),
        Request("GET /compare/export", at(f"/compare/export?baseline={done}&candidate={done + 3}")),
        Request("GET /baselines", at("/baselines")),
        Request("GET /baselines/{name}", at("/baselines/none"), title="none: 404"),
        Request("GET /files/{sha256}", at(f"/files/{hashlib.sha256(SOURCE).hexdigest()}")),
        Request("GET /tables", at(f"/tables?job={done}"), title="of a job"),
        Request("GET /tables", at(f"/tables?sweep={sweep}"), title="of the sweep"),
        Request("GET /tables", at(f"/tables?job={large}"), title="of the large job"),
        Request(
            "GET /tables", at(f"/tables?sweep={sweep}&sort=step_ms&limit=50"), title="of the sweep, sorted, 50 rows"
        ),
        Request("GET /jobs/{job_id}/export", at(f"/jobs/{large}/export"), title="of the large job"),
        Request("GET /compare", at(f"/compare?baseline={done}&candidate={done}"), title="a job with itself"),
        Request("GET /compare", at(f"/compare?baseline={large}&candidate={large}"), title="the large with itself"),
        Request("GET /queue/places", at(f"/queue/places?job={filled.queued}"), title="of a queued job"),
    ]


def reads_of_pages(filled: Filled) -> list[Request]:
    """Return the requests that read pages and parts of them."""
    done, large, sweep = filled.done, filled.large, filled.sweep
    return [
        Request("GET /ui/jobs/{job_id}", at(f"/ui/jobs/{done}")),
        Request("GET /ui/jobs/{job_id}", at(f"/ui/jobs/{large}"), title="large"),
        Request("GET /ui/jobs/{job_id}", at(f"/ui/jobs/{large}"), title="large, unchanged", revalidates=True),
        Request("GET /ui", at(f"/ui?sweep={sweep}"), title="of the sweep"),
        Request("GET /ui", at("/ui?text=nightly"), title="with a text that all have"),
        Request("GET /ui", at("/ui?text=nobody"), title="with a text that none has"),
        Request("GET /ui", at("/ui?since=7d&state=failed"), title="of a week, failed"),
        Request("GET /ui/jobs/{job_id}", at(f"/ui/jobs/{filled.queued}"), title="queued"),
        Request("GET /ui/jobs/{job_id}/samples", at(f"/ui/jobs/{done}/samples")),
        Request("GET /ui/jobs/{job_id}/samples", at(f"/ui/jobs/{large}/samples"), title="large"),
        Request("GET /ui/jobs/{job_id}/cells", at(f"/ui/jobs/{done}/cells")),
        Request("GET /ui/jobs/{job_id}/cells", at(f"/ui/jobs/{large}/cells?page=50"), title="large, page 50"),
        Request("GET /ui/jobs/{job_id}/cells", at(f"/ui/jobs/{large}/cells?sort=metric_3"), title="large, sorted"),
        Request("GET /ui/new", at("/ui/new")),
        Request("GET /ui/new", at(f"/ui/new?job={done}"), title="like a job"),
        Request("GET /ui/new/preview", at("/ui/new/preview?kind=benchmark&spec.context_length=64,128")),
        Request("GET /ui/jobs/{job_id}/panels", at(f"/ui/jobs/{done}/panels")),
        Request("GET /ui/jobs/{job_id}/panels", at(f"/ui/jobs/{large}/panels"), title="large"),
        Request("GET /ui/jobs/{job_id}/plots/{name}", at(f"/ui/jobs/{done}/plots/phases")),
        Request("GET /ui/jobs/{job_id}/explore", at(f"/ui/jobs/{done}/explore?table=none"), title="none: 404"),
        Request("GET /ui/jobs/{job_id}/stacks", at(f"/ui/jobs/{done}/stacks"), title="none: 404"),
        Request("GET /ui/sweeps/{sweep_id}", at(f"/ui/sweeps/{sweep}")),
        Request("GET /ui/sweeps/{sweep_id}", at(f"/ui/sweeps/{sweep}"), title="unchanged", revalidates=True),
        Request("GET /ui/sweeps", at("/ui/sweeps")),
        Request(
            "GET /ui/sweeps/{sweep_id}", at(f"/ui/sweeps/{sweep}?sort=-context_length&page=50"), title="sorted, page 50"
        ),
        Request("GET /ui/sweeps/{sweep_id}", at(f"/ui/sweeps/{sweep}?sort=step_ms"), title="sorted by a metric"),
        Request("GET /ui/plots", at(f"/ui/plots?sweep={sweep}"), title="of the sweep, again"),
        Request("GET /ui/plots", drawn_anew(f"/ui/plots?sweep={sweep}"), title="of the sweep, drawn anew"),
        Request("GET /ui/plots", drawn_anew(f"/ui/plots?job={large}"), title="of the large job, drawn anew"),
        Request("GET /ui/plots", at(f"/ui/plots?job={done}"), title="of a job"),
        Request("GET /ui/tables", at("/ui/tables"), title="nothing chosen"),
        Request("GET /ui/tables", at(f"/ui/tables?sweep={sweep}"), title="of the sweep"),
        Request("GET /ui/tables", at(f"/ui/tables?job={done}&pivot=context_length"), title="of a job, pivoted"),
        Request("GET /ui/compare", at("/ui/compare"), title="nothing chosen"),
        Request("GET /ui/compare", at(f"/ui/compare?job={done}&job={done + 3}"), title="two jobs"),
        Request("GET /ui/compare/add", at(f"/ui/compare/add?job={done}+{large}")),
    ]


def writes(filled: Filled, fresh: Callable[[str, Any], int]) -> list[Request]:
    """Return the requests that write, by route. `fresh` submits a job or a sweep and returns its id."""
    done, sweep = filled.done, filled.sweep
    return [
        Request("POST /jobs", at("/jobs"), body=BODY),
        Request("POST /sweeps", at("/sweeps"), body=SWEEP, title="4 jobs"),
        Request("POST /jobs/{job_id}/cancel", lambda: f"/jobs/{fresh('/jobs', BODY)}/cancel"),
        Request("POST /ui/jobs/{job_id}/cancel", lambda: f"/ui/jobs/{fresh('/jobs', BODY)}/cancel", headers=FORM),
        Request("POST /jobs/{job_id}/retry", at(f"/jobs/{done}/retry"), title="of a succeeded job: 409"),
        Request("POST /ui/jobs/{job_id}/retry", at(f"/ui/jobs/{done}/retry"), title="409", headers=FORM),
        Request("POST /ui/jobs/{job_id}/rerun", at(f"/ui/jobs/{done}/rerun"), headers=FORM),
        Request("POST /ui/jobs/cancel", at("/ui/jobs/cancel"), body=f"job={done}", title="a job", headers=FORM),
        Request("POST /ui/demo", at("/ui/demo"), title="4 jobs", headers=FORM),
        Request("POST /ui/new", at("/ui/new"), body="kind=benchmark&spec.model.size=tiny", headers=FORM),
        Request("POST /sweeps/{sweep_id}/cancel", lambda: f"/sweeps/{fresh('/sweeps', SWEEP)}/cancel"),
        Request(
            "POST /ui/sweeps/{sweep_id}/cancel", lambda: f"/ui/sweeps/{fresh('/sweeps', SWEEP)}/cancel", headers=FORM
        ),
        Request("POST /ui/sweeps/{sweep_id}/resume", at(f"/ui/sweeps/{sweep}/resume"), title="409", headers=FORM),
        Request("POST /sweeps/{sweep_id}/resume", at(f"/sweeps/{sweep}/resume"), title="nothing to resume: 409"),
        Request("DELETE /jobs/{job_id}", lambda: f"/jobs/{next(filled.deletable)}"),
        Request("PUT /files/{sha256}", at(f"/files/{hashlib.sha256(SOURCE).hexdigest()}"), body=SOURCE),
        Request("PUT /baselines/{name}", at("/baselines/latencies"), body={"job": done}),
        Request("DELETE /baselines/{name}", at("/baselines/none"), title="none: 404"),
        Request("PUT /queue/paused", at("/queue/paused"), body={"kinds": []}),
        Request("POST /jobs/cancel", at("/jobs/cancel?label=suite:none"), title="none matches"),
        Request("DELETE /jobs", at("/jobs?label=suite:none"), title="none matches"),
    ]


def routes_of(app: FastAPI) -> set[str]:
    """Return every route as "METHOD /path", but HEAD, which follows from GET."""
    found: set[str] = set()
    routes = [("", route) for route in [*app.routes, *(route for module in ROUTERS for route in module.router.routes)]]
    routes += [(pages.PREFIX, route) for module in pages.MODULES for route in module.router.routes]
    for prefix, route in routes:
        path, methods = getattr(route, "path", None), getattr(route, "methods", None) or ()
        plain = prefix + re.sub(r":\w+}", "}", str(path))  # {name:path}
        found |= {f"{method} {plain}" for method in methods if method not in ("HEAD", "OPTIONS")}
    return found


class Client:
    """One kept connection, which costs little itself."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
        self._connection.connect()

    def send(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> tuple[int, bytes, str | None]:
        """Return status, body and ETag of the answer. Raises RuntimeError for a fault of the server."""
        if body is None or isinstance(body, bytes):
            encoded = body
        else:
            encoded = (body if isinstance(body, str) else json.dumps(body)).encode()
        kind = {} if body is None else {"Content-Type": "application/json"}
        self._connection.request(method, path, encoded, {**kind, **headers})
        with self._connection.getresponse() as response:
            content = response.read()
            if response.status >= http.client.INTERNAL_SERVER_ERROR:
                raise RuntimeError(f"{method} {path}: {response.status}: {content.decode(errors='replace')[:500]}")
            return response.status, content, response.getheader("ETag")

    def close(self) -> None:
        self._connection.close()


def measure(client: Client, server: psutil.Process, request: Request, rounds: int, budget_s: float) -> dict[str, str]:
    """Send the request `rounds` times, or as often as the budget allows, at least twice; returns a row of the table."""
    method = request.route.partition(" ")[0]
    samples: list[float] = []
    tag: str | None = None
    begin = time.perf_counter()
    busy_s = 0.0
    for number in range(rounds + 1):
        if not samples:
            busy_s = _processor_s(server)
        path = request.path()
        headers = {**request.headers, **({"If-None-Match": tag} if request.revalidates and tag else {})}
        start = time.perf_counter()
        status, content, tag = client.send(method, path, request.body, headers)
        took_s = time.perf_counter() - start
        if number or took_s > budget_s:  # the first one warms up, unless it has taken all the time that there is
            samples.append(1000 * took_s)
        if len(samples) >= 2 and time.perf_counter() - begin > budget_s:
            break
    busy_s = _processor_s(server) - busy_s
    p50, p99 = percentiles(samples, 50, 99)
    return {
        "request": request.name,
        "p50, ms": p50,
        "p99, ms": p99,
        "CPU, ms": f"{1000 * busy_s / len(samples):.0f}",
        "times": str(len(samples)),
        "status": str(status),
        "answer, KiB": f"{len(content) / 1024:.1f}",
        "server, MiB": f"{server.memory_info().rss / 2**20:.0f}",
    }


def _processor_s(server: psutil.Process) -> float:
    """Return the processor time of the server so far. Unlike latencies it hardly depends on what else the host does."""
    times = server.cpu_times()
    return float(times.user + times.system)


def run(size: Size, rounds: int, budget_s: float, only: re.Pattern[str]) -> tuple[list[dict[str, str]], str, list[str]]:
    """Fill a database, time every request whose name has the pattern.

    Returns the table, a line on the server, and the faults of the server, of which there should be none.
    """
    with started_service() as service:
        http_client = service.client()
        begin = time.perf_counter()
        with contextlib.closing(open_database(service.settings())) as database:
            filled = fill(database, http_client, size)
        built_s = time.perf_counter() - begin
        print(f"The database was built in {built_s:.0f} s.", flush=True)
        known = routes_of(create_app(Settings(data_dir=service.folder / "unused")))

        def fresh(path: str, body: Any) -> int:
            return int(http_client.post(path, json=body).raise_for_status().json()["id"])

        asked = [*reads(filled), *writes(filled, fresh)]
        forgotten = known - {request.route for request in asked}
        if forgotten:
            raise RuntimeError(f"no request for {', '.join(sorted(forgotten))}: add one to benchmarks/latencies.py")
        assert service.server is not None
        server = psutil.Process(service.server.pid)
        with contextlib.closing(Client(service.url)) as client:
            table, faults = [], []
            for request in asked:
                if request.route not in known or not only.search(request.name):
                    continue
                try:
                    table.append(measure(client, server, request, rounds, budget_s))
                except RuntimeError as fault:  # one faulty page must not cost the figures of all others
                    faults.append(str(fault))
                    print(fault, flush=True)
                else:
                    print_now(table[-1])
        if faults:
            print(service.logs()[-MOST_LOG:])
        peak = next(line for line in Path(f"/proc/{server.pid}/status").read_text().splitlines() if "VmHWM" in line)
    return (
        table,
        f"The server's peak: {int(peak.split()[1]) / 1024:.0f} MiB; the database was built in {built_s:.0f} s",
        faults,
    )


def main(given: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--finished", type=int, default=100_000, help="finished jobs in the database")
    parser.add_argument("--queued", type=int, default=5_000, help="queued jobs")
    parser.add_argument("--measurements", type=int, default=1_000_000, help="measurements of all jobs")
    parser.add_argument("--large", type=int, default=150_000, help="measurements of the large job")
    parser.add_argument("--side", type=int, default=SIDE, help="the sweep has as many jobs as this number squared")
    parser.add_argument("--rounds", type=int, default=100, help="times that each request is sent")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds after which a request is sent no more")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="requests whose row has this pattern")
    arguments = parser.parse_args(given)
    size = Size(arguments.finished, arguments.queued, arguments.measurements, arguments.side, arguments.large)
    table, line, faults = run(size, arguments.rounds, arguments.budget, arguments.only)
    jobs = f"{size.finished} finished and {size.queued} queued jobs, {size.measurements} measurements"
    print_report(f"With {jobs}. {line}", table)
    if faults:
        raise RuntimeError(f"{len(faults)} requests met a fault of the server, the first one: {faults[0]}")


if __name__ == "__main__":
    main()
