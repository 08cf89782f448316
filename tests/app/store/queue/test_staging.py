"""A large finish: others write between its slices, nobody sees half of it, and nothing of a lost one stays."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from sqlalchemy import func, select

from app import results
from app.errors import DatabaseBusy, LeaseLost
from app.store.database.engine import Database
from app.store.queue import staging
from app.store.queue.transitions import Queue
from app.store.reading.queries import Reading
from app.store.records import Claim, Finish, MeasurementRecord, StoredArtifact, TableRecord, UnitRecord

ROWS = 35
SLICES = 5


@pytest.fixture
def large(record: Callable[..., MeasurementRecord], monkeypatch: pytest.MonkeyPatch) -> Finish:
    """A success of five slices: a unit, 35 measurements, a table and a file."""
    monkeypatch.setattr(staging, "MAX_ROWS", 8)
    return Finish(
        "succeeded",
        units=[UnitRecord(0, "unit", "succeeded")],
        measurements=[record(case_key=f"case {number}") for number in range(ROWS)],
        tables=[TableRecord(0, "kernels", [], 0, b"")],
        artifacts=[StoredArtifact(0, "trace.json", "trace", "application/json", 3, "ab" * 32)],
    )


@dataclass
class Pauses:
    """What happens in each pause between two slices."""

    call: Callable[[], object] = lambda: None


@pytest.fixture
def pauses() -> Pauses:
    return Pauses()


@pytest.fixture
def queue(database: Database, pauses: Pauses) -> Queue:
    return Queue(database, pause=lambda _seconds: pauses.call())


def stored(database: Database) -> int:
    """Rows of results, of whatever attempt."""
    with database.read() as connection:
        return sum(
            connection.execute(select(func.count()).select_from(table)).scalar_one() for table in staging.RESULT_TABLES
        )


def seen(database: Database, job_id: int) -> int:
    """What clients see of a job's results."""
    reading = Reading(database)
    found = [part(job_id) for part in (reading.units, reading.artifacts)]
    return sum(map(len, [*found, results.list_tables(database, job_id), reading.measurements(job_id)["rows"]]))


def test_nobody_sees_half_a_result(shop, queue, database, large, pauses, settings) -> None:
    claim, other = shop.running_job(), shop.running_job()
    another_process = Database(settings.resolved_database_url, busy_timeout_s=0.1)
    looks: list[tuple[int, int]] = []

    def look() -> None:
        looks.append((stored(database), seen(database, claim.job_id)))
        assert Queue(another_process).renew([other]).lost == frozenset()
        shop.submit()

    pauses.call = look
    assert queue.finish(claim, large) == "succeeded"
    another_process.close()
    assert [rows for rows, _ in looks] == [8, 16, 24, 32]
    assert [rows for _, rows in looks] == [0, 0, 0, 0]
    assert seen(database, claim.job_id) == ROWS + 3
    keys = [row["case_key"] for row in Reading(database).measurements(claim.job_id)["rows"]]
    assert keys == [f"case {number}" for number in range(ROWS)]
    assert queue.delete_abandoned_results() == 0


def test_slices_are_bounded_in_bytes(record: Callable[..., MeasurementRecord], shop: Any) -> None:
    samples = b"." * (staging.MAX_BYTES // 2)
    records = [record(samples=samples) for _ in range(5)] + [record(samples=4 * samples), record()]
    slices = list(staging.slices(shop.running_job(), Finish("succeeded", measurements=records), partial=False))
    assert [len(rows) for [(_, rows)] in slices] == [2, 2, 1, 1, 1]


def lose_after(number: int, queue: Queue, pauses: Pauses, claim: Claim) -> None:
    """Let the watcher take the job after so many slices."""
    slices = itertools.count(1)

    def lose() -> None:
        if next(slices) == number:
            (running,) = (one for one in queue.running() if one.job_id == claim.job_id)
            queue.recover(running)

    pauses.call = lose


def break_off_finish(queue: Queue, pauses: Pauses, claim: Claim, large: Finish) -> None:
    """Let a finish fail after its first slice, and later ones go on."""

    def break_off() -> None:
        raise DatabaseBusy("somebody writes for long")

    pauses.call = break_off
    with pytest.raises(DatabaseBusy):
        queue.finish(claim, large)
    pauses.call = lambda: None


def test_rows_of_a_lost_attempt_are_never_seen(shop, queue, database, large, pauses) -> None:
    claim = shop.running_job()
    lose_after(2, queue, pauses, claim)
    with pytest.raises(LeaseLost):
        queue.finish(claim, large)
    pauses.call = lambda: None
    assert (stored(database), seen(database, claim.job_id)) == (16, 0)
    again = shop.claim("w2")
    assert (again.job_id, again.attempt) == (claim.job_id, 2)
    queue.finish(again, replace(large, measurements=large.measurements[:3]))
    assert (stored(database), seen(database, claim.job_id)) == (22, 6)
    assert queue.delete_abandoned_results(slices=1) == 1
    assert queue.delete_abandoned_results() > 0
    assert (stored(database), seen(database, claim.job_id)) == (6, 6)
    assert queue.delete_abandoned_results() == 0


def test_a_finish_that_broke_off_begins_anew(shop, queue, database, large, pauses) -> None:
    claim = shop.running_job()
    break_off_finish(queue, pauses, claim, large)
    assert stored(database) == 8
    assert queue.finish(claim, large) == "succeeded"
    assert stored(database) == seen(database, claim.job_id) == ROWS + 3


def test_a_running_attempts_rows_are_not_swept(shop, queue, database, large, pauses) -> None:
    break_off_finish(queue, pauses, shop.running_job(), large)
    assert queue.delete_abandoned_results() == 0
    assert stored(database) == 8
    queue.recover(queue.running()[0])
    assert queue.delete_abandoned_results() > 0
    assert stored(database) == 0


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_job_given_back_amid_its_finish_keeps_nothing_of_it(shop, queue, database, large, pauses, cancelled) -> None:
    claim = shop.running_job()
    break_off_finish(queue, pauses, claim, large)
    if cancelled:
        queue.cancel(claim.job_id)
    queue.give_back(claim)
    assert stored(database) == seen(database, claim.job_id) == 0
    if not cancelled:
        again = shop.claim("w2")
        assert (again.job_id, again.attempt) == (claim.job_id, claim.attempt)
        queue.finish(again, replace(large, measurements=large.measurements[:3]))
        assert stored(database) == seen(database, claim.job_id) == 6


def test_a_cancel_between_slices_makes_all_of_them_partial(shop, queue, database, large, pauses) -> None:
    claim = shop.running_job()
    pauses.call = lambda: queue.cancel(claim.job_id)
    assert queue.finish(claim, large) == "cancelled"
    rows = Reading(database).measurements(claim.job_id)["rows"]
    assert [row["partial"] for row in rows] == [True] * ROWS
    assert stored(database) == ROWS + 3
