"""/sweeps: a grid of jobs submitted together."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from pydantic import Field, JsonValue, ValidationError, model_validator
from pydantic_core import to_json

from app import results
from app.api.access import OWN_SWEEP, OWN_SWEEP_AGAIN, Sender, check_code, check_limits
from app.api.bodies import Body, JobOptions, json_body, request_body, summary, timeout_without_one, wrong_at
from app.api.guard import Access
from app.api.links import linked_sweep
from app.api.notifying import check_notify_url
from app.api.parameters import (
    NO_QUERY,
    Cursor,
    Json,
    Limit,
    StrictQuery,
    SubmissionQuery,
    SweepId,
    declared,
    idempotency,
)
from app.api.pointers import MAX_ERRORS, describe, pointer, sent_location
from app.api.results import RowsQuery
from app.api.schemas import DryRun, Page, Sweep, SweepTable
from app.api.services import CurrentServices, Services, slow
from app.api.specs import known_names, unknown_names
from app.api.tables import MAX_LIMIT, in_every_format, written
from app.errors import FieldError, InvalidRequest, did_you_mean
from app.specs import SpecBase, spec_adapter
from app.specs._base import Location, field_error, without_effect
from app.specs._fit import MAX_SEARCHES, Fit, FitBody, GridPath
from app.specs._sweep import Point, expand
from app.store.records import Idempotency, NewJob, Submitted
from flopwatch.defaults import USER

router = APIRouter(prefix="/sweeps", tags=["sweeps"])

GridValues = Annotated[list[JsonValue], Field(min_length=1, max_length=1000)]


class SweepBody(JobOptions):
    """The body of `POST /sweeps`; labels and the other options go to every job, and so does the name, followed by the
    coordinates that distinguish the job."""

    base: dict[str, JsonValue]
    """The spec that the jobs have in common, with its kind."""
    grid: dict[GridPath, GridValues] = Field(default={}, max_length=32)
    """Dotted paths below the spec, each with the values to try; one job per combination. With `fit`, one search per
    combination, or a single one if there is no grid."""
    fit: FitBody | None = None
    """Instead of all values of an axis, search for the largest with which the job does not run out of memory."""
    exclude: list[dict[str, JsonValue]] = Field(default=[], max_length=1000)
    """Partial points, such as {"model.size": "xl"}; combinations that match one are left out."""

    @model_validator(mode="after")
    def _there_is_something_to_do(self) -> Self:
        if not self.grid and self.fit is None:
            raise field_error("grid", "give at least one path with values, or fit")
        if self.fit is not None and self.fit.axis in self.grid:
            raise field_error("fit/axis", "The grid sets it, too: take it out of the grid")
        return self


read_sweep_body = json_body(SweepBody)

SHORT_POINTS = 500
"""Number of points that are validated within some hundredths of a second; a sweep with more counts as a long
request."""


class SweepsQuery(StrictQuery):
    limit: Limit = 50
    after: Cursor | None = None
    """`next` of the previous page."""


@router.post(
    "",
    operation_id="submit_sweep",
    status_code=201,
    responses={200: {"model": DryRun, "description": "With `dry_run`"}, 201: {"model": Sweep}},
    openapi_extra=request_body(SweepBody) | declared("Idempotency-Key", USER),
    summary="Submit a sweep",
)
async def submit(
    request: Request,
    services: CurrentServices,
    sender: Sender,
    query: Annotated[SubmissionQuery, Query()],
    body: Annotated[Body[SweepBody], Depends(read_sweep_body)],
) -> Response:
    """Submits all jobs of the grid or, if one of them is not valid, none. `Idempotency-Key` makes repeating the request
    safe."""
    if query.dry_run:
        jobs, fit = await run_sync(lambda: planned(services, body.model, sender))
        await run_sync(services.queue.check_room, jobs)
        most = len(jobs) * (1 if fit is None else fit.most_jobs)
        idle = await run_sync(lambda: without_effect([job.spec for job in jobs]))
        return Json({"jobs": len(jobs), "most_jobs": most, "without_effect": idle})
    key = idempotency(request.headers, sender.own("POST /sweeps"), body.sent)
    submitted = await submit_sweep(services, body.model, sender, key)
    headers = {"Location": f"/sweeps/{submitted.response['id']}"}
    if submitted.replayed:
        headers["Idempotency-Replayed"] = "true"
    return Json(linked_sweep(submitted.response), status_code=201, headers=headers)


async def submit_sweep(
    services: Services, body: SweepBody, sender: Access, key: Idempotency | None = None
) -> Submitted:
    """Store every job of a sweep of this sender, or raise InvalidRequest with pointers into the body, InsufficientScope
    or QueueFull."""

    def store() -> Submitted:
        if first := services.queue.first_answer(key):
            return first
        jobs, fit = planned(services, body, sender)
        return services.queue.submit_sweep(
            body.name, body.labels, body.base, body.grid, body.exclude, jobs, key, fit, body.notify_url
        )

    count = math.prod(map(len, body.grid.values()))
    run = services.writes.run if count <= SHORT_POINTS else services.writes.run_long
    return await run(store)


def planned(services: Services, body: SweepBody, sender: Access) -> tuple[list[NewJob], Fit | None]:
    """Return the jobs with which a sweep of this sender begins, and its search; raises InvalidRequest with pointers
    into the body, or InsufficientScope."""
    check_notify_url(services.settings, body.notify_url)
    fit = None
    if body.fit is not None:
        jobs, fit = first_of_searches(services, body, body.fit)
    else:
        points = expand(body.base, body.grid, body.exclude)
        jobs = _jobs(services, body, valid_specs(services, points), points)
    check_code(sender, jobs)
    check_limits(services, sender, jobs)
    return [replace(job, submitted_by=sender.name) for job in jobs], fit


def _jobs(services: Services, body: SweepBody, specs: Sequence[SpecBase], points: Sequence[Point]) -> list[NewJob]:
    default = timeout_without_one(services.settings, body)
    return [body.new_job(spec, default, point.choice) for spec, point in zip(specs, points, strict=True)]


@dataclass(frozen=True)
class SearchPoint(Point):
    """A point of a search, with a value on its axis."""

    fit: Fit
    said_by: str
    """The field of `fit` that has the value."""

    def origin(self, location: Location) -> Location:
        """Return where the sweep's body sets the spec's field at `location`."""
        axis = tuple(self.fit.axis.split("."))
        return ("fit", self.said_by) if location[: len(axis)] == axis else super().origin(location)


def first_of_searches(services: Services, options: SweepBody, body: FitBody) -> tuple[list[NewJob], Fit]:
    """Return the first job of each search; raises InvalidRequest if its first or its largest value is not valid."""
    points = expand(options.base, options.grid, options.exclude) if options.grid else [Point(options.base, {})]
    if len(points) > MAX_SEARCHES:
        raise wrong_at(("grid",), f"{len(points)} searches; a sweep has at most {MAX_SEARCHES}: split it")
    base = valid_specs(services, points)[0]
    # An estimate runs nothing: its jobs take no longer near the limit.
    fit = Fit.of(body, *_axis(base, body.axis), coarse=base.kind != "estimate")
    firsts, lasts = (
        [SearchPoint(fit.spec(point.spec, value), {**point.choice, fit.axis: value}, fit, said_by) for point in points]
        for value, said_by in ((fit.start, "start"), (fit.upto, "upto"))
    )
    specs = valid_specs(services, [*firsts, *lasts])
    if all(fit.axis in (*spec.unmeasured, *spec.without_effect()) for spec in specs[len(firsts) :]):
        raise wrong_at(("fit", "axis"), "Changes nothing in these specs, so every value would fit")
    return _jobs(services, options, specs[: len(firsts)], firsts), fit


def _axis(spec: SpecBase, axis: str) -> tuple[Any, int]:
    """Return the value of an axis in a spec, and the smallest that its field takes."""
    schema = type(spec).model_json_schema()
    place: Any = schema
    value: Any = spec.model_dump(mode="json")
    for part in axis.split("."):
        place = schema["$defs"][place["$ref"].rpartition("/")[2]] if "$ref" in place else place
        # `arguments` take any name.
        named = (its for name, its in place.get("patternProperties", {}).items() if re.search(name, part))
        known = place.get("properties", {})
        place = known.get(part) or next(named, None)
        if place is None:
            hint = did_you_mean(part, list(known))
            raise wrong_at(("fit", "axis"), f"Kind {spec.kind} has no field {axis}{hint}")
        value = value.get(part) if isinstance(value, dict) else None
    variants = [variant.get("items", variant) for variant in place.get("anyOf", [place])]
    integers = [variant for variant in variants if variant.get("type") == "integer"]
    if not integers:
        raise wrong_at(("fit", "axis"), "Must be a field that takes integers, or a list of them")
    return value, max(int(integers[0].get("minimum", 1)), 1)


def valid_specs(services: Services, points: Sequence[Point]) -> list[SpecBase]:
    """Return every point's validated spec; raises InvalidRequest that points into base and grid.

    It stops after MAX_ERRORS wrong points, since most points of a sweep are wrong in the same way.
    """
    known = known_names(services)
    specs: list[SpecBase] = []
    errors: dict[tuple[str, str], FieldError] = {}
    wrong = 0
    for point in points:
        try:
            spec = spec_adapter.validate_json(to_json(point.spec))
        except ValidationError as invalid:
            problems = list(_misfits(point, invalid))
        else:
            problems = [(point.origin(location), detail) for location, detail in unknown_names(spec, known)]
            specs.append(spec)
        for location, detail in problems:
            field = FieldError(pointer(location), detail)
            errors[field.pointer, field.detail] = field
        wrong += bool(problems)
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
            origin = origin[:2]  # the path is wrong, whatever the value
        if isinstance(point, SearchPoint) and error["type"] == "less_than_equal" and origin[0] == "fit":
            yield origin, f"{point.fit.axis} takes at most {error['ctx']['le']}, the end of its range"
        else:
            yield origin, describe(error, SpecBase)


@router.get("", responses={200: {"model": Page[Sweep]}}, summary="List sweeps, newest first")
def list_sweeps(services: CurrentServices, query: Annotated[SweepsQuery, Query()]) -> Response:
    sweeps, following = services.reading.sweeps(limit=query.limit, after=query.after)
    return Json({"data": [linked_sweep(sweep) for sweep in sweeps], "next": following})


@router.get("/{sweep_id}", responses={200: {"model": Sweep}}, dependencies=[NO_QUERY], summary="Show a sweep")
def get_sweep(services: CurrentServices, sweep_id: SweepId) -> Response:
    """Returns the sweep, with `counts` of its points by the state of their latest job, and with `fit` its
    `searches`."""
    return Json(linked_sweep(services.reading.sweep(sweep_id)))


class SweepTableQuery(RowsQuery):
    """The rows of a table of a sweep's jobs."""

    limit_per_job: Annotated[int, Field(ge=1, le=MAX_LIMIT)] | None = None
    """The largest number of rows of each job, the first in the order of `sort`: 1 for the kernel of each configuration
    that takes the most time."""

    def excerpt(self) -> results.Excerpt:
        return replace(super().excerpt(), limit_per_job=self.limit_per_job)


@router.get(
    "/{sweep_id}/tables/{name:path}",
    responses={200: in_every_format(SweepTable)},
    summary="One of the own tables of a sweep's jobs",
)
@slow
def get_sweep_table(
    services: CurrentServices, sweep_id: SweepId, name: str, query: Annotated[SweepTableQuery, Query()]
) -> Response:
    """Returns the rows of the last attempt of all finished jobs of the sweep, each with its job and its values of the
    grid: the kernels of profiles, or the largest allocations, in one table."""
    sheet = results.sweep_table(services.database, services.reading.sweep(sweep_id), name, query.excerpt())
    return written(query.styled(sheet), query.format)


@router.post(
    "/{sweep_id}/cancel",
    status_code=202,
    responses={202: {"model": Sweep}},
    dependencies=[NO_QUERY, OWN_SWEEP],
    summary="Cancel what is left of a sweep",
)
async def cancel_sweep(services: CurrentServices, sweep_id: SweepId) -> Response:
    """Cancels the unfinished jobs; the others keep their results."""
    return Json(linked_sweep(await services.writes.run(lambda: services.queue.cancel_sweep(sweep_id))), status_code=202)


@router.post(
    "/{sweep_id}/resume",
    status_code=202,
    responses={202: {"model": Sweep}},
    dependencies=[NO_QUERY, OWN_SWEEP_AGAIN],
    summary="Run again what has no result",
)
async def resume_sweep(services: CurrentServices, sweep_id: SweepId) -> Response:
    """Submits a new job for each point whose latest job failed, was cancelled or was deleted; 409 if there is no such
    point.

    `counts` and tables take the latest job of each point.
    """
    return Json(
        linked_sweep(await services.writes.run_long(lambda: services.queue.resume_sweep(sweep_id))), status_code=202
    )
