"""/history: one metric of one case over time."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from app import results
from app.api.parameters import Coordinate, Id, Json, StrictQuery, Text
from app.api.services import CurrentServices, slow
from app.results import History
from app.results.history import MAX_POINTS

router = APIRouter(prefix="/history", tags=["results"])

MIN_PREFIX = 4


class HistoryQuery(StrictQuery):
    """The case, by its key or by a job that measured it; and which of its measurements."""

    case: Annotated[str, Field(min_length=MIN_PREFIX, max_length=200)] | None = None
    """The case's key, as `case_key` has it, or its beginning."""
    job: Id | None = None
    """A job that has measured the case."""
    coordinate: list[Coordinate] = Field(default=[], max_length=100)
    """`name=value`: chooses among the cases; repeat it for several."""
    metric: Text | None = None
    """Named as its column, `step_ms`; by default the main one."""
    device: Text | None = None
    """Only on this device, as `device_key` has it."""
    limit: Annotated[int, Field(ge=1, le=MAX_POINTS)] = MAX_POINTS
    """Maximum number of points, the newest ones."""

    @model_validator(mode="after")
    def _names_a_case(self) -> HistoryQuery:
        if self.case is None and self.job is None:
            raise PydanticCustomError("case", "give `case`, a case's key, or `job`, a job that measured it")
        return self

    @property
    def choice(self) -> results.CaseChoice:
        coordinates = self.coordinate
        return results.CaseChoice(self.case, self.job, coordinates)  # type: ignore[arg-type]  # pairs, once validated


@router.get("", responses={200: {"model": History}}, summary="A metric of a case over time")
@slow
def get_history(services: CurrentServices, query: Annotated[HistoryQuery, Query()]) -> Response:
    """Returns the median of the metric in each job that measured the case, with its interval, in the order in which the
    jobs finished. `version` is the code that ran: the hash of uploaded code, or the commit of the worker's checkout.

    404 if nothing has measured it, 422 with the cases' keys if several match."""
    return Json(results.history(services.database, query.choice, query.metric, query.device, query.limit))
