"""/usage: who used how much device time."""

from datetime import datetime
from typing import Annotated, cast

from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import Field

from app.api.parameters import Json, Moment, StrictQuery
from app.api.schemas import Usage
from app.api.services import CurrentServices
from app.store.public import rfc3339

router = APIRouter(prefix="/usage", tags=["queue"])


class UsageQuery(StrictQuery):
    since: Moment = Field(default="30d", validate_default=True)
    """Attempts that ended since then: `12h`, `7d` or `2w` ago, a date (`2026-03-01`) or a time."""


@router.get("", responses={200: {"model": Usage}}, summary="Device hours by user")
def get_usage(services: CurrentServices, query: Annotated[UsageQuery, Query()]) -> Response:
    """Returns device hours by user, kind and device, also of jobs that were deleted since; `now` has who competes.

    They are kept by the hour in which attempts ended, so the first hour counts whole. Attempts that workers gave back
    do not count.
    """
    since = cast("datetime", query.since)
    used, now = services.reading.usage(since)
    return Json({"since": rfc3339(since), "data": used, "now": now, "next": None})
