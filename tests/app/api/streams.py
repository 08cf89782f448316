"""Streams of a job's events, as tests read them."""

from collections.abc import Iterator
from typing import Any

from flopwatch import connection

STREAM = {"Accept": "text/event-stream"}


def parse_stream(lines: Iterator[str]) -> Iterator[tuple[int, str, Any]]:
    """Yield (id, type, data) of each event."""
    for event_id, event in connection.parse_stream(lines):
        if event is not None:
            yield int(event_id), event.type, event.data


def streamed(site: Any, job_id: int, **headers: str) -> list[tuple[int, str, Any]]:
    """Return the events of one stream, up to its end."""
    with site.http.stream("GET", f"/jobs/{job_id}/events", headers={**STREAM, **headers}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(parse_stream(response.iter_lines()))
