"""/healthz, /readyz and /metrics, for monitoring."""

import shutil

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from app.api.metrics import FromDatabase
from app.api.parameters import NO_QUERY, Json
from app.api.services import CurrentServices
from app.errors import DatabaseBusy
from app.store.reading import monitoring
from flopwatch.version import own_version

router = APIRouter(tags=["health"])

VERSION = own_version()

PROBE_WAIT_S = 0.2
LAST_WAIT_S = 1.0
"""Seconds that the check waits if writes have been refused for long, so that it does not fail by bad luck alone."""


@router.get("/healthz", dependencies=[NO_QUERY], summary="Is the process alive?")
async def get_health() -> Response:
    """Answers 200 while the process is alive, with Flopwatch's version; needs no token and no database."""
    return Json({"status": "ok", "version": VERSION})


@router.get("/readyz", dependencies=[NO_QUERY], summary="Can it do its work?")
def get_readiness(services: CurrentServices) -> Response:
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
    dependencies=[NO_QUERY],
    response_class=PlainTextResponse,
    responses={200: {"content": {"application/openmetrics-text": {"schema": {"type": "string"}}}}},
    summary="Prometheus metrics",
)
def get_metrics(request: Request, services: CurrentServices) -> Response:
    """Returns the metrics in Prometheus's text format or, if `Accept` asks for it, as OpenMetrics.

    Every server of a database returns the same, except `flopwatch_http_…`, `flopwatch_store_errors_total` and
    `flopwatch_disk_free_bytes`, which are its own.
    """
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    registry = CollectorRegistry()
    settings = services.settings
    folders = {"data": settings.data_dir, "artifacts": settings.artifacts_dir}
    if settings.object_store_url is not None:
        del folders["artifacts"]
    free = {name: shutil.disk_usage(folder).free for name, folder in folders.items() if folder.is_dir()}
    registry.register(FromDatabase(monitoring.read(services.database), VERSION, free))
    registry.register(request.app.state.requests.registry)
    return Response(encode(registry), media_type=media_type)
