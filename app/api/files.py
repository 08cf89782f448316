"""/files: Python files that users upload, for the `code` of specs."""

import asyncio
import hashlib
from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import PlainTextResponse, Response

from app.api.access import CODE
from app.api.bodies import read_limited
from app.api.parameters import NO_QUERY, ETag, Json, declared
from app.api.schemas import CodeFile
from app.api.services import CurrentServices
from app.errors import InvalidRequest
from flopwatch.packing import MAX_BYTES, check_packed, is_packed

router = APIRouter(prefix="/files", tags=["files"])

Sha256 = Annotated[
    str, Path(pattern=r"^[0-9a-f]{64}$", description="The SHA-256 of the content, in lower-case hexadecimal digits.")
]
SOURCE = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


@router.put(
    "/{sha256}",
    status_code=201,
    responses={201: {"model": CodeFile}, 200: {"model": CodeFile, "description": "It was there before"}},
    openapi_extra={"requestBody": {"required": True, "content": SOURCE}},
    dependencies=[NO_QUERY, CODE],
    summary="Upload a Python file",
)
async def put_file(request: Request, services: CurrentServices, sha256: Sha256) -> Response:
    """Stores the body, a UTF-8 file or a zip file of a folder, of at most 64 MiB; a spec's `code` names it by its
    SHA-256.

    Only workers started with --allow-code run it. A file that no job names is removed after a day.
    """
    content = await read_limited(request, MAX_BYTES, "of uploaded code")
    actual = await asyncio.to_thread(lambda: hashlib.sha256(content).hexdigest())
    if actual != sha256:
        raise InvalidRequest.at(
            "", f"The body's SHA-256 is {actual}, not that of the path: it was damaged, or is another file."
        )
    await asyncio.to_thread(_check, content)
    file, is_new = await services.writes.run(lambda: services.uploads.put(content))
    return Json(file, status_code=201 if is_new else 200, headers={"Location": file["url"]} if is_new else {})


def _check(content: bytes) -> None:
    """Check that a file may be Python, without parsing it, and of a folder the files' names. Raises InvalidRequest."""
    if is_packed(content):
        try:
            check_packed(content)
        except ValueError as error:
            raise InvalidRequest.at("", f"The body cannot be unpacked: {error}.") from None
        return
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest.at("", f"The body is no Python source: byte {error.start} is not UTF-8.") from None
    if not text.strip() or "\0" in text:
        raise InvalidRequest.at("", "The body is no Python source: it is empty, or has NUL characters.")


@router.get(
    "/{sha256}",
    response_class=PlainTextResponse,
    responses={304: {}},
    openapi_extra=declared("If-None-Match"),
    dependencies=[NO_QUERY],
    summary="Read an uploaded file",
)
def get_file(request: Request, services: CurrentServices, sha256: Sha256) -> Response:
    """Returns the file's source as plain text, which no browser runs; of a folder, the zip file."""
    content = services.uploads.read(sha256)
    tag = ETag(sha256)
    headers = {"ETag": str(tag), "Cache-Control": "no-cache"}
    if tag.is_known_to(request):
        return Response(status_code=304, headers=headers)
    media_type = "application/zip" if is_packed(content) else "text/plain; charset=utf-8"
    return Response(content, media_type=media_type, headers=headers)
