"""/jobs/{id}/…: what a job left behind: log, measurements, artifacts, attempts."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response
from pydantic import Field

from app.api.parameters import MAX_ID, NO_QUERY, ETag, JobId, Json, StrictQuery, sendable_media_type
from app.api.schemas import Artifact, Attempt, Measurements, Page
from app.api.services import CurrentServices

router = APIRouter(prefix="/jobs/{job_id}", tags=["results"])


class MeasurementsQuery(StrictQuery):
    samples: Annotated[bool, Field(description="Add the raw samples of every row.")] = False


@router.get("/logs", dependencies=[NO_QUERY], response_class=PlainTextResponse, summary="A job's output")
def logs(services: CurrentServices, job_id: JobId) -> Response:
    """Standard output and error of the last attempt; head and tail are kept, the middle of a long log is cut."""
    return PlainTextResponse(services.reading.log(job_id))


@router.get("/measurements", responses={200: {"model": Measurements}}, summary="A job's measurements")
def measurements(services: CurrentServices, job_id: JobId, query: Annotated[MeasurementsQuery, Query()]) -> Response:
    """One row is one metric of one case."""
    return Json(services.reading.measurements(job_id, samples=query.samples))


@router.get("/attempts", responses={200: {"model": Page[Attempt]}}, dependencies=[NO_QUERY], summary="A job's attempts")
def attempts(services: CurrentServices, job_id: JobId) -> Response:
    return Json({"data": services.reading.attempts(job_id), "next": None})


@router.get("/artifacts", responses={200: {"model": Page[Artifact]}}, dependencies=[NO_QUERY], summary="A job's files")
def artifacts(services: CurrentServices, job_id: JobId) -> Response:
    return Json({"data": services.reading.artifacts(job_id), "next": None})


@router.get("/artifacts/{name}", dependencies=[NO_QUERY], response_class=FileResponse, summary="Download a file")
def artifact(request: Request, services: CurrentServices, job_id: JobId, name: str) -> Response:
    """Whole or in ranges; the strong ETag is the content's SHA-256."""
    found = services.reading.artifact(job_id, name)
    tag = ETag(found["sha256"])
    if tag.is_known_to(request):
        return Response(status_code=304, headers={"ETag": str(tag)})
    path = services.files.open_path(found["sha256"])
    check_range(request, found["size"])
    return FileResponse(
        path,
        media_type=sendable_media_type(found["media_type"]),
        filename=name,
        headers={"ETag": str(tag), "Cache-Control": "no-cache"},
    )


def check_range(request: Request, size: int) -> None:
    """Refuse a Range outside the file; forget one that cannot be read, as RFC 9110 section 14.2 asks.

    What is left is written back to the request with numbers that the response can read, however many digits they had.
    """
    wanted = request.headers.get("range")
    if wanted is None:
        return
    parts = [part.strip() for part in wanted.removeprefix("bytes=").split(",")]
    readable = wanted.startswith("bytes=") and all(re.fullmatch(r"\d+-\d*|-\d+", part, re.ASCII) for part in parts)
    bounds = [[_position(digits) for digits in part.split("-")] for part in parts] if readable else []
    if any(start is not None and end is not None and start > end for start, end in bounds):
        readable = False
    others = [header for header in request.scope["headers"] if header[0] != b"range"]
    if not readable:
        request.scope["headers"] = others
        return
    if any((start is not None and start >= size) or (start is None and end == 0) for start, end in bounds):
        raise HTTPException(416, f"The file has {size} bytes.", headers={"Content-Range": f"bytes */{size}"})
    text = ",".join("-".join("" if number is None else str(number) for number in pair) for pair in bounds)
    request.scope["headers"] = [*others, (b"range", f"bytes={text}".encode())]


def _position(digits: str) -> int | None:
    # Python refuses to read numbers of thousands of digits; beyond any file, one is as good as another.
    digits = digits.lstrip("0") or digits[:1]
    return min(int(digits[:20]), MAX_ID) if digits else None
