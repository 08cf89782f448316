"""/compare over HTTP: formats, what it says of the whole, what it refuses."""

from typing import Any
from urllib.parse import unquote

import pytest

WORK = {
    **dict.fromkeys(("phase", "range", "operator", "shapes", "name", "class"), "string"),
    **dict.fromkeys(("total_ms", "calls"), "number"),
}


@pytest.fixture
def profiles(site: Any, measured: Any, reported: Any) -> list[int]:
    """Two finished jobs with a table of 30 kernels; the second one's are faster, the last one most."""

    def profile(factor: float, precision: str) -> int:
        kernels = [["forward", "", f"k{n}", "", f"k{n}", "copy", 10.0 - factor * n / 30, 2.0] for n in range(30)]
        table = reported("work", kernels, **WORK)
        rows = [measured("step_ms", 1.0, model="tiny", precision=precision)]
        return int(site.run(spec={"precision": precision}, measurements=rows, tables=[table]))

    return [profile(0.0, "fp32"), profile(3.0, "bf16")]


def test_json_has_all_rows_and_says_what_differs(site: Any, profiles: list[int]) -> None:
    one, other = profiles
    answer = site.http.get("/compare", params={"baseline": one, "candidate": other}).json()
    assert set(answer) == {
        *("columns", "rows", "next", "alternated", "agreement", "baseline", "candidate", "differences", "notes"),
        *("sentence", "conclusion", "headline", "gate", "distributions"),
        *("spec_differences", "environment_differences"),
    }
    assert [column["name"] for column in answer["columns"]][:4] == ["table", "phase", "name", "class"]
    assert [row["name"] for row in answer["rows"][:2]] == ["all work", "k29"]
    assert len(answer["rows"]) == 31
    assert answer["alternated"] is False
    assert answer["differences"] == [{"name": "precision", "baseline": "fp32", "candidate": "bf16"}]
    side = {"name": None, "job": one, "jobs": [one], "kind": "benchmark", "state": "succeeded", "url": f"/jobs/{one}"}
    assert answer["baseline"] == {**side, "validity": None, "verdicts": {}, "processes": 1}


@pytest.mark.parametrize(
    ("format_", "media_type", "kernels"),
    [
        ("csv", "text/csv", 30),
        ("markdown", "text/markdown", 20),
        ("latex", "application/x-latex", 20),
        ("html", "text/html", 20),
    ],
)
def test_people_get_what_changed_most(site, profiles, format_, media_type, kernels) -> None:
    query = {"baseline": profiles[0], "candidate": profiles[1], "format": format_}
    response = site.http.get("/compare", params=query)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith(media_type)
    assert all(f"k{n}" in response.text for n in range(10, 30))
    assert ("k5" in response.text) == (kernels == 30)
    assert ("Shown are the 20 that changed most of 30 rows of work" in response.text) == (kernels == 20)
    few = site.http.get("/compare", params={**query, "limit": 1}).text
    assert "k29" in few
    assert "k28" not in few


@pytest.mark.parametrize(
    ("query", "pointers"),
    [
        ({}, ["/baseline", "/candidate"]),
        ({"baseline": 1}, ["/candidate"]),
        ({"candidate": 1}, ["/baseline"]),
        ({"job": 1, "baseline": 1}, ["/baseline"]),
        ({"baseline": "x", "candidate": 1}, [""]),
        ({"baseline": 1, "candidate": 0}, [""]),
        ({"baseline": 1, "candidate": 1, "sort": "name"}, [""]),
    ],
)
def test_a_query_that_names_no_two_sides(site: Any, query: dict[str, Any], pointers: list[str]) -> None:
    refused = site.http.get("/compare", params=query)
    assert refused.status_code == 422
    assert [error["pointer"] for error in refused.json()["errors"]] == pointers


def test_headers_tell_the_gate_in_every_format(site: Any, profiles: list[int]) -> None:
    one, other = profiles
    asked = {"baseline": one, "candidate": other, "fail_above_percent": 5}
    gate = site.http.get("/compare", params=asked).json()["gate"]
    for format_ in ("json", "csv", "markdown", "latex", "html"):
        headers = site.http.get("/compare", params={**asked, "format": format_}).headers
        assert headers["Flopwatch-Gate"] == gate["outcome"] == "inconclusive"
        assert unquote(headers["Flopwatch-Gate-Sentence"]) == gate["sentence"]
    assert "Flopwatch-Gate" not in site.http.get("/compare", params={"baseline": one, "candidate": other}).headers


def test_jobs_that_cannot_be_compared(site: Any, profiles: list[int]) -> None:
    waiting = site.submit()["id"]
    (done, _) = profiles
    for query, status, code in (
        ({"baseline": done, "candidate": 99_999}, 404, "not_found"),
        ({"job": 99_999}, 404, "not_found"),
        ({"baseline": done, "candidate": waiting}, 409, "conflict"),
        ({"job": waiting}, 409, "conflict"),
        ({"job": done}, 422, "invalid_request"),
    ):
        response = site.http.get("/compare", params=query)
        assert (response.status_code, response.json()["code"]) == (status, code), query
    assert site.http.get("/compare", params={"job": done}).json()["errors"][0]["pointer"] == "/job"
