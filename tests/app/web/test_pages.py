"""The pages, read without JavaScript."""

import html
from types import SimpleNamespace
from typing import Any

import pytest

from app.specs import KINDS
from app.store.reading import measurements
from app.store.records import StoredArtifact, UnitRecord
from flopwatch.table_options import FORMATS
from tests.app.conftest import TINY
from tests.app.web.checker import page

CHECK = {"name": "drift", "ok": False, "detail": "9 %"}
NOTE = {"name": "host_bound", "ok": False, "detail": "by far", "severity": "note"}


def test_every_reference_leads_somewhere(site: Any, measured: Any) -> None:
    sweep = site.http.post("/sweeps", json={"base": {"kind": "benchmark"}, "grid": {"seed": [1]}, "priority": 9}).json()
    claim = site.worker.claim()
    site.worker.finish(claim, measurements=[measured("forward_ms", 1.0, model="tiny")], log="log")
    site.submit(labels={"a": "x&y=z #1"})
    for path in ("/ui", f"/ui/jobs/{claim.job_id}", f"/ui/sweeps/{sweep['id']}", "/ui/workers", "/ui/jobs/99999"):
        found = page(site, path, 404 if "99999" in path else 200)
        for reference in set(found.references):
            assert site.http.get(reference).status_code == 200, reference


def test_filters_and_pages(fresh_site: Any) -> None:
    for number in range(60):
        fresh_site.submit(name=f"job-{number}", labels={"n": str(number)})
    first = page(fresh_site, "/ui")
    assert "job-59" in first.text
    assert "job-9\n" not in first.text
    [older] = {reference for reference in first.references if "after=" in reference}
    second = page(fresh_site, older)
    assert "job-9" in second.text
    assert "job-59" not in second.text
    assert "60 queued" in first.text
    for label in ("n=7", "n:7"):
        only = page(fresh_site, f"/ui?state=&kind=&label={label}&sweep=")
        assert "job-7" in only.text
        assert "job-8" not in only.text
        assert "n=7" in only.text, "as the command line writes it"
    assert "No job matches" in page(fresh_site, "/ui?state=failed").text


def test_values_are_escaped(site: Any, measured: Any) -> None:
    evil = "<script>alert(1)</script>"
    job_id = site.submit(name=evil, labels={"x": evil}, priority=10)["id"]
    claim = site.worker.claim_job(job_id)
    error = {"type": "t", "title": evil, "code": "failed", "detail": evil}
    measurement = measured("forward_ms", None, outcome=evil, model=evil)
    site.worker.finish(claim, "failed", error=error, measurements=[measurement], log=evil, environment={evil: evil})
    for path in ("/ui", f"/ui/jobs/{job_id}", f"/ui?label=x:{evil}"):
        text = site.http.get(path).text
        assert "<script>alert" not in text
        assert html.escape(evil) in text


def test_a_job_while_it_runs_and_after(site: Any, measured: Any) -> None:
    job_id = site.submit(priority=10)["id"]
    path = f"/ui/jobs/{job_id}"
    assert "Cancel job" in page(site, path).text
    claim = site.worker.claim_job(job_id)
    assert path in page(site, path).references, "it refreshes itself"
    rows = [measured("forward_ms", 1234.5678, model="tiny"), measured("backward_ms", None, outcome="oom", model="tiny")]
    site.worker.finish(
        claim, measurements=rows, validity={"verdict": "suspect", "checks": [NOTE, CHECK]}, environment={"t": "2.13"}
    )
    done = page(site, path)
    assert path not in done.references, "nothing changes any more"
    assert "Cancel job" not in done.text
    words = " ".join(done.text.split())
    for word in ("1,235", "oom", "out of memory", "2.13", "note host_bound: by far"):
        assert word in words
    assert 'id="doubt">drift: 9 %' in site.http.get(path).text, "the first doubt, under the title"
    wrong = {"name": "measured", "ok": False, "detail": "1 of 2 cases are wrong", "severity": "wrong"}
    job = site.run(measurements=rows, validity={"verdict": "wrong", "checks": [CHECK, wrong]})
    assert 'id="doubt">measured: 1 of 2 cases are wrong' in site.http.get(f"/ui/jobs/{job}").text


@pytest.mark.parametrize("finding", ["growth", ""])
def test_what_a_kind_looks_for_stands_under_the_title(site: Any, monkeypatch: pytest.MonkeyPatch, finding: str) -> None:
    monkeypatch.setattr(KINDS["benchmark"], "finding", finding)
    leaks = {"name": "growth", "ok": False, "severity": "note", "detail": "memory grows by 1 MiB a step"}
    job = site.run(validity={"verdict": "valid", "checks": [NOTE, leaks]})
    said = 'id="finding"><strong>memory grows by 1 MiB a step' in site.http.get(f"/ui/jobs/{job}").text
    assert said == bool(finding)


def test_a_job_of_several_units_shows_them_and_their_tables(site: Any, measured: Any, reported: Any) -> None:
    evil = "<script>alert(1)</script>"
    rows = [[f"{evil}{number};", number / 8, number] for number in range(30)]
    doubtful = {
        "verdict": "suspect",
        "counts": {"valid": 298, "suspect": 2},
        "checks": [CHECK | {"case": f"length {number}"} for number in range(9)],
    }
    columns = {"kernel": "string", "total_ms": "number", "calls": "integer"}
    job_id = site.run(
        "failed",
        measurements=[measured("forward_ms", 1.0, model="tiny")],
        validity=doubtful,
        tables=[
            reported("kernels/forward", rows, **columns),
            reported("kernels/forward", [["d", 0.5, 9]], 1, **columns),
        ],
        units=[
            UnitRecord(0, f"replicate 0 {evil}", "succeeded", validity=doubtful),
            UnitRecord(1, "replicate 1", "crashed", reason="signal 11"),
        ],
        artifacts=[StoredArtifact(1, "trace-unit-1.json.gz", "trace", "application/gzip", 3, "ab" * 32)],
    )
    found = page(site, f"/ui/jobs/{job_id}")
    assert "suspect (298 valid, 2 suspect)" in found.text
    assert found.text.count("9 %") == 9, "each check of the job once, and not again with its unit"
    assert "signal 11" in found.text
    assert found.references.count(f"/jobs/{job_id}/artifacts/trace-unit-1.json.gz") == 1
    assert f"{evil}10;" in found.text
    assert f"{evil}9;" not in found.text, "the rows with the most time only"
    assert "The first 20 of 31 rows." in found.text
    for format_ in FORMATS:
        reference = f"/jobs/{job_id}/tables/kernels%2Fforward?format={format_}"
        assert reference in found.references
        assert site.http.get(reference).status_code == 200


def test_a_page_reads_a_bounded_number_of_measurements(fresh_site, measured, monkeypatch) -> None:
    monkeypatch.setattr(measurements, "MAX_BEGINNING", 5)
    sweep = fresh_site.http.post("/sweeps", json={"base": {"kind": "benchmark"}, "grid": {"seed": [1, 2, 3]}}).json()
    for length in (1000, 2000, 3000):
        cases = [measured(f"{phase}_ms", 1.0, context_length=length) for phase in ("forward", "backward")]
        fresh_site.worker.finish(fresh_site.worker.claim(), measurements=cases)
    panel = fresh_site.http.get("/ui/tables", params={"sweep": sweep["id"], "panel": "true"}).text
    assert "Rows 1 to 2" in panel
    assert "2000" in panel
    assert "3000" not in panel, "of whose measurements only one would have been read"
    assert f'href="/ui/tables?sweep={sweep["id"]}&amp;after=2"' in panel
    lengths = [measured(f"{phase}_ms", 1.0, context_length=length) for length in range(4) for phase in ("step", "x")]
    job_id = fresh_site.run(measurements=lengths)
    assert "The first 2 rows; all of them." in page(fresh_site, f"/ui/jobs/{job_id}").text
    units = [UnitRecord(index, f"process {index}", "succeeded") for index in range(2)]
    values = [measured("step_ms", 1.0 + 2 * unit, unit_index=unit, context_length=n) for unit in (0, 1) for n in "abc"]
    repeated = fresh_site.run(measurements=values, units=units)
    shown = fresh_site.http.get("/ui/tables", params={"job": repeated}).text
    assert ("No finished job" in shown, shown.count("2 (1–3)")) == (False, 3), "no row has half of its processes"


def test_a_page_that_has_not_changed_is_not_sent_again(site, measured, monkeypatch) -> None:
    monkeypatch.setattr("app.web.live.time", SimpleNamespace(monotonic=lambda: 0.0))  # ages go on every 10 s
    sweep = site.http.post("/sweeps", json={"base": TINY, "grid": {"seed": [5]}, "priority": 20}).json()
    claim = site.worker.claim()
    paths = [f"/ui/sweeps/{sweep['id']}", f"/ui/jobs/{claim.job_id}"]

    def tags(known: dict[str, str]) -> dict[str, str]:
        """The pages' tags; those that are known must be answered without the page."""
        found = {}
        for path in paths:
            answer = site.http.get(path, headers={"If-None-Match": known[path]} if path in known else {})
            assert answer.headers["cache-control"] == "private, no-cache"
            assert answer.content == b"" if answer.status_code == 304 else answer.status_code == 200
            found[path] = answer.headers["etag"]
            assert (answer.status_code == 304) == (known.get(path) == found[path])
        return found

    before = tags({})
    assert tags(before) == before
    site.worker.report(claim, "log", text="a line\n")
    after_log = tags(before)
    assert after_log[paths[1]] != before[paths[1]]
    site.worker.finish(claim, measurements=[measured("forward_ms", 1.0)])
    after_end = tags(after_log)
    assert all(after_end[path] != after_log[path] for path in paths)
    assert site.http.delete(f"/jobs/{claim.job_id}").status_code == 204
    assert site.http.get(paths[0], headers={"If-None-Match": after_end[paths[0]]}).status_code == 200


def test_why_a_job_waits(fresh_site: Any) -> None:
    fresh_site.worker.register()
    job_id = fresh_site.submit(spec={"device": "cuda"})["id"]
    reason = fresh_site.job(job_id)["waiting"]
    assert reason
    assert reason in page(fresh_site, "/ui").text
    assert reason in page(fresh_site, f"/ui/jobs/{job_id}").text
    sweep = {"base": {"kind": "benchmark", "device": "cuda"}, "grid": {"seed": [1, 2]}}
    sweep_id = fresh_site.http.post("/sweeps", json=sweep).json()["id"]
    for path, waiting in (("/ui", 3), (f"/ui/sweeps/{sweep_id}", 2)):
        text = page(fresh_site, path).text
        assert f"{waiting} jobs wait: {reason}." in text
        assert text.count(reason) == 1, "once above the list, not in each row"


@pytest.mark.parametrize("path", ["/ui/jobs/0", "/ui/jobs/x", "/ui/sweeps/7777", "/ui/nothing"])
def test_errors_are_pages(site: Any, path: str) -> None:
    assert "All jobs" in page(site, path, 404).text


def test_broken_rows_are_shown(site: Any) -> None:
    job = site.submit(labels={"team": "a"})
    site.worker.register()
    sweep = site.http.post("/sweeps", json={"base": TINY, "grid": {"batch_size": [1]}}).json()
    done = site.run(validity={"verdict": "valid", "checks": []})
    with site.services.database.write() as connection:
        for table, columns in {
            "job": ("spec", "summary", "requirements"),
            "sweep": ("base",),
            "worker": ("kinds",),
        }.items():
            for column in columns:
                connection.exec_driver_sql(f"UPDATE {table} SET {column} = '{{'")
    paths = ("/jobs", f"/jobs/{job['id']}", f"/jobs/{done}", "/sweeps", f"/sweeps/{sweep['id']}", "/workers")
    for path in paths:
        answer = site.http.get(path)
        assert (answer.status_code, '"code":"unreadable"' in answer.text) == (200, True), path
    pages = ("/ui", f"/ui/jobs/{job['id']}", f"/ui/jobs/{done}", f"/ui/sweeps/{sweep['id']}", "/ui/workers")
    for path in pages:
        assert "cannot be read" in page(site, path).text, path
