"""/ui: jobs, one job, sweeps, workers."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version as package_version
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response
from markupsafe import Markup
from pydantic import BeforeValidator

from app.api.parameters import NO_QUERY, Cursor, ETag, Id, JobId, Label, StrictQuery, SweepId, Text
from app.api.services import CurrentServices, Services
from app.layout import case_text, varying_columns
from app.specs import KINDS
from app.states import FINISHED_STATES, JOB_STATES, JobState
from app.store import results
from app.store.queue import RETRIED_STATES
from app.web.templates import render

router = APIRouter(prefix="/ui", include_in_schema=False)

JOBS_PER_PAGE = 50
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

REVALIDATED = {"Cache-Control": "private, no-cache"}

# A form sends every field, the empty ones too.
NONE_IF_EMPTY = BeforeValidator(lambda value: value or None)


class Filters(StrictQuery):
    """The query that the form above the list of jobs sends."""

    state: Annotated[JobState | None, NONE_IF_EMPTY] = None
    kind: Annotated[Text | None, NONE_IF_EMPTY] = None
    label: Annotated[Label | None, NONE_IF_EMPTY] = None
    sweep: Annotated[Id | None, NONE_IF_EMPTY] = None
    after: Annotated[Cursor | None, NONE_IF_EMPTY] = None


@router.get("")
def jobs(request: Request, services: CurrentServices, filters: Annotated[Filters, Query()]) -> Response:
    chosen = {name: value for name, value in request.query_params.items() if value}
    labels: Any = [] if filters.label is None else [filters.label]
    found, following = services.reading.jobs(
        state=filters.state,
        kind=filters.kind,
        labels=labels,
        sweep=filters.sweep,
        limit=JOBS_PER_PAGE,
        after=filters.after,
    )
    return render(
        request,
        "jobs.html",
        jobs=[(job, case_text(job.get("summary") or {})) for job in found],
        older=f"/ui?{urlencode({**chosen, 'after': following})}" if following is not None else None,
        newest="/ui?" + urlencode({name: value for name, value in chosen.items() if name != "after"}),
        chosen=chosen,
        this="/ui" + (f"?{urlencode(chosen)}" if chosen else ""),
        states=JOB_STATES,
        kinds=sorted(KINDS),
        counts=services.reading.counts(),
        paused=services.pausing.kinds(),
    )


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


@router.get("/sweeps/{sweep_id}", dependencies=[NO_QUERY])
def sweep(request: Request, services: CurrentServices, sweep_id: SweepId) -> Response:
    tag = page_tag(services.reading.sweep_page_version(sweep_id))
    if tag.is_known_to(request):
        return unchanged(tag)
    found = services.reading.sweep(sweep_id)
    sheet = results.table(services.database, sweep=sweep_id, first=SHOWN_CASES)
    return tagged(
        tag,
        request,
        "sweep.html",
        sweep=found,
        finished=not found["counts"]["queued"] and not found["counts"]["running"],
        table=table(sheet),
        sheet=sheet,
    )


def page_tag(*parts: str | None) -> ETag:
    """The ETag of a page that these texts and this version of Flopwatch make. A page asks for itself every 2 s."""
    text = json.dumps([*parts, package_version("flopwatch")])
    return ETag(hashlib.sha256(text.encode()).hexdigest()[:20], weak=True)


def unchanged(tag: ETag) -> Response:
    return Response(status_code=304, headers={"ETag": str(tag), **REVALIDATED})


def tagged(tag: ETag, request: Request, template: str, **values: Any) -> Response:
    """The page, for the browser to keep and to ask for again only if it has changed."""
    response = render(request, template, **values)
    response.headers.update({"ETag": str(tag), **REVALIDATED})
    return response


def table(sheet: results.Sheet) -> Markup:
    """A table of results; empty where it has no rows."""
    text = results.render(sheet, "html") if sheet.rows else ""
    return Markup(text)  # noqa: S704  # its cells are escaped


@router.get("/workers", dependencies=[NO_QUERY])
def workers(request: Request, services: CurrentServices) -> Response:
    return render(request, "workers.html", workers=services.reading.workers())


def error_page(request: Request, problem: dict[str, Any]) -> Response | None:
    """Return the page that shows a page's error; None for requests that are not for pages."""
    if not request.url.path.startswith(router.prefix):
        return None
    return render(request, "error.html", status_code=problem["status"], problem=problem)
