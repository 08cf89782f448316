"""The state machine, one transition at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy.exc import StatementError

from app.errors import Conflict, IdempotencyMismatch, LeaseLost, NotFound, job_problem
from app.settings import Settings
from app.specs.benchmark import BenchmarkSpec
from app.store import queue as queue_module
from app.store import sqlite
from app.store.engine import Database
from app.store.queue import Queue
from app.store.reading import Reading
from app.store.records import Claim, Finish, Idempotency, MeasurementRecord, NewEvent, NewJob, RunningAttempt

FAILURE = Finish("failed", error=job_problem("crashed", "exit code 1"), log="boom\n")
ENDINGS = {"succeeded": Finish("succeeded"), "failed": FAILURE, "cancelled": Finish("cancelled")}


def job(reading: Reading, job_id: int) -> dict[str, Any]:
    return reading.job(job_id)[0]


def progress(done: int) -> NewEvent:
    return NewEvent("progress", {"done": done, "total": 9, "message": "measuring"})


def states(reading: Reading, job_id: int) -> list[str]:
    return [event["data"]["state"] for event in reading.events(job_id) if event["type"] == "state"]


def everything(reading: Reading, job_id: int) -> tuple[Any, ...]:
    """All that can be read of a job."""
    return (
        reading.job(job_id),
        reading.events(job_id),
        reading.attempts(job_id),
        reading.measurements(job_id),
        reading.artifacts(job_id),
        reading.log(job_id),
    )


class TestSubmit:
    def test_the_answer_is_the_job_as_it_is_read_later(self, queue: Queue, reading: Reading) -> None:
        new = NewJob(BenchmarkSpec(), name="first", labels={"team": "a"}, priority=3, timeout_s=1.5, max_attempts=1)
        submitted = queue.submit(new)
        assert not submitted.replayed
        assert submitted.response == job(reading, submitted.response["id"])

    def test_the_public_job_has_the_contracts_fields(self, queue: Queue) -> None:
        response = queue.submit(NewJob(BenchmarkSpec())).response
        assert list(response) == [
            "id", "kind", "name", "labels", "state", "spec", "priority", "attempt", "max_attempts", "timeout_s",
            "progress", "error", "worker_id", "sweep_id", "created_at", "started_at", "finished_at",
            "cancel_requested_at", "environment", "validity", "links",
        ]  # fmt: skip
        assert response["state"] == "queued"
        assert response["progress"] == {"done": 0, "total": 0, "message": ""}
        assert response["spec"] == BenchmarkSpec().model_dump(mode="json")
        assert response["created_at"].endswith("Z")
        assert response["links"]["measurements"] == f"/jobs/{response['id']}/measurements"

    def test_ids_are_not_reused(self, shop: Any, queue: Queue) -> None:
        first = shop.submit()
        queue.cancel(first)
        queue.delete(first)
        assert shop.submit() > first

    def test_nulls_are_nulls_in_the_database(self, shop: Any, database: Database) -> None:
        shop.submit()
        with database.read() as connection:
            where = "error IS NULL AND environment IS NULL AND validity IS NULL AND timeout_s IS NULL"
            assert connection.exec_driver_sql(f"SELECT count(*) FROM job WHERE {where}").scalar_one() == 1


class TestSweep:
    def test_a_sweep_and_its_jobs_land_together(self, queue: Queue, reading: Reading) -> None:
        jobs = [NewJob(BenchmarkSpec(context_length=length)) for length in (128, 256, 512)]
        submitted = queue.submit_sweep("lengths", {"a": "b"}, {"kind": "benchmark"}, {"context_length": [1]}, [], jobs)
        sweep = submitted.response
        assert sweep == reading.sweep(sweep["id"])
        assert sweep["counts"] == {"queued": 3, "running": 0, "succeeded": 0, "failed": 0, "cancelled": 0}
        found, _ = reading.jobs(sweep=sweep["id"])
        assert [one["spec"]["context_length"] for one in reversed(found)] == [128, 256, 512]

    def test_a_sweep_that_fails_halfway_leaves_nothing(self, queue: Queue, reading: Reading) -> None:
        broken = NewJob(BenchmarkSpec(), labels={"k": object()})  # type: ignore[dict-item]
        with pytest.raises(Exception, match="object"):
            queue.submit_sweep(None, {}, {}, {}, [], [NewJob(BenchmarkSpec()), broken])
        assert reading.counts()["queued"] == 0
        assert reading.sweeps() == ([], None)


class TestIdempotency:
    KEY = Idempotency("key", "POST /jobs", "digest")

    def test_the_same_request_gets_the_first_answer(self, queue: Queue, reading: Reading) -> None:
        first = queue.submit(NewJob(BenchmarkSpec()), self.KEY)
        queue.cancel(first.response["id"])
        again = queue.submit(NewJob(BenchmarkSpec()), self.KEY)
        assert again.replayed
        assert again.response == first.response
        assert sum(reading.counts().values()) == 1

    def test_another_body_is_refused(self, queue: Queue, reading: Reading) -> None:
        queue.submit(NewJob(BenchmarkSpec()), self.KEY)
        with pytest.raises(IdempotencyMismatch):
            queue.submit(NewJob(BenchmarkSpec()), replace(self.KEY, digest="another"))
        assert sum(reading.counts().values()) == 1

    def test_another_route_is_another_request(self, queue: Queue) -> None:
        queue.submit(NewJob(BenchmarkSpec()), self.KEY)
        sweep = queue.submit_sweep(None, {}, {}, {}, [], [NewJob(BenchmarkSpec())], replace(self.KEY, route="sweeps"))
        assert not sweep.replayed

    def test_a_sweep_is_made_once(self, queue: Queue, reading: Reading) -> None:
        answers = [queue.submit_sweep("s", {}, {}, {}, [], [NewJob(BenchmarkSpec())], self.KEY) for _ in range(3)]
        assert [answer.replayed for answer in answers] == [False, True, True]
        assert len({answer.response["id"] for answer in answers}) == 1
        assert reading.counts()["queued"] == 1

    def test_twenty_threads_with_one_key_make_one_job(self, queue: Queue, reading: Reading) -> None:
        start, answers = threading.Barrier(20), []

        def submit() -> None:
            start.wait(20)
            answers.append(queue.submit(NewJob(BenchmarkSpec()), self.KEY))

        threads = [threading.Thread(target=submit) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == 20
        assert sum(not answer.replayed for answer in answers) == 1
        assert len({answer.response["id"] for answer in answers}) == 1
        assert reading.counts()["queued"] == 1


class TestRunning:
    def test_a_claim_counts_the_attempt(self, shop: Any, reading: Reading) -> None:
        job_id = shop.submit(name="n", timeout_s=9.0)
        claim = shop.claim("w1")
        assert (claim.job_id, claim.attempt, claim.worker_id) == (job_id, 1, "w1")
        assert (claim.name, claim.timeout_s) == ("n", 9.0)
        assert claim.spec == BenchmarkSpec().model_dump(mode="json")
        found = job(reading, job_id)
        assert (found["state"], found["attempt"], found["worker_id"]) == ("running", 1, "w1")
        assert found["started_at"] >= found["created_at"]
        assert shop.try_claim("w2") is None

    def test_events_and_progress_are_recorded(self, shop: Any, queue: Queue, reading: Reading) -> None:
        claim = shop.running_job()
        events = [progress(1), NewEvent("log", {"text": "a\n"}), progress(2)]
        queue.report(claim, events)
        assert job(reading, claim.job_id)["progress"] == progress(2).data
        recorded = [NewEvent(event["type"], event["data"]) for event in reading.events(claim.job_id)]
        assert [event.type for event in recorded[:2]] == ["state", "state"]
        assert recorded[2:] == events

    def test_a_success_lands_with_all_it_leaves(
        self, shop: Any, queue: Queue, reading: Reading, results: Finish
    ) -> None:
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

    def test_what_a_failed_job_measured_is_partial(
        self, shop: Any, queue: Queue, reading: Reading, record: Callable[..., MeasurementRecord]
    ) -> None:
        claim = shop.running_job()
        assert queue.finish(claim, replace(FAILURE, measurements=[record()])) == "failed"
        assert job(reading, claim.job_id)["error"]["code"] == "crashed"
        assert reading.measurements(claim.job_id)["rows"][0]["partial"]

    def test_the_last_artifact_of_a_name_counts(
        self, shop: Any, queue: Queue, reading: Reading, results: Finish
    ) -> None:
        claim = shop.running_job()
        newer = replace(results.artifacts[0], sha256="cd" * 32)
        queue.finish(claim, replace(results, artifacts=[*results.artifacts, newer]))
        assert [artifact["sha256"] for artifact in reading.artifacts(claim.job_id)] == ["cd" * 32]

    @pytest.mark.parametrize("sabotage", [False, True], ids=["as it is", "without transactions"])
    def test_a_finish_that_breaks_off_leaves_nothing(
        self,
        shop: Any,
        settings: Settings,
        reading: Reading,
        results: Finish,
        sabotage: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        claim = shop.running_job()
        before = everything(reading, claim.job_id)
        if sabotage:
            monkeypatch.setattr(sqlite, "_begin", lambda connection: None)  # each statement commits by itself
        database = Database(settings.resolved_database_url)
        with pytest.raises(StatementError, match="object"):
            Queue(database).finish(claim, replace(results, environment={"not JSON": object()}))
        database.close()
        assert (everything(reading, claim.job_id) == before) == (not sabotage)

    @pytest.mark.parametrize(
        "wrong", [{"state": "failed"}, {"state": "succeeded", "error": {}}, {"state": "queued"}, {"state": "lost"}]
    )
    def test_impossible_endings_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError):
            Finish(**wrong)

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

    def test_every_change_has_a_new_version(self, shop: Any, queue: Queue, reading: Reading) -> None:
        versions = [reading.job(shop.submit())[1]]
        claim = shop.claim()
        versions.append(reading.job(claim.job_id)[1])
        queue.report(claim, [progress(1)])
        versions.append(reading.job(claim.job_id)[1])
        queue.cancel(claim.job_id)
        versions.append(reading.job(claim.job_id)[1])
        queue.finish(claim, Finish("succeeded"))
        versions.append(reading.job(claim.job_id)[1])
        assert versions == sorted(set(versions))

    def test_a_renewal_tells_what_is_lost_and_what_is_to_be_cancelled(self, shop: Any, queue: Queue) -> None:
        mine, lost, cancelled = (shop.running_job() for _ in range(3))
        queue.give_back(lost)
        queue.cancel(cancelled.job_id)
        renewal = queue.renew([mine, lost, cancelled])
        assert renewal.lost == {lost.job_id}
        assert renewal.cancel_requested == {cancelled.job_id}
        assert {running.job_id: running.beat for running in queue.running()} == {mine.job_id: 1, cancelled.job_id: 1}
        assert queue.renew([]).lost == frozenset()


class TestCancel:
    def test_a_queued_job_is_cancelled_at_once(self, shop: Any, queue: Queue, reading: Reading) -> None:
        job_id = shop.submit()
        answer = queue.cancel(job_id)
        assert (answer["state"], answer["error"]["code"]) == ("cancelled", "cancelled")
        assert queue.cancel(job_id) == answer
        assert shop.try_claim() is None
        assert states(reading, job_id) == ["queued", "cancelled"]
        assert reading.events(job_id)[-1]["type"] == "done"

    @pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
    def test_a_running_job_ends_cancelled_whatever_its_worker_says(
        self, shop: Any, queue: Queue, reading: Reading, ending: Finish, record: Callable[..., MeasurementRecord]
    ) -> None:
        claim = shop.running_job()
        answer = queue.cancel(claim.job_id)
        assert answer["state"] == "running"
        assert answer["cancel_requested_at"] is not None
        assert queue.cancel(claim.job_id) == answer
        assert queue.finish(claim, replace(ending, measurements=[record()])) == "cancelled"
        assert job(reading, claim.job_id)["error"]["code"] == "cancelled"
        assert reading.measurements(claim.job_id)["rows"][0]["partial"]
        assert queue.cancel(claim.job_id)["state"] == "cancelled"

    def test_a_cancelled_job_that_is_given_back_stays_cancelled(
        self, shop: Any, queue: Queue, reading: Reading
    ) -> None:
        claim = shop.running_job()
        queue.cancel(claim.job_id)
        queue.give_back(claim)
        assert job(reading, claim.job_id)["state"] == "cancelled"
        assert reading.attempts(claim.job_id)[0]["state"] == "cancelled"

    def test_a_cancelled_job_whose_worker_is_lost_is_cancelled(self, shop: Any, queue: Queue, reading: Reading) -> None:
        claim = shop.running_job()
        queue.cancel(claim.job_id)
        assert queue.recover(queue.running()[0]) == "cancelled"
        assert job(reading, claim.job_id)["state"] == "cancelled"
        assert reading.attempts(claim.job_id)[0]["state"] == "lost"

    @pytest.mark.parametrize("ending", ["succeeded", "failed"])
    def test_what_is_over_cannot_be_cancelled(self, shop: Any, queue: Queue, reading: Reading, ending: str) -> None:
        claim = shop.running_job()
        queue.finish(claim, ENDINGS[ending])
        before = everything(reading, claim.job_id)
        with pytest.raises(Conflict, match=ending):
            queue.cancel(claim.job_id)
        assert everything(reading, claim.job_id) == before

    @pytest.mark.parametrize("unknown", [0, -1, 77, 2**63, 10**30])
    def test_unknown_ids_are_not_found(self, queue: Queue, reading: Reading, unknown: int) -> None:
        for method in (queue.cancel, queue.delete, reading.job, reading.events, reading.log, reading.sweep):
            with pytest.raises(NotFound):
                method(unknown)


class TestRecover:
    def test_a_lost_workers_job_is_retried_until_its_attempts_are_used_up(
        self, shop: Any, queue: Queue, reading: Reading
    ) -> None:
        first = shop.running_job(max_attempts=2)
        assert queue.recover(queue.running()[0]) == "queued"
        second = shop.claim("w2")
        assert (second.job_id, second.attempt) == (first.job_id, 2)
        assert second.token != first.token
        assert queue.recover(queue.running()[0]) == "failed"
        assert job(reading, first.job_id)["error"]["code"] == "worker_lost"
        assert [attempt["state"] for attempt in reading.attempts(first.job_id)] == ["lost", "lost"]
        assert states(reading, first.job_id) == ["queued", "running", "queued", "running", "failed"]
        assert shop.try_claim() is None

    def test_a_beat_since_it_was_seen_saves_the_attempt(self, shop: Any, queue: Queue, reading: Reading) -> None:
        claim = shop.running_job()
        (seen,) = queue.running()
        queue.renew([claim])
        assert queue.recover(seen) is None
        (seen,) = queue.running()
        queue.report(claim, [])
        assert queue.recover(seen) is None
        assert job(reading, claim.job_id)["state"] == "running"

    def test_an_attempt_that_ended_is_not_recovered(self, shop: Any, queue: Queue, reading: Reading) -> None:
        claim = shop.running_job()
        (seen,) = queue.running()
        queue.finish(claim, Finish("succeeded"))
        assert queue.recover(seen) is None
        assert queue.recover(RunningAttempt(77, 77, 1, 0)) is None
        assert job(reading, claim.job_id)["state"] == "succeeded"


STALE_WRITES: dict[str, Callable[[Queue, Claim, Finish], object]] = {
    "report": lambda queue, claim, _: queue.report(claim, [progress(9)]),
    "finish": lambda queue, claim, results: queue.finish(claim, results),
    "fail": lambda queue, claim, _: queue.finish(claim, FAILURE),
    "give_back": lambda queue, claim, _: queue.give_back(claim),
}


def a_stale_worker_records_nothing(
    write: Callable[[Queue, Claim, Finish], object], queue: Queue, reading: Reading, shop: Any, results: Finish
) -> bool:
    """Whether a worker that lost its lease is told so, and changes nothing of the attempt that another runs now."""
    stale = shop.running_job()
    queue.recover(queue.running()[0])
    fresh = shop.claim("w2")
    assert fresh.job_id == stale.job_id
    before = everything(reading, stale.job_id)
    try:
        write(queue, stale, results)
    except LeaseLost:
        return everything(reading, stale.job_id) == before
    return False


@pytest.mark.parametrize("write", STALE_WRITES.values(), ids=STALE_WRITES.keys())
class TestFence:
    def test_a_worker_that_lost_its_lease_records_nothing(
        self, write: Callable[..., object], queue: Queue, reading: Reading, shop: Any, results: Finish
    ) -> None:
        assert a_stale_worker_records_nothing(write, queue, reading, shop, results)

    def test_without_the_fence_it_would(
        self,
        write: Callable[..., object],
        queue: Queue,
        reading: Reading,
        shop: Any,
        results: Finish,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(queue_module, "_pass_fence", lambda connection, claim: None)
        assert not a_stale_worker_records_nothing(write, queue, reading, shop, results)

    def test_nor_after_another_has_finished_the_job(
        self, write: Callable[..., object], queue: Queue, reading: Reading, shop: Any, results: Finish
    ) -> None:
        stale = shop.running_job()
        queue.recover(queue.running()[0])
        queue.finish(shop.claim("w2"), Finish("succeeded"))
        before = everything(reading, stale.job_id)
        with pytest.raises(LeaseLost):
            write(queue, stale, results)
        assert everything(reading, stale.job_id) == before

    @pytest.mark.parametrize("field", ["token", "attempt", "attempt_id", "job_id"])
    def test_each_part_of_a_claim_counts(
        self, write: Callable[..., object], field: str, queue: Queue, reading: Reading, shop: Any, results: Finish
    ) -> None:
        claim, other = shop.running_job(), shop.running_job()
        forged = replace(claim, **{field: "0" * 32 if field == "token" else getattr(other, field) + 1})
        before = everything(reading, claim.job_id), everything(reading, other.job_id)
        with pytest.raises(LeaseLost):
            write(queue, forged, results)
        assert (everything(reading, claim.job_id), everything(reading, other.job_id)) == before


def test_a_lost_claim_is_not_renewed(shop: Any, queue: Queue) -> None:
    stale = shop.running_job()
    queue.recover(queue.running()[0])
    fresh = shop.claim("w2")
    assert queue.renew([stale]).lost == {stale.job_id}
    assert queue.running()[0].beat == 0
    assert queue.renew([fresh]).lost == frozenset()


class TestDelete:
    def test_all_that_belongs_to_a_job_goes_with_it(
        self, shop: Any, queue: Queue, reading: Reading, results: Finish, database: Database
    ) -> None:
        claim = shop.running_job(labels={"a": "b"})
        queue.finish(claim, results)
        kept = shop.submit()
        assert queue.delete(claim.job_id) == ["ab" * 32]
        with pytest.raises(NotFound):
            reading.job(claim.job_id)
        with database.read() as connection:
            for table in ("attempt", "measurement", "artifact", "event", "job_label"):
                sql = f"SELECT count(*) FROM {table} WHERE job_id = ?"
                assert connection.exec_driver_sql(sql, (claim.job_id,)).scalar_one() == 0
        assert job(reading, kept)["state"] == "queued"

    def test_a_content_that_another_job_refers_to_is_not_returned(
        self, shop: Any, queue: Queue, results: Finish
    ) -> None:
        first, second = shop.running_job(), shop.running_job()
        queue.finish(first, results)
        queue.finish(second, results)
        assert queue.delete(first.job_id) == []
        assert queue.delete(second.job_id) == ["ab" * 32]

    def test_only_finished_jobs_can_be_deleted(self, shop: Any, queue: Queue) -> None:
        job_id = shop.submit()
        with pytest.raises(Conflict, match="queued"):
            queue.delete(job_id)
        shop.claim()
        with pytest.raises(Conflict, match="running"):
            queue.delete(job_id)
