"""/ui/workers: who runs jobs."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.api.parameters import NO_QUERY
from app.api.services import CurrentServices
from app.web.templates import Entry, render

router = APIRouter()
NAVIGATION = Entry("Workers", "/ui/workers", order=60)


@router.get("/workers", dependencies=[NO_QUERY])
def workers(request: Request, services: CurrentServices) -> Response:
    return render(request, "workers.html", workers=services.reading.workers())
