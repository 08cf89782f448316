"""Sends files that are on an object store, whole or one range, as FileResponse sends those on a disk."""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import formatdate
from urllib.parse import quote

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.datastructures import Headers

from app.store.files.store import RemoteContent


def streamed(
    request: Request, content: RemoteContent, name: str, media_type: str, headers: Mapping[str, str]
) -> Response:
    """Answer with a content; `headers` has its ETag. A request for several ranges gets all of it.

    Raises NotFound, Damaged or StoreUnreachable before the answer begins, if the object is not as it was stored.
    """
    content.check()
    modified = formatdate(content.modified_at, usegmt=True)
    start, stop = 0, content.size
    asked = Headers(raw=request.scope["headers"])  # check_range has changed them; request.headers are the former ones
    if asked.get("if-range", headers["ETag"]) in (headers["ETag"], modified):
        start, stop = _range(asked.get("range"), content.size)
    is_part = (start, stop) != (0, content.size)
    quoted = quote(name, safe="")
    named = f'filename="{name}"' if quoted == name else f"filename*=utf-8''{quoted}"
    all_headers = {
        **headers,
        "Accept-Ranges": "bytes",
        "Content-Disposition": f"attachment; {named}",
        "Content-Length": str(stop - start),
        "Last-Modified": modified,
        **({"Content-Range": f"bytes {start}-{stop - 1}/{content.size}"} if is_part else {}),
    }
    return StreamingResponse(content.stream(start, stop), 206 if is_part else 200, all_headers, media_type)


def _range(wanted: str | None, size: int) -> tuple[int, int]:
    """Return the first byte, and the one after the last, of a Range that check_range has let through."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted or "")
    if match is None:
        return 0, size
    first, last = match.groups()
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1) if last else size
