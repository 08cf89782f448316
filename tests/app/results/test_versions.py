"""Uploaded code is a version of a case: its versions meet in tables, comparisons and baselines."""

from collections.abc import Callable
from typing import Any

import pytest

from app.errors import InvalidRequest
from app.results import compare
from app.specs import spec_adapter
from app.store.database.engine import Database
from app.store.keeping.baselines import Baselines
from app.store.records import Finish, UnitRecord
from tests.app.results.conftest import table

Measure = Callable[..., int]
OLD, NEW = "a" * 64, "b" * 64


def spec_of(sha256: str, **code: Any) -> dict[str, Any]:
    fields = {"sha256": sha256, "function": "mine", "file": "attention.py", **code}
    return {"kind": "benchmark", "attention_code": {name: value for name, value in fields.items() if value is not None}}


def key_of(spec: dict[str, Any]) -> str:
    return spec_adapter.validate_python(spec).case().key


def upload(database: Database) -> None:
    """Let the store know both files."""
    with database.write() as connection:
        for sha256 in (OLD, NEW):
            connection.exec_driver_sql(
                "INSERT INTO code_file (sha256, size, put_at) VALUES (?, 1, '2026-01-01 00:00:00')", (sha256,)
            )


def test_versions_of_one_case_meet(database: Database, measure: Measure) -> None:
    upload(database)
    one, other = spec_of(OLD), spec_of(NEW, revision={"label": "main"})
    assert key_of(one) == key_of(other)
    jobs = [measure(("step_ms", {"case_key": key_of(spec), "median": 2.0}), spec=spec) for spec in (one, other)]
    shown = table(database, jobs=[*jobs, measure(("step_ms", {"median": 2.0}))])
    names = [column.name for column in shown.columns]
    assert [row[names.index("version")] for row in shown.rows] == [OLD[:8], NEW[:8], None]
    comparison = compare(database, jobs[:1], jobs[1:])
    assert [(row.judged.metric, row.case_key) for row in comparison.rows] == [("step_ms", key_of(one))]
    assert [(it.name, it.baseline, it.candidate) for it in comparison.differences] == [("version", OLD[:8], NEW[:8])]
    Baselines(database).put("kept", job=jobs[0])
    checked = compare(database, "kept", jobs[1:])
    assert [row.case_key for row in checked.rows] == [key_of(one)]
    again = measure(("step_ms", {"case_key": key_of(one), "median": 2.0}), spec=one)
    with pytest.raises(InvalidRequest, match="Jobs 1 and 2 of the baseline ran other versions"):
        compare(database, jobs, [again])
    assert compare(database, [jobs[0], again], [jobs[1]]).rows


def test_versions_that_one_job_measured_are_no_samples_of_one(database: Database, measure: Measure) -> None:
    upload(database)
    spec = {"kind": "compare", "baseline": spec_of(OLD), "candidate": spec_of(NEW)}
    step = {"case_key": key_of(spec_of(OLD)), "case": {"attention_code.function": "mine"}}
    units = [UnitRecord(at, "", "succeeded", side=side) for at, side in enumerate(("baseline", "candidate"))]
    times = [("step_ms", {**step, "unit_index": unit.unit_index}) for unit in units]
    jobs = [measure(*times, spec=spec, finish=Finish("succeeded", units=units)) for _ in range(2)]
    with pytest.raises(InvalidRequest, match="Job 1 ran two versions of the code: flopwatch compare 1 compares them"):
        compare(database, jobs[:1], jobs[1:])
