"""One metric of one case over the jobs that measured it."""

from collections.abc import Callable
from typing import Any

import pytest

from app import results
from app.errors import InvalidRequest, NotFound, job_problem
from app.results import CaseChoice, History
from app.results.environments import commit_of, revision_of, revision_text, short_version, version_of
from app.store.database.engine import Database
from app.store.reading import history as stored
from app.store.records import Finish, UnitRecord

Measure = Callable[..., int]
A, B = "a" * 40, "b" * 40
KEY = "0123456789abcdef0123"


def at(commit: str | None, *, dirty: bool = False) -> Finish:
    """A success with a checkout's commit."""
    return Finish("succeeded", environment={"software": {"git_commit": commit, "git_dirty": dirty}})


def of(database: Database, key: str = KEY, **options: Any) -> History:
    return results.history(database, CaseChoice(key=key), **options)


def test_each_job_has_a_point_with_its_version(database: Database, measure: Measure) -> None:
    row = {"case_key": KEY, "n": 20, "median_low": 1.5, "median_high": 3.0}
    jobs = [
        measure(("step_ms", {**row, "median": value}), ("peak_memory_mib", {**row, "unit": "MiB"}), finish=finish)
        for value, finish in ((2.0, at(A)), (2.5, at(B, dirty=True)), (2.25, at(None)))
    ]
    measure(("step_ms", {"case_key": "another", "median": 9.0}))
    history = of(database)
    assert [point.job for point in history.points] == jobs
    first = history.points[0]
    assert (first.value, first.low, first.high, first.n) == (2.0, 1.5, 3.0, 20)
    assert [point.short_version for point in history.points] == ["aaaaaaaa", "bbbbbbbb-dirty", None]
    assert (history.kind, history.metric, history.unit, history.better) == ("benchmark", "step_ms", "ms", "less")
    assert history.metrics == ["step_ms", "peak_memory_mib"]
    assert not history.is_cut
    assert of(database, metric="peak_memory_mib").unit == "MiB"
    assert of(database, KEY[:4]).case_key == KEY, "the beginning of a key is enough"
    assert [point.job for point in of(database, limit=2).points] == jobs[1:]
    assert of(database, limit=2).is_cut


def test_devices_have_their_own_points(database: Database, measure: Measure) -> None:
    job = measure(*(("step_ms", {"case_key": KEY, "device_key": device}) for device in ("1x GPU", "1x CPU")))
    assert of(database).devices == ["1x CPU", "1x GPU"]
    assert [(point.job, point.device_key) for point in of(database, device="1x GPU").points] == [(job, "1x GPU")]
    with pytest.raises(NotFound, match="1x TPU"):
        of(database, device="1x TPU")


def test_points_tell_their_hosts(database: Database, measure: Measure) -> None:
    for host in ("b", "a"):
        measure(("step_ms", {"case_key": KEY}), finish=Finish("succeeded", environment={"host": {"hostname": host}}))
    measure(("step_ms", {"case_key": KEY}))
    history = of(database)
    assert ([point.host for point in history.points], history.hosts) == (["b", "a", None], ["a", "b"])


def test_processes_are_one_point_and_failures_an_outcome(database: Database, measure: Measure) -> None:
    rows = [("step_ms", {"case_key": KEY, "unit_index": unit, "median": 1.0 + unit}) for unit in range(3)]
    measure(*rows, spec={"replicates": 3})
    broken = Finish("failed", error=job_problem("timeout", "It took too long."))
    measure(*rows[:1], spec={"replicates": 3}, finish=broken)
    whole, stopped = of(database).points
    assert (whole.value, whole.n) == (2.0, 3)
    assert (stopped.value, stopped.outcome) == (None, "timeout")


def test_of_the_oldest_job_all_processes_count_or_none(database, measure, monkeypatch) -> None:
    rows = [("step_ms", {"case_key": KEY, "unit_index": unit, "median": 1.0 + unit}) for unit in range(2)]
    jobs = [measure(*rows, spec={"replicates": 2}) for _ in range(3)]
    for most, shown in ((3, jobs[2:]), (4, jobs[1:]), (6, jobs)):
        monkeypatch.setattr(stored, "MAX_ROWS", most)
        history = of(database)
        assert [(point.job, point.value) for point in history.points] == [(job, 1.5) for job in shown]
        assert history.is_cut == (len(shown) < len(jobs))


def test_only_the_last_recorded_attempt_counts(database, queue, ended, shop, record) -> None:
    broken = Finish("failed", error=job_problem("failed", "It broke."), measurements=[record("step_ms", case_key=KEY)])
    queue.retry(ended(finish=broken))
    with pytest.raises(NotFound):  # it is not finished any more
        of(database)
    queue.finish(shop.claim(), Finish("succeeded", measurements=[record("step_ms", case_key=KEY, median=7.0)]))
    assert [point.value for point in of(database).points] == [7.0]


def test_sides_of_a_comparison_are_points(database, ended, record) -> None:
    sides = ("baseline", "candidate")
    ended(
        {"kind": "compare", **{side: {"kind": "benchmark"} for side in sides}},
        measurements=[record("step_ms", case_key=KEY, unit_index=unit, median=1.0 + unit) for unit in range(2)],
        units=[UnitRecord(unit, side, "succeeded", side) for unit, side in enumerate(sides)],
    )
    history = of(database)
    assert history.kind == "benchmark"
    assert [(point.side, point.value) for point in history.points] == [("baseline", 1.0), ("candidate", 2.0)]


def test_one_of_several_cases_is_chosen(database: Database, measure: Measure) -> None:
    job = measure(
        *(
            ("step_ms", {"case_key": f"key-{precision}", "case": {"precision": precision}, "median": value})
            for precision, value in (("fp32", 2.0), ("bf16", 1.0))
        )
    )
    with pytest.raises(InvalidRequest, match=r"2 cases match.*key-fp32 \(precision=fp32\); key-bf16") as refused:
        results.history(database, CaseChoice(job=job))
    assert refused.value.errors[0].pointer == "/job"
    for choice in (
        CaseChoice(job=job, coordinates=[("precision", "bf16")]),
        CaseChoice(key="key-", coordinates=[("precision", "bf*"), ("tile", "none")]),
        CaseChoice(job=job, key="key-b"),
    ):
        assert [point.value for point in results.history(database, choice).points] == [1.0]
    assert list(results.cases_of_job(database, job)) == ["key-fp32", "key-bf16"]
    with pytest.raises(InvalidRequest, match="No row has precision=int4; there is fp32, bf16"):
        results.history(database, CaseChoice(job=job, coordinates=[("precision", "int4")]))
    with pytest.raises(InvalidRequest, match="no coordinate 'precison'; did you mean precision"):
        results.history(database, CaseChoice(job=job, coordinates=[("precison", "fp32")]))


def test_versions() -> None:
    dirty = {"software": {"git_commit": A, "git_dirty": True}}
    spec = {"code": {"sha256": "c" * 64, "function": "attention"}}
    assert version_of(spec, dirty, {"precision": "bf16"}) == f"{A}-dirty"
    uploaded = version_of(spec, dirty, {"code.function": "attention"})
    assert uploaded == "c" * 64, "uploaded code decides, not the checkout that ran it"
    assert (short_version(f"{A}-dirty"), short_version(uploaded)) == ("aaaaaaaa-dirty", "cccccccc")
    assert (commit_of(f"{A}-dirty"), commit_of(uploaded), commit_of(None)) == (A, None, None)
    assert version_of({}, None, {}) is version_of({}, {}, {}) is None


def test_uploaded_code_says_where_it_comes_from(database: Database, measure: Measure) -> None:
    revision = {"label": "main", "commit": B, "dirty": True, "diff": "1 file changed"}
    code = {"sha256": "c" * 64, "function": "mine", "file": "mine.py", "revision": revision}
    with database.write() as connection:
        connection.exec_driver_sql(
            "INSERT INTO code_file (sha256, size, put_at) VALUES (?, 1, '2026-01-01 00:00:00')", ("c" * 64,)
        )
    case = {"code.function": "mine", "code.file": "mine.py"}
    measure(("step_ms", {"case_key": KEY, "case": case}), spec={"kind": "benchmark", "code": code}, finish=at(A))
    (point,) = of(database).points
    assert (point.short_version, point.commit) == ("cccccccc", B), "not the commit of the worker's checkout"
    assert point.revision == "main, bbbbbbbb-dirty, 1 file changed"
    assert revision_of({"code": {**code, "revision": None}}, case) == {}
    assert revision_of({"code": code}, {}) == {}, "a case without the code"
    assert revision_text({}) is None
