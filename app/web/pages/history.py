"""/ui/history: one metric of one case over all jobs that measured it, and the versions between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import Field

from app import results
from app.api.parameters import Id, StrictQuery, Text
from app.api.services import CurrentServices, Services
from app.results.history import HistoryPoint
from app.web import history_plot
from app.web.history_plot import Along
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
    along: Along = "time"


class EndsQuery(StrictQuery):
    """The jobs between which versions are listed: from the first of them to the last."""

    job: list[Id] = Field(min_length=1, max_length=SHOWN_POINTS)
    back: Text = ""
    """For the page of comparisons, to which the same form leads."""


@router.get("/history")
def history(request: Request, services: CurrentServices, query: Annotated[HistoryQuery, Query()]) -> Response:
    if query.case is None:
        return _choose(request, services, query)
    return _history(request, services, results.CaseChoice(key=query.case), query)


@router.get("/history/{case}/{metric}")
def between(
    request: Request, services: CurrentServices, case: str, metric: str, query: Annotated[EndsQuery, Query()]
) -> Response:
    """Show a history with the versions between some of its jobs."""
    return _history(request, services, results.CaseChoice(key=case), HistoryQuery(metric=metric), query.job)


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


def _history(
    request: Request, services: Services, choice: results.CaseChoice, query: HistoryQuery, ends: Sequence[int] = ()
) -> Response:
    whole = results.history(services.database, choice, query.metric, query.device, SHOWN_POINTS)
    return render(
        request,
        "history.html",
        plots=True,
        history=whole,
        query=query,
        plot=embedded(history_plot.figure(whole, query.along)),
        points=_rows(whole.points),
        between=_between(whole, ends) if ends else None,
        between_address=f"/ui/history/{quote(whole.case_key, safe='')}/{quote(whole.metric, safe='')}",
        json=f"/history?{_query(case=whole.case_key, metric=whole.metric, device=query.device)}",
    )


def _rows(points: Sequence[HistoryPoint]) -> list[dict[str, Any]]:
    """Return the points, newest first, each with the address of its comparison with the one before on its device."""
    rows: list[dict[str, Any]] = []
    latest: dict[str, int] = {}
    for point in points:
        before = latest.get(point.device_key)
        compared = (
            None if before in (None, point.job) else f"/ui/compare?{urlencode([('job', before), ('job', point.job)])}"
        )
        rows.append({**vars(point), "compared": compared})
        latest[point.device_key] = point.job
    return rows[::-1]


def _between(whole: results.History, ends: Sequence[int]) -> dict[str, Any]:
    """Return the versions that were measured from the oldest to the newest of these jobs, each with its points, in
    order; and the command that lists the commits between, if both ends have one."""
    points = whole.between(ends)
    versions: dict[str | None, list[HistoryPoint]] = {}
    for point in points:
        versions.setdefault(point.version, []).append(point)
    first, last = points[0].commit, points[-1].commit
    log = f"git log --oneline {first}..{last}" if first and last and first != last else None
    jobs = [points[0].job, points[-1].job]
    return {
        "jobs": jobs,
        "versions": list(versions.values()),
        "log": log,
        "compare": f"/ui/compare?{urlencode([('job', job) for job in jobs])}",
    }


def _query(**parameters: Any) -> str:
    return urlencode({name: value for name, value in parameters.items() if value is not None})
