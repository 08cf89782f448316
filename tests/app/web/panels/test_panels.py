"""Panels on a job's page: which a job has, their plots, and its tables to search in."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from app.specs import KINDS
from app.web import panels
from app.web.panels import _walk
from tests.app.conftest import Site
from tests.app.web.checker import Checker, page

CLASSES = {"scope": "string", "class": "string", "total_ms": "number"}
WEB = Path(panels.__file__).parents[1]
KERNELS = {"name": "string", "class": "string", "total_ms": "number"}


def finished(site: Site, spec: dict[str, Any], **results: Any) -> int:
    """A job of any kind with these results."""
    kind = spec["kind"]
    site.worker.register(frozenset({kind}))
    response = site.http.post("/jobs", json={"spec": spec, "priority": 99})
    assert response.status_code == 201, response.text
    claim = site.worker.claim(kind)
    assert claim.job_id == response.json()["id"]
    site.worker.finish(claim, **results)
    return claim.job_id


def shown(site: Site, job_id: int) -> Checker:
    """The panels of a job; every plot and link of them answers."""
    response = site.http.get(f"/ui/jobs/{job_id}/panels")
    assert response.status_code == 200, response.text
    checker = Checker()
    checker.feed(response.text)
    assert checker.open == []
    for reference in checker.references:
        assert site.http.get(reference).status_code == 200, reference
    return checker


@pytest.fixture
def profile(site: Site, reported: Any) -> int:
    kernels = [[f"gemm_{number}", "matmul" if number % 2 else "copy", float(number)] for number in range(120)]
    files = [site.stored(b"forward;a 10\n", name) for name in ("stacks.txt", "trace.json.gz")]
    return finished(
        site,
        {"kind": "profile", "model": {"size": "tiny"}},
        tables=[
            reported("classes", [["forward", "matmul", 2.0]], **CLASSES),
            reported("kernels-forward", kernels, **KERNELS),
            reported("kernels/odd name", [["<i>x</i>", "copy", None]], **KERNELS),
        ],
        artifacts=[replace(files[0], kind="stacks"), files[1]],
    )


def test_each_panel_is_named_after_a_kind() -> None:
    assert set(_walk()) <= set(KINDS)


def test_a_script_shows_the_phases_that_it_names(site: Site, measured: Any) -> None:
    rows = [measured("data_ms", 1.0, phase="data"), measured("step_ms", 3.0, phase="step")]
    job_id = finished(site, {"kind": "script"}, measurements=rows)
    shown(site, job_id)
    assert site.http.get(f"/ui/jobs/{job_id}/plots/phases").json()["table"]["rows"] == [["one process", 1.0, 2.0]]


def test_panels_draw_what_the_small_bundle_of_plotly_can() -> None:
    """A page of a job loads Plotly's bundle `basic`, which has no heat maps and boxes."""
    for path in (*WEB.glob("panels/*.py"), WEB / "samples.py", WEB / "history_plot.py"):
        drawn = set(re.findall(r'"type": "(\w+)"', path.read_text()))
        assert drawn <= {"scatter", "bar", "log", "linear", "category", "date", "data", "line", "rect"}, path


def test_a_profile_has_what_its_results_allow(site: Site, profile: int) -> None:
    found = shown(site, profile)
    assert set(found.ids) >= {"panel-trace", "panel-classes", "panel-kernels", "panel-flame-graph"}
    assert "panel-roofline" not in found.ids, "no table of products"
    assert "Open in Perfetto" in found.text
    assert f"/ui/jobs/{profile}/panels" in page(site, f"/ui/jobs/{profile}").references
    assert site.http.get(f"/ui/jobs/{profile}/plots/classes").json()["data"][0]["x"] == [2.0]
    assert site.http.get(f"/ui/jobs/{profile}/plots/flame-graph").json()["data"][0]["text"] == ["all", "forward", "a"]


def test_a_missing_plot_is_not_found(site: Site, profile: int) -> None:
    missing = site.http.get(f"/ui/jobs/{profile}/plots/timeline")
    assert missing.status_code == 404
    assert "it has: classes" in missing.text
    assert site.http.get("/ui/jobs/99999/panels").status_code == 404
    assert shown(site, finished(site, {"kind": "profile", "model": {"size": "tiny"}})).ids == ["panels"]


def test_a_table_with_other_columns_does_not_break_the_page(site: Site, reported: Any) -> None:
    tables = [reported("classes", [["x", 1.0]], part="string", total_ms="number")]
    job_id = finished(site, {"kind": "profile", "model": {"size": "tiny"}}, tables=tables)
    assert site.http.get(f"/ui/jobs/{job_id}/panels").status_code == 200
    figure = site.http.get(f"/ui/jobs/{job_id}/plots/classes", headers={"accept": "application/json"})
    assert figure.status_code == 409
    assert "not what this version draws" in figure.text


def test_a_kind_without_a_module_gets_charts_of_its_cells(site: Site, measured: Any) -> None:
    rows = [measured("sum", value, subject=f"s{value}", accumulation="fp32") for value in (1.0, 2.0)]
    found = shown(site, finished(site, {"kind": "mixed_precision"}, measurements=rows))
    assert found.ids == ["panels", "panel-sum", "title-sum"]


def test_perfetto_can_be_left_out(serve: Any, tmp_path: Path) -> None:
    with serve(tmp_path, perfetto_url="") as own:
        job_id = finished(own, {"kind": "profile", "model": {"size": "tiny"}}, artifacts=[own.stored(b"trace")])
        text = own.http.get(f"/ui/jobs/{job_id}/panels").text
        assert "Perfetto" not in text
        assert f"/jobs/{job_id}/artifacts/trace.json.gz" in text


def explored(site: Site, job_id: int, **query: Any) -> str:
    response = site.http.get(f"/ui/jobs/{job_id}/explore", params=query)
    assert response.status_code == 200, response.text
    return response.text


def test_a_table_is_searched_sorted_and_paged(site: Site, profile: int) -> None:
    found = page(site, f"/ui/jobs/{profile}/explore?table=kernels-forward")
    assert "Rows 1 to 50 of 120." in found.text
    assert "Total (ms)" in found.text
    for reference in set(found.references):
        assert site.http.get(reference).status_code == 200, reference
    both = explored(site, profile, table="kernels-forward", q="GEMM 1 matmul", sort="-total_ms")
    assert "Rows 1 to 24 of 24 that match, of 120." in both
    assert both.index("gemm_119") < both.index("gemm_117") < both.index("gemm_1<")
    assert "gemm_118" not in both
    assert 'aria-sort="descending"' in both
    last = explored(site, profile, table="kernels-forward", after=100)
    assert "Rows 101 to 120 of 120." in last
    assert 'rel="prev"' in last
    assert 'rel="next"' not in last
    assert "None of 120 rows matches." in explored(site, profile, table="kernels-forward", q="nothing")


def test_names_in_tables_are_escaped(site: Site, profile: int) -> None:
    found = explored(site, profile, table="kernels/odd name")
    assert "&lt;i&gt;x&lt;/i&gt;" in found
    assert "kernels%2Fodd%20name?format=csv" in found


@pytest.mark.parametrize(
    ("query", "status"),
    [("table=none", 404), ("table=", 200), *((f"table=kernels-forward&{one}", 422) for one in ("after=-1", "page=1"))],
)
def test_invalid_views_are_refused(site: Site, profile: int, query: str, status: int) -> None:
    assert site.http.get(f"/ui/jobs/{profile}/explore?{query}").status_code == status


def diagnosed(site: Site, reported: Any) -> int:
    """A diagnosis with each cause, each verdict, and a gap."""
    from workers.changes._base import Cause
    from workers.jobs.diagnosis.conclude import CAUSES, CHANGES
    from workers.jobs.diagnosis.look import GAP_COLUMNS

    def columns(of: Any) -> dict[str, str]:
        return {column.name: column.type for column in of}

    causes: list[Any] = [[at, kind, None, 9.0, 9.0, 91.0, "ceiling"] for at, kind in enumerate(get_args(Cause), 1)]
    measured = (80.0, 0.8, 0.7, 0.9)
    changes = [
        ["fused_optimizer", "optimizer", *measured, "better", 0.0, "fused=True <for> the optimizer"],
        ["threads", "optimizer", *measured, "inconclusive", 0.0, "all cores"],
        ["tf32", "kernels", *[None] * 4, "refused", None, "set: a CPU has none"],
        ["compile_model", "kernels", *[None] * 4, "not_tried", None, "compile: no time was left"],
        ["no_optimizer", "optimizer", *measured, "better", 0.1, "no optimizer"],
        ["together", "optimizer", *measured, "better", 0.0, "fused_optimizer"],
    ]
    candidates = [[name, name == "no_optimizer"] for name, *_ in changes[:-1]]
    lines = [["step 100 ms ± 0.4 %"], ["1  optimizer  40 ms  at most: 60 ms  train.py:51-55 SlowAdam.step"]]
    tables = (
        reported("answer", lines, answer="string"),
        reported("causes", causes, **columns(CAUSES)),
        reported("changes", changes, **columns(CHANGES)),
        reported("candidates", candidates, change="string", removes="boolean"),
        reported("gaps", [[1.0, 2.0, "launches", "sgemm", "train.py:3 step"]], **columns(GAP_COLUMNS)),
    )
    site.worker.register(frozenset({"benchmark"}))
    return finished(site, {"kind": "diagnosis", "step": {"kind": "benchmark"}}, tables=tables)


def test_a_diagnosis_has_its_waterfall_changes_with_commands_and_gaps(site: Site, reported: Any) -> None:
    job_id = diagnosed(site, reported)
    assert {"panel-waterfall", "panel-changes", "panel-gaps", "losers", "untried"} <= set(shown(site, job_id).ids)
    html = site.http.get(f"/ui/jobs/{job_id}/panels").text
    assert f"flopwatch why {job_id} --change fused_optimizer" in html
    assert "fused=True &lt;for&gt; the optimizer" in html
    again = re.findall(rf"flopwatch why {job_id} --change (\w+)<", html)
    assert again == ["fused_optimizer", "threads", "compile_model"], "neither a refused change nor a bound is a cure"
    for name in ("waterfall", "changes"):
        assert site.http.get(f"/ui/jobs/{job_id}/plots/{name}").json()["data"], name
