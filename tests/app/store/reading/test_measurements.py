"""Environments of jobs."""

from typing import Any

from app.errors import job_problem
from app.store.database.engine import Database
from app.store.queue.transitions import Queue
from app.store.reading import measurements
from app.store.reading.measurements import JobChoice, choose_jobs, environments, first_measurements
from app.store.records import Finish, UnitRecord
from tests.app.store.conftest import Shop


def units(*names: str | None, sides: tuple[str | None, ...] = (None, None)) -> list[UnitRecord]:
    return [
        UnitRecord(index, "a unit", "succeeded", side=side, environment=None if name is None else {"host": name})
        for index, (name, side) in enumerate(zip(names, sides, strict=False))
    ]


def hosts(database: Database, jobs: list[int], side: str | None = None) -> list[Any]:
    with database.read() as snapshot:
        return [one["host"] for one in environments(snapshot, choose_jobs(snapshot, JobChoice(jobs=jobs)), side)]


def test_the_first_environment_of_the_last_recorded_attempt(database: Database, queue: Queue, shop: Shop) -> None:
    jobs = [shop.ran(units=units(None, "a")), shop.ran(units=units("b", "c"))]
    jobs.append(shop.ran("failed", error=job_problem("failed", "It broke."), units=units("former")))
    queue.retry(jobs[2])
    queue.finish(shop.claim(), Finish("succeeded", units=units(None)))
    assert hosts(database, jobs) == ["a", "b"]
    assert hosts(database, jobs[2:]) == []


def test_environments_of_one_side(database: Database, shop: Shop) -> None:
    sides = ("baseline", "candidate")
    job = shop.ran(units=units("a", "b", sides=sides))
    assert [hosts(database, [job], side) for side in sides] == [["a"], ["b"]]


def test_the_first_measurements_are_of_the_job_that_is_listed_first(database, shop, record, monkeypatch) -> None:
    """A search lists its jobs by the value tried; the rows are read job by job."""
    monkeypatch.setattr(measurements, "MAX_BEGINNING", 3)
    measured = [record(f"{at}_ms", case={"at": at // 2}, case_key=str(at // 2)) for at in range(6)]
    ids = [shop.ran(measurements=measured, units=units("a")) for _ in range(2)]
    with database.read() as snapshot:
        chosen = choose_jobs(snapshot, JobChoice(jobs=ids))
        found = [first_measurements(snapshot, jobs, "median") for jobs in (chosen, chosen[::-1])]
    assert [([job.id for job in jobs], {row.job_id for row in rows}, cut) for jobs, rows, cut in found] == [
        (ids[:1], {ids[0]}, True),
        (ids[::-1], {*ids}, False),
    ]
