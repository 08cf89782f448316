"""/jobs/{id}/events: a job's events, as a list or as a live stream of server-sent events."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response
from pydantic_core import to_json

from app.api.gate import stays
from app.api.parameters import Cursor, JobId, Json, Limit, StrictQuery
from app.api.schemas import Event, Page
from app.api.services import CurrentServices, Services
from app.api.streaming import ClosingStream
from app.errors import STORE_UNAVAILABLE, NotFound
from app.states import FINISHED_STATES, JobState

router = APIRouter(prefix="/jobs", tags=["jobs"])

EVENT_STREAM = "text/event-stream"
BATCH = 500
KEEP_ALIVE_S = 15.0
QUEUED_KEEP_ALIVE_S = 1.0
"""While the job is queued: clients then ask why it waits, which is no event, since it depends on the workers."""
KEEP_ALIVE = b": keep-alive\n\n"


class EventsQuery(StrictQuery):
    after: Cursor | None = None
    """Id of the last event that the client already has; the header `Last-Event-ID` does the same."""
    limit: Limit = BATCH


@router.get(
    "/{job_id}/events",
    responses={200: {"model": Page[Event], "content": {EVENT_STREAM: {}}}, 204: {}},
    summary="List or stream a job's events",
)
async def get_job_events(
    request: Request,
    services: CurrentServices,
    job_id: JobId,
    query: Annotated[EventsQuery, Query()],
    last_event_id: Annotated[Cursor | None, Header(alias="Last-Event-ID")] = None,
) -> Response:
    """With `Accept: text/event-stream`, sends a stream of `state`, `progress`, `log` and, last, `done`; otherwise a
    list.

    A stream resumes after `Last-Event-ID`. After `done` there is nothing to resume: 204 tells browsers to stop. It ends
    when its token is revoked or expires, or its session ends; another server's notices within 15 s.
    """
    after = int(last_event_id or query.after or 0)
    if EVENT_STREAM not in request.headers.get("accept", ""):
        _state, events, following = await run_sync(services.reading.events_page, job_id, after, query.limit)
        return Json({"data": events, "next": None if following is None else str(following)})
    state, events, _ = await run_sync(services.reading.events_page, job_id, after, 1)
    if state in FINISHED_STATES and not events:
        return Response(status_code=204)
    return ClosingStream(
        stream(services, job_id, after, lambda: stays(request)),
        media_type=EVENT_STREAM,
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def stream(
    services: Services, job_id: int, after: int, may_follow: Callable[[], Awaitable[bool]]
) -> AsyncIterator[bytes]:
    """Yield the job's events after `after` as they are committed, until it is done or its reader may no longer follow
    it; no transaction stays open."""
    # If the job was deleted or the database is unavailable, the stream ends; a client that resumes it gets the error.
    with services.changes.following(job_id) as followed, contextlib.suppress(NotFound, *STORE_UNAVAILABLE):
        while True:
            generation = followed.generation
            state, frames, following = await run_sync(_look, services, job_id, after)
            if not await may_follow():
                return
            for event_id, text in frames:
                after = event_id
                if text:
                    yield text
            if following is not None:
                continue
            if state in FINISHED_STATES or followed.stopping:
                return
            silent_s = min(KEEP_ALIVE_S, QUEUED_KEEP_ALIVE_S) if state == "queued" else KEEP_ALIVE_S
            while not await followed.after(generation, silent_s):
                if not await may_follow():
                    return
                yield KEEP_ALIVE


def _look(services: Services, job_id: int, after: int) -> tuple[JobState, list[tuple[int, bytes]], int | None]:
    """Return the job's state, the ids and frames of its next events, and the cursor of the following page. The frame of
    a `done` that other events follow is empty: the job ran again."""
    state, events, following = services.reading.events_page(job_id, after, BATCH)
    last = events[-1]["id"] if events and following is None else None
    frames = [
        (event["id"], b"" if event["type"] == "done" and event["id"] != last else frame(event)) for event in events
    ]
    return state, frames, following


def frame(event: dict[str, Any]) -> bytes:
    """Return an event in the format of https://html.spec.whatwg.org/multipage/server-sent-events.html."""
    head = f"id: {event['id']}\nevent: {event['type']}\ndata: "
    return head.encode() + to_json(event["data"], inf_nan_mode="null") + b"\n\n"
