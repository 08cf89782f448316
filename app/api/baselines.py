"""/baselines: named sets of results that later ones are compared with."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import Response
from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from app.api.access import Sender
from app.api.bodies import Body, json_body, request_body
from app.api.parameters import NO_QUERY, Id, Json, Limit, StrictQuery, declared
from app.api.schemas import Baseline, BaselineOfCases, Page, PutBaseline
from app.api.services import CurrentServices
from app.errors import InvalidRequest
from app.specs._base import StrictModel
from flopwatch.defaults import USER

router = APIRouter(prefix="/baselines", tags=["baselines"])

NAME = "[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}"
ABOUT = "The baseline's name: letters, digits, `_`, `.` and `-`."
Name = Annotated[str, Path(description=ABOUT, pattern=f"^{NAME}$")]
NewName = Annotated[
    str, Path(description=ABOUT, pattern=f"^{NAME}$", json_schema_extra={"pattern": f"^(?![0-9]+$){NAME}$"})
]
"""A name that is not only of digits: `flopwatch compare 17 23` means job 17."""


class BaselineBody(StrictModel):
    """The body of `PUT /baselines/{name}`: a job, or a sweep."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": [name], "properties": {name: {"type": "integer"}}} for name in ("job", "sweep")]
        }
    )

    job: Id | None = None
    """A job that succeeded; its results replace those of the same cases."""
    sweep: Id | None = None
    """Instead of a job: a finished sweep; the latest job of each point that succeeded."""

    @model_validator(mode="after")
    def _one_of_both(self) -> BaselineBody:
        if (self.job is None) == (self.sweep is None):
            raise PydanticCustomError("baseline", 'give {"job": ID} or {"sweep": ID}, one of them')
        return self


read_baseline_body = json_body(BaselineBody)


class BaselinesQuery(StrictQuery):
    limit: Limit = 50
    after: Annotated[str, Field(pattern=f"^{NAME}$")] | None = None
    """`next` of the previous page."""


@router.get("", responses={200: {"model": Page[Baseline]}}, summary="List baselines by name")
def list_baselines(services: CurrentServices, query: Annotated[BaselinesQuery, Query()]) -> Response:
    entries, following = services.baselines.page(query.limit, query.after)
    return Json({"data": entries, "next": following})


@router.get(
    "/{name:path}", responses={200: {"model": BaselineOfCases}}, dependencies=[NO_QUERY], summary="Show a baseline"
)
def get_baseline(services: CurrentServices, name: Name) -> Response:
    """Returns the baseline with its cases, each with the jobs that measured it."""
    return Json(services.baselines.get(name))


@router.put(
    "/{name:path}",
    responses={200: {"model": PutBaseline}, 201: {"model": PutBaseline}},
    openapi_extra=request_body(BaselineBody) | declared(USER),
    dependencies=[NO_QUERY],
    summary="Put a job or a sweep into a baseline",
)
async def put_baseline(
    services: CurrentServices,
    sender: Sender,
    name: NewName,
    body: Annotated[Body[BaselineBody], Depends(read_baseline_body)],
) -> Response:
    """Replaces the cases that the job or sweep has, and leaves the others; makes the baseline if there is none.

    409 unless the job has succeeded, with results that are not invalid, or the sweep is finished. `left_out` lists jobs
    without complete results or with invalid ones; `suspect` lists jobs with suspect results, which are in the baseline.
    """
    if name.isdecimal():
        detail = f"{name!r} would be taken for a job's id: let a baseline's name have something else than digits."
        raise InvalidRequest.at("/name", detail)
    job, sweep = body.model.job, body.model.sweep
    kept = await services.writes.run_long(
        lambda: services.baselines.put(name, job=job, sweep=sweep, set_by=sender.name)
    )
    headers = {"Location": kept.baseline["links"]["self"]} if kept.is_new else None
    answer = {**kept.baseline, "left_out": kept.left_out, "suspect": kept.suspect}
    return Json(answer, status_code=201 if kept.is_new else 200, headers=headers)


@router.delete("/{name:path}", status_code=204, dependencies=[NO_QUERY], summary="Delete a baseline")
async def delete_baseline(services: CurrentServices, name: Name) -> Response:
    """Deletes the baseline. Its jobs stay, and can be deleted from now on."""
    await services.writes.run(lambda: services.baselines.delete(name))
    return Response(status_code=204)
