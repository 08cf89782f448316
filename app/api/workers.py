"""/workers: the workers that run the jobs, and their devices."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from app.api.parameters import Json, Limit, StrictQuery, Text
from app.api.schemas import Page, Worker
from app.api.services import CurrentServices
from app.states import WorkerState

router = APIRouter(prefix="/workers", tags=["workers"])


def _cursor(value: str) -> tuple[datetime, str]:
    """Parse the `next` of a page: the time at which its last worker registered, and that worker's id."""
    registered_at, _, worker_id = value.partition("_")
    try:
        parsed = datetime.fromisoformat(registered_at)
    except ValueError:
        parsed = None
    if parsed is None or parsed.tzinfo is None or not worker_id:
        raise PydanticCustomError("cursor", "must be the `next` of an earlier page")
    return parsed, worker_id


WorkerCursor = Annotated[Text, AfterValidator(_cursor)]


class WorkersQuery(StrictQuery):
    state: WorkerState | None = None
    limit: Limit = 50
    after: WorkerCursor | None = None
    """`next` of the previous page."""


@router.get("", responses={200: {"model": Page[Worker]}}, summary="List workers, newest first")
def list_workers(services: CurrentServices, query: Annotated[WorkersQuery, Query()]) -> Response:
    """Lists workers, each with its registered devices, kinds and names, and when it was last seen."""
    workers, following = services.reading.worker_page(
        state=query.state,
        limit=query.limit,
        after=query.after,  # type: ignore[arg-type]  # a pair, once validated
    )
    return Json({"data": workers, "next": following})
