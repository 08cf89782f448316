"""/ui/jobs/ID: one job, while it waits and runs and when it has ended."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response
from markupsafe import Markup
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool

from app import results
from app.api.access import OWN_JOB, OWN_JOB_AGAIN, access_of
from app.api.bodies import NO_TIMEOUT, JobChanges, parse, read_limited
from app.api.parameters import NO_QUERY, JobId, Json, StrictQuery, Text
from app.api.services import CurrentServices, Services
from app.errors import FieldError, InvalidRequest
from app.results.footnotes import NOT_MEASURED
from app.specs import KINDS, without_effect_in
from app.specs._code import codes_of
from app.states import FINISHED_STATES
from app.store.keeping.describing import describe_job
from app.store.queue.transitions import RETRIED_STATES
from app.store.reading.queries import FACTS, STATISTICS
from app.web import facts, separated
from app.web.live import clock, page_tag, tagged, unchanged
from app.web.pages.jobs import headline_of
from app.web.samples import over_steps
from app.web.templates import table
from flopwatch.spelling import command, curl
from flopwatch.text.cases import case_text, in_use

router = APIRouter()

# The page shows the end of a long log, with a link to all of it.
SHOWN_LOG_CHARACTERS = 20_000
# The page shows the beginning of long tables, with links to all of them.
SHOWN_CASES = 200
SHOWN_MEASUREMENTS = 200
SHOWN_ROWS = 20
SHOWN_TABLES = 20
# Columns by which the largest rows of a table come first: people look for those, not for zeros.
SIZES = ("total_ms", "peak_mib", "size_mib")
MAX_SORTED = 5000
SHOWN_UNITS = 100
SHOWN_CHECKS = 6
# The reasons of a verdict stand in the list of checks, and not below the table again.
WITHOUT_REASONS = results.Layout(reasons=False)
SHOWN_FILES = 200
SHOWN_ATTEMPTS = 50


@router.get("/jobs/{job_id}", dependencies=[NO_QUERY])
def job(request: Request, services: CurrentServices, job_id: JobId) -> Response:
    version = services.reading.job_page_version(job_id)
    job, _version = services.reading.job(job_id)
    place = services.reading.places([job_id]).get(job_id) if job["state"] == "queued" else None
    tag = page_tag(
        version, job["waiting"], str(place), clock(finished=job["state"] in FINISHED_STATES), access_of(request).name
    )
    if tag.is_known_to(request):
        return unchanged(tag, plots=True)
    log, last_event = services.reading.log_so_far(job_id)
    progress = services.reading.progress(job_id) if job["state"] == "running" else []
    spec = job["spec"] if job["broken"] is None else {}
    metrics = set(KINDS[job["kind"]].table_columns) if job["kind"] in KINDS else set()
    of_results = _results(services, job)
    is_measured = job["state"] == "succeeded" or (
        job["state"] in FINISHED_STATES and of_results["measurements"]["rows"]
    )
    again = resubmission(job, services.settings.default_timeout_s)
    return tagged(
        tag,
        request,
        "job.html",
        plots=True,
        job=job,
        case=case_text(job["summary"] or {}),
        finished=job["state"] in FINISHED_STATES,
        retried=job["state"] in RETRIED_STATES,
        compared=is_measured and job["kind"] in KINDS and KINDS[job["kind"]].has_sides,
        finding=next(
            (
                check["detail"]
                for check in (job["validity"] or {}).get("checks", ())
                if job["kind"] in KINDS and check["name"] == KINDS[job["kind"]].finding and not check["ok"]
            ),
            None,
        ),
        headline=headline_of(job["kind"], services.reading.first_values([job_id], metrics).get(job_id, ())),
        labels_text=separated.joined(f"{key}={value}" for key, value in job["labels"].items()),
        place=place,
        pace=facts.pace(progress),
        differences=facts.differences(spec),
        idle=without_effect_in(spec),
        environment=facts.environment_facts(job["environment"] or {}),
        shown_checks=SHOWN_CHECKS,
        command=command(again),
        has_code=any(codes_of(spec)),
        curl=curl(again, str(request.base_url)),
        log=log[-SHOWN_LOG_CHARACTERS:],
        log_is_cut=len(log) > SHOWN_LOG_CHARACTERS,
        last_event=last_event,
        **of_results,
    )


def _results(services: Services, job: Mapping[str, Any]) -> dict[str, Any]:
    job_id = job["id"]
    measurements = services.reading.measurements(job_id, limit=SHOWN_MEASUREMENTS)
    sheet = (
        results.table(services.database, results.JobChoice(jobs=[job_id]), WITHOUT_REASONS, first=SHOWN_CASES)
        if measurements["rows"]
        else None
    )
    missing = [] if sheet is None else sheet.missing
    units = services.reading.units(job_id)
    tables = results.list_tables(services.database, job_id)
    artifacts = services.reading.artifacts(job_id)
    attempts = services.reading.attempts(job_id)
    columns = varying_columns(measurements)
    return {
        "table": table(sheet) if sheet is not None and job["state"] == "succeeded" else "",
        "sheet": sheet,
        "missing": missing,
        "checks": facts.checks(job["validity"] or {}, without_details=(NOT_MEASURED,) if missing else ()),
        "measurements": measurements,
        "columns": columns,
        "several_cases": len({row["case_key"] for row in measurements["rows"]}) > 1,
        "sampled": sampled_cases(measurements["rows"], columns),
        "units": units[:SHOWN_UNITS] if len(units) > 1 else [],
        "all_units": len(units),
        "answers": [(own, first_rows(services, job_id, own, SHOWN_ROWS)) for own in tables if own["answers"]],
        "tables": [(own, first_rows(services, job_id, own, SHOWN_ROWS)) for own in tables[:SHOWN_TABLES]],
        "all_tables": len(tables),
        "shown_rows": SHOWN_ROWS,
        "artifacts": artifacts[:SHOWN_FILES],
        "all_artifacts": len(artifacts),
        "attempts": attempts[-SHOWN_ATTEMPTS:],
        "all_attempts": len(attempts),
    }


def sampled_cases(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> dict[str, str]:
    """Return names of the cases with several samples of a time, by case key: the coordinates that differ."""
    apart = [name for name in columns if name not in ("unit_title", "device_key")]
    return {
        row["case_key"]: case_text({name: row[name] for name in apart}) or "the case"
        for row in rows
        if (row["n"] or 0) > 1 and row["unit"] == "ms"
    }


def first_rows(services: Services, job_id: int, own: Mapping[str, Any], limit: int) -> Markup:
    """Return `limit` rows of a table that units reported, one of `results.list_tables`: the largest by its first column
    of `SIZES`, or the first."""
    columns = [column["name"] for column in own["columns"]]
    size = next((name for name in SIZES if name in columns), None)
    sort = None if size is None or own["rows"] > MAX_SORTED else f"-{size}"
    sheet = results.result_table(services.database, job_id, own["name"], results.Excerpt(limit=limit, sort=sort))
    return Markup(results.render(sheet, "html"))  # noqa: S704  # its cells are escaped


def resubmission(job: Mapping[str, Any], default_timeout_s: float | None) -> dict[str, Any]:
    """Return the body of `POST /jobs` that submits the job once more; defaults are left out."""
    body: dict[str, Any] = {"spec": facts.changed_only(job["spec"])}
    for name, default in (("name", None), ("labels", {}), ("priority", 0), ("max_attempts", 2)):
        if job[name] not in (None, default):
            body[name] = job[name]
    if job["timeout_s"] != default_timeout_s:
        body["timeout_s"] = NO_TIMEOUT if job["timeout_s"] is None else job["timeout_s"]
    return body


@router.post("/jobs/{job_id}/cancel", dependencies=[NO_QUERY, OWN_JOB])
async def cancel(services: CurrentServices, job_id: JobId) -> Response:
    await services.writes.run(lambda: services.queue.cancel(job_id))
    return RedirectResponse(f"/ui/jobs/{job_id}", status_code=303)


@router.post("/jobs/{job_id}/retry", dependencies=[NO_QUERY, OWN_JOB_AGAIN])
async def retry(services: CurrentServices, job_id: JobId) -> Response:
    await services.writes.run(lambda: services.queue.retry(job_id))
    return RedirectResponse(f"/ui/jobs/{job_id}", status_code=303)


@router.post("/jobs/{job_id}/describe", dependencies=[NO_QUERY])
async def describe(request: Request, services: CurrentServices, job_id: JobId) -> Response:
    """Change name, labels and note to what the form has; empty fields remove theirs."""
    raw = await read_limited(request, services.settings.max_body_bytes)
    sent = dict(parse_qsl(raw.decode(errors="replace"), keep_blank_values=True))
    try:
        labels = dict(separated.pairs(sent.get("labels", "")))
    except ValueError as wrong:
        raise InvalidRequest(f"Labels: {wrong}.", errors=(FieldError("/labels", str(wrong)),)) from wrong
    job, _version = await run_in_threadpool(services.reading.job, job_id)
    texts = {name: sent.get(name, "").replace("\r\n", "\n").strip() or None for name in ("name", "note")}
    body = {**texts, "labels": {**dict.fromkeys(job["labels"]), **labels}}
    changes = parse(to_json(body), JobChanges).model.model_dump(exclude_unset=True)
    await services.writes.run(lambda: describe_job(services.database, job_id, changes))
    return RedirectResponse(f"/ui/jobs/{job_id}", status_code=303)


class CaseQuery(StrictQuery):
    case: Text | None = None
    """Key of a case; the first one that was sampled is the default."""


@router.get("/jobs/{job_id}/samples")
def samples(services: CurrentServices, job_id: JobId, query: Annotated[CaseQuery, Query()]) -> Response:
    """Return a plot of the times of one case over the index of their step, with a line per phase and process."""
    return Json(over_steps(*services.reading.samples(job_id, query.case)))


def varying_columns(measurements: Mapping[str, Any]) -> list[str]:
    """Return the columns that distinguish a page's measurements: coordinates, device and unit, where they vary."""
    rows: Sequence[Mapping[str, Any]] = measurements["rows"]
    always_shown = {*FACTS, *STATISTICS, "samples"} - {"device_key", "unit_title"}
    names = [column["name"] for column in measurements["columns"] if column["name"] not in always_shown]
    return [name for name in names if len({json.dumps(in_use(row.get(name))) for row in rows}) > 1]
