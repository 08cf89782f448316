"""Sends files that are on a disk, and those on an object store, whole or in ranges; no changed file as if it were
whole."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from email.utils import formatdate
from typing import Any
from urllib.parse import quote

from anyio.to_thread import run_sync
from fastapi import Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from app.store.files.store import FolderContent, RemoteContent


class StoredFile(FileResponse):
    """A file on a disk. Raises Damaged before the answer begins if its size is not `size`, or it is small and another
    content than its name says; with a larger one, before the last part of the whole."""

    def __init__(self, content: FolderContent, size: int, **named: Any) -> None:
        super().__init__(content.path, **named)
        self._content, self._size = content, size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_sync(self._content.check, self._size)
        digest, is_whole = hashlib.sha256(), False

        async def send_checked(message: Message) -> None:
            nonlocal is_whole
            if message["type"] == "http.response.start":
                is_whole = message["status"] == 200
            elif is_whole:
                digest.update(message["body"])
                if not message.get("more_body", False):
                    self._content.check_digest(digest.hexdigest())
            await send(message)

        await super().__call__(scope, receive, send_checked)


def streamed(
    request: Request, content: RemoteContent, name: str, media_type: str, headers: Mapping[str, str]
) -> Response:
    """Answer with a content; `headers` has its ETag. A request for several ranges gets all of it."""
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
    return _Checked(content, content.stream(start, stop), 206 if is_part else 200, all_headers, media_type)


class _Checked(StreamingResponse):
    """Raises NotFound, Damaged or StoreUnreachable before the answer begins, if the object is not as it was stored. No
    thread waits for the store meanwhile."""

    def __init__(self, content: RemoteContent, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._content.check()
        await super().__call__(scope, receive, send)


def _range(wanted: str | None, size: int) -> tuple[int, int]:
    """Return the first byte, and the one after the last, of a Range that check_range has let through."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted or "")
    if match is None:
        return 0, size
    first, last = match.groups()
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1) if last else size
