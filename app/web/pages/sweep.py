"""/ui/sweeps/ID: one sweep."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.api.parameters import NO_QUERY, SweepId
from app.api.services import CurrentServices
from app.store import results
from app.web.live import page_tag, tagged, unchanged
from app.web.templates import table

router = APIRouter()

# The page shows the beginning of a long table, with a link to all of it.
SHOWN_CASES = 200


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
