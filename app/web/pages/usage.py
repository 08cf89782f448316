"""/ui/usage: device hours by user, and who competes now."""

from datetime import datetime
from typing import Annotated, cast

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from app.api.queue import UsageQuery
from app.api.services import CurrentServices
from app.web.templates import Entry, render

router = APIRouter()
NAVIGATION = Entry("Usage", "/ui/usage", order=65)
SPANS = {"1d": "a day", "7d": "a week", "30d": "30 days", "365d": "a year"}


@router.get("/usage")
def usage(request: Request, services: CurrentServices, query: Annotated[UsageQuery, Query()]) -> Response:
    used, now = services.reading.usage(cast("datetime", query.since))
    since = request.query_params.get("since", "30d")
    return render(
        request,
        "usage.html",
        used=used,
        now=now,
        since=since,
        spans=SPANS,
        total=sum(row["device_hours"] for row in used),
        is_shared=any(row["recent_device_hours"] is not None for row in now),
        half_life_h=services.settings.fair_share_half_life_h,
        most=services.settings.max_running_devices,
        this=f"/ui/usage?since={since}",
    )
