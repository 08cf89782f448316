"""/ui/jobs/ID: one job, while it waits and runs and when it has ended."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from markupsafe import Markup

from app.api.parameters import NO_QUERY, JobId
from app.api.services import CurrentServices, Services
from app.layout import varying_columns
from app.states import FINISHED_STATES
from app.store import results
from app.store.queue import RETRIED_STATES
from app.web.live import page_tag, tagged, unchanged
from app.web.templates import table

router = APIRouter()

# The page shows the end of a long log, with a link to all of it.
SHOWN_LOG_CHARACTERS = 20_000
# The page shows the beginning of long tables, with links to all of them.
SHOWN_CASES = 200
SHOWN_MEASUREMENTS = 200
SHOWN_ROWS = 20
SHOWN_TABLES = 20
SHOWN_UNITS = 100
SHOWN_FILES = 200
SHOWN_ATTEMPTS = 50


@router.get("/jobs/{job_id}", dependencies=[NO_QUERY])
def job(request: Request, services: CurrentServices, job_id: JobId) -> Response:
    version = services.reading.job_page_version(job_id)
    found, _version = services.reading.job(job_id)
    tag = page_tag(version, found["waiting"])
    if tag.is_known_to(request):
        return unchanged(tag)
    measurements = services.reading.measurements(job_id, limit=SHOWN_MEASUREMENTS)
    sheet = results.table(services.database, jobs=[job_id], first=SHOWN_CASES) if measurements["rows"] else None
    units = services.reading.units(job_id)
    tables = results.list_tables(services.database, job_id)
    artifacts = services.reading.artifacts(job_id)
    attempts = services.reading.attempts(job_id)
    log = services.reading.log(job_id)
    return tagged(
        tag,
        request,
        "job.html",
        job=found,
        finished=found["state"] in FINISHED_STATES,
        retried=found["state"] in RETRIED_STATES,
        table=table(sheet) if sheet is not None and found["state"] == "succeeded" else "",
        sheet=sheet,
        missing=[] if sheet is None else sheet.missing,
        measurements=measurements,
        columns=varying_columns(measurements),
        units=units[:SHOWN_UNITS] if len(units) > 1 else [],
        all_units=len(units),
        tables=[(own, first_rows(services, own["name"], job_id)) for own in tables[:SHOWN_TABLES]],
        all_tables=len(tables),
        shown_rows=SHOWN_ROWS,
        artifacts=artifacts[:SHOWN_FILES],
        all_artifacts=len(artifacts),
        attempts=attempts[-SHOWN_ATTEMPTS:],
        all_attempts=len(attempts),
        log=log[-SHOWN_LOG_CHARACTERS:],
        log_is_cut=len(log) > SHOWN_LOG_CHARACTERS,
    )


def first_rows(services: Services, name: str, job_id: int) -> Markup:
    """The beginning of a table that units reported."""
    sheet = results.result_table(services.database, job_id, name, limit=SHOWN_ROWS)
    return Markup(results.render(sheet, "html"))  # noqa: S704  # its cells are escaped


@router.post("/jobs/{job_id}/cancel", dependencies=[NO_QUERY])
async def cancel(services: CurrentServices, job_id: JobId) -> Response:
    await services.writes.run(lambda: services.queue.cancel(job_id))
    return RedirectResponse(f"/ui/jobs/{job_id}", status_code=303)


@router.post("/jobs/{job_id}/retry", dependencies=[NO_QUERY])
async def retry(services: CurrentServices, job_id: JobId) -> Response:
    await services.writes.run(lambda: services.queue.retry(job_id))
    return RedirectResponse(f"/ui/jobs/{job_id}", status_code=303)
