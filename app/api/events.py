"""/jobs/{id}/events: a job's events, as a list or as a live stream of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import zip_longest
from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic_core import to_json

from app.api.parameters import Cursor, JobId, Json, Limit, StrictQuery
from app.api.schemas import Event, Page
from app.api.services import CurrentServices, Services
from app.errors import NotFound
from app.states import FINISHED_STATES

router = APIRouter(prefix="/jobs", tags=["jobs"])

EVENT_STREAM = "text/event-stream"
BATCH = 500
KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": keep-alive\n\n"


class EventsQuery(StrictQuery):
    after: Cursor | None = None
    """Id of the last event that the client has already; `Last-Event-ID` does the same."""
    limit: Limit = BATCH


@router.get(
    "/{job_id}/events",
    responses={200: {"model": Page[Event], "content": {EVENT_STREAM: {}}}, 204: {}},
    summary="List or stream a job's events",
)
async def events(
    request: Request,
    services: CurrentServices,
    job_id: JobId,
    query: Annotated[EventsQuery, Query()],
    last_event_id: Annotated[Cursor | None, Header()] = None,
) -> Response:
    """With `Accept: text/event-stream` a stream of `state`, `progress`, `log` and, last, `done`; else a list.

    The list has a `done` for each time that the job was done; a stream leaves out those that a retry followed. A stream
    resumes after `Last-Event-ID`. After `done` there is nothing to resume: 204 tells browsers to stop.
    """
    after = int(last_event_id or query.after or 0)
    if EVENT_STREAM not in request.headers.get("accept", ""):
        found = await run_sync(services.reading.events, job_id, after, query.limit)
        following = str(found[-1]["id"]) if len(found) == query.limit else None
        return Json({"data": found, "next": following})
    finished, found = await run_sync(_look, services, job_id, after)
    if finished and not found:
        return Response(status_code=204)
    return StreamingResponse(
        stream(services, job_id, after),
        media_type=EVENT_STREAM,
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def stream(services: Services, job_id: int, after: int) -> AsyncIterator[bytes]:
    """Yield the job's events after `after` as they are committed, until it is done; no transaction stays open."""
    changes = services.changes
    while True:
        generation = changes.generation
        try:
            finished, found = await run_sync(_look, services, job_id, after)
        except NotFound:  # deleted meanwhile
            return
        for event, following in zip_longest(found[:BATCH], found[1:]):
            after = event["id"]
            if event["type"] != "done" or following is None:  # else the job was retried: it is not done
                yield frame(event)
        if len(found) > BATCH:
            continue
        if finished or changes.stopping:
            return
        if not await changes.after(generation, KEEP_ALIVE_S):
            yield KEEP_ALIVE


def _look(services: Services, job_id: int, after: int) -> tuple[bool, list[dict[str, Any]]]:
    """Return whether the job is finished, and its next events: a batch, and the one that follows it."""
    # The state first: once a job is finished, its events are complete.
    job, _version = services.reading.job(job_id)
    return job["state"] in FINISHED_STATES, services.reading.events(job_id, after, BATCH + 1)


def frame(event: dict[str, Any]) -> bytes:
    """One event in the format of https://html.spec.whatwg.org/multipage/server-sent-events.html."""
    head = f"id: {event['id']}\nevent: {event['type']}\ndata: "
    return head.encode() + to_json(event["data"], inf_nan_mode="null") + b"\n\n"
