"""Events, as a list and as a stream."""

from typing import Any

import httpx
import pytest

from app.api import events
from app.errors import DatabaseGone
from tests.app.api.streams import STREAM, parse_stream, streamed
from tools.waiting import wait_until


def run(site: Any, **report: Any) -> int:
    """A finished job with a progress and a log event."""
    job_id: int = site.submit(priority=10)["id"]
    claim = site.worker.claim_job(job_id)
    site.worker.report(claim, "progress", done=1, total=2, message="half")
    site.worker.report(claim, "log", text=report.get("text", "hello\n"))
    site.worker.finish(claim)
    return job_id


def test_list(site: Any) -> None:
    job_id = run(site)
    page = site.http.get(f"/jobs/{job_id}/events").json()
    assert page["next"] is None
    assert [event["type"] for event in page["data"]] == ["state", "state", "progress", "log", "state", "done"]
    assert {event["job_id"] for event in page["data"]} == {job_id}
    first = site.http.get(f"/jobs/{job_id}/events?limit=4").json()
    rest = site.http.get(f"/jobs/{job_id}/events", params={"limit": 4, "after": first["next"]}).json()
    assert first["data"] + rest["data"] == page["data"]
    assert rest["next"] is None


def test_stream_of_a_finished_job(site: Any) -> None:
    job_id = run(site, text="naïve\nlines\r\n\n: no comment\n")
    listed = site.http.get(f"/jobs/{job_id}/events").json()["data"]
    assert streamed(site, job_id) == [(event["id"], event["type"], event["data"]) for event in listed]


def test_live_stream(site: Any) -> None:
    job_id = site.submit(priority=10)["id"]
    with httpx.stream("GET", f"{site.url}/jobs/{job_id}/events", headers=STREAM, timeout=30) as response:
        stream = parse_stream(response.iter_lines())
        assert next(stream)[1:] == ("state", {"state": "queued"})
        claim = site.worker.claim_job(job_id)
        assert next(stream)[2]["state"] == "running"
        for done in range(3):
            site.worker.report(claim, "progress", done=done, total=3, message="step")
            assert next(stream)[1:] == ("progress", {"done": done, "total": 3, "message": "step"})
        site.worker.finish(claim, "failed")
        assert next(stream)[2] == {"state": "failed"}
        _, last, data = next(stream)
        assert (last, data["error"]["code"]) == ("done", "failed")
        assert list(stream) == [], "the stream ends after done"


def test_two_hundred_events_in_order(site: Any) -> None:
    job_id = site.submit(priority=10)["id"]
    claim = site.worker.claim_job(job_id)
    for number in range(200):
        site.worker.report(claim, "log", text=str(number))
    site.worker.finish(claim)
    texts = [data["text"] for _, type_, data in streamed(site, job_id) if type_ == "log"]
    assert texts == [str(number) for number in range(200)]


@pytest.mark.parametrize("sooner", ["KEEP_ALIVE_S", "QUEUED_KEEP_ALIVE_S"])
def test_keep_alive(site: Any, monkeypatch: pytest.MonkeyPatch, sooner: str) -> None:
    """A queued job's stream shows more often that it lives."""
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 3600.0)
    monkeypatch.setattr(events, "QUEUED_KEEP_ALIVE_S", 3600.0)
    monkeypatch.setattr(events, sooner, 0.05)
    job_id = site.submit()["id"]
    with site.http.stream("GET", f"/jobs/{job_id}/events", headers=STREAM) as response:
        lines = response.iter_lines()
        assert any(line == ": keep-alive" for _, line in zip(range(50), lines, strict=False))


def test_a_stream_holds_no_transaction(site: Any) -> None:
    """The log could not be truncated if it did."""
    job_id = site.submit()["id"]
    log = site.services.settings.data_dir / "flopwatch.sqlite3-wal"

    def truncated() -> bool:
        site.services.database.checkpoint()
        return not log.exists() or log.stat().st_size == 0

    with site.http.stream("GET", f"/jobs/{job_id}/events", headers=STREAM) as response:
        stream = parse_stream(response.iter_lines())
        next(stream)
        for _ in range(20):
            site.submit()
        wait_until(truncated, "the log to be truncated")  # the stream looks at each commit, but only for a moment


def test_an_outage_ends_streams_without_an_error(fresh_site, monkeypatch, caplog) -> None:
    """A client that resumes its stream gets the error."""
    job_id = fresh_site.submit()["id"]

    def gone(*_: Any) -> None:
        raise DatabaseGone("it cannot be reached")

    with fresh_site.http.stream("GET", f"/jobs/{job_id}/events", headers=STREAM) as response:
        lines = response.iter_lines()
        next(lines)
        monkeypatch.setattr(type(fresh_site.services.reading), "events_page", gone)
        fresh_site.submit()  # followers look again
        fresh_site.http.post(f"/jobs/{job_id}/cancel")
        list(lines)
    assert fresh_site.http.get(f"/jobs/{job_id}/events", headers=STREAM).status_code == 503
    assert not [record for record in caplog.records if record.exc_info]


def test_stopping_ends_streams(serve: Any, tmp_path: Any) -> None:
    with serve(tmp_path) as site:
        job_id = site.submit()["id"]
        with site.http.stream("GET", f"/jobs/{job_id}/events", headers=STREAM) as response:
            stream = parse_stream(response.iter_lines())
            next(stream)
            site.services.changes.stop()
            assert list(stream) == []
