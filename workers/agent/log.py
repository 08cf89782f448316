"""Keeps head and tail of a job's output and cuts the middle; followers get whole lines as they arrive.

So a job that prints 100 MB fills neither memory nor database, and never waits for a full pipe.
"""

import codecs
from collections import deque

HEAD_BYTES = 256 << 10
TAIL_BYTES = 256 << 10
LIVE_BYTES = 1 << 20


class CappedLog:
    """Takes any number of bytes and keeps at most HEAD_BYTES + TAIL_BYTES (and one chunk) of them.

    Followers get the first LIVE_BYTES as they arrive, and the tail when the job has ended.
    """

    def __init__(
        self, head_bytes: int = HEAD_BYTES, tail_bytes: int = TAIL_BYTES, live_bytes: int = LIVE_BYTES
    ) -> None:
        self._head_room = head_bytes
        self._tail_bytes = tail_bytes
        self._live_room = live_bytes
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._cut = 0
        self._live = bytearray()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._not_live = 0

    def write(self, chunk: bytes) -> None:
        live = chunk[: self._live_room]
        self._not_live += len(chunk) - len(live)
        if self._live_room > 0:
            self._live += live
            self._live_room -= len(live)
            if self._live_room == 0:
                self._live += b"\n[live output ends here; the log's tail follows when the job has ended]\n"
        taken = chunk[: self._head_room]
        self._head += taken
        self._head_room -= len(taken)
        rest = chunk[len(taken) :]
        if rest:
            self._tail.append(rest)
            self._tail_size += len(rest)
        while self._tail and self._tail_size - len(self._tail[0]) >= self._tail_bytes:
            self._cut += len(self._tail[0])
            self._tail_size -= len(self._tail.popleft())

    def end(self) -> None:
        """End the log: followers get the tail of the output that they have missed."""
        missed = min(self._not_live, self._tail_bytes)
        if self._not_live > missed:
            self._live += f"[… {self._not_live - missed} bytes cut …]\n".encode()
        if missed:
            self._live += (bytes(self._head) + b"".join(self._tail))[-missed:]
        self._not_live = 0

    def drain(self) -> str:
        """Return the output since the last call, for followers: whole characters."""
        text = _without_nul(self._decoder.decode(self._live))
        self._live.clear()
        return text

    def head(self, size: int) -> str:
        return _decode(self._head[:size])

    def tail(self, size: int) -> str:
        return _decode((bytes(self._head) + b"".join(self._tail))[-size:])

    def text(self) -> str:
        """Return the whole output, or head and tail with a note of how much was cut between them."""
        note = f"\n[… {self._cut} bytes cut …]\n" if self._cut else ""
        return _decode(self._head) + note + _decode(b"".join(self._tail))


def _decode(data: bytes | bytearray) -> str:
    return _without_nul(data.decode(errors="replace"))


def _without_nul(text: str) -> str:
    return text.replace("\0", "\N{SYMBOL FOR NULL}")  # NUL cannot be kept in PostgreSQL's text
