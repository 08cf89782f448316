"""/workers: the workers that run the jobs, and their devices."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from app.api.parameters import NO_QUERY, Json
from app.api.schemas import Page, Worker
from app.api.services import CurrentServices

router = APIRouter(prefix="/workers", tags=["workers"])


@router.get("", responses={200: {"model": Page[Worker]}}, dependencies=[NO_QUERY], summary="List workers")
def list_workers(services: CurrentServices) -> Response:
    """Devices, kinds and names that each registered, and when it was last seen."""
    return Json({"data": services.reading.workers(), "next": None})
