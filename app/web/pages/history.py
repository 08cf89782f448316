"""/ui/history: one metric of one case over all jobs that measured it."""

from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from app import results
from app.api.parameters import Id, StrictQuery, Text
from app.api.services import CurrentServices, Services
from app.results.history import HistoryPoint
from app.web import history_plot
from app.web.pages.compare import short_names
from app.web.parameters import NONE_IF_EMPTY
from app.web.templates import Entry, embedded, render
from flopwatch.text.cases import case_text

router = APIRouter()
NAVIGATION = Entry("History", "/ui/history", order=47)

SHOWN_POINTS = 500
"""Most points of a page: the newest."""
RECENT_JOBS = 20


class HistoryQuery(StrictQuery):
    """The case, by its key or by a job that measured it."""

    case: Annotated[Text | None, NONE_IF_EMPTY] = None
    job: Annotated[Id | None, NONE_IF_EMPTY] = None
    metric: Annotated[Text | None, NONE_IF_EMPTY] = None
    device: Annotated[Text | None, NONE_IF_EMPTY] = None


@router.get("/history")
def history(request: Request, services: CurrentServices, query: Annotated[HistoryQuery, Query()]) -> Response:
    if query.case is None:
        return _choose(request, services, query)
    return _history(request, services, results.CaseChoice(key=query.case), query)


def _choose(request: Request, services: Services, query: HistoryQuery) -> Response:
    """Show the cases of the job, or, without a job, recent jobs; of a job with one case, its history."""
    if query.job is None:
        jobs, _ = services.reading.jobs(state="succeeded", limit=RECENT_JOBS)
        shown = [(job, case_text(job["summary"] or {})) for job in jobs]
        return render(request, "history_choice.html", job=None, jobs=shown)
    job, _version = services.reading.job(query.job)
    cases = results.cases_of_job(services.database, query.job)
    if len(cases) == 1:
        return _history(request, services, results.CaseChoice(job=query.job), query)
    words = {key: case_text(coordinates) for key, coordinates in cases.items()}
    names = short_names(list(words.values()))
    shown_cases = [(names[text], f"/ui/history?{_query(case=key)}") for key, text in words.items()]
    return render(request, "history_choice.html", job=job, cases=shown_cases)


def _history(request: Request, services: Services, choice: results.CaseChoice, query: HistoryQuery) -> Response:
    whole = results.history(services.database, choice, query.metric, query.device, SHOWN_POINTS)
    return render(
        request,
        "history.html",
        plots=True,
        history=whole,
        query=query,
        plot=embedded(history_plot.figure(whole)),
        points=_rows(whole.points),
        json=f"/history?{_query(case=whole.case_key, metric=whole.metric, device=query.device)}",
    )


def _rows(points: Sequence[HistoryPoint]) -> list[dict[str, Any]]:
    """Return the points, newest first, each with the address of its comparison with the one before on its device; a
    side of a comparison has none."""
    rows: list[dict[str, Any]] = []
    latest: dict[str, int] = {}
    for point in points:
        before = latest.get(point.device_key) if point.side is None else None
        address = f"/ui/compare?{urlencode([('job', before), ('job', point.job)])}"
        rows.append({**vars(point), "compared": None if before is None else address})
        if point.side is None:
            latest[point.device_key] = point.job
    return rows[::-1]


def _query(**parameters: Any) -> str:
    return urlencode({name: value for name, value in parameters.items() if value is not None})
