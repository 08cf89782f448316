"""/ui/baselines: the named results that later ones are compared with, and the cases of each."""

from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from app.api.baselines import BaselinesQuery, Name
from app.api.parameters import NO_QUERY
from app.api.services import CurrentServices
from app.web.templates import Entry, render

router = APIRouter()
NAVIGATION = Entry("Baselines", "/ui/baselines", order=45)

SHOWN_JOBS = 12
"""Jobs and sweeps of a baseline that the list names."""
SHOWN_CASES = 200


@router.get("/baselines")
def baselines(request: Request, services: CurrentServices, query: Annotated[BaselinesQuery, Query()]) -> Response:
    entries, following = services.baselines.page(query.limit, query.after)
    return render(
        request,
        "baselines.html",
        baselines=entries,
        shown_jobs=SHOWN_JOBS,
        following=None if following is None else f"/ui/baselines?{urlencode({'after': following})}",
        first=query.after is None,
    )


@router.get("/baselines/{name:path}", dependencies=[NO_QUERY])
def baseline(request: Request, services: CurrentServices, name: Name) -> Response:
    whole = services.baselines.get(name)
    cases = [
        {**case, "history": f"/ui/history?{urlencode({'case': case['case_key'], 'device': case['device_key']})}"}
        for case in whole["cases"][:SHOWN_CASES]
    ]
    return render(request, "baseline.html", baseline=whole, cases=cases, all_cases=len(whole["cases"]))
