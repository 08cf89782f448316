"""What retention lets go, what it keeps, that it holds nobody up, and that the file shrinks."""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import delete, insert, select, update

from app.errors import FlopwatchError, NotFound, job_problem
from app.settings import Settings
from app.specs.benchmark import BenchmarkSpec
from app.store import tables
from app.store.database import slices
from app.store.database.engine import Database
from app.store.database.slices import Slices
from app.store.files.artifacts import ArtifactFiles
from app.store.keeping import deleting, pruning
from app.store.keeping.deleting import delete_job
from app.store.keeping.pruning import Pruned, Pruning, Retention
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from app.store.records import Finish, Idempotency, NewEvent, NewJob, StoredArtifact
from app.store.tables import utc_now
from tests.app.store.conftest import ON_SQLITE

KEPT = Retention(timedelta(days=7), timedelta(days=90))
NOTHING = Pruned(workers=0, events=0, keys=0, jobs=0, sweeps=0, code_files=0, pages=0)


@pytest.fixture
def files(settings: Settings, database: Database) -> ArtifactFiles:
    files = ArtifactFiles(settings.artifacts_dir)
    files.claim(database)
    return files


@pytest.fixture
def prune(database: Database, files: ArtifactFiles) -> Callable[..., Pruned]:
    """Prune as it would happen in some days; says first what would go, which must be what goes."""

    def run(in_days: float, retention: Retention = KEPT) -> Pruned:
        made = Pruning(Slices(database), files, retention, clock=lambda: utc_now() + timedelta(days=in_days))
        planned, before = made.plan(), rows(database)
        assert rows(database) == before
        done = made.run()
        assert (replace(done, pages=0), replace(made.run(), pages=0)) == (replace(planned, pages=0), NOTHING)
        return replace(done, pages=0)

    return run


def rows(database: Database) -> dict[str, int]:
    """The number of rows of each table that has any; tally, use of devices and the files' id outlive jobs."""
    with database.read() as connection:
        counts = {
            name: connection.exec_driver_sql(f"SELECT count(*) FROM {name}").scalar_one()
            for name in tables.SQLModel.metadata.tables
            if name not in ("tally", "setting", "device_use", "fair_share")
        }
    return {name: count for name, count in counts.items() if count}


def finished(shop: Any, queue: Queue, *, log: str | None = "a line\n", **results: Any) -> int:
    """A job that reported progress and output, and succeeded."""
    claim = shop.running_job(labels={"a": "b"})
    events = [NewEvent("progress", {"done": n, "total": 3, "message": ""}) for n in range(3)]
    queue.report(claim, [*events, NewEvent("log", {"text": "a line\n"})])
    queue.finish(claim, Finish("succeeded", log=log, **results))
    return int(claim.job_id)


def test_nothing_young_goes(shop: Any, queue: Queue, prune: Any, results: Finish, database: Database) -> None:
    shop.register()
    finished(shop, queue, measurements=results.measurements)
    shop.submit(idempotency=Idempotency("key", "POST /jobs", "digest"))
    shop.registration.set_worker_state("worker", "stopped")
    before = rows(database)
    assert prune(in_days=6.9) == NOTHING
    assert rows(database) == before


class TestWorkers:
    def test_those_that_are_gone_go(self, shop: Any, reading: Reading, prune: Any) -> None:
        for name, state in {"stopped": "stopped", "lost": "lost", "alive": "active", "ending": "draining"}.items():
            shop.register(name)
            shop.registration.set_worker_state(name, state)
        assert prune(in_days=31) == replace(NOTHING, workers=2)
        assert {worker["id"] for worker in reading.workers()} == {"alive", "ending"}

    def test_the_newest_of_very_many_stay(self, shop, reading, prune, monkeypatch) -> None:
        monkeypatch.setattr(pruning, "KEPT_WORKERS", 2)
        for number in range(5):
            shop.register(f"worker-{number}")
            shop.registration.set_worker_state(f"worker-{number}", "lost")
        assert prune(in_days=0) == replace(NOTHING, workers=3)
        assert [worker["id"] for worker in reading.workers()] == ["worker-3", "worker-4"]

    def test_names_are_known_as_long_as_somebody_had_them(self, shop: Any, reading: Reading, prune: Any) -> None:
        shop.register("gone", capabilities=frozenset({"attention:old"}))
        shop.registration.set_worker_state("gone", "stopped")
        shop.register("alive", capabilities=frozenset({"attention:new"}))
        prune(in_days=29)
        assert reading.known_names()["capabilities"] == {"attention:old", "attention:new"}
        prune(in_days=31)
        assert reading.known_names()["capabilities"] == {"attention:new"}

    def test_a_forgotten_worker_registers_again(self, shop: Any, prune: Any) -> None:
        shop.register()
        assert shop.queue.renew([], ("worker", "active")).knows_worker
        shop.registration.set_worker_state("worker", "lost")
        prune(in_days=31)
        assert not shop.queue.renew([], ("worker", "active")).knows_worker


class TestEvents:
    def test_progress_and_output_go_and_the_log_stays(self, shop, queue, reading, prune) -> None:
        job_id = finished(shop, queue)
        running = shop.running_job()
        queue.report(running, [NewEvent("log", {"text": "still running"})])
        before = reading.job(job_id)
        assert prune(in_days=8) == replace(NOTHING, events=4)
        assert [event["type"] for event in reading.events(job_id)] == ["state", "state", "state", "done"]
        assert (reading.log(job_id), reading.job(job_id)) == ("a line\n", before)
        assert reading.log(running.job_id) == "still running"

    def test_a_log_that_stands_nowhere_else_stays(self, shop: Any, queue: Queue, reading: Reading, prune: Any) -> None:
        job_id = finished(shop, queue, log=None)
        assert prune(in_days=8) == replace(NOTHING, events=3)
        assert reading.log(job_id) == "a line\n"

    def test_the_log_of_a_lost_attempt_stays(self, shop: Any, queue: Queue, reading: Reading, prune: Any) -> None:
        lost = shop.running_job()
        queue.report(lost, [NewEvent("log", {"text": "last words\n"})])
        queue.recover(queue.running()[0])
        again = shop.claim()
        queue.report(again, [NewEvent("log", {"text": "a line\n"})])
        queue.finish(again, Finish("succeeded", log="a line\n"))
        assert prune(in_days=8) == replace(NOTHING, events=1)
        assert (reading.log(lost.job_id, 1), reading.log(lost.job_id, 2)) == ("last words\n", "a line\n")

    def test_jobs_that_ended_since_are_looked_at_next_time(self, shop, queue, reading, database, files) -> None:
        claim = shop.running_job()  # submitted first, ends last
        finished(shop, queue)
        made = Pruning(Slices(database), files, KEPT, clock=lambda: utc_now() + timedelta(days=8))
        assert made.run().events == 4
        queue.report(claim, [NewEvent("progress", {"done": 1, "total": 1, "message": ""})])
        queue.finish(claim, Finish("succeeded"))
        assert made.run().events == 1


def test_keys_go(shop: Any, queue: Queue, prune: Any) -> None:
    key = Idempotency("key", "POST /jobs", "digest")
    first = shop.submit(idempotency=key)
    assert prune(in_days=29) == NOTHING
    assert shop.submit(idempotency=key) == first
    assert prune(in_days=31) == replace(NOTHING, keys=1)
    assert shop.submit(idempotency=key) != first


class TestJobs:
    def test_finished_ones_go_with_everything(self, shop, queue, prune, results, database, files) -> None:
        sha256, size = files.put_bytes(b"trace")
        stored = StoredArtifact(0, "trace.json", "trace", "application/json", size, sha256)
        finished(shop, queue, measurements=results.measurements, artifacts=[stored])
        files.release([sha256])
        queued = shop.submit()
        assert prune(in_days=91) == replace(NOTHING, jobs=1)
        assert rows(database).keys() == {"job", "event"}
        with pytest.raises(NotFound):
            files.open_path(sha256)
        assert Reading(database).job(queued)[0]["state"] == "queued"

    def test_by_default_none_ever(self, shop: Any, queue: Queue, prune: Any) -> None:
        finished(shop, queue)
        default = Retention.of(Settings())
        assert default.jobs is None
        assert prune(30_000, default) == replace(NOTHING, events=4)

    def test_a_sweep_goes_after_its_last_job(self, shop: Any, queue: Queue, prune: Any, database: Database) -> None:
        jobs = [NewJob(BenchmarkSpec(seed=seed), point={"seed": seed}) for seed in range(2)]
        queue.submit_sweep("s", {}, {}, {}, [], jobs)
        queue.finish(shop.claim(), Finish("succeeded"))
        assert prune(in_days=91) == replace(NOTHING, jobs=1)
        queue.cancel(2)
        assert prune(in_days=91) == replace(NOTHING, jobs=1, sweeps=1)
        assert rows(database) == {}


def many_measurements(database: Database, job_id: int, number: int) -> None:
    """Rows as a job's results have them, without making each."""
    row = dict.fromkeys(("mean", "median", "min", "max"), 1.0)
    row |= {"job_id": job_id, "attempt": 1, "unit_index": 0, "case": {"i": 1}, "case_key": "key", "device_key": "cpu"}
    row |= {"metric": "step_ms", "unit": "ms", "outcome": "ok", "partial": False, "n": 1, "samples": b"x" * 300}
    with database.write() as connection:
        connection.execute(insert(tables.measurement), [row] * number)


def delete_in_slices(database: Database, job_id: int, *, slice_s: float, pause: Any = None) -> int:
    """Delete a job; returns the number of deleted jobs."""
    return deleting.delete_jobs(Slices(database, slice_s=slice_s, pause=pause), [tables.job.c.id == job_id]).jobs


def delete_one_slice(database: Database, job_id: int) -> int:
    """Delete a job, but stop after the first slice; returns the number of deleted jobs."""
    changes = Slices(database, slice_s=0.0, pause=lambda _seconds: changes.stop())
    return deleting.delete_jobs(changes, [tables.job.c.id == job_id]).jobs


def test_others_write_between_slices(database: Database) -> None:
    """Each slice is followed by a pause as long as itself, in which the lock is free."""
    paused: list[float] = []

    def pause(seconds: float) -> None:
        with database.write():  # nobody holds it
            paused.append(seconds)

    change = Slices(database, pause=pause)
    began = time.monotonic()
    steps = iter((1, 1, 1, 0))

    def step(_connection: Any) -> int:
        time.sleep(slices.SLICE_S)
        return next(steps)

    assert change.run(step) == 3
    assert len(paused) == 3
    assert 3 * slices.SLICE_S <= sum(paused) <= time.monotonic() - began


@pytest.mark.parametrize("by", ["repetition", "upkeep"])
def test_nobody_reads_a_part_of_the_results(database, queue, shop, reading, files, monkeypatch, by) -> None:
    """Stopped after its first slice, as by the end of the process, a deletion leaves no half results behind, and is
    completed, also where finished jobs are kept for ever."""
    monkeypatch.setattr(deleting, "ROWS_AT_ONCE", 5)
    sha256, size = files.put_bytes(b"trace")
    files.release([sha256])
    artifact = StoredArtifact(0, "trace", "trace", "text/plain", size, sha256)
    job_id, other = finished(shop, queue, artifacts=[artifact]), finished(shop, queue)
    many_measurements(database, job_id, 20)
    assert delete_one_slice(database, job_id) == 0
    assert rows(database)["measurement"] == 15
    assert reading.measurements(job_id)["rows"] == []
    if by == "repetition":
        assert delete_job(database, job_id) == [sha256]
    else:
        made = Pruning(Slices(database), files, replace(KEPT, jobs=None))
        assert made.plan().jobs == made.run().jobs == 1
        with pytest.raises(NotFound):
            files.open_path(sha256)
    assert [job["id"] for job in reading.jobs()[0]] == [other]
    assert "measurement" not in rows(database)


def test_control_of_the_slices(database, queue, shop, monkeypatch) -> None:
    """A transaction that takes every step leaves others no pause before all is gone."""
    monkeypatch.setattr(deleting, "ROWS_AT_ONCE", 5)
    job_id = finished(shop, queue)
    many_measurements(database, job_id, 20)
    paused: list[float] = []
    assert delete_in_slices(database, job_id, slice_s=3600.0, pause=paused.append) == 1
    assert rows(database) == {}
    assert paused == []


def test_a_job_that_is_being_deleted_cannot_be_retried(database, queue, shop, monkeypatch) -> None:
    monkeypatch.setattr(deleting, "ROWS_AT_ONCE", 5)
    claim = shop.running_job()
    queue.finish(claim, Finish("failed", error=job_problem("failed", "it broke")))
    many_measurements(database, claim.job_id, 8)
    answers = []

    def retry(_seconds: float) -> None:
        with pytest.raises(FlopwatchError) as refused:
            queue.retry(claim.job_id)
        answers.append(refused.value.code)

    assert delete_in_slices(database, claim.job_id, slice_s=0.0, pause=retry) == 1
    assert answers[0] == "conflict"
    assert set(answers) <= {"conflict", "not_found"}
    assert rows(database) == {}


def test_control_of_the_order(database, queue, shop, reading, monkeypatch) -> None:
    """With the attempts deleted last, as ON DELETE CASCADE would, the part that is left is shown as the whole."""

    def rows_first(connection: Any, job_ids: Any, _contents: Any) -> int:
        some = select(tables.measurement.c.id).where(tables.measurement.c.job_id.in_(job_ids)).limit(5)
        return int(connection.execute(delete(tables.measurement).where(tables.measurement.c.id.in_(some))).rowcount)

    monkeypatch.setattr(deleting, "_delete_rows", rows_first)
    job_id = finished(shop, queue)
    many_measurements(database, job_id, 20)
    delete_one_slice(database, job_id)
    assert len(reading.measurements(job_id)["rows"]) == 15


def test_a_job_that_is_queued_again_meanwhile_is_not_deleted(database: Database, queue: Queue, shop: Any) -> None:
    job_id = finished(shop, queue)
    with database.write() as connection:
        connection.execute(update(tables.job).values(state="queued"))
    assert deleting.delete_jobs(Slices(database), [tables.job.c.id == job_id]).jobs == 0
    assert rows(database)["attempt"] == 1


@ON_SQLITE
class TestFile:
    def grown(self, database: Database, queue: Queue, shop: Any) -> int:
        """A database of some megabytes that are free again."""
        job_id = finished(shop, queue)
        many_measurements(database, job_id, 5000)
        database.checkpoint()
        size = database.backend.size
        delete_job(database, job_id)
        database.checkpoint()
        return size

    def test_it_shrinks(self, database: Database, queue: Queue, shop: Any, files: ArtifactFiles) -> None:
        before = self.grown(database, queue, shop)
        assert database.backend.size >= before, "free pages stay in the file"
        made = Pruning(Slices(database), files, KEPT)
        assert made.plan().pages == made.run().pages > 0
        database.checkpoint()
        assert database.backend.size < before / 2
        with database.read() as connection:
            assert connection.exec_driver_sql("PRAGMA integrity_check").scalar_one() == "ok"
