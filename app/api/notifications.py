"""Notifications: which addresses a job may give to be told its end, and how far the telling is."""

from ipaddress import ip_address
from urllib.parse import urlsplit

from fastapi import APIRouter
from fastapi.responses import Response

from app.api.notifying import why_refused
from app.api.parameters import NO_QUERY, JobId, Json, SweepId
from app.api.schemas import Notification
from app.api.services import CurrentServices, Services
from app.errors import FieldError, InvalidRequest

router = APIRouter(tags=["notifications"])


def check_notify_url(services: Services, url: str | None) -> None:
    """Raise InvalidRequest for an address that this server would never tell anything. Names are resolved later."""
    settings, why = services.settings, None
    if url is None:
        return
    if settings.notify_secret is None:
        why = "Webhooks are off: FLOPWATCH_NOTIFY_SECRET is not set on the server"
    else:
        try:
            why = why_refused(ip_address(urlsplit(url).hostname or ""), settings.notify_networks)
        except ValueError:  # a name
            return
    if why is not None:
        raise InvalidRequest(f"/notify_url: {why}", errors=(FieldError("/notify_url", why),))


@router.get(
    "/jobs/{job_id}/notification",
    dependencies=[NO_QUERY],
    responses={200: {"model": Notification}},
    summary="How far is the telling of a job's end?",
)
def get_job_notification(services: CurrentServices, job_id: JobId) -> Response:
    """Returns the state of the job's webhook; 404 if it has no `notify_url`."""
    return Json(services.webhooks.public(job_id=job_id))


@router.get(
    "/sweeps/{sweep_id}/notification",
    dependencies=[NO_QUERY],
    responses={200: {"model": Notification}},
    summary="How far is the telling of a sweep's end?",
)
def get_sweep_notification(services: CurrentServices, sweep_id: SweepId) -> Response:
    """Returns the state of the sweep's webhook; 404 if it has no `notify_url`."""
    return Json(services.webhooks.public(sweep_id=sweep_id))
