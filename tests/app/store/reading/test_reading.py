import array
import json
import math
import zlib
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import insert, text, update

from app.errors import InvalidRequest, job_problem
from app.specs.benchmark import BenchmarkSpec
from app.store import tables
from app.store.database.engine import Database
from app.store.queue.transitions import Queue
from app.store.reading import queries as reading_module
from app.store.reading.queries import Reading
from app.store.records import Finish, NewEvent, NewJob, StoredArtifact, UnitRecord
from app.store.tables import utc_now
from tests.app.store.conftest import Shop


def ids(page: tuple[list[dict[str, Any]], str | None]) -> list[int]:
    return [item["id"] for item in page[0]]


class TestJobs:
    def test_a_page_that_is_just_full_is_the_last(self, shop: Any, reading: Reading) -> None:
        for _ in range(3):
            shop.submit()
        assert reading.jobs(limit=3)[1] is None

    def test_a_page_has_only_so_many_bytes(self, shop, reading, monkeypatch) -> None:
        for size in (10, 10, 5000, 10, 10):  # characters of the environment
            shop.ran(environment={"host": "x" * size})
        whole, _ = reading.jobs()
        of_spec = len(json.dumps(whole[0]["spec"]))
        monkeypatch.setattr(reading_module, "MAX_PAGE_BYTES", 2 * (of_spec + 100))
        pages, after = [], None
        while not pages or after is not None:
            page, after = reading.jobs(after=after)
            pages.append([job["id"] for job in page])
        assert pages == [[5, 4], [3], [2, 1]], "one that is too large has a page of its own"
        assert reading.jobs(after="6") == (whole[:2], "4")

    def test_usage_has_numbers_on_every_engine(self, shop: Any, reading: Reading) -> None:
        for _ in range(2):
            shop.ran()
        ((row,), _) = reading.usage(utc_now())
        assert row["attempts"] == 2
        assert {type(row[name]) for name in ("attempts", "device_hours")} == {int, float}

    @pytest.mark.parametrize("text", ['a"b\\', "a'b%", "ä:€", ""])
    def test_labels_may_be_any_text(self, shop: Any, reading: Reading, text: str) -> None:
        job_id = shop.submit(labels={text: text})
        shop.submit(labels={"other": text})
        assert (ids(reading.jobs(labels=[(text, text)])), len(ids(reading.jobs(text=text)))) == ([job_id], 2)
        assert reading.job(job_id)[0]["labels"] == {text: text}

    @pytest.mark.parametrize("after", ["", "-1", "9" * 19, "٣"])
    def test_a_broken_cursor_is_refused(self, reading: Reading, after: str) -> None:
        with pytest.raises(InvalidRequest) as caught:
            reading.jobs(after=after)
        assert caught.value.errors[0].pointer == "/after"

    def test_numbers_beyond_the_databases_are_no_error(self, shop: Any, reading: Reading) -> None:
        job_id = shop.submit()
        assert (reading.jobs(sweep=2**70), reading.events(job_id, after=2**70)) == (([], None), [])
        assert (len(reading.events(job_id, after=-(2**70), limit=2**70)), len(reading.jobs(limit=2**70)[0])) == (1, 1)


class TestMeasurements:
    def test_columns_describe_the_rows(self, shop, reading, record) -> None:
        case = {"model": "tiny", "context_length": 128, "compile": False, "n": 3, "rate": 1, "what": None}
        records = [
            record(case=case),
            record(case={**case, "rate": 0.5}, outcome="oom"),
            record(metric="mfu", case={"model": "tiny", "extra": "x"}, mean=math.inf, unit_index=1, validity="suspect"),
        ]
        units = [UnitRecord(0, "replicate 0", "succeeded"), UnitRecord(1, "replicate 1", "succeeded")]
        found = reading.measurements(shop.ran(measurements=records, units=units))
        names = [column["name"] for column in found["columns"]]
        assert names[:7] == ["model", "context_length", "compile", "case.n", "rate", "what", "extra"]
        assert names[7:12] == ["case_key", "device_key", "attempt", "unit_index", "unit_title"]
        assert names[12:19] == ["phase", "metric", "unit", "outcome", "reason", "partial", "validity"]
        assert " ".join(names[19:]) == "n mean std median min max p05 p25 p75 p95 median_low median_high"
        types = {column["name"]: column["type"] for column in found["columns"]}
        assert (types["compile"], types["case.n"], types["rate"]) == ("boolean", "integer", "number")
        assert (types["what"], types["extra"]) == ("null", "string")
        assert all(list(row) == names for row in found["rows"])
        assert found["rows"][0]["case.n"] == 3
        oom = found["rows"][1]
        assert (oom["outcome"], oom["reason"]) == ("oom", "out of memory")
        assert [oom[name] for name in names[19:]] == [None] * 12
        last = found["rows"][2]
        assert (last["context_length"], last["mean"]) == (None, None)
        assert (last["unit_index"], last["unit_title"], last["validity"]) == (1, "replicate 1", "suspect")
        assert (last["case_key"], last["device_key"]) == ("key", "1x test CPU")
        json.dumps(found, allow_nan=False)

    def test_raw_samples_on_demand(self, shop, reading, record) -> None:
        packed = zlib.compress(array.array("d", [1.5, math.nan, 2.5]).tobytes())
        job = shop.ran(measurements=[record(samples=packed), record(outcome="oom")])
        assert "samples" not in reading.measurements(job)["rows"][0]
        found = reading.measurements(job, samples=True)
        assert [row["samples"] for row in found["rows"]] == [[1.5, None, 2.5], None]
        assert found["columns"][-1] == {"name": "samples", "type": "array", "unit": None}

    def test_a_page_has_so_many_samples(self, shop, reading, record, monkeypatch) -> None:
        monkeypatch.setattr("app.store.reading.queries.MAX_SAMPLES", 5)
        sizes = [2, 3, 1, 9, None, 4, 1]
        job = shop.ran(measurements=[record(n=size) for size in sizes])
        pages: list[list[int | None]] = []
        after = None
        while True:
            page = reading.measurements(job, samples=True, limit=4, after=after)
            pages.append([row["n"] for row in page["rows"]])
            after = page["next"]
            if after is None:
                break
        assert pages == [[2, 3], [1], [9], [None, 4, 1]]
        assert len(reading.measurements(job)["rows"]) == len(sizes), "without samples they do not count"


def test_in_the_order_of_the_plan_with_their_files(shop: Any, queue: Queue, reading: Reading) -> None:
    claim = shop.running_job()
    validity = {"verdict": "suspect", "counts": {"suspect": 1}, "checks": []}
    units = [
        UnitRecord(1, "replicate 1", "crashed", reason="signal 11"),
        UnitRecord(0, "replicate 0", "succeeded", side="baseline", environment={"gpu": "a"}, validity=validity),
    ]
    files = [StoredArtifact(at, f"trace-{2 - at}", "trace", "application/gzip", 3, "ab" * 32) for at in (0, 1)]
    queue.finish(claim, Finish("failed", error={"code": "crashed"}, units=units, artifacts=files))
    first, second = reading.units(claim.job_id)
    assert (first["unit_index"], first["title"], first["side"]) == (0, "replicate 0", "baseline")
    assert (first["environment"], first["validity"]) == ({"gpu": "a"}, validity)
    assert (second["outcome"], second["reason"], second["partial"]) == ("crashed", "signal 11", True)
    assert second["artifacts"] == [{"name": "trace-1", "url": f"/jobs/{claim.job_id}/artifacts/trace-1"}]
    listed = reading.artifacts(claim.job_id)
    assert [(one["unit_index"], one["unit_title"]) for one in listed] == [(1, "replicate 1"), (0, "replicate 0")]


class TestWorkersAndSweeps:
    def test_the_last_readings_of_devices_are_kept(self, shop: Any, reading: Reading) -> None:
        shop.register("one")
        assert reading.workers()[0]["readings"] is None
        readings = {"read_at": "2026-01-01T00:00:00Z", "devices": [{"type": "cpu", "load_1min": 0.5}]}
        shop.queue.renew([], ("one", "active"), readings)
        shop.queue.renew([], ("one", "active"))
        assert reading.workers()[0]["readings"] == readings

    def test_workers_page_by_page_newest_first(self, shop: Any, reading: Reading, database: Database) -> None:
        for number in range(5):
            shop.register(f"worker-{number}")
        with database.write() as connection:  # two that registered at the same moment
            connection.execute(text("UPDATE worker SET registered_at = '2026-01-01 00:00:00.000000' WHERE pid = 1"))
        shop.registration.set_worker_state("worker-3", "stopped")
        found, after = [], None
        for _ in range(3):
            page, cursor = reading.worker_page(limit=2, after=after)
            found += [worker["id"] for worker in page]
            if cursor is None:
                break
            registered_at, _, worker_id = cursor.partition("_")
            after = (datetime.fromisoformat(registered_at), worker_id)
        assert found == [f"worker-{number}" for number in (4, 3, 2, 1, 0)]
        assert cursor is None
        assert [worker["id"] for worker in reading.worker_page("stopped")[0]] == ["worker-3"]
        assert reading.worker_counts() == {"active": 4, "unfit": 0, "draining": 0, "stopped": 1, "lost": 0}
        assert [worker["id"] for worker in reading.workers(gone=0)] == [f"worker-{number}" for number in (0, 1, 2, 4)]

    def test_sweeps_page_by_page_with_their_counts(self, queue: Queue, shop: Any, reading: Reading) -> None:
        for number in range(3):
            jobs = [NewJob(BenchmarkSpec(seed=seed), point={"seed": seed}) for seed in range(number + 1)]
            queue.submit_sweep(str(number), {}, {}, {}, [], jobs)
        shop.claim()
        page, after = reading.sweeps(limit=2)
        assert [(sweep["name"], sweep["counts"]["queued"]) for sweep in page] == [("2", 3), ("1", 2)]
        page, after = reading.sweeps(limit=2, after=after)
        assert [(sweep["name"], sweep["counts"]["running"]) for sweep in page] == [("0", 1)]
        assert after is None


def test_a_page_of_events_ends_by_number_or_by_bytes(queue, reading, shop, monkeypatch) -> None:
    monkeypatch.setattr("app.store.reading.queries.MAX_EVENT_BYTES", 100)
    claim = shop.running_job()
    for piece in ("x" * 120, "y", "z"):
        queue.report(claim, [NewEvent("log", {"text": piece})])
    pages: list[list[str]] = []
    after: int | None = 0
    while after is not None:
        state, found, after = reading.events_page(claim.job_id, after, 3)
        pages.append([event["data"].get("text", "")[:1] for event in found])
    assert state == "running"
    assert pages == [["", "", "x"], ["y", "z"]]
    last = reading.events(claim.job_id, after=reading.events_page(claim.job_id, 0, 3)[2] or 0)[-1]["id"]
    assert reading.events_page(claim.job_id, last - 1, 1)[2] is None, "nothing follows a page that is just full"


def test_jobs_of_a_time_are_found_though_the_clock_went_back(database: Database, reading: Reading, shop: Shop) -> None:
    """Ids are in the order of submission; times need not be."""
    now = utc_now()
    ids = [shop.submit() for _ in range(5)]
    for job_id, minutes in zip(ids, (50, 10, 40, 20, 30), strict=True):
        at = now - timedelta(minutes=minutes)
        with database.write() as connection:
            connection.execute(update(tables.job).where(tables.job.c.id == job_id).values(created_at=at))

    def found(**chosen: Any) -> list[int]:
        return [job["id"] for job in reading.jobs(**chosen)[0]]

    since, until = now - timedelta(minutes=35), now - timedelta(minutes=15)
    assert (found(since=since), found(until=until)) == ([ids[4], ids[3], ids[1]], [ids[4], ids[3], ids[2], ids[0]])
    assert found(since=since, until=until) == [ids[4], ids[3]]
    assert found(since=now) == found(until=now - timedelta(days=1)) == []


def test_first_values_are_those_of_the_last_attempt_that_recorded_any(database, reading, shop, record) -> None:
    """Those of an attempt that still runs are not shown before its end."""
    job = shop.ran("failed", error=job_problem("failed", "x"), measurements=[record(median=1.0)])
    shop.queue.retry(job)
    running = shop.claim()
    staged = {"job_id": running.job_id, "attempt": running.attempt, "partial": False, **vars(record(median=2.0))}
    with database.write() as connection:
        connection.execute(insert(tables.measurement), staged)
    (value,) = reading.first_values([job], ["step_ms"])[job]
    assert (value["median"], value["is_cut"]) == (1.0, False)


def test_first_values_tell_that_there_are_more(reading, shop, record) -> None:
    job = shop.ran(measurements=[record(), record("forward_ms")])
    (value,) = reading.first_values([job], ["step_ms", "forward_ms"], limit=1)[job]
    assert (value["metric"], value["is_cut"]) == ("step_ms", True)
