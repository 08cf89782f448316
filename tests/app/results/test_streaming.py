"""Tables too large to be made as a whole have the same rows, part by part."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from app.errors import InvalidRequest, NotFound, job_problem
from app.results import Choice, is_too_large, render, stream, streaming, table
from app.store.database.engine import Database
from app.store.reading import measurements
from app.store.records import Finish

Measure = Callable[..., int]


@pytest.fixture
def jobs(measure: Measure) -> list[int]:
    """Five jobs, of which one ran out of memory and one was stopped."""
    found = [
        measure(("step_ms", {"mean": float(length)}), ("forward_ms", {}), spec={"context_length": length})
        for length in (64, 128, 256)
    ]
    found.append(measure(("step_ms", {"outcome": "oom"}), spec={"context_length": 512, "precision": "bf16"}))
    stopped = Finish("failed", error=job_problem("timeout", "too long"))
    found.append(measure(("step_ms", {}), spec={"context_length": 1024}, finish=stopped))
    return found


def lines(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.parametrize("per_part", [1, 2, 500])
def test_the_rows_are_those_of_the_whole_table(
    database: Database, jobs: list[int], per_part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "JOBS_PER_PART", per_part)
    whole = json.loads(render(table(database, kind="benchmark"), "json"))["rows"]
    answer = json.loads("".join(stream(database, "json", Choice(kind="benchmark"))))
    assert answer["next"] is None
    names = set(answer["rows"][0]) & set(whole[0])
    assert {"model", "context_length", "precision", "step_ms", "step_ms_std", "step_ms_outcome", "job"} <= names
    chosen = [{name: row[name] for name in names} for row in answer["rows"]]
    assert chosen == [{name: row[name] for name in names} for row in whole]
    assert [column["name"] for column in answer["columns"]] == list(answer["rows"][0])
    assert [row["partial"] for row in answer["rows"]] == [False] * 4 + [True]
    as_csv = lines("".join(stream(database, "csv", Choice(kind="benchmark"))))
    assert [row["step_ms"] for row in as_csv] == ["64.0", "128.0", "256.0", "", str(whole[-1]["step_ms"])]
    assert [row["job"] for row in as_csv] == [str(job) for job in jobs]


def test_jobs_without_results_show_their_cases(database: Database, measure: Measure) -> None:
    measure(("step_ms", {}), spec={"precision": "fp32"})
    stopped = Finish("failed", error=job_problem("timeout", "too long"))
    for steps in (1, 2):
        measure(spec={"precision": "bf16", "batch_size": steps}, finish=stopped)
    whole = json.loads(render(table(database), "json"))
    answer = json.loads("".join(stream(database, "json", Choice())))
    names = [column["name"] for column in whole["columns"]]
    assert {"precision", "batch_size"} <= set(names)
    assert {column["name"] for column in answer["columns"]} == {*names, "case_key"}
    assert [{name: row[name] for name in names} for row in answer["rows"]] == whole["rows"]


def test_of_many_measurements_few_are_read_at_once(
    database: Database, jobs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "MEASUREMENTS_PER_PART", 3)
    read: list[int] = []
    original = measurements.measurements

    def counted(*given: Any, **options: Any) -> Any:
        found = original(*given, **options)
        read.append(len(found))
        return found

    monkeypatch.setattr(measurements, "measurements", counted)
    assert len(lines("".join(stream(database, "csv", Choice())))) == 5
    assert read == [2, 2, 3, 1]


def test_columns_and_statistic_are_those_asked_for(database: Database, jobs: list[int]) -> None:
    pieces = stream(database, "csv", Choice(jobs=jobs[:1]), rows=["precision"], columns=["step_ms"], statistic="median")
    text = "".join(pieces)
    assert text.splitlines()[0] == (
        "precision,case_key,job,step_ms,step_ms_n,step_ms_outcome,validity,validity_reason,partial"
    )


def test_a_job_deleted_meanwhile_is_left_out(
    database: Database, jobs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "JOBS_PER_PART", 1)
    pieces = stream(database, "csv", Choice())
    text = next(pieces) + next(pieces)
    with database.write() as connection:
        connection.exec_driver_sql(f"DELETE FROM job WHERE id = {jobs[2]}")
    assert [row["job"] for row in lines(text + "".join(pieces))] == [str(job) for job in jobs if job != jobs[2]]


def test_jobs_that_finish_meanwhile_are_not_among_them(
    database: Database, jobs: list[int], measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "JOBS_PER_PART", 1)
    pieces = stream(database, "csv", Choice())
    text = next(pieces) + next(pieces)
    measure(("forward_ms", {}), spec={"kind": "attention", "sequence_lengths": [128], "implementations": ["eager"]})
    assert [row["job"] for row in lines(text + "".join(pieces))] == [str(job) for job in jobs]


def test_mistakes_are_told_before_the_first_piece(database: Database, measure: Measure, jobs: list[int]) -> None:
    with pytest.raises(NotFound):
        stream(database, "csv", Choice(jobs=[999]))
    with pytest.raises(InvalidRequest, match="'nose' is none of"):
        stream(database, "csv", Choice(), columns=["nose"])
    measure(("tflops", {}), spec={"kind": "attention", "sequence_lengths": [128], "implementations": ["eager"]})
    with pytest.raises(InvalidRequest, match=r"of several kinds.*attention, benchmark"):
        stream(database, "csv", Choice())
    assert "".join(stream(database, "csv", Choice(kind=["attention", "benchmark"])))


@pytest.mark.parametrize(("bound", "limit"), [("MAX_JOBS", 4), ("MAX_MEASUREMENTS", 7)])
def test_what_is_too_large(
    database: Database, jobs: list[int], monkeypatch: pytest.MonkeyPatch, bound: str, limit: int
) -> None:
    assert not is_too_large(database, Choice())
    monkeypatch.setattr(measurements, bound, limit)
    assert is_too_large(database, Choice())
    assert not is_too_large(database, Choice(jobs=jobs[:1]))


def test_nothing_is_an_empty_table(database: Database) -> None:
    assert json.loads("".join(stream(database, "json", Choice())))["rows"] == []
