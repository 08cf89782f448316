"""/sweeps: a grid of jobs submitted together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from pydantic import Field, JsonValue, StringConstraints, ValidationError
from pydantic_core import to_json

from app.api.bodies import Body, JobOptions, json_body, request_body, summary
from app.api.names import known_names, unknown_names
from app.api.parameters import NO_QUERY, Cursor, Json, Limit, StrictQuery, SweepId, idempotency
from app.api.pointers import MAX_ERRORS, describe, pointer, sent_location
from app.api.schemas import Page, Sweep
from app.api.services import CurrentServices, Services
from app.errors import FieldError, InvalidRequest
from app.specs import SpecBase, spec_adapter
from app.specs._base import Location
from app.specs._sweep import Point, expand
from app.store.records import Idempotency, Submitted

router = APIRouter(prefix="/sweeps", tags=["sweeps"])

GridPath = Annotated[str, StringConstraints(max_length=200, pattern=r"^[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)*$")]
GridValues = Annotated[list[JsonValue], Field(min_length=1, max_length=1000)]


class SweepBody(JobOptions):
    """The body of `POST /sweeps`; name, labels and the other options go to every job."""

    base: dict[str, JsonValue]
    """The spec that the jobs have in common, with its kind."""
    grid: dict[GridPath, GridValues] = Field(min_length=1, max_length=32)
    """Dotted paths below the spec, each with the values to try; one job per combination."""
    exclude: list[dict[str, JsonValue]] = Field(default=[], max_length=1000)
    """Partial points, such as {"model.size": "xl"}; combinations that match one are left out."""


read_sweep_body = json_body(SweepBody)

SHORT_POINTS = 500
"""Points that are validated within some hundredths of a second; a sweep with more is long work."""


class SweepsQuery(StrictQuery):
    limit: Limit = 50
    after: Cursor | None = None
    """`next` of the page before."""


@router.post(
    "",
    status_code=201,
    responses={201: {"model": Sweep}},
    openapi_extra=request_body(SweepBody),
    dependencies=[NO_QUERY],
    summary="Submit a sweep",
)
async def submit(
    request: Request, services: CurrentServices, body: Annotated[Body[SweepBody], Depends(read_sweep_body)]
) -> Response:
    """All jobs of the grid or, when one of them is not valid, none. `Idempotency-Key` makes repeating safe."""
    key = idempotency(request.headers, "POST /sweeps", body.digest)
    submitted = await submit_sweep(services, body.model, key)
    headers = {"Location": f"/sweeps/{submitted.response['id']}"}
    if submitted.replayed:
        headers["Idempotency-Replayed"] = "true"
    return Json(submitted.response, status_code=201, headers=headers)


async def submit_sweep(services: Services, body: SweepBody, key: Idempotency | None = None) -> Submitted:
    """Store every job of a sweep, or raise InvalidRequest with pointers into the body."""

    def store() -> Submitted:
        if first := services.queue.first_answer(key):
            return first
        points = expand(body.base, body.grid, body.exclude)
        specs = valid_specs(services, points)
        default = services.settings.default_timeout_s
        jobs = [body.new_job(spec, default, point.choice) for spec, point in zip(specs, points, strict=True)]
        return services.queue.submit_sweep(body.name, body.labels, body.base, body.grid, body.exclude, jobs, key)

    count = math.prod(map(len, body.grid.values()))
    run = services.writes.run if count <= SHORT_POINTS else services.writes.run_long
    return await run(store)


def valid_specs(services: Services, points: list[Point]) -> list[SpecBase]:
    """Return every point's validated spec; raises InvalidRequest that points into base and grid.

    It looks at no further point after MAX_ERRORS wrong ones, since most of a sweep's points are wrong in the same way.
    """
    known = known_names(services)
    specs: list[SpecBase] = []
    errors: dict[tuple[str, str], FieldError] = {}
    wrong = 0
    for point in points:
        try:
            spec = spec_adapter.validate_json(to_json(point.spec))
        except ValidationError as invalid:
            found = list(_misfits(point, invalid))
        else:
            found = [(point.origin(location), detail) for location, detail in unknown_names(spec, known)]
            specs.append(spec)
        for location, detail in found:
            field = FieldError(pointer(location), detail)
            errors[field.pointer, field.detail] = field
        wrong += bool(found)
        if max(len(errors), wrong) >= MAX_ERRORS:
            break
    if errors:
        fields = tuple(errors.values())[:MAX_ERRORS]
        raise InvalidRequest(summary(fields), errors=fields)
    return specs


def _misfits(point: Point, invalid: ValidationError) -> Iterator[tuple[Location, str]]:
    for error in invalid.errors(include_url=False):
        origin = point.origin(sent_location(error, point.spec, ()))
        if error["type"] == "extra_forbidden" and origin[0] == "grid" and len(origin) == len(("grid", "path", "index")):
            origin = origin[:2]  # the path is wrong, whichever the value
        yield origin, describe(error, SpecBase)


@router.get("", responses={200: {"model": Page[Sweep]}}, summary="List sweeps, newest first")
def list_sweeps(services: CurrentServices, query: Annotated[SweepsQuery, Query()]) -> Response:
    sweeps, following = services.reading.sweeps(limit=query.limit, after=query.after)
    return Json({"data": sweeps, "next": following})


@router.get("/{sweep_id}", responses={200: {"model": Sweep}}, dependencies=[NO_QUERY], summary="Show a sweep")
def show(services: CurrentServices, sweep_id: SweepId) -> Response:
    """The sweep, with `counts` of its points by the state of their latest job."""
    return Json(services.reading.sweep(sweep_id))


@router.post(
    "/{sweep_id}/cancel",
    status_code=202,
    responses={202: {"model": Sweep}},
    dependencies=[NO_QUERY],
    summary="Cancel what is left of a sweep",
)
async def cancel(services: CurrentServices, sweep_id: SweepId) -> Response:
    """Cancels the jobs that are not finished; the others keep their results."""
    return Json(await services.writes.run(lambda: services.queue.cancel_sweep(sweep_id)), status_code=202)


@router.post(
    "/{sweep_id}/resume",
    status_code=202,
    responses={202: {"model": Sweep}},
    dependencies=[NO_QUERY],
    summary="Run again what has no result",
)
async def resume(services: CurrentServices, sweep_id: SweepId) -> Response:
    """A new job for each point whose latest one failed, was cancelled or deleted; 409 when there is none.

    `counts` and tables take the latest job of each point.
    """
    return Json(await services.writes.run_long(lambda: services.queue.resume_sweep(sweep_id)), status_code=202)
