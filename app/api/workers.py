"""/workers: the workers that run the jobs, and their devices."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from app.api.parameters import Json, Limit, StrictQuery, Text
from app.api.schemas import LackingModules, Page, Worker
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


class ModulesQuery(StrictQuery):
    module: list[Text] = Field(min_length=1, max_length=1000)
    """A top-level Python module, such as `numpy`; may be repeated."""


@router.get(
    "/lacking",
    operation_id="list_lacking_modules",
    responses={200: {"model": Page[LackingModules]}},
    summary="List the Python modules that workers lack",
)
def list_lacking(services: CurrentServices, query: Annotated[ModulesQuery, Query()]) -> Response:
    """Lists the living workers that run uploaded code, each with those of these modules that it could not import."""
    return Json({"data": services.reading.lacking_modules(query.module), "next": None})


@router.get(
    "", operation_id="list_workers", responses={200: {"model": Page[Worker]}}, summary="List workers, newest first"
)
def list_workers(services: CurrentServices, query: Annotated[WorkersQuery, Query()]) -> Response:
    """Lists workers, each with its registered devices, kinds and names, and when it was last seen."""
    workers, following = services.reading.worker_page(
        state=query.state,
        limit=query.limit,
        after=query.after,  # type: ignore[arg-type]  # a pair, once validated
    )
    return Json({"data": workers, "next": following})
