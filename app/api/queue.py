"""/queue: pausing kinds of jobs, or all of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import Response
from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from app.api.bodies import Body, json_body, request_body
from app.api.parameters import NO_QUERY, Json
from app.api.services import CurrentServices
from app.specs import KINDS
from app.specs._base import StrictModel
from app.store.pausing import ALL

router = APIRouter(prefix="/queue", tags=["queue"])


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise PydanticCustomError("kind", "{message}", {"message": f"Unknown kind; known kinds: {', '.join(KINDS)}"})
    return kind


def _is_all(kinds: Any) -> str:
    return "all" if kinds == ALL else "list"


Kinds = Annotated[
    Annotated[Literal["all"], Tag("all")]
    | Annotated[list[Annotated[str, AfterValidator(_known)]], Field(max_length=1000), Tag("list")],
    Discriminator(_is_all),
]


class PausedBody(StrictModel):
    """The body of `PUT /queue/paused`."""

    kinds: Kinds
    """Kinds to pause, and no others: their names, or "all", also for kinds to come. An empty list pauses nothing."""


class Paused(TypedDict):
    kinds: list[str] | Literal["all"]


read_paused_body = json_body(PausedBody)


@router.get("/paused", responses={200: {"model": Paused}}, dependencies=[NO_QUERY], summary="Which kinds are paused?")
def paused(services: CurrentServices) -> Response:
    return Json({"kinds": services.pausing.kinds()})


@router.put(
    "/paused",
    responses={200: {"model": Paused}},
    openapi_extra=request_body(PausedBody),
    dependencies=[NO_QUERY],
    summary="Pause kinds, and let all others go on",
)
async def pause(services: CurrentServices, body: Annotated[Body[PausedBody], Depends(read_paused_body)]) -> Response:
    """No worker claims a job of a paused kind. Its jobs stay queued and say so in `waiting`; what runs goes on."""
    return Json({"kinds": await services.writes.run(lambda: services.pausing.pause(body.model.kinds))})
