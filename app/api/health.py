"""/healthz, /readyz and /metrics, for monitoring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response

from app.api.parameters import NO_QUERY, Json
from app.api.services import CurrentServices
from app.errors import DatabaseBusy
from app.states import JOB_STATES

router = APIRouter(tags=["health"])

VERSION = version("flopwatch")

PROBE_WAIT_S = 0.2
LAST_WAIT_S = 1.0
"""Seconds that the check waits if writes have been refused for long, so that it does not fail by bad luck alone."""


@router.get("/healthz", operation_id="get_health", dependencies=[NO_QUERY], summary="Is the process alive?")
async def healthz() -> Response:
    """Answers 200 while the process is alive, with Flopwatch's version; needs no token and no database."""
    return Json({"status": "ok", "version": VERSION})


@router.get("/readyz", operation_id="get_readiness", dependencies=[NO_QUERY], summary="Can it do its work?")
def readyz(services: CurrentServices) -> Response:
    """Reads the database, writes to it and stores a file; answers 503 or 507 with the reason when that fails.

    While others hold the write lock, it answers ready without having written: a busy database is not a fault. It is a
    fault if no write has begun for longer than FLOPWATCH_BUSY_TIMEOUT_S: the lock's holder may have been stopped.
    """
    services.reading.check()
    patience_s = services.settings.busy_timeout_s
    try:
        services.database.probe(PROBE_WAIT_S if services.database.busy_s() <= patience_s else LAST_WAIT_S)
    except DatabaseBusy as error:
        if (busy_s := services.database.busy_s()) > patience_s:
            raise DatabaseBusy(f"Writes have been refused for {busy_s:.0f} s. {error.detail}") from error
    services.files.probe()
    return Json({"status": "ready"})


@router.get(
    "/metrics",
    operation_id="get_metrics",
    dependencies=[NO_QUERY],
    response_class=PlainTextResponse,
    summary="Prometheus metrics",
)
def metrics(services: CurrentServices) -> Response:
    """Returns the metrics in Prometheus's text format 0.0.4."""
    counts = services.reading.counts()
    workers = services.reading.worker_counts()
    lines = [
        *_gauge("flopwatch_jobs", "Jobs by state.", {state: counts.get(state, 0) for state in JOB_STATES}),
        *_gauge("flopwatch_workers", "Workers by state.", workers),
    ]
    return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4; charset=utf-8")


def _gauge(name: str, text: str, by_state: Mapping[str, int]) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} gauge"
    for state, count in by_state.items():
        yield f'{name}{{state="{state}"}} {count}'
