"""/queue: the places of jobs in the queue; pauses kinds of jobs, or all of them. /usage: who used how much."""

from datetime import datetime
from typing import Annotated, Literal, cast

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response
from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from app.api.access import ADMIN
from app.api.bodies import Body, json_body, request_body
from app.api.parameters import NO_QUERY, Id, Json, Moment, StrictQuery
from app.api.schemas import Page, Usage
from app.api.services import CurrentServices
from app.specs import KINDS
from app.specs._base import StrictModel
from app.store.public import rfc3339
from app.store.queue.pausing import ALL
from app.store.queue.sharing import hour_of
from app.store.reading.places import Place

router = APIRouter(tags=["queue"])


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise PydanticCustomError("kind", "Unknown kind; known kinds: {known}", {"known": ", ".join(KINDS)})
    return kind


Kind = Annotated[str, Field(json_schema_extra={"enum": [*KINDS]}), AfterValidator(_known)]


Kinds = Annotated[
    Annotated[Literal["all"], Tag("all")] | Annotated[list[Kind], Field(max_length=1000), Tag("list")],
    Discriminator(lambda kinds: "all" if kinds == ALL else "list"),
]


class PausedBody(StrictModel):
    """The body of `PUT /queue/paused`."""

    kinds: Kinds
    """The kinds to pause; all others are resumed. A list of names, or "all", which includes kinds that are added later.
    An empty list pauses nothing."""


class PlacesQuery(StrictQuery):
    job: list[Id] = Field(min_length=1, max_length=1000)
    """A job's id; repeat it for several."""


class Paused(TypedDict):
    kinds: list[str] | Literal["all"]


read_paused_body = json_body(PausedBody)


@router.get("/queue/places", responses={200: {"model": Page[Place]}}, summary="Places of jobs in the queue")
def get_queue_places(services: CurrentServices, query: Annotated[PlacesQuery, Query()]) -> Response:
    """Returns the places, counted from 1, of the queued ones of these jobs: by priority, the users' shares, submission.

    `about_s` is a guess in how many seconds it starts: null while no worker is connected, or before any job has ended.
    Jobs that have to wait for other devices, or whose kind is paused, have a place too; later ones may start first.
    """
    places = sorted(services.reading.places(query.job).values(), key=lambda job: job.place)
    return Json({"data": places, "next": None})


@router.get(
    "/queue/paused", responses={200: {"model": Paused}}, dependencies=[NO_QUERY], summary="Which kinds are paused?"
)
def get_paused_kinds(services: CurrentServices) -> Response:
    return Json({"kinds": services.pausing.kinds()})


@router.put(
    "/queue/paused",
    responses={200: {"model": Paused}},
    openapi_extra=request_body(PausedBody),
    dependencies=[NO_QUERY, ADMIN],
    summary="Pause kinds, and let all others go on",
)
async def put_paused_kinds(
    services: CurrentServices, body: Annotated[Body[PausedBody], Depends(read_paused_body)]
) -> Response:
    """Pauses these kinds: no worker claims their jobs, which stay queued and say so in `waiting`. Running jobs
    continue."""
    return Json({"kinds": await services.writes.run(lambda: services.pausing.pause(body.model.kinds))})


class UsageQuery(StrictQuery):
    since: Moment = Field(default="30d", validate_default=True)
    """Attempts that ended since then: `12h`, `7d` or `2w` ago, a date (`2026-03-01`) or a time."""


@router.get("/usage", responses={200: {"model": Usage}}, summary="Device hours by user")
def get_usage(services: CurrentServices, query: Annotated[UsageQuery, Query()]) -> Response:
    """Returns device hours by user, kind and device, also of jobs that were deleted since; `now` has who competes.

    They are kept by the hour in which attempts ended, so the first hour counts whole. Attempts that workers gave back
    do not count.
    """
    since = cast("datetime", query.since)
    used, now = services.reading.usage(since)
    return Json({"since": rfc3339(hour_of(since)), "data": used, "now": now, "next": None})
