"""Parts of a job's page that show what its kind measures.

/ui/jobs/ID/panels: the panels, which the page requests once it is loaded. /ui/jobs/ID/plots/NAME: their plots.
/ui/jobs/ID/explore: one of the job's tables, to search in.
"""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from app.api.parameters import NO_QUERY, JobId, Json
from app.api.services import CurrentServices, Services, slow
from app.errors import NotFound
from app.web.explorer import View, table_page
from app.web.live import REVALIDATED, page_tag, unchanged
from app.web.panels import JobResults, panels_of
from app.web.templates import render

router = APIRouter(prefix="/jobs/{job_id}")


def results_of(services: Services, job_id: int) -> JobResults:
    """Return a job's results. Raises NotFound."""
    job, _version = services.reading.job(job_id)
    return JobResults(job, services.database, services.reading, services.files)


@router.get("/panels", dependencies=[NO_QUERY])
@slow
def panels(request: Request, services: CurrentServices, job_id: JobId) -> Response:
    results = results_of(services, job_id)
    perfetto = services.settings.perfetto_url
    return render(request, "panels.html", job=results.job, panels=panels_of(results), perfetto=perfetto)


@router.get("/plots/{name}", dependencies=[NO_QUERY])
@slow
def plot(request: Request, services: CurrentServices, job_id: JobId, name: str) -> Response:
    """Return the JSON of a plot, or 304 while the job has not changed."""
    tag = page_tag(services.reading.job_page_version(job_id))
    if tag.is_known_to(request):
        return unchanged(tag)
    shown = [drawn for panel in panels_of(results_of(services, job_id)) for drawn in (panel, *panel.more)]
    plots = {panel.name: panel.figure for panel in shown if panel.draw is not None}
    if name not in plots:
        raise NotFound(f"Job {job_id} has no plot {name!r}; it has: {', '.join(plots) or 'none'}.")
    response = Json(plots[name]())
    response.headers.update({"ETag": str(tag), **REVALIDATED})
    return response


@router.get("/explore")
@slow
def explore(request: Request, services: CurrentServices, job_id: JobId, view: Annotated[View, Query()]) -> Response:
    results = results_of(services, job_id)
    return render(request, "explore.html", job=results.job, table=table_page(services.database, results, view))
