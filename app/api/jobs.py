"""/jobs: submit, list, show, cancel, retry, delete."""

import asyncio
from dataclasses import replace
from typing import Annotated, Any
from zlib import crc32

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from pydantic import Field

from app.api.access import OWN_JOB, OWN_JOB_AGAIN, Sender, check_code, check_limits, own_name
from app.api.bodies import Body, JobBody, JobChanges, json_body, request_body, timeout_without_one
from app.api.guard import Access
from app.api.links import linked_job, linked_jobs
from app.api.notifying import check_notify_url
from app.api.parameters import (
    NO_QUERY,
    Cursor,
    ETag,
    Id,
    JobId,
    Json,
    Label,
    Limit,
    Moment,
    StrictQuery,
    SubmissionQuery,
    Text,
    declared,
    idempotency,
    wait_seconds,
)
from app.api.schemas import DryRun, Job, Page
from app.api.services import CurrentServices, Services
from app.api.specs import check_names, known_names
from app.errors import STORE_UNAVAILABLE
from app.states import FINISHED_STATES, JobState
from app.store.keeping.deleting import delete_job
from app.store.keeping.describing import describe_job
from app.store.records import MAX_LABELS, Idempotency, NewJob, Submitted
from flopwatch.defaults import USER

router = APIRouter(prefix="/jobs", tags=["jobs"])

read_job_body = json_body(JobBody, union_at=("spec",))
read_job_changes = json_body(JobChanges)


class JobsQuery(StrictQuery):
    """The filters of `GET /jobs`; a job must match all."""

    state: JobState | None = None
    kind: Text | None = None
    label: list[Label] = Field(default=[], max_length=MAX_LABELS)
    """`key=value` or `key:value`; repeat it for several."""
    sweep: Id | None = None
    submitted_by: Text | None = None
    """The user who submitted it."""
    mine: bool = False
    """Only jobs that the sender submitted."""
    since: Moment | None = None
    """Jobs that were submitted since then: `90min`, `12h`, `7d` or `2w` ago, a date (`2026-03-01`) or a time."""
    limit: Limit = 50
    after: Cursor | None = None
    """`next` of the previous page."""


@router.post(
    "",
    operation_id="submit_job",
    status_code=201,
    responses={200: {"model": DryRun, "description": "With `dry_run`"}, 201: {"model": Job}},
    openapi_extra=request_body(JobBody) | declared("Idempotency-Key", "Prefer", USER),
    summary="Submit a job",
)
async def submit(
    request: Request,
    services: CurrentServices,
    sender: Sender,
    query: Annotated[SubmissionQuery, Query()],
    body: Annotated[Body[JobBody], Depends(read_job_body)],
) -> Response:
    """Submits a job. `Idempotency-Key` makes repeating the request safe; `Prefer: wait=N` holds the answer until the
    job is done.

    A repeated request gets the first answer. If the first request waited and broke off, there is no answer yet, and the
    repeated request may wait for it. While another job with the same `unique_key` is queued or running, the answer is
    409 with that job's `job_id` and `Location`.
    """
    if query.dry_run:
        new = await run_sync(lambda: new_job(services, body.model, sender))
        await run_sync(services.queue.check_room, [new])
        return Json({"jobs": 1, "most_jobs": 1, "without_effect": body.model.spec.without_effect()})
    seconds = wait_seconds(request.headers)
    key = idempotency(request.headers, sender.own("POST /jobs"), body.sent, awaits=seconds is not None)
    submitted = await submit_job(services, body.model, sender, key)
    job = submitted.response
    headers = {"Location": f"/jobs/{job['id']}"}
    if submitted.replayed:
        headers["Idempotency-Replayed"] = "true"
    if seconds is not None and (submitted.awaited or not submitted.replayed):
        job = await finished_job(services, job["id"], seconds)
        headers["Preference-Applied"] = f"wait={seconds}"
        # A client that disconnected got no answer; a repeated request may still wait for one.
        if key is not None and not await request.is_disconnected():
            job = await _first_awaited(services, key, job)
    return Json(linked_job(job), status_code=201, headers=headers)


async def submit_job(services: Services, body: JobBody, sender: Access, key: Idempotency | None = None) -> Submitted:
    """Store a job of this sender, or raise InvalidRequest with pointers into the body, InsufficientScope, QueueFull."""

    def store() -> Submitted:
        if first := services.queue.first_answer(key):
            return first
        return services.queue.submit(new_job(services, body, sender), key)

    return await services.writes.run(store)


def new_job(services: Services, body: JobBody, sender: Access) -> NewJob:
    """Return the job that this sender submits. Raises InvalidRequest with pointers into the body, InsufficientScope."""
    check_names(body.spec, known_names(services), "/spec")
    check_notify_url(services.settings, body.notify_url)
    new = replace(body.new_job(body.spec, timeout_without_one(services.settings, body)), submitted_by=sender.name)
    check_code(sender, [new])
    check_limits(services, sender, [new])
    return new


async def _first_awaited(services: Services, key: Idempotency, job: dict[str, Any]) -> dict[str, Any]:
    """Keep the job as the first answer to this key, unless another request was faster; returns the first answer."""
    try:
        return await services.writes.run(lambda: services.queue.keep_awaited_answer(key, job))
    except STORE_UNAVAILABLE:
        return job  # the answer stays awaited: a repeated request waits for the job, which has ended


async def finished_job(services: Services, job_id: int, timeout_s: float) -> dict[str, Any]:
    """Return the job once it is finished, or its present state after `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    with services.changes.following(job_id) as followed:
        while True:
            generation = followed.generation
            job, _version = await run_sync(services.reading.job, job_id)
            left_s = deadline - asyncio.get_running_loop().time()
            if job["state"] in FINISHED_STATES or left_s <= 0 or followed.stopping:
                return job
            await followed.after(generation, left_s)


@router.get("", responses={200: {"model": Page[Job]}}, summary="List jobs, newest first")
def list_jobs(services: CurrentServices, sender: Sender, query: Annotated[JobsQuery, Query()]) -> Response:
    jobs, following = services.reading.jobs(
        state=query.state,
        kind=query.kind,
        labels=query.label,  # type: ignore[arg-type]  # pairs, once validated
        sweep=query.sweep,
        limit=query.limit,
        after=query.after,
        since=query.since,  # type: ignore[arg-type]  # a time, once validated
        submitted_by=own_name(sender, query.submitted_by) if query.mine else query.submitted_by,
    )
    if not jobs and query.sweep is not None:
        services.reading.sweep(query.sweep)  # an unknown one is an error
    return Json({"data": linked_jobs(jobs), "next": following})


@router.get(
    "/{job_id}",
    responses={200: {"model": Job}, 304: {}},
    openapi_extra=declared("If-None-Match"),
    dependencies=[NO_QUERY],
    summary="Show a job",
)
def get_job(request: Request, services: CurrentServices, job_id: JobId) -> Response:
    job, version = services.reading.job(job_id)
    # The reason to wait changes with the workers, so the job's version does not cover it.
    waiting = f"-{crc32(job['waiting'].encode()):08x}" if job["waiting"] else ""
    tag = ETag(f"{job_id}-{version}{waiting}", weak=True)
    if tag.is_known_to(request):
        return Response(status_code=304, headers={"ETag": str(tag)})
    return Json(linked_job(job), headers={"ETag": str(tag)})


@router.patch(
    "/{job_id}",
    operation_id="describe_job",
    responses={200: {"model": Job}},
    openapi_extra=request_body(JobChanges),
    dependencies=[NO_QUERY],
    summary="Change a job's name, labels and note",
)
async def describe(
    services: CurrentServices, job_id: JobId, body: Annotated[Body[JobChanges], Depends(read_job_changes)]
) -> Response:
    """Changes what people wrote about a job, in any state. What is left out stays; null removes."""
    changes = body.model.model_dump(exclude_unset=True)
    await services.writes.run(lambda: describe_job(services.database, job_id, changes))
    job, _version = await run_sync(services.reading.job, job_id)
    return Json(linked_job(job))


@router.post(
    "/{job_id}/cancel",
    status_code=202,
    responses={202: {"model": Job}},
    dependencies=[NO_QUERY, OWN_JOB],
    summary="Cancel a job",
)
async def cancel_job(services: CurrentServices, job_id: JobId) -> Response:
    """Cancels a queued job at once, and a running one as soon as its worker has ended its processes."""
    return Json(linked_job(await services.writes.run(lambda: services.queue.cancel(job_id))), status_code=202)


@router.post(
    "/{job_id}/retry",
    status_code=202,
    responses={202: {"model": Job}},
    dependencies=[NO_QUERY, OWN_JOB_AGAIN],
    summary="Run a job again",
)
async def retry_job(services: CurrentServices, job_id: JobId) -> Response:
    """Queues a failed or cancelled job for its next attempt; results of earlier attempts stay."""
    return Json(linked_job(await services.writes.run(lambda: services.queue.retry(job_id))), status_code=202)


@router.delete(
    "/{job_id}",
    operation_id="delete_job",
    status_code=204,
    dependencies=[NO_QUERY, OWN_JOB],
    summary="Delete a finished job",
)
async def delete(services: CurrentServices, job_id: JobId) -> Response:
    """Deletes a finished job with its results and files."""
    # It may have a million rows, which are deleted in slices.
    database, files = services.database, services.files
    await services.writes.run_long(lambda: files.remove(delete_job(database, job_id), database))
    return Response(status_code=204)
