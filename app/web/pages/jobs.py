"""/ui: the jobs."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BeforeValidator

from app.api.parameters import Cursor, Id, Label, StrictQuery, Text
from app.api.services import CurrentServices
from app.layout import case_text
from app.specs import KINDS
from app.states import JOB_STATES, JobState
from app.web.templates import Entry, render

router = APIRouter()
NAVIGATION = Entry("Jobs", "/ui", order=10)

JOBS_PER_PAGE = 50

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
