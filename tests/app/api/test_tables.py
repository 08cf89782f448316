"""GET /tables through a real server: parameters, streams, files."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from app.store.reading import measurements
from tests.app.web.test_standalone import get


@pytest.fixture
def measured_jobs(site: Any, measured: Callable[..., Any]) -> Iterator[list[int]]:
    """Two precisions at two lengths, with labels of their own; the second of each takes half the time."""
    jobs = []
    for length in (64, 128):
        for precision, mean in (("fp32", 2.0), ("bf16", 1.0)):
            spec = {"kind": "benchmark", "model": {"size": "tiny"}, "context_length": length, "precision": precision}
            job = site.submit(spec=spec, priority=90, labels={"table": "tables"})["id"]
            case = {"model": "tiny", "context_length": length, "precision": precision}
            found = [measured("step_ms", mean * length, **case), measured("forward_ms", mean, **case)]
            site.worker.finish(site.worker.claim_job(job), measurements=found)
            jobs.append(job)
    yield jobs
    for job in jobs:
        site.http.delete(f"/jobs/{job}")


def test_every_route_refuses_or_honours_repeats(site: Any) -> None:
    """Each GET route with query parameters, as OpenAPI declares them: those that take one value refuse two."""
    paths = get(site, "/openapi.json").json()["paths"]
    asked = 0
    for path, methods in paths.items():
        for parameter in methods.get("get", {}).get("parameters", ()):
            schema = json.dumps(parameter["schema"])
            if parameter["in"] != "query" or '"array"' in schema:
                continue
            url = re.sub(r"{\w+}", "1", path)
            response = site.http.get(f"{url}?{parameter['name']}=1&{parameter['name']}=1")
            assert response.status_code == 422, f"{url}: {parameter['name']}"
            assert f"'{parameter['name']}' is there 2 times" in response.text
            asked += 1
    assert asked > 20
    assert site.http.get("/ui?state=queued&state=running").status_code == 422


def test_unions_and_repeated_values(site: Any, measured_jobs: list[int]) -> None:
    query = "&".join(f"job={job}" for job in measured_jobs[:3])
    assert len(get(site, f"/tables?{query}&kind=benchmark").json()["rows"]) == 3
    assert len(get(site, "/tables?label=table:tables").json()["rows"]) == 4
    assert get(site, "/tables?label=table:tables&kind=attention").json()["rows"] == []
    assert len(get(site, "/tables?label=table:tables&kind=attention&kind=benchmark").json()["rows"]) == 4
    get(site, f"/tables?job={measured_jobs[0]}&sweep=999999", 404)


def test_since_and_until(site: Any, measured_jobs: list[int]) -> None:
    chosen = "/tables?label=table:tables"
    assert len(get(site, f"{chosen}&since=1h").json()["rows"]) == 4
    assert get(site, f"{chosen}&until=1h").json()["rows"] == []
    assert len(get(site, f"{chosen}&since=2026-01-01T00:00:00+02:00&until=2999-01-01").json()["rows"]) == 4
    problem = get(site, f"{chosen}&since=yesterday", 422).json()
    assert "'since': must be a span such as 90min, 12h, 7d or 2w, a date" in problem["detail"]


def test_pivot_reference_and_best(site: Any, measured_jobs: list[int]) -> None:
    text = get(
        site,
        "/tables?label=table:tables&columns=step_ms&pivot=context_length&relative_to=precision=fp32&best=true"
        "&format=markdown&caption=Steps",
    ).text
    assert text.startswith("**Steps**\n\n| model")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "bf16" in line]
    assert rows[0][1:] == ["bf16", "**64**", "**128**", "2.00×", "2.00×"]
    problem = get(site, "/tables?relative_to=precision", 422).json()
    assert "must be written coordinate=value, such as precision=fp32" in problem["detail"]


def test_where_chooses_cases_whose_reference_may_be_elsewhere(site: Any, measured_jobs: list[int]) -> None:
    chosen = "/tables?label=table:tables&columns=step_ms&relative_to=precision=fp32&where=precision=bf16"
    rows = get(site, f"{chosen}&where=context_length=64&where=context_length=128").json()["rows"]
    assert [(row["context_length"], row["step_ms_speedup"]) for row in rows] == [(64, 2.0), (128, 2.0)]
    pivoted = get(site, f"{chosen}&pivot=context_length").json()["rows"]
    assert [row["step_ms, context_length=128"] for row in pivoted] == [128.0]
    problem = get(site, f"{chosen}&where=context_length=65", 422).json()
    assert problem["detail"] == "No row has context_length=65; there is 64, 128."
    assert problem["errors"][0]["pointer"] == "/where"


def test_columns_get_other_names(site: Any, measured_jobs: list[int]) -> None:
    chosen = "/tables?label=table:tables&columns=step_ms&rename=context_length=d_model&rename=step_ms=Time, ms"
    assert get(site, f"{chosen}&format=csv").text.startswith('model,d_model,precision,"Time, ms","Time, ms_low"')
    pivoted = f"{chosen}&pivot=context_length"
    assert "Time, ms, d_model=64" in [column["name"] for column in get(site, pivoted).json()["columns"]]
    assert r"\multicolumn{2}{c}{Time, ms}" in get(site, f"{pivoted}&format=latex").text
    for wrong, words in (
        ("step_ms=model", "Two columns would be called 'model'"),
        ("context_length=T std&rename=step_ms=T&statistic=mean", "Two columns would be called 'T std'"),
        ("step_ms=", "new name of 'step_ms' is blank"),
        ("step_ms=x&rename=step_ms=y", "gives step_ms twice"),
        ("step_ms=x&caption=%20", "is blank"),
        ("step_ms_low=low", "no column 'step_ms_low'"),
    ):
        assert words in get(site, f"/tables?label=table:tables&columns=step_ms&rename={wrong}", 422).json()["detail"]


@pytest.mark.parametrize("pivot", ["", "&pivot=precision"])
@pytest.mark.parametrize("format_", ["markdown", "latex", "html"])
def test_the_standard_deviation_has_a_column(site, measured, measured_jobs, format_, pivot) -> None:
    job = site.run(measurements=[replace(measured("step_ms", 41.5, model="tiny", precision="fp32"), std=0.25, n=10)])
    asked = f"/tables?job={job}&columns=step_ms&statistic=mean{pivot}&format={format_}"
    together, apart = get(site, asked).text, get(site, f"{asked}&separate=true").text
    assert "±" in together.replace(r"$\pm$", "±").partition("41.5")[2].partition("0.2")[0]
    cells = re.split(r"[|&<>\\]", apart)
    assert {"41.50", "0.2500"} <= {cell.strip() for cell in cells}
    assert " std" in apart or "step_ms_std" in apart
    assert ("their standard deviation" in apart, "±" in apart, r"\pm" in apart) == (True, False, False)
    site.http.delete(f"/jobs/{job}")


def test_links_are_whole_addresses(site: Any, measured_jobs: list[int]) -> None:
    job = measured_jobs[0]
    text = get(site, f"/tables?job={job}&links=true&format=markdown").text
    found = re.search(rf"\[{job}\]\((http://\S+)/ui/jobs/{job}\)", text)
    assert found
    assert found[1] == str(site.http.base_url).rstrip("/")


def test_pages_in_order(site: Any, measured_jobs: list[int]) -> None:
    first = get(site, "/tables?label=table:tables&sort=-step_ms&limit=3").json()
    rest = get(site, f"/tables?label=table:tables&sort=-step_ms&limit=3&after={first['next']}").json()
    assert [row["step_ms"] for row in (*first["rows"], *rest["rows"])] == [256.0, 128.0, 128.0, 64.0]
    assert rest["next"] is None


@pytest.mark.parametrize("options", ["", "format=csv", "format=markdown", "columns=step_ms", "limit=5"])
def test_a_table_that_is_too_large_is_refused(site, measured_jobs, monkeypatch, options) -> None:
    monkeypatch.setattr(measurements, "MAX_MEASUREMENTS", 3)
    detail = get(site, f"/tables?label=table:tables&{options}", 422).json()["detail"]
    assert "more than 3 measurements: choose fewer jobs (kind, sweep, job" in detail
    assert "page by page at /jobs/{id}/measurements" in detail
