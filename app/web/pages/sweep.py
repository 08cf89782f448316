"""/ui/sweeps/ID: one sweep, its jobs, its plots and its table."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response
from pydantic import Field

from app import results
from app.api.access import OWN_SWEEP, OWN_SWEEP_AGAIN, access_of
from app.api.parameters import NO_QUERY, StrictQuery, SweepId, Text
from app.api.services import CurrentServices, Services
from app.metrics import headline
from app.results.digits import column_texts
from app.specs import KINDS
from app.specs._sweep import expand
from app.states import FINISHED_STATES, JOB_STATES, JobState
from app.store.reading import members
from app.web.live import Known, clock, is_refresh, page_tag, refreshed, tagged, unchanged
from app.web.pages.sweeps import varies
from app.web.parameters import NONE_IF_EMPTY
from flopwatch.text.cases import case_text
from flopwatch.text.times import current_time, duration, parsed_time
from flopwatch.text.values import value_text

router = APIRouter()

JOBS_PER_PAGE = 50
MAX_METRICS = 4
"""Largest number of metrics in the list of jobs; the table below has all."""


class SweepQuery(StrictQuery):
    """The choice and order of the sweep's jobs on the page."""

    state: Annotated[JobState | None, NONE_IF_EMPTY] = None
    sort: Annotated[Text | None, NONE_IF_EMPTY] = None
    """A path, a metric, job, state, verdict or duration; with "-" before it, descending."""
    page: Annotated[int, Field(ge=1, le=10_000)] = 1

    def choice(self, sort: str) -> members.MemberQuery:
        """`sort`: by what jobs are sorted unless the query says so."""
        sort = self.sort or sort
        return members.MemberQuery(self.state, sort.removeprefix("-"), sort.startswith("-"))


@router.get("/sweeps/{sweep_id}")
async def sweep(
    request: Request, services: CurrentServices, sweep_id: SweepId, query: Annotated[SweepQuery, Query()]
) -> Response:
    return await refreshed(request, lambda known: page(request, services, sweep_id, query, known))


def page(request: Request, services: Services, sweep_id: int, query: SweepQuery, known: Known) -> Response:
    """Make the page of a sweep, with the chosen ones of its jobs, or answer 304."""
    version = services.reading.sweep_page_version(sweep_id)
    sweep = services.reading.sweep(sweep_id)
    finished = not sweep["counts"]["queued"] and not sweep["counts"]["running"]
    reader = None if is_refresh(request) else access_of(request).name
    tag = page_tag(version, str(request.query_params), clock(finished=finished), reader)
    if known(tag):
        return unchanged(tag, plots=True)
    progress = members.progress(services.database, sweep, current_time())
    choice = query.choice(next(iter(members.searched(sweep)), "job"))
    jobs, number = members.page(
        services.database, sweep, choice, limit=JOBS_PER_PAGE, offset=(query.page - 1) * JOBS_PER_PAGE
    )
    values = headline_values(services, sweep, jobs)
    return tagged(
        tag,
        request,
        "sweep.html",
        plots=True,
        sweep=sweep,
        progress=progress,
        finished=finished,
        resumable=is_resumable(sweep),
        took=elapsed(progress),
        varies=varies(sweep),
        searched_at=list(sweep["grid"]),
        jobs=[
            {**job, "cells": values["jobs"].get(job["id"], {}), "case": case_text(job.get("summary") or {})}
            for job in jobs
        ],
        one_case_each=members.has_one_case_each(sweep),
        metrics=values["metrics"],
        own_tables=own_tables(services, jobs),
        number=number,
        paths=[path for path, options in sweep["grid"].items() if len(options) > 1] + members.searched(sweep)
        or list(sweep["grid"]),
        chosen=query,
        sort=choice.sort,
        descending=choice.descending,
        value_text=value_text,
        states=JOB_STATES,
        address=lambda **changes: address(request, sweep_id, changes),
        pages=-(-number // JOBS_PER_PAGE),
        this=address(request, sweep_id, {}),
    )


def own_tables(services: Services, jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tables that jobs of the kind report themselves: those of the first finished one in the list."""
    first = next((job["id"] for job in jobs if job["state"] == "succeeded"), None)
    return [] if first is None else results.list_tables(services.database, first)


def is_resumable(sweep: Mapping[str, Any]) -> bool:
    """Return True if resuming would submit a job: if points of the grid failed, were cancelled or have no job."""
    counts = sweep["counts"]
    if sweep["broken"]:
        return False
    if counts["failed"] or counts["cancelled"]:
        return True
    if sweep["searches"] is not None:
        return any(search["resumable"] for search in sweep["searches"])
    # Without `exclude` the grid need not be expanded.
    number: int = sum(counts.values())
    most: int = math.prod(map(len, sweep["grid"].values()))
    return number < most and number < len(expand(sweep["base"], sweep["grid"], sweep["exclude"]))


def headline_values(services: Services, sweep: Mapping[str, Any], jobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the most important metrics with their units, and each job's cells as text and outcome.

    There are none where a job has many cases: those are in the plots and the table.
    """
    ended = [job["id"] for job in jobs if job["state"] in FINISHED_STATES]
    units = members.metrics(services.database, None, ended) if members.has_one_case_each(sweep) else {}
    first = [name for name in KINDS[sweep["base"]["kind"]].table_columns if name in units] if units else []
    main_metric = headline(first)
    shown = sorted(first, key=lambda name: name != main_metric)[:MAX_METRICS]
    if not shown:
        return {"metrics": {}, "jobs": {}}
    sheet = results.metric_table(services.database, results.JobChoice(jobs=ended), shown)
    cells_of_jobs: dict[int, dict[str, Any]] = {job_id: {} for job_id in sheet.column("job")}
    for column in sheet.columns:
        if column.name in shown:
            cells = sheet.column(column.name)
            for job_id, text, cell in zip(cells_of_jobs, column_texts(cells, column), cells, strict=True):
                cells_of_jobs[job_id][column.name] = {"text": text, "outcome": cell.outcome}
    return {"metrics": {name: units[name] for name in shown}, "jobs": cells_of_jobs}


def elapsed(progress: members.Progress) -> str | None:
    """Write the time from the first start to the last end; None if none has started."""
    if progress.started_at is None:
        return None
    is_running = progress.done < progress.total or progress.finished_at is None
    end = current_time() if is_running else parsed_time(str(progress.finished_at))
    return duration((end - parsed_time(progress.started_at)).total_seconds())


def address(request: Request, sweep_id: int, changes: Mapping[str, Any]) -> str:
    """Return the page's address with another order, or page; a change to None leaves the parameter out."""
    kept = [(name, value) for name, value in request.query_params.multi_items() if value and name not in changes]
    pairs = [*kept, *((name, str(value)) for name, value in changes.items() if value is not None)]
    return f"/ui/sweeps/{sweep_id}" + (f"?{urlencode(pairs)}" if pairs else "")


@router.post("/sweeps/{sweep_id}/cancel", dependencies=[NO_QUERY, OWN_SWEEP])
async def cancel(services: CurrentServices, sweep_id: SweepId) -> Response:
    await services.writes.run(lambda: services.queue.cancel_sweep(sweep_id))
    return RedirectResponse(f"/ui/sweeps/{sweep_id}", status_code=303)


@router.post("/sweeps/{sweep_id}/resume", dependencies=[NO_QUERY, OWN_SWEEP_AGAIN])
async def resume(services: CurrentServices, sweep_id: SweepId) -> Response:
    await services.writes.run_long(lambda: services.queue.resume_sweep(sweep_id))
    return RedirectResponse(f"/ui/sweeps/{sweep_id}", status_code=303)
