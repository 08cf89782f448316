"""Exports: a job, a sweep or a comparison as one HTML file that needs neither a server nor a network.

It has tables, plots, verdicts, environment and spec. The plots are the figures of the live pages; Plotly and plots.js,
which evaluates it when a plot is seen, are part of the file (1.5 MB). The file's content security policy allows these
two scripts, by their hashes, and no request.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, Response
from markupsafe import Markup
from pydantic import Field

from app import results
from app.api.compare import SHOWN_TO_PEOPLE, ComparedQuery
from app.api.parameters import JobId, StrictQuery, SweepId, Text
from app.api.services import CurrentServices, Services
from app.errors import Conflict
from app.specs._base import flat
from app.states import FINISHED_STATES
from app.web.pages import compare as compare_page
from app.web.pages.job import SHOWN_LOG_CHARACTERS, WITHOUT_REASONS, first_rows, first_samples
from app.web.pages.plots import PlotsQuery, drawn, versions
from app.web.panels import JobResults, panels_of
from app.web.templates import STATIC, embedded, page_text, plain, table
from flopwatch.text.cases import case_text
from flopwatch.text.numbers import NOTHING
from flopwatch.text.times import current_time
from flopwatch.version import own_version

router = APIRouter(tags=["results"])

STYLES = ("colours.css", "export.css")
"""The files of `static` that an export's style is made of."""
PLOTLY = {name: f"vendor/plotly/plotly-{name}.min.js" for name in ("basic", "cartesian")}
"""Plotly's bundles, files of `static`. `basic` starts in half the time, and has no boxes and heat maps."""
DRAWING = "plots.js"
MAX_ROWS = 10_000
SHOWN_ROWS = 1000
"""Rows of the table of results, unless the client asks for others."""
SHOWN_OF_TABLES = 30
"""Rows of each table that units reported."""
MAX_TABLES = 40
MAX_JOBS = 200
"""Largest number of jobs of a sweep whose environments are read."""


class ExportQuery(StrictQuery):
    """The options of the export of a job or a sweep."""

    rows: Annotated[int, Field(ge=1, le=MAX_ROWS)] = SHOWN_ROWS
    """Largest number of rows of the table of results."""
    metric: Text | None = None
    """The metric that is drawn; by default the kind's main metric."""


HTML: dict[int | str, dict[str, Any]] = {200: {"content": {"text/html": {}}, "description": "The file."}}


@router.get(
    "/jobs/{job_id}/export",
    operation_id="export_job",
    response_class=HTMLResponse,
    responses=HTML,
    summary="A job as one HTML file",
)
async def job(
    request: Request, services: CurrentServices, job_id: JobId, query: Annotated[ExportQuery, Query()]
) -> Response:
    """Returns one HTML file to share, with results, plots, the tables that units reported, verdict, environment and
    spec. It opens without the server.
    """
    return await run_sync(lambda: _job(request, services, job_id, query), limiter=services.tables)


@router.get(
    "/sweeps/{sweep_id}/export",
    operation_id="export_sweep",
    response_class=HTMLResponse,
    responses=HTML,
    summary="A sweep as one HTML file",
)
async def sweep(
    request: Request, services: CurrentServices, sweep_id: SweepId, query: Annotated[ExportQuery, Query()]
) -> Response:
    """Returns one HTML file, as for a job: results and plots of all points, verdicts, environments, base and grid."""
    return await run_sync(lambda: _sweep(request, services, sweep_id, query), limiter=services.tables)


@router.get(
    "/compare/export",
    operation_id="export_comparison",
    response_class=HTMLResponse,
    responses=HTML,
    summary="A comparison as one HTML file",
)
async def compare(request: Request, services: CurrentServices, query: Annotated[ComparedQuery, Query()]) -> Response:
    """Returns one HTML file, as for a job: the table and the sentences of `GET /compare`, with plots of ratios and
    distributions."""
    query.check()
    return await run_sync(lambda: _compare(request, services, query), limiter=services.tables)


@dataclass(frozen=True)
class Assets:
    """The style and the scripts that every export contains, and the content security policy that allows them."""

    style: Markup
    plotly: Markup
    drawing: Markup
    policy: str


@functools.cache
def assets(bundle: str) -> Assets:
    """Read the styles and scripts of `static`, with this bundle of Plotly."""
    style = "".join((STATIC / name).read_text(encoding="utf-8") for name in STYLES)
    scripts = [(STATIC / name).read_text(encoding="utf-8") for name in (PLOTLY[bundle], DRAWING)]
    if any("</script" in script or "<!--" in script for script in scripts):
        raise RuntimeError("a script that contains </script or <!-- would end its element in the file")
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "form-action 'none'; base-uri 'none'"
    )
    return Assets(Markup(style), Markup(scripts[0]), Markup(scripts[1]), policy)  # noqa: S704


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def whole_file(
    request: Request, name: str, path: str, *, template: str = "export.html", all_of_plotly: bool, **values: Any
) -> Response:
    """Return a file that needs no server, under the name by which it is saved. `path` is where the same is shown."""
    own = assets("cartesian" if all_of_plotly else "basic")
    text = page_text(
        template,
        assets=own,
        source=str(request.base_url).rstrip("/") + path,
        made_at=f"{current_time():%Y-%m-%d %H:%M:%S} UTC",
        version=own_version(),
        **values,
    )
    headers = {
        "Content-Disposition": f'inline; filename="{name}"',
        "Content-Security-Policy": own.policy,
    }
    return HTMLResponse(text, headers=headers)


def _file(request: Request, name: str, path: str, **values: Any) -> Response:
    needs_all = "ratios" in values or bool((values.get("view") or {}).get("maps"))
    return whole_file(request, name, path, all_of_plotly=needs_all, **values)


def _job(request: Request, services: Services, job_id: int, query: ExportQuery) -> Response:
    job, _version = services.reading.job(job_id)
    is_finished = job["state"] in FINISHED_STATES
    sheet = (
        results.table(services.database, results.JobChoice(jobs=[job_id]), WITHOUT_REASONS, first=query.rows)
        if is_finished
        else None
    )
    units = services.reading.units(job_id)
    tables = results.list_tables(services.database, job_id)
    log, _last_event = services.reading.log_so_far(job_id)
    return _file(
        request,
        f"flopwatch-job-{job_id}.html",
        f"/ui/jobs/{job_id}",
        title=f"Job {job_id}: {job['name'] or job['kind']}",
        what=", ".join(filter(None, (job["kind"], case_text(job["summary"] or {})))),
        job=job,
        results=_results(sheet),
        view=_plots(services, PlotsQuery(job=[job_id], metric=query.metric)) if query.metric and is_finished else None,
        samples=first_samples(services, job_id) if is_finished else None,
        panels=_panels(services, job) if is_finished else [],
        log=log[-SHOWN_LOG_CHARACTERS:],
        log_is_cut=len(log) > SHOWN_LOG_CHARACTERS,
        tables=[
            (own["name"], own["rows"], first_rows(services, job_id, own, SHOWN_OF_TABLES))
            for own in tables[:MAX_TABLES]
        ],
        shown_rows=SHOWN_OF_TABLES,
        tables_left_out=max(0, len(tables) - MAX_TABLES),
        units=units if len(units) > 1 else [],
        environment=_facts([job["environment"]]),
        spec=job["spec"],
    )


def _sweep(request: Request, services: Services, sweep_id: int, query: ExportQuery) -> Response:
    sweep = services.reading.sweep(sweep_id)
    sheet = results.table(services.database, results.JobChoice(sweep=sweep_id), first=query.rows)
    jobs, following = services.reading.jobs(sweep=sweep_id, limit=MAX_JOBS)
    verdicts: dict[str, int] = {}
    for job in jobs:
        if job["validity"] is not None:
            verdict = str(job["validity"].get("verdict", "unknown"))
            verdicts[verdict] = verdicts.get(verdict, 0) + 1
    return _file(
        request,
        f"flopwatch-sweep-{sweep_id}.html",
        f"/ui/sweeps/{sweep_id}",
        title=f"Sweep {sweep_id}" + (f": {sweep['name']}" if sweep["name"] else ""),
        what=", ".join(f"{count} {state}" for state, count in sweep["counts"].items() if count),
        sweep=sweep,
        results=_results(sheet),
        view=_plots(services, PlotsQuery(sweep=sweep_id, metric=query.metric)),
        verdicts=verdicts,
        of_jobs=len(jobs) if following is not None else None,
        environment=_facts([job["environment"] for job in jobs]),
        spec={name: sweep[name] for name in ("base", "grid", "exclude")},
    )


def _compare(request: Request, services: Services, query: ComparedQuery) -> Response:
    comparison = query.comparison(services.database)
    sheet = results.sheet_of(comparison, SHOWN_TO_PEOPLE if query.limit is None else query.limit)
    shown = compare_page.shown(comparison, ("baseline", "candidate"))
    metric = shown["headline"]
    ids = [query.job] if query.job is not None else [*query.baseline, *query.candidate]
    jobs = [services.reading.job(number)[0] for number in ids]
    name = "-".join(str(number) for number in ids[:4])
    return _file(
        request,
        f"flopwatch-compare-{name}.html",
        "/ui/compare?" + "&".join(f"job={number}" for number in ids),
        title="Comparison of " + ", ".join(f"job {number}" for number in ids[:9]),
        what=comparison.judgement.sentence,
        jobs=jobs,
        results=_results(sheet),
        compared=shown,
        metric=metric,
        distributions=compare_page.distributions([shown], metric) if metric else None,
        ratios=compare_page.ratios([shown]),
        environment=_facts([job["environment"] for job in jobs]),
        spec={f"job {job['id']}": job["spec"] for job in jobs},
    )


def _results(sheet: results.Sheet | None) -> dict[str, Any]:
    if sheet is None:
        return {"table": "", "missing": [], "is_cut": False, "rows": 0}
    return {
        "table": table(sheet),
        "missing": list(sheet.missing or ()),
        "is_cut": sheet.is_cut,
        "rows": len(sheet.rows),
    }


def _plots(services: Services, query: PlotsQuery) -> dict[str, Any]:
    return drawn(services, versions(services, query), query.model_dump_json())


def _panels(services: Services, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the panels of the job's kind that have a plot and are open at first: `panel`, and `plot` or `problem`."""
    shown: list[dict[str, Any]] = []
    for panel in panels_of(JobResults(job, services.database, services.reading, services.files)):
        if panel.draw is None or panel.folded:
            continue
        try:
            shown.append({"panel": panel, "plot": embedded(panel.figure())})
        except Conflict as problem:
            shown.append({"panel": panel, "problem": str(problem)})
    return shown


def _facts(environments: Iterable[Mapping[str, Any] | None]) -> list[tuple[str, list[str]]]:
    """Return the facts of environments by name, each with its values: several where the jobs differ."""
    facts: dict[str, list[str]] = {}
    for environment in environments:
        for name, value in flat(environment or {}).items():
            values = facts.setdefault(name, [])
            if (text := plain(value) or NOTHING) not in values:
                values.append(text)
    return list(facts.items())
