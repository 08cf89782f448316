"""/jobs/{id}/…: a job's log, measurements, tables, units, artifacts and attempts."""

from dataclasses import replace
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Query, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from pydantic import Field

from app import results
from app.api.parameters import NO_QUERY, Cursor, ETag, JobId, Json, StrictQuery, Text, declared, sendable_media_type
from app.api.schemas import Artifact, Attempt, Measurements, Page, ReportedTable, Unit
from app.api.services import CurrentServices, slow
from app.api.streaming import sent
from app.api.tables import MAX_LIMIT, TextQuery, in_every_format, split, written
from app.store.reading.queries import MAX_MEASUREMENTS
from flopwatch.table_options import Format

router = APIRouter(prefix="/jobs/{job_id}", tags=["results"])


MAX_UNIT = 2**31 - 1
"""Largest index of a unit, and number of an attempt, that a query may have."""
MAX_ROWS = 10_000
"""Largest number of rows of a page of a job's own table, in JSON."""


class AttemptQuery(StrictQuery):
    """The attempt whose results the client asks for."""

    attempt: Annotated[int, Field(ge=1, le=MAX_UNIT)] | None = None
    """The number of an attempt; by default the last."""


class MeasurementsQuery(AttemptQuery):
    """The page that the client asks for, and whether rows carry their samples."""

    samples: Annotated[bool, Field(description="Add the raw samples of every row.")] = False
    limit: Annotated[int, Field(ge=1, le=MAX_MEASUREMENTS)] = MAX_MEASUREMENTS
    after: Cursor | None = None


class RowsQuery(TextQuery):
    """The rows of a reported table that the client asks for, their order and their format."""

    format: Format = "json"
    sort: Text | None = None
    """A column to sort by; `-column` sorts in descending order. Unknown values come last."""
    limit: Annotated[int, Field(ge=1, le=MAX_LIMIT)] | None = None
    """The largest number of rows; by default all. JSON has 10 000 at most, and `next`."""
    after: Cursor | None = None
    unit: Annotated[int, Field(ge=0, le=MAX_UNIT)] | None = None
    """The index of a unit; by default the rows of all units."""
    columns: list[Text] = Field(default=[], max_length=100)
    """Columns to show, repeated or separated by commas; `all` for every one. By default Markdown, LaTeX and HTML show
    the most important ones, and JSON and CSV have all."""

    def excerpt(self) -> results.Excerpt:
        return results.Excerpt(
            unit=self.unit,
            sort=self.sort,
            limit=min(self.limit or MAX_ROWS, MAX_ROWS) if self.format == "json" else self.limit,
            after=int(self.after or 0),
            columns=split(self.columns),
            where=self.where,  # type: ignore[arg-type]  # pairs, once validated
        )


class ReportedTableQuery(AttemptQuery, RowsQuery):
    """The rows of a job's table, and the attempt."""

    def excerpt(self) -> results.Excerpt:
        return replace(super().excerpt(), attempt=self.attempt)


@router.get("/logs", response_class=PlainTextResponse, summary="A job's output")
def get_job_log(services: CurrentServices, job_id: JobId, query: Annotated[AttemptQuery, Query()]) -> Response:
    """Returns the standard output and error of an attempt; a long log keeps its head and tail, and the middle is
    cut."""
    return PlainTextResponse(services.reading.log(job_id, query.attempt))


@router.get("/measurements", responses={200: {"model": Measurements}}, summary="A job's measurements")
def get_job_measurements(
    services: CurrentServices, job_id: JobId, query: Annotated[MeasurementsQuery, Query()]
) -> Response:
    """Returns measurements: one row is one metric of one case in one unit; the columns are those of this page's
    rows."""
    page = services.reading.measurements(
        job_id, samples=query.samples, limit=query.limit, after=query.after, attempt=query.attempt
    )
    return Json(page)


@router.get("/units", responses={200: {"model": Page[Unit]}}, summary="A job's units")
def list_job_units(services: CurrentServices, job_id: JobId, query: Annotated[AttemptQuery, Query()]) -> Response:
    """Returns the job's units in the last attempt that ended: the parts that fresh processes measured one after the
    other."""
    return Json({"data": services.reading.units(job_id, query.attempt), "next": None})


@router.get("/tables", responses={200: {"model": Page[ReportedTable]}}, summary="A job's own tables")
def list_job_tables(services: CurrentServices, job_id: JobId, query: Annotated[AttemptQuery, Query()]) -> Response:
    """Lists the tables that the job's units reported, beside its measurements."""
    return Json({"data": results.list_tables(services.database, job_id, query.attempt), "next": None})


@router.get("/tables/{name:path}", responses={200: in_every_format(Measurements)}, summary="One of a job's own tables")
@slow
def get_job_table(
    services: CurrentServices, job_id: JobId, name: str, query: Annotated[ReportedTableQuery, Query()]
) -> Response:
    """Returns the rows of all units, with a column `unit_index`; only JSON has `next`."""
    sheet = results.result_table(services.database, job_id, name, query.excerpt())
    return written(query.styled(sheet), query.format)


@router.get("/attempts", responses={200: {"model": Page[Attempt]}}, dependencies=[NO_QUERY], summary="A job's attempts")
def list_job_attempts(services: CurrentServices, job_id: JobId) -> Response:
    return Json({"data": services.reading.attempts(job_id), "next": None})


@router.get("/artifacts", responses={200: {"model": Page[Artifact]}}, summary="A job's files")
def list_job_artifacts(services: CurrentServices, job_id: JobId, query: Annotated[AttemptQuery, Query()]) -> Response:
    return Json({"data": services.reading.artifacts(job_id, query.attempt), "next": None})


@router.get(
    "/artifacts/{name}",
    response_class=StreamingResponse,
    responses={206: {}, 304: {}},
    openapi_extra=declared("Range", "If-None-Match"),
    summary="Download a file",
)
async def download_job_artifact(
    request: Request, services: CurrentServices, job_id: JobId, name: str, query: Annotated[AttemptQuery, Query()]
) -> Response:
    """Sends the file, whole or a range of it; the strong ETag is the content's SHA-256.

    Of a file that the disk has changed, the answer is 500, or if it is larger than 8 MiB, ends before the last bytes.
    """
    row = await run_sync(services.reading.artifact, job_id, name, query.attempt)
    tag = ETag(row["sha256"])
    if tag.is_known_to(request):
        return Response(status_code=304, headers={"ETag": str(tag)})
    content = await run_sync(lambda: services.files.open(row["sha256"]))
    headers = {"ETag": str(tag), "Cache-Control": "no-cache"}
    return await sent(request, content, row["size"], name, sendable_media_type(row["media_type"]), headers)
