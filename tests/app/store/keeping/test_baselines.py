"""Baselines: which results they take, which they replace, and that their jobs cannot be deleted."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import delete

from app.errors import Conflict, DatabaseFailed, InBaseline, InvalidRequest, NotFound
from app.specs import spec_adapter
from app.specs.compare import CompareSpec
from app.store import tables
from app.store.database.engine import Database
from app.store.database.slices import Slices
from app.store.files.artifacts import ArtifactFiles
from app.store.keeping.baselines import Baselines
from app.store.keeping.bulk import Bulk
from app.store.keeping.deleting import delete_job, delete_jobs
from app.store.queue.transitions import Queue
from app.store.reading.filters import JobFilter
from app.store.records import Finish, NewJob, UnitRecord
from tests.app.store.conftest import Shop


@pytest.fixture
def baselines(database: Database) -> Baselines:
    return Baselines(database)


@pytest.fixture
def done(shop: Shop, record: Callable[..., Any]) -> Callable[..., int]:
    """Run a job that measured these cases, by their keys."""

    def run(*keys: str, device: str = "1x test CPU", state: Any = "succeeded", **job: Any) -> int:
        claim = shop.running_job(**job)
        rows = [record(metric, case_key=key, device_key=device) for key in keys for metric in ("step_ms", "mfu")]
        error = None if state == "succeeded" else {"code": "timeout"}
        shop.queue.finish(claim, Finish(state, measurements=rows, error=error, units=[UnitRecord(0, "unit", "ok")]))
        return claim.job_id

    return run


def cases(baselines: Baselines, name: str = "main") -> dict[tuple[str, str], list[int]]:
    return {(case["case_key"], case["device_key"]): case["jobs"] for case in baselines.get(name)["cases"]}


def test_a_job_replaces_the_cases_that_it_has(baselines: Baselines, done: Callable[..., int]) -> None:
    one, other, far = done("a", "b"), done("b", "c"), done("b", device="1x GPU")
    kept = baselines.put("main", job=one)
    assert (kept.is_new, kept.left_out) == (True, [])
    assert (kept.baseline["number_of_cases"], kept.baseline["jobs"]) == (2, [one])
    again = baselines.put("main", job=other)
    assert (again.is_new, again.baseline["number_of_cases"], again.baseline["jobs"]) == (False, 3, [one, other])
    baselines.put("main", job=far)
    here = "1x test CPU"
    assert cases(baselines) == {("a", here): [one], ("b", here): [other], ("c", here): [other], ("b", "1x GPU"): [far]}
    (first, *_) = baselines.get("main")["cases"]
    assert (first["kind"], first["case"]) == ("benchmark", "tiny, context_length=128")


def test_cases_that_differ_in_a_field_have_names_of_their_own(baselines, shop, record) -> None:
    plain = {"model": "tiny", "context_length": 128, "compile": False, "batch_size": 4}
    measured = [record(case={**plain, "compile": value}, case_key=str(value)) for value in (False, True)]
    baselines.put("main", job=shop.ran(measurements=measured))
    assert {case["case"] for case in baselines.get("main")["cases"]} == {
        "tiny, context_length=128",
        "tiny, context_length=128, compile",
    }


def test_succeeded_jobs_of_a_sweep_are_samples(baselines: Baselines, shop: Shop, record: Callable[..., Any]) -> None:
    base = {"kind": "benchmark"}
    specs = [spec_adapter.validate_python({**base, "seed": seed}) for seed in (1, 2, 3)]
    jobs = [NewJob(spec, point={"seed": at}) for at, spec in enumerate(specs)]
    sweep = shop.queue.submit_sweep(None, {}, base, {"seed": [1, 2, 3]}, [], jobs).response["id"]
    with pytest.raises(Conflict, match=f"Sweep {sweep} is not finished: 3 jobs"):
        baselines.put("main", sweep=sweep)
    ids = []
    for state in ("succeeded", "succeeded", "failed"):
        claim = shop.claim()
        error = {"code": "timeout"} if state == "failed" else None
        shop.queue.finish(claim, Finish(state, measurements=[record(case_key="a")], error=error))
        ids.append(claim.job_id)
    assert baselines.put("main", sweep=sweep).left_out == [{"job": ids[2], "why": "failed (timeout)"}]
    assert cases(baselines) == {("a", "1x test CPU"): ids[:2]}


def test_what_has_no_complete_results_is_refused(baselines, done, shop, queue) -> None:
    for ids, words in (
        ({"job": done("a", state="failed")}, "failed .timeout., so its results may be incomplete"),
        ({"job": done("a", state="cancelled")}, "is cancelled"),
        ({"job": done()}, "no measurements, so no case"),
        ({"job": shop.running_job().job_id}, "is running: wait"),
        ({"job": shop.submit()}, "is queued: wait for its end"),
    ):
        with pytest.raises(Conflict, match=words):
            baselines.put("main", **ids)  # type: ignore[arg-type]
    for missing in ({"job": 999}, {"sweep": 999}, {"job": 2**70}):
        with pytest.raises(NotFound):
            baselines.put("main", **missing)  # type: ignore[arg-type]
    with pytest.raises(NotFound, match="there is none yet"):
        baselines.get("main")
    assert baselines.page() == ([], None)


def test_invalid_results_get_into_no_baseline(baselines: Baselines, shop: Shop, record: Callable[..., Any]) -> None:
    def run(**verdicts: str | None) -> int:
        measurements = [
            record(metric, case_key=key, validity=verdict, unit_index=unit, case={"context_length": ord(key)})
            for key, verdict in verdicts.items()
            for metric in ("step_ms", "mfu")
            for unit in range(2)
        ]
        measurements[0] = replace(measurements[0], validity="valid")  # the worst of a case's processes counts
        return shop.ran(measurements=measurements)

    invalid = run(a="invalid")
    with pytest.raises(Conflict, match=f"Job {invalid}: invalid. Nothing can be judged against results that"):
        baselines.put("main", job=invalid)
    assert baselines.page() == ([], None)
    mixed = run(a="suspect", b="invalid", c="valid", d=None)
    kept = baselines.put("main", job=mixed)
    assert kept.left_out == [{"job": mixed, "why": "1 of 4 cases invalid: context_length=98"}]
    assert kept.suspect == [{"job": mixed, "why": "1 of 4 cases suspect: context_length=97"}]
    validities = {case["case_key"]: case["validity"] for case in baselines.get("main")["cases"]}
    assert validities == {"a": "suspect", "c": "valid", "d": None}
    # What is invalid replaces nothing.
    again = run(a="valid", c="invalid")
    kept = baselines.put("main", job=again)
    assert (cases(baselines)["c", "1x test CPU"], cases(baselines)["a", "1x test CPU"]) == ([mixed], [again])


def test_wrong_results_get_into_no_baseline(baselines: Baselines, shop: Shop, record: Callable[..., Any]) -> None:
    """A wrong case has no times, only its error; a process that was right does not help."""

    def run(*wrong: str) -> int:
        results = [
            record("output_error", case_key=key, unit_index=unit, case={"context_length": ord(key)})
            for key in ("a", "b")
            for unit in range(2)
        ]
        results += [
            record("step_ms", mean=None, outcome="wrong", case_key=key, case={"context_length": ord(key)})
            for key in wrong
        ]
        return shop.ran(measurements=results)

    nothing_right = run("a", "b")
    with pytest.raises(Conflict, match=r"2 of 2 cases wrong: context_length=97, …\. Nothing can be judged against"):
        baselines.put("main", job=nothing_right)
    assert baselines.page() == ([], None)
    kept = baselines.put("main", job=(half := run("b")))
    assert kept.left_out == [{"job": half, "why": "1 of 2 cases wrong: context_length=98"}]
    assert [case["case_key"] for case in baselines.get("main")["cases"]] == ["a"]


def test_a_comparison_is_refused(baselines: Baselines, queue: Queue, shop: Shop, record: Callable[..., Any]) -> None:
    job = queue.submit(NewJob(CompareSpec.example())).response["id"]
    queue.finish(shop.claim(kinds=frozenset({"compare"})), Finish("succeeded", measurements=[record()]))
    with pytest.raises(InvalidRequest, match="whose sides may share a case") as raised:
        baselines.put("main", job=job)
    assert [error.pointer for error in raised.value.errors] == ["/job"]


def test_a_job_in_a_baseline_cannot_be_deleted(baselines, done, queue, database, tmp_path) -> None:
    kept, other = done("a", labels={"of": "test"}), done("b", labels={"of": "test"})
    for name, user in (("main", None), ("release", "bob")):
        baselines.put(name, job=kept, set_by=user)
    with pytest.raises(InBaseline, match=rf"Job {kept} is in the baselines main, release \(set by bob\): ") as raised:
        delete_job(database, kept)
    assert raised.value.extensions == {"baselines": ["main", "release"]}
    bulk = Bulk(Slices(database), queue, ArtifactFiles(tmp_path / "artifacts"))
    deleted = bulk.delete(JobFilter(labels=[("of", "test")]))
    assert (deleted.deleted, deleted.unfinished, deleted.in_baselines) == (1, 0, 1)
    with database.read() as connection:
        remaining = connection.execute(tables.job.select()).all()
    assert [row.id for row in remaining] == [kept]
    assert other != kept
    # Should a statement forget to ask, the database itself refuses.
    with pytest.raises(DatabaseFailed, match=r"(?i)foreign key"), database.write() as connection:
        connection.execute(delete(tables.job).where(tables.job.c.id == kept))
    baselines.put("release", job=done("a"))
    baselines.delete("main")
    assert delete_job(database, kept) == []


def test_a_job_whose_deletion_began_just_now_gets_into_none(baselines, done, database, monkeypatch) -> None:
    job, write = done("a"), database.write

    def deleted_meanwhile() -> Any:
        monkeypatch.setattr(database, "write", write)
        delete_jobs(Slices(database), [tables.job.c.id == job])
        return write()

    monkeypatch.setattr(database, "write", deleted_meanwhile)
    with pytest.raises(Conflict, match="is being deleted"):
        baselines.put("main", job=job)
    assert baselines.page() == ([], None)
