import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import update

from app import results
from app.errors import InvalidRequest, job_problem
from app.results import JobChoice, Question, metric_table, render, sheet_of
from app.results.cases import CaseOfJob
from app.results.choosing import coordinates_of
from app.specs.benchmark import BenchmarkSpec
from app.store import tables
from app.store.database.engine import Database
from app.store.queue.transitions import Queue
from app.store.reading import measurements
from app.store.records import Finish, MeasurementRecord, NewJob
from tests.app.results.conftest import table

BROKEN = Finish("failed", error=job_problem("failed", "it broke"))


def test_by_the_time_of_their_end(database: Database, measure: Callable[..., int]) -> None:
    jobs = [measure(("step_ms", {}), spec={"context_length": length}) for length in (1, 2, 3)]
    ends = [datetime(2026, 3, day, 12, tzinfo=UTC) for day in (1, 2, 3)]
    with database.write() as connection:
        for job, end in zip(jobs, ends, strict=True):
            connection.execute(update(tables.job).where(tables.job.c.id == job).values(finished_at=end))
    assert table(database, since=ends[1]).column("context_length") == [2, 3]
    assert table(database, until=ends[1]).column("context_length") == [1]
    assert table(database, since=ends[0], until=ends[2]).column("context_length") == [1, 2]


def test_too_many_are_refused_and_not_cut(database, measure, monkeypatch) -> None:
    for _ in range(2):
        measure(("step_ms", {}))
    monkeypatch.setattr(measurements, "MAX_JOBS", 1)
    with pytest.raises(InvalidRequest, match="more than 1 jobs"):
        table(database)


class TestSweeps:
    @pytest.fixture
    def sweep(self, queue: Queue) -> Callable[..., int]:
        """Submits a sweep of jobs with these points; the context length tells them apart."""

        def submit(*points: dict[str, int] | None) -> int:
            jobs = [NewJob(BenchmarkSpec(context_length=100 + at), point=point) for at, point in enumerate(points)]
            return int(queue.submit_sweep(None, {}, {}, {}, [], jobs).response["id"])

        return submit

    def finish(self, shop: Any, queue: Queue, record: Callable[..., MeasurementRecord], ending: Finish) -> None:
        claim = shop.claim()
        case = {"context_length": claim.spec["context_length"]}
        measured = [record(case=case, case_key=str(case))] if ending.state == "succeeded" else []
        queue.finish(claim, Finish(ending.state, error=ending.error, measurements=measured))

    def test_of_each_point_the_latest_job(self, database, shop, queue, record, sweep) -> None:
        number = sweep({"x": 0, "y": 1}, {"x": 1, "y": 1}, {"x": 0, "y": 1})
        for ending in (BROKEN, Finish("succeeded"), Finish("succeeded")):
            self.finish(shop, queue, record, ending)
        assert table(database, sweep=number).column("context_length") == [101, 102]

    def test_with_other_jobs_and_sweeps_it_is_a_union(self, database, shop, queue, record, sweep, measure) -> None:
        first, second = sweep({"x": 0}), sweep({"x": 0}, {"x": 1})
        for _ in range(3):
            self.finish(shop, queue, record, Finish("succeeded"))
        alone = measure(("step_ms", {}), spec={"context_length": 7})
        measure(("step_ms", {}), spec={"context_length": 8})
        assert table(database, sweep=[first, second]).column("context_length") == [100, 100, 101]
        assert table(database, sweep=second, jobs=[alone]).column("context_length") == [100, 101, 7]
        assert table(database, sweep=second, jobs=[alone], labels=[("no", "such")]).rows == []

    @pytest.mark.parametrize(
        ("grid", "shown"),
        [
            ({"model.num_layers": [1, 2]}, ["model", "context_length", "model.num_layers"]),
            ({"model.num_layers": [1]}, ["model", "context_length"]),
            ({}, ["model", "context_length"]),
        ],
    )
    def test_a_swept_field_behind_a_label_is_a_column(self, database, queue, shop, record, grid, shown) -> None:
        jobs = [
            NewJob(BenchmarkSpec.model_validate({"model": {"size": "tiny", "num_layers": layers}}), point={"x": layers})
            for layers in (1, 2)
        ]
        number = queue.submit_sweep(None, {}, {}, grid, [], jobs).response["id"]
        for _ in jobs:
            claim = shop.claim()
            case = dict(BenchmarkSpec.model_validate(claim.spec).case().coordinates)
            queue.finish(claim, Finish("succeeded", measurements=[record(case=case, case_key=str(case))]))
        assert table(database, sweep=number).names("coordinate") == shown
        pivoted = table(database, sweep=number, pivot="model.num_layers", columns=["step_ms"])
        assert pivoted.names("coordinate") == ["context_length"], "model follows from it, and makes no row of its own"
        points = metric_table(database, JobChoice(sweep=number), ["step_ms"])
        assert points.names("coordinate") == shown

    @pytest.mark.parametrize(
        ("widths", "shown", "numbers"),
        [
            ([256, 256, 512, 512], ["context_length", "model.d_ff"], [[1, 2], [3, 4]]),
            ([256, 512, 256, 512], ["context_length"], [[1, 2], [3, 4]]),
        ],
    )
    def test_a_pivot_of_one_of_a_models_fields(self, database, queue, shop, record, widths, shown, numbers) -> None:
        """The other field makes the rows unless it follows from the first, and `model` none."""
        models = [{"size": "tiny", "d_ff": width, "num_layers": 1 + at % 2} for at, width in enumerate(widths)]
        jobs = [NewJob(BenchmarkSpec.model_validate({"model": one}), point={"x": at}) for at, one in enumerate(models)]
        grid = {"model.d_ff": [256, 512], "model.num_layers": [1, 2]}
        number = queue.submit_sweep(None, {}, {}, grid, [], jobs).response["id"]
        for at, _ in enumerate(jobs):
            claim = shop.claim()
            case = dict(BenchmarkSpec.model_validate(claim.spec).case().coordinates)
            measured = record(median=float(1 + at), case=case, case_key=str(case))
            queue.finish(claim, Finish("succeeded", measurements=[measured]))
        pivoted = table(database, sweep=number, pivot="model.num_layers", columns=["step_ms"])
        assert [name for name in pivoted.names("coordinate") if name != "run"] == shown
        values = [[cell.value for cell in row if hasattr(cell, "outcome")] for row in pivoted.rows]
        assert values == numbers

    def test_a_point_that_is_being_resumed_has_no_result(self, database, shop, queue, record, sweep) -> None:
        number = sweep({"x": 0}, {"x": 0})
        self.finish(shop, queue, record, BROKEN)
        assert table(database, sweep=number).rows == []


@pytest.fixture
def retried(queue: Queue, shop: Any, record: Callable[..., MeasurementRecord]) -> int:
    """A job with three measurements of its first attempt, which failed, and three of its second one."""

    def measured(mean: float) -> list[MeasurementRecord]:
        return [record(mean=mean, case={"context_length": n}, case_key=str(n)) for n in (1, 2, 3)]

    job: int = shop.ran("failed", error=BROKEN.error, measurements=measured(1.0))
    queue.retry(job)
    queue.finish(shop.claim(), Finish("succeeded", measurements=measured(2.0)))
    return job


def test_former_attempts_do_not_fill_a_table(database: Database, retried: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "MAX_BEGINNING", 3)
    sheet = table(database, jobs=[retried], first=9)
    assert [cell.value for cell in sheet.column("step_ms")] == [2.0] * 3
    assert not sheet.is_cut


@pytest.mark.parametrize(("measured", "value", "outcome"), [(["step_ms"], 3.0, "ok"), ([], None, "worker_lost")])
def test_a_job_retried_and_lost_shows_what_it_measured(database, queue, shop, record, measured, value, outcome) -> None:
    """And a comparison takes no numbers of a job that did not succeed."""
    good, claim = shop.ran(measurements=[record("step_ms")]), shop.running_job(max_attempts=1)
    records = [record(metric, median=3.0) for metric in (*measured, "forward_ms")]
    queue.finish(claim, Finish("failed", error=BROKEN.error, measurements=records))
    queue.retry(claim.job_id)
    shop.claim()
    assert queue.recover(queue.running()[0]) == "failed"
    sheet = table(database, jobs=[claim.job_id], columns=["step_ms"])
    assert [(cell.value, cell.outcome) for cell in sheet.column("step_ms")] == [(value, outcome)]
    compared = sheet_of(results.compare(database, [good], [claim.job_id], Question(["step_ms"])), None)
    (row,) = json.loads(render(compared, "json"))["rows"]
    assert (row["candidate"], row["candidate_outcome"]) == (None, "worker_lost")


def of_kind(kind: str, **coordinates: Any) -> CaseOfJob:
    return CaseOfJob(job=1, kind=kind, tabled_as=(kind, "benchmark"), coordinates=coordinates)


def test_what_a_strategy_implies_is_a_column_only_where_rows_look_the_same_without_it() -> None:
    naive, early = of_kind("ddp", strategy="naive", prefetch=None), of_kind("ddp", strategy="fsdp", prefetch=1)
    assert coordinates_of([naive, early], None) == ["strategy"]
    assert coordinates_of([naive, early, of_kind("ddp", strategy="fsdp", prefetch=0)], None) == ["strategy", "prefetch"]
