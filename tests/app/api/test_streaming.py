"""Answers that a client leaves before their end."""

import contextlib
import hashlib
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from fastapi import Request
from fastapi.responses import StreamingResponse

from app.api import streaming
from app.store.files.store import CHUNK_BYTES, SMALL_BYTES, FolderContent

Leave = Callable[[anyio.CancelScope], Awaitable[None]]


async def break_off(_scope: anyio.CancelScope) -> None:
    raise ConnectionError


async def cancel(scope: anyio.CancelScope) -> None:
    scope.cancel()
    await checkpoint()


async def cancel_the_next_read(scope: anyio.CancelScope) -> None:
    scope.cancel()


def is_open(path: Path) -> bool:
    return path in {link.resolve() for link in Path("/proc/self/fd").iterdir()}


def is_open_after(path: Path, leave: Leave) -> bool:
    """Download a file, leave after the first part, and tell whether the file is still open."""
    size = SMALL_BYTES + CHUNK_BYTES
    path.write_bytes(bytes(size))
    content = FolderContent(path, hashlib.sha256(bytes(size)).hexdigest(), size)
    request = Request({"type": "http", "headers": []})

    async def download() -> bool:
        answer = await streaming.sent(request, content, size, "x", "text/plain", {"ETag": '"1"'})
        assert isinstance(answer, StreamingResponse)
        scope = anyio.CancelScope()

        async def send(message: MutableMapping[str, Any]) -> None:
            if message.get("body"):
                assert is_open(path)
                await leave(scope)

        with scope, contextlib.suppress(ConnectionError):
            await answer.stream_response(send)
            raise AssertionError("it was not left")
        return is_open(path)

    return anyio.run(download)


@pytest.mark.parametrize("leave", [break_off, cancel, cancel_the_next_read])
def test_a_download_that_is_cut_off_closes_its_file(tmp_path: Path, leave: Leave) -> None:
    assert not is_open_after(tmp_path / "file", leave)


def test_control_of_the_closing_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "ClosingStream", StreamingResponse)
    assert is_open_after(tmp_path / "file", cancel)
