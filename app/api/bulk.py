"""/jobs: cancel and delete all jobs that a filter chooses."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import Field

from app.api.access import Sender, own_name
from app.api.guard import Access
from app.api.parameters import Id, Json, Label, StrictQuery, Text
from app.api.services import CurrentServices, Services
from app.errors import InsufficientScope, InvalidRequest
from app.states import JobState
from app.store.keeping.bulk import BulkCancelled, BulkDeleted
from app.store.reading.filters import JobFilter
from app.store.records import MAX_LABELS

router = APIRouter(prefix="/jobs", tags=["jobs"])


class _Chosen(StrictQuery):
    """The filters of `GET /jobs`; at least one is required, and a job must match all."""

    kind: Text | None = None
    label: list[Label] = Field(default=[], max_length=MAX_LABELS)
    """`key=value` or `key:value`; repeat it for several."""
    sweep: Id | None = None
    submitted_by: Text | None = None
    mine: bool = False
    """Only jobs that the sender submitted: those of the token's name or, without one, of the user whom it names."""


class CancelQuery(_Chosen):
    state: Literal["queued", "running"] | None = None


class DeleteQuery(_Chosen):
    state: Literal["succeeded", "failed", "cancelled"] | None = None


@router.post("/cancel", status_code=202, responses={202: {"model": BulkCancelled}}, summary="Cancel many jobs")
async def cancel_jobs(services: CurrentServices, sender: Sender, query: Annotated[CancelQuery, Query()]) -> Response:
    """Cancels queued and running jobs that match every filter, without the scope `admin` only the sender's own; without
    any filter 422.

    `cancelled` is the number of jobs that were queued, `requested` the number of running jobs, which end soon.
    Repeating the request does no harm.
    """
    chosen = _filter(sender, query, query.state, "cancel")
    return Json(await services.writes.run_long(lambda: services.bulk.cancel(_known(services, chosen))), status_code=202)


@router.delete("", responses={200: {"model": BulkDeleted}}, summary="Delete many finished jobs")
async def delete_jobs(services: CurrentServices, sender: Sender, query: Annotated[DeleteQuery, Query()]) -> Response:
    """Deletes finished jobs that match every filter, with their results and files, without the scope `admin` only the
    sender's own; without any filter 422.

    `unfinished` counts the matching jobs that stay because they are queued or running, `in_baselines` those that stay
    because baselines need them.
    """
    chosen = _filter(sender, query, query.state, "delete")
    return Json(await services.writes.run_long(lambda: services.bulk.delete(_known(services, chosen))))


def _filter(sender: Access, query: _Chosen, state: JobState | None, verb: str) -> JobFilter:
    labels: Any = query.label  # pairs, once validated
    submitted_by = own_name(sender, query.submitted_by) if query.mine else query.submitted_by
    chosen = JobFilter(state, query.kind, labels, query.sweep, submitted_by=submitted_by)
    if not chosen.conditions:
        every = "every job" if sender.allows("admin") else "every job of yours, which `mine` says"
        names = "state, kind, label, sweep, submitted_by, mine"
        raise InvalidRequest.at("", f"Give at least one of {names}: without any, this would {verb} {every}.")
    if sender.allows("admin"):
        return chosen
    if submitted_by not in (None, sender.name):
        raise InsufficientScope(f"To {verb} jobs of others asks for a token with the scope `admin`.", "admin")
    return replace(chosen, submitted_by=sender.name)


def _known(services: Services, chosen: JobFilter) -> JobFilter:
    if chosen.sweep is not None:
        services.reading.sweep(chosen.sweep)  # an unknown one is an error
    return chosen
