"""/baselines: named sets of results that later ones are compared with."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import Response
from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from app.api.access import Sender
from app.api.bodies import Body, json_body, request_body
from app.api.parameters import NO_QUERY, Id, Json, Limit, StrictQuery, Text, declared, documented
from app.api.schemas import Baseline, BaselineOfCases, Page, PutBaseline
from app.api.services import CurrentServices
from app.errors import InvalidRequest
from app.specs._base import StrictModel
from flopwatch.defaults import USER

router = APIRouter(prefix="/baselines", tags=["baselines"])

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")
LIKE_AN_ID = re.compile(r"[0-9]+")
"""Names that a new baseline may not have: `flopwatch compare 17 23` means job 17."""


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


def _after(value: str) -> str:
    if not NAME.fullmatch(value):
        raise PydanticCustomError("cursor", "must be the `next` of an earlier page")
    return value


class BaselinesQuery(StrictQuery):
    limit: Limit = 50
    after: Annotated[Text, documented(f"^{NAME.pattern}$"), AfterValidator(_after)] | None = Field(default=None)
    """`next` of the previous page."""


A_NAME = Path(description="The baseline's name.", json_schema_extra={"pattern": f"^{NAME.pattern}$"})


async def _name(name: Annotated[str, A_NAME]) -> str:
    """Return the name in a path. Raises InvalidRequest when no baseline can have it."""
    if not NAME.fullmatch(name):
        detail = (
            f"A baseline's name has 1 to 63 letters, digits, '_', '.' and '-', and begins with none of the last two; "
            f"got {name[:80]!r}."
        )
        raise InvalidRequest.at("/name", detail)
    return name


Name = Annotated[str, Depends(_name)]


A_NEW_NAME = Path(description="The baseline's name.", json_schema_extra={"pattern": f"^(?![0-9]+$){NAME.pattern}$"})


async def _new_name(name: Annotated[str, A_NEW_NAME]) -> str:
    """Return the name of a baseline to set. Raises InvalidRequest if it could be mistaken for a job's id."""
    name = await _name(name)
    if LIKE_AN_ID.fullmatch(name):
        detail = f"{name[:80]!r} would be taken for a job's id: let a baseline's name have something else than digits."
        raise InvalidRequest.at("/name", detail)
    return name


NewName = Annotated[str, Depends(_new_name)]


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
