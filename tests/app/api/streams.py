"""Streams of a job's events, as tests read them."""

import json
from collections.abc import Iterator
from typing import Any

STREAM = {"Accept": "text/event-stream"}


def parse_stream(lines: Iterator[str]) -> Iterator[tuple[int, str, Any]]:
    """Yield (id, type, data) of each event, not by the client's parser, which excuses what is missing."""
    fields: dict[str, str] = {}
    for line in lines:
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            yield int(fields["id"]), fields["event"], json.loads(fields["data"])
            fields = {}


def streamed(site: Any, job_id: int, **headers: str) -> list[tuple[int, str, Any]]:
    """Return the events of one stream, up to its end."""
    with site.http.stream("GET", f"/jobs/{job_id}/events", headers={**STREAM, **headers}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(parse_stream(response.iter_lines()))
