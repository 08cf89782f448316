"""Environments of jobs."""

from typing import Any

from app.errors import job_problem
from app.store.database.engine import Database
from app.store.queue.transitions import Queue
from app.store.reading import measurements
from app.store.reading.measurements import JobChoice, choose_jobs, environments, first_measurements
from app.store.records import Finish, UnitRecord
from tests.app.store.conftest import Shop

FAILED = job_problem("failed", "It broke.")


def units(*names: str | None, sides: tuple[str | None, ...] = (None, None)) -> list[UnitRecord]:
    return [
        UnitRecord(index, "a unit", "succeeded", side=side, environment=None if name is None else {"host": name})
        for index, (name, side) in enumerate(zip(names, sides, strict=False))
    ]


def hosts(database: Database, jobs: list[int], side: str | None = None) -> list[Any]:
    with database.read() as snapshot:
        return [one["host"] for one in environments(snapshot, choose_jobs(snapshot, JobChoice(jobs=jobs)), side)]


def test_the_first_environment_of_the_last_recorded_attempt(database: Database, queue: Queue, shop: Shop) -> None:
    claims = [shop.running_job() for _ in range(3)]
    queue.finish(claims[0], Finish("succeeded", units=units(None, "a")))
    queue.finish(claims[1], Finish("succeeded", units=units("b", "c")))
    queue.finish(claims[2], Finish("failed", error=FAILED, units=units("former")))
    queue.retry(claims[2].job_id)
    queue.finish(shop.claim(), Finish("succeeded", units=units(None)))
    jobs = [claim.job_id for claim in claims]
    assert hosts(database, jobs) == ["a", "b"]
    assert hosts(database, jobs[2:]) == []


def test_environments_of_one_side(database: Database, queue: Queue, shop: Shop) -> None:
    claim = shop.running_job()
    sides = ("baseline", "candidate")
    queue.finish(claim, Finish("succeeded", units=units("a", "b", sides=sides)))
    assert [hosts(database, [claim.job_id], side) for side in sides] == [["a"], ["b"]]


def test_the_first_measurements_are_of_the_job_that_is_read_first(database, queue, shop, record, monkeypatch) -> None:
    """A search lists its jobs by the value tried; the rows are read job by job."""
    monkeypatch.setattr(measurements, "MAX_BEGINNING", 3)
    claims = [shop.running_job() for _ in range(2)]
    for claim in claims:
        rows = [record(f"{at}_ms", case={"at": at // 2}, case_key=str(at // 2)) for at in range(6)]
        queue.finish(claim, Finish("succeeded", measurements=rows, units=units("a")))
    with database.read() as snapshot:
        chosen = choose_jobs(snapshot, JobChoice(jobs=[claim.job_id for claim in claims]))
        jobs, rows, cut = first_measurements(snapshot, chosen[::-1], "median")
    assert cut
    assert {row.job_id for row in rows} == {job.id for job in jobs} == {claims[0].job_id}
