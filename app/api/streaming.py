"""Sends streams: stored files, of a disk or an object store, whole or in part; no changed file as if it were whole."""

import contextlib
import re
from collections.abc import Mapping
from urllib.parse import quote

from fastapi import HTTPException, Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Send

from app.store.files.store import Content


class ClosingStream(StreamingResponse):
    """A stream that closes its generator also if the client disconnects before the end, so that it no longer follows
    a job, or holds a file open."""

    async def stream_response(self, send: Send) -> None:
        async with contextlib.aclosing(self.body_iterator):  # type: ignore[type-var]  # it is the generator given
            await super().stream_response(send)


MAX_DIGITS = 18
"""A number with more digits is beyond the end of every file."""


async def sent(
    request: Request, content: Content, size: int, name: str, media_type: str, headers: Mapping[str, str]
) -> Response:
    """Answer with a content; `headers` has its ETag.

    Raises NotFound, Damaged or StoreUnreachable if it is not as it was stored, with `size` bytes, and HTTPException for
    a Range outside of it. Of a large file that the disk has changed, the last part is missing.
    """
    await content.check(size)
    wanted = request.headers.get("range") if request.headers.get("if-range") in (None, headers["ETag"]) else None
    part = _range(wanted, size)
    start, stop = part or (0, size)
    quoted = quote(name, safe="")
    named = f'filename="{name}"' if quoted == name else f"filename*=utf-8''{quoted}"
    all_headers = {
        **headers,
        "Accept-Ranges": "bytes",
        "Content-Disposition": f"attachment; {named}",
        "Content-Length": str(stop - start),
        **({"Content-Range": f"bytes {start}-{stop - 1}/{size}"} if part else {}),
    }
    return ClosingStream(content.stream(start, stop), 206 if part else 200, all_headers, media_type)


def _range(wanted: str | None, size: int) -> tuple[int, int] | None:
    """Return the first byte, and the one after the last, of a Range; None, which means all of the file, for one that
    cannot be parsed or has several parts (RFC 9110, section 14.2). Raises HTTPException for one outside of it."""
    match = re.fullmatch(r"bytes=(?:0*(\d+)-(?:0*(\d+))?|-0*(\d+))", wanted or "", re.ASCII)
    if match is None:
        return None
    first, last, suffix = (None if digits is None else int(digits[:MAX_DIGITS]) for digits in match.groups())
    if first is None:
        first, last = max(0, size - (suffix or 0)), None
    if last is not None and last < first:
        return None
    if first >= size or suffix == 0:
        raise HTTPException(416, f"The file has {size} bytes.", headers={"Content-Range": f"bytes */{size}"})
    return first, size if last is None else min(size, last + 1)
