"""The state machine, one transition at a time."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, event, update
from sqlalchemy.exc import StatementError

from app.errors import Conflict, DatabaseFailed, KeyTaken, LeaseLost, NotFound, QueueFull, job_problem
from app.results import list_tables
from app.specs.benchmark import BenchmarkSpec
from app.store import tables
from app.store.database.engine import Database
from app.store.keeping.deleting import delete_job
from app.store.queue import fence, submission
from app.store.queue.pausing import Pausing
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from app.store.records import (
    Claim,
    Finish,
    HandedOver,
    Idempotency,
    NewEvent,
    NewJob,
    StoredArtifact,
    TableRecord,
    UnitRecord,
)

FAILURE = Finish("failed", error=job_problem("crashed", "exit code 1"), log="boom\n")


def job(reading: Reading, job_id: int) -> dict[str, Any]:
    return reading.job(job_id)[0]


def progress(done: int) -> NewEvent:
    return NewEvent("progress", {"done": done, "total": 9, "message": "measuring"})


def states(reading: Reading, job_id: int) -> list[str]:
    return [event["data"]["state"] for event in reading.events(job_id) if event["type"] == "state"]


def everything(reading: Reading, job_id: int) -> tuple[Any, ...]:
    return (
        reading.job(job_id),
        reading.events(job_id),
        reading.attempts(job_id),
        reading.measurements(job_id),
        reading.artifacts(job_id),
        reading.log(job_id),
    )


def test_ids_are_not_reused(shop: Any, queue: Queue, database: Database) -> None:
    first = shop.submit()
    queue.cancel(first)
    delete_job(database, first)
    assert shop.submit() > first


def points(*lengths: int, **options: Any) -> list[NewJob]:
    """Jobs of a sweep over context lengths."""
    return [
        NewJob(BenchmarkSpec(context_length=length), point={"context_length": index}, **options)
        for index, length in enumerate(lengths)
    ]


class TestSweep:
    def test_a_sweep_and_its_jobs_land_together(self, queue: Queue, reading: Reading) -> None:
        jobs = points(128, 256, 512)
        submitted = queue.submit_sweep("lengths", {"a": "b"}, {"kind": "benchmark"}, {"context_length": [1]}, [], jobs)
        sweep = submitted.response
        assert sweep == reading.sweep(sweep["id"])
        assert sweep["counts"] == {"queued": 3, "running": 0, "succeeded": 0, "failed": 0, "cancelled": 0}
        found, _ = reading.jobs(sweep=sweep["id"])
        assert [one["spec"]["context_length"] for one in reversed(found)] == [128, 256, 512]

    def test_a_sweep_that_fails_halfway_leaves_nothing(self, queue: Queue, reading: Reading) -> None:
        with pytest.raises(DatabaseFailed, match=r"(?i)unique"):
            queue.submit_sweep(None, {}, {}, {}, [], points(8, 16, unique_key="of one job"))
        assert reading.counts()["queued"] == 0
        assert reading.sweeps() == ([], None)


@pytest.fixture
def swept(queue: Queue, shop: Any) -> int:
    """A sweep of four points: one succeeded, one failed, one runs and one is queued."""
    base, grid = {"kind": "benchmark"}, {"context_length": [8, 16, 32, 64]}
    jobs = points(8, 16, 32, 64, priority=1, timeout_s=5.0)
    sweep = queue.submit_sweep("s", {"a": "b"}, base, grid, [], jobs).response
    queue.finish(shop.claim(), Finish("succeeded"))
    queue.finish(shop.claim(), FAILURE)
    shop.claim()
    return int(sweep["id"])


class TestStatementsOfSweeps:
    """While a large sweep is submitted or resumed, nobody else can write: it takes few statements, whatever its
    size."""

    @pytest.fixture
    def statements(self) -> Iterator[list[str]]:
        executed: list[str] = []

        def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            executed.append(statement)

        event.listen(Engine, "before_cursor_execute", note)
        yield executed
        event.remove(Engine, "before_cursor_execute", note)

    def test_the_size_does_not_matter(self, queue: Queue, database: Database, statements: list[str]) -> None:
        numbers = []
        for length in (2, 200):
            grid = {"context_length": list(range(1, length + 1))}
            jobs = points(*grid["context_length"], labels={"a": "b"})
            statements.clear()
            sweep = queue.submit_sweep("s", {"a": "b"}, {"kind": "benchmark"}, grid, [], jobs).response["id"]
            of_submission = len(statements)
            queue.cancel_sweep(sweep)
            statements.clear()
            queue.resume_sweep(sweep)
            of_cancelled = len(statements)
            with database.write() as connection:
                connection.exec_driver_sql(f"DELETE FROM job WHERE sweep_id = {sweep}")
            statements.clear()
            assert queue.resume_sweep(sweep)["counts"]["queued"] == length
            numbers.append((of_submission, of_cancelled, len(statements)))
        assert numbers[0] == numbers[1]


class TestSweepsAsWholes:
    def test_cancelling_leaves_what_is_finished(self, queue: Queue, reading: Reading, swept: int) -> None:
        counts = {"queued": 0, "running": 1, "succeeded": 1, "failed": 1, "cancelled": 1}
        for _ in range(2):
            assert queue.cancel_sweep(swept) == reading.sweep(swept)
            assert reading.sweep(swept)["counts"] == counts
        running = next(job for job in reading.jobs(sweep=swept)[0] if job["state"] == "running")
        assert running["cancel_requested_at"] is not None
        events = reading.events(running["id"])
        assert [event["data"].get("cancel_requested") for event in events] == [None, None, True]

    def test_what_is_being_cancelled_is_resumed_too(self, queue: Queue, reading: Reading, swept: int) -> None:
        queue.cancel_sweep(swept)
        assert reading.sweep(swept)["counts"]["running"] == 1, "its worker has not heard of it yet"
        queue._max_queued = 2
        with pytest.raises(QueueFull, match="3 more would exceed 2"):
            queue.resume_sweep(swept)
        queue._max_queued = 3
        counts = queue.resume_sweep(swept)["counts"]
        assert counts == {"queued": 3, "running": 0, "succeeded": 1, "failed": 0, "cancelled": 0}

    def test_a_points_former_job_follows_a_deleted_one(self, queue, reading, swept, database) -> None:
        queue.resume_sweep(swept)
        queue.cancel_sweep(swept)
        delete_job(database, reading.jobs(sweep=swept)[0][0]["id"])
        assert reading.sweep(swept)["counts"]["failed"] == 1

    @pytest.mark.parametrize("deleted", [["failed"], ["succeeded", "failed"]], ids=" and ".join)
    def test_resuming_submits_points_whose_jobs_were_deleted(self, queue, reading, swept, deleted, database) -> None:
        before = {job["spec"]["context_length"]: job for job in reading.jobs(sweep=swept)[0]}
        gone = {length: job for length, job in before.items() if job["state"] in deleted}
        for job in gone.values():
            delete_job(database, job["id"])
        sweep = queue.resume_sweep(swept)
        assert sweep == reading.sweep(swept)
        assert sweep["counts"]["queued"] == 1 + len(gone)
        now = {job["spec"]["context_length"]: job for job in reading.jobs(sweep=swept)[0]}
        assert set(now) == set(before)
        same = ("kind", "spec", "summary", "priority", "timeout_s", "max_attempts", "sweep_id")
        for length, job in gone.items():
            assert {name: now[length][name] for name in same} == {name: job[name] for name in same}
            assert (now[length]["name"], now[length]["labels"]) == (f"s: context_length={length}", {"a": "b"})
            assert states(reading, now[length]["id"]) == ["queued"]
        with pytest.raises(Conflict, match="nothing to resume"):
            queue.resume_sweep(swept)

    def test_a_point_that_is_no_longer_valid_says_so(self, queue, reading, swept, database) -> None:
        with database.write() as connection:
            connection.exec_driver_sql("""UPDATE sweep SET base = '{"kind": "benchmark", "gone": 1}'""")
        assert queue.resume_sweep(swept)["counts"]["queued"] == 2, "jobs that are there are run as they are"
        queue.cancel_sweep(swept)
        for job in reading.jobs(sweep=swept)[0]:
            if job["spec"]["context_length"] == 16:
                delete_job(database, job["id"])
        with pytest.raises(Conflict, match=r"does not take its point context_length = 16: Extra inputs"):
            queue.resume_sweep(swept)


class TestIdempotency:
    KEY = Idempotency("key", "POST /jobs", "digest")

    def test_the_same_request_gets_the_first_answer(self, queue: Queue, reading: Reading) -> None:
        first = queue.submit(NewJob(BenchmarkSpec()), self.KEY)
        queue.cancel(first.response["id"])
        again = queue.submit(NewJob(BenchmarkSpec()), self.KEY)
        assert again.replayed
        assert again.response == first.response
        assert sum(reading.counts().values()) == 1


class TestRunning:
    def test_a_success_lands_with_all_it_leaves(self, shop, queue, reading, results) -> None:
        claim = shop.running_job()
        assert queue.finish(claim, results) == "succeeded"
        found = job(reading, claim.job_id)
        assert (found["state"], found["error"]) == ("succeeded", None)
        assert (found["environment"], found["validity"]) == ({"gpu": None}, {"valid": True})
        assert found["finished_at"] >= found["started_at"]
        (row,) = reading.measurements(claim.job_id)["rows"]
        assert (row["metric"], row["mean"], row["partial"]) == ("step_ms", 2.0, False)
        assert [artifact["name"] for artifact in reading.artifacts(claim.job_id)] == ["trace.json"]
        assert reading.log(claim.job_id) == "done\n"
        assert reading.events(claim.job_id)[-1]["type"] == "done"
        assert states(reading, claim.job_id) == ["queued", "running", "succeeded"]

    def test_what_a_failed_job_measured_is_partial(self, shop, queue, reading, record, database) -> None:
        claim = shop.running_job()
        of_unit = {"units": [UnitRecord(0, "first", "crashed")], "tables": [TableRecord(0, "kernels", [], 0, b"")]}
        assert queue.finish(claim, replace(FAILURE, measurements=[record()], **of_unit)) == "failed"
        assert job(reading, claim.job_id)["error"]["code"] == "crashed"
        assert reading.measurements(claim.job_id)["rows"][0]["partial"]
        assert reading.units(claim.job_id)[0]["partial"]
        assert list_tables(database, claim.job_id)[0]["partial"]

    def test_a_finish_that_breaks_off_leaves_nothing(self, shop, queue, reading, results) -> None:
        claim = shop.running_job()
        before = everything(reading, claim.job_id)
        with pytest.raises(StatementError, match="object"):
            queue.finish(claim, replace(results, environment={"not JSON": object()}))
        assert everything(reading, claim.job_id) == before

    def test_giving_back_does_not_use_the_attempt_up(self, shop: Any, queue: Queue, reading: Reading) -> None:
        claim = shop.running_job(max_attempts=1)
        queue.report(claim, [NewEvent("log", {"text": "first\n"}), progress(1)])
        queue.give_back(claim)
        found = job(reading, claim.job_id)
        assert (found["state"], found["attempt"], found["worker_id"], found["started_at"]) == ("queued", 0, None, None)
        assert found["progress"]["done"] == 0
        again = shop.claim("w2")
        assert (again.job_id, again.attempt) == (claim.job_id, 1)
        queue.report(again, [NewEvent("log", {"text": "second\n"})])
        assert reading.log(claim.job_id) == "second\n"
        assert queue.finish(again, Finish("succeeded")) == "succeeded"
        assert [attempt["state"] for attempt in reading.attempts(claim.job_id)] == ["given_back", "succeeded"]


class TestHandingOver:
    """A claim that another worker takes over."""

    def handed(self, claim: Claim) -> HandedOver:
        return HandedOver(claim.job_id, claim.attempt, claim.token)

    def test_only_the_new_token_counts(self, shop: Any, queue: Queue, reading: Reading) -> None:
        first = shop.running_job()
        second = queue.take_over(self.handed(first), "new", "other")
        assert queue.renew([first]).lost == frozenset({first.attempt_id})
        assert queue.renew([second]).lost == frozenset()
        with pytest.raises(LeaseLost):
            queue.finish(first, Finish("succeeded"))
        assert queue.finish(second, Finish("succeeded")) == "succeeded"
        assert job(reading, first.job_id)["worker_id"] == "other"
        (attempt,) = reading.attempts(first.job_id)
        assert (attempt["state"], attempt["worker_id"]) == ("succeeded", "other")

    def test_nobody_takes_it_over_twice(self, shop: Any, queue: Queue) -> None:
        claim = shop.running_job()
        queue.take_over(self.handed(claim), "new", "other")
        with pytest.raises(LeaseLost, match="taken over"):
            queue.take_over(self.handed(claim), "third", "another")

    def test_control_a_claim_that_keeps_its_token_is_taken_over_twice(self, shop: Any, queue: Queue) -> None:
        claim = shop.running_job()
        for worker in ("other", "another"):
            assert queue.take_over(self.handed(claim), claim.token, worker)
        assert queue.renew([claim]).lost == frozenset()

    def test_a_lost_answer_is_repeated(self, shop: Any, queue: Queue) -> None:
        claim = shop.running_job()
        taken = [queue.take_over(self.handed(claim), "new", "other") for _ in range(2)]
        assert taken[0] == taken[1]

    def test_an_attempt_that_is_over_is_not_taken_over(self, shop: Any, queue: Queue) -> None:
        claim = shop.running_job()
        queue.give_back(claim)
        assert shop.claim().attempt == claim.attempt
        with pytest.raises(LeaseLost):
            queue.take_over(self.handed(claim), "new", "other")

    def test_a_job_whose_kind_was_paused_meanwhile_goes_back(self, shop, queue, database, reading) -> None:
        job_id = shop.submit()
        claim = queue.claim("worker-1", shop.offer(), waits_for="its allocation")
        Pausing(database).pause("all")
        with pytest.raises(LeaseLost, match="went back: the queue is paused"):
            queue.take_over(self.handed(claim), "new", "other")
        assert (job(reading, job_id)["state"], job(reading, job_id)["attempt"]) == ("queued", 0)
        Pausing(database).pause([])
        again = queue.claim("worker-1", shop.offer(), waits_for="its allocation")
        assert queue.take_over(self.handed(again), "new", "other").attempt == 1
        Pausing(database).pause("all")
        assert queue.take_over(self.handed(again), "new", "other"), "a lost answer is repeated: it runs already"

    def test_a_worker_that_is_lost_before_the_job_began_costs_no_attempt(self, shop, queue, reading) -> None:
        job_id = shop.submit(max_attempts=1)
        queue.claim("worker-1", shop.offer(), waits_for="its allocation")
        assert queue.recover(*queue.running()) == "queued"
        assert (job(reading, job_id)["attempt"], reading.attempts(job_id)[0]["state"]) == (0, "given_back")

    def test_a_job_that_a_former_server_has_ended_does_not_start(self, shop, queue, database, reading) -> None:
        """Release 0.1.0 ends a queued job and knows nothing of its attempt, which waits in a cluster."""
        claim = shop.running_job()
        with database.write() as connection:
            connection.execute(update(tables.job).values(state="cancelled"))
        with pytest.raises(LeaseLost, match="is cancelled"):
            queue.take_over(self.handed(claim), "new", "other")
        assert reading.job(claim.job_id)[0]["state"] == "cancelled"


STALE_WRITES: dict[str, Callable[[Queue, Claim, Finish], object]] = {
    "report": lambda queue, claim, _: queue.report(claim, [progress(9)]),
    "finish": lambda queue, claim, results: queue.finish(claim, results),
    "fail": lambda queue, claim, _: queue.finish(claim, FAILURE),
    "give_back": lambda queue, claim, _: queue.give_back(claim),
}


@pytest.mark.parametrize("write", STALE_WRITES.values(), ids=STALE_WRITES.keys())
class TestFence:
    @pytest.mark.parametrize("field", ["token", "attempt", "attempt_id", "job_id"])
    def test_each_part_of_a_claim_counts(self, write, field, queue, reading, shop, results) -> None:
        claim, other = shop.running_job(), shop.running_job()
        forged = replace(claim, **{field: "0" * 32 if field == "token" else getattr(other, field) + 1})
        before = everything(reading, claim.job_id), everything(reading, other.job_id)
        with pytest.raises(LeaseLost):
            write(queue, forged, results)
        assert (everything(reading, claim.job_id), everything(reading, other.job_id)) == before


def left(attempt: int, **changes: Any) -> dict[str, Any]:
    """What an attempt leaves: a measurement, a unit, a table, an artifact and a log, with its number in each."""
    sha256 = f"{attempt:02}" * 32
    return {
        "units": [UnitRecord(0, f"unit of {attempt}", "succeeded")],
        "tables": [TableRecord(0, "kernels", [{"name": "n", "type": "integer", "unit": None}], attempt, b"")],
        "artifacts": [StoredArtifact(0, "trace.json", "trace", "application/json", attempt, sha256)],
        "environment": {"attempt": attempt},
        "validity": {"verdict": "valid", "attempt": attempt},
        "log": f"log of {attempt}\n",
        **changes,
    }


class TestRetry:
    @pytest.mark.parametrize("ending", ["failed", "cancelled"])
    def test_a_job_runs_once_more(self, shop: Any, queue: Queue, reading: Reading, ending: str) -> None:
        claim = shop.running_job(max_attempts=1, labels={"a": "b"}, priority=3)
        if ending == "cancelled":
            queue.cancel(claim.job_id)
        queue.finish(claim, FAILURE)
        before = job(reading, claim.job_id)
        retried = queue.retry(claim.job_id)
        assert retried == job(reading, claim.job_id)
        assert (retried["state"], retried["attempt"], retried["max_attempts"]) == ("queued", 1, 2)
        fresh = queue.submit(NewJob(BenchmarkSpec())).response
        for field in ("error", "worker_id", "started_at", "finished_at", "cancel_requested_at", "progress"):
            assert retried[field] == fresh[field], field
        for field in ("id", "spec", "labels", "priority", "created_at", "timeout_s"):
            assert retried[field] == before[field], field
        again = shop.claim()
        assert (again.job_id, again.attempt) == (claim.job_id, 2)
        assert queue.renew([again]).cancel_requested == frozenset(), "nobody asked for that again"
        queue.finish(again, Finish("succeeded"))
        assert job(reading, claim.job_id)["state"] == "succeeded"
        assert states(reading, claim.job_id)[-4:] == [ending, "queued", "running", "succeeded"]

    def test_what_an_attempt_left_stays_readable(self, shop, queue, reading, record, database) -> None:
        claim = shop.running_job(max_attempts=1)
        job_id = claim.job_id
        queue.finish(claim, replace(FAILURE, **left(1, measurements=[record(n=1)])))
        queue.retry(job_id)
        assert reading.log(job_id) == "log of 1\n"
        again = shop.claim()
        queue.report(again, [NewEvent("log", {"text": "live of 2\n"})])
        assert reading.log(job_id) == reading.log(job_id, 2) == "live of 2\n"
        assert reading.measurements(job_id)["rows"][0]["attempt"] == 1, "the last that recorded any"
        queue.finish(again, Finish("succeeded", **left(2, measurements=[record(n=2)])))
        assert job(reading, job_id)["validity"] == {"verdict": "valid", "attempt": 2}
        for attempt, chosen in ((1, 1), (2, 2), (2, None)):
            query = "" if chosen is None else f"?attempt={chosen}"
            assert reading.log(job_id, chosen) == f"log of {attempt}\n"
            (row,) = reading.measurements(job_id, attempt=chosen)["rows"]
            assert (row["n"], row["attempt"], row["unit_title"]) == (attempt, attempt, f"unit of {attempt}")
            (unit,) = reading.units(job_id, chosen)
            assert (unit["title"], unit["attempt"]) == (f"unit of {attempt}", attempt)
            (file,) = reading.artifacts(job_id, chosen)
            assert (file["attempt"], file["size"]) == (attempt, attempt)
            assert file["url"] == unit["artifacts"][0]["url"] == f"/jobs/{job_id}/artifacts/trace.json{query}"
            assert reading.artifact(job_id, "trace.json", chosen) == file
            (table,) = list_tables(database, job_id, chosen)
            assert (table["rows"], table["url"]) == (attempt, f"/jobs/{job_id}/tables/kernels{query}")
        first, second = reading.attempts(job_id)
        assert (first["state"], first["error"]["code"], second["error"]) == ("failed", "crashed", None)
        assert first["links"]["logs"] == f"/jobs/{job_id}/logs?attempt=1"
        for read in (reading.log, reading.units, reading.artifacts):
            with pytest.raises(NotFound, match="no attempt 3"):
                read(job_id, 3)
        assert delete_job(database, job_id) == ["01" * 32, "02" * 32]

    @pytest.mark.parametrize("write", STALE_WRITES.values(), ids=STALE_WRITES.keys())
    def test_a_late_write_of_the_former_attempt_does_not_count(
        self, write, shop, queue, reading, results, monkeypatch
    ) -> None:
        former = shop.running_job(max_attempts=1)
        assert queue.recover(queue.running()[0]) == "failed"
        queue.retry(former.job_id)

        def refused() -> None:
            before = everything(reading, former.job_id)
            with pytest.raises(LeaseLost):
                write(queue, former, results)
            assert everything(reading, former.job_id) == before

        refused()
        shop.claim("w2")
        refused()
        before = everything(reading, former.job_id)
        monkeypatch.setattr(fence, "check", lambda connection, claim: None)
        write(queue, former, results)
        assert everything(reading, former.job_id) != before, "without the fence it counts"

    def test_a_job_whose_point_was_resumed_is_not(self, queue: Queue, reading: Reading, swept: int) -> None:
        """Else two jobs would measure one point, and the sweep would show the other one."""
        (failed,) = [job for job in reading.jobs(sweep=swept)[0] if job["state"] == "failed"]
        queue.resume_sweep(swept)
        newest = reading.jobs(sweep=swept)[0][0]["id"]
        with pytest.raises(Conflict, match=f"job {newest} stands in the place of job {failed['id']}"):
            queue.retry(failed["id"])
        queue.cancel_sweep(swept)
        assert queue.retry(newest)["state"] == "queued"


class TestUniqueKey:
    def test_one_job_with_a_key_is_on_its_way(self, shop: Any, queue: Queue, reading: Reading) -> None:
        first = shop.submit(unique_key="nightly")
        assert job(reading, first)["unique_key"] == "nightly"
        shop.submit(unique_key="other")
        shop.submit()

        def refused(state: str) -> None:
            with pytest.raises(KeyTaken, match=f"Job {first} with the unique_key 'nightly' is {state}") as taken:
                shop.submit(unique_key="nightly")
            assert taken.value.extensions == {"job_id": first}

        refused("queued")
        claim = shop.claim()
        refused("running")
        queue.give_back(claim)
        refused("queued")
        queue.cancel(first)
        second = shop.submit(unique_key="nightly")
        with pytest.raises(KeyTaken, match=f"Job {second}"):
            queue.retry(first)
        assert job(reading, first)["state"] == "cancelled"
        queue.cancel(second)
        assert queue.retry(first)["unique_key"] == "nightly"

    def test_a_refused_one_leaves_nothing(self, shop: Any, database: Database) -> None:
        shop.submit(unique_key="k")
        key = Idempotency("k", "POST /jobs", "d")
        with pytest.raises(KeyTaken):
            shop.submit(unique_key="k", labels={"a": "b"}, idempotency=key)
        with database.read() as connection:
            for table, rows in (("job", 1), ("job_label", 0), ("event", 1), ("idempotency_key", 0)):
                assert connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one() == rows

    def test_a_repeated_request_gets_its_first_answer(self, shop: Any) -> None:
        key = Idempotency("k", "POST /jobs", "d")
        assert shop.submit(unique_key="k", idempotency=key) == shop.submit(unique_key="k", idempotency=key)

    def test_the_index_refuses_a_second_one(self, shop: Any, reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever the code believes."""
        monkeypatch.setattr(submission, "check_key", lambda connection, unique_key: None)
        shop.submit(unique_key="k")
        with pytest.raises(DatabaseFailed, match=r"(UNIQUE.*|unique.*)unique_key"):
            shop.submit(unique_key="k")
        assert reading.counts()["queued"] == 1

    def test_control_of_the_key(self, shop: Any, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        with database.write() as connection:
            connection.exec_driver_sql("DROP INDEX ix_job_unique_key")
        monkeypatch.setattr(submission, "check_key", lambda connection, unique_key: None)
        assert shop.submit(unique_key="k") < shop.submit(unique_key="k")


class TestDelete:
    def test_all_that_belongs_to_a_job_goes_with_it(self, shop, queue, reading, results, database) -> None:
        claim = shop.running_job(labels={"a": "b"})
        left = {"units": [UnitRecord(0, "u", "succeeded")], "tables": [TableRecord(0, "t", [], 0, b"")]}
        queue.finish(claim, replace(results, **left))
        kept = shop.submit()
        assert delete_job(database, claim.job_id) == ["ab" * 32]
        with pytest.raises(NotFound):
            reading.job(claim.job_id)
        with database.read() as connection:
            for table in ("attempt", "measurement", "unit", "result_table", "artifact", "event", "job_label"):
                sql = f"SELECT count(*) FROM {table} WHERE job_id = {claim.job_id}"
                assert connection.exec_driver_sql(sql).scalar_one() == 0
        assert job(reading, kept)["state"] == "queued"

    def test_a_content_that_another_job_refers_to_is_not_returned(self, shop, results, database) -> None:
        first, second = (shop.ran(artifacts=results.artifacts) for _ in range(2))
        assert delete_job(database, first) == []
        assert delete_job(database, second) == ["ab" * 32]

    def test_only_finished_jobs_can_be_deleted(self, shop: Any, queue: Queue, database: Database) -> None:
        job_id = shop.submit()
        with pytest.raises(Conflict, match="queued"):
            delete_job(database, job_id)
        shop.claim()
        with pytest.raises(Conflict, match="running"):
            delete_job(database, job_id)
