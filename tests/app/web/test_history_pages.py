"""Baselines and histories: their routes and pages, without a browser."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from app.results.history import History, HistoryPoint
from app.web.history_plot import figure
from app.web.pages import history
from tests.app.web.checker import page

COMMITS = [f"{number:040x}" for number in range(1, 6)]
CASE = {"model": "tiny", "context_length": 64}
KEY = "feedfacefeedfacefeed"


@pytest.fixture(scope="module")
def filled(serve: Any, measured: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Five jobs of one case, of which the first two are of one version and the last ran out of memory; a job with two
    other cases."""
    with serve(tmp_path_factory.mktemp("history")) as site:
        site.worker.register()
        for number in range(5):
            commit = COMMITS[max(number, 1)]
            row = measured("step_ms", 10.0 + number, **CASE) if number < 4 else measured("step_ms", None, "oom", **CASE)
            site.run(
                measurements=[replace(row, case_key=KEY), replace(measured("tflops", 1.0, **CASE), case_key=KEY)],
                environment={"software": {"git_commit": commit, "git_dirty": False}},
            )
        site.run(measurements=[measured("step_ms", 1.0, model="tiny", precision=name) for name in ("fp32", "bf16")])
        assert site.http.put("/baselines/main", json={"job": 2}, headers={"Flopwatch-User": "ada"}).status_code == 201
        yield site


def test_the_history_of_a_case_by_its_key_and_by_a_job(filled: Any) -> None:
    by_job = filled.http.get("/history", params={"job": 3}).json()
    assert filled.http.get("/history", params={"case": KEY[:6]}).json() == by_job
    assert (by_job["case_key"], by_job["metric"], by_job["metrics"]) == (KEY, "step_ms", ["step_ms", "tflops"])
    points = by_job["points"]
    assert [point["job"] for point in points] == [1, 2, 3, 4, 5]
    assert [point["value"] for point in points] == [10.0, 11.0, 12.0, 13.0, None]
    assert points[-1]["outcome"] == "oom"
    assert [point["baselines"] for point in points] == [[], ["main"], [], [], []]
    assert points[3]["version"] == COMMITS[3]


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ({}, 422, "give `case`"),
        ({"case": "abc"}, 422, "4"),
        ({"case": "nothing"}, 404, "no such case"),
        ({"job": 99}, 404, "no job 99"),
        ({"job": 6}, 422, "precision=bf16"),
        ({"job": 3, "metric": "pace"}, 422, "it has step_ms, tflops"),
        ({"job": 3, "device": "none"}, 404, "'none'"),
        ({"job": 3, "coordinate": "precision"}, 422, "coordinate=value"),
    ],
)
def test_what_has_no_history_says_why(filled: Any, query: dict[str, Any], status: int, words: str) -> None:
    answer = filled.http.get("/history", params=query)
    assert answer.status_code == status
    assert words in answer.text


def test_a_case_of_several_is_chosen_by_its_coordinates(filled: Any) -> None:
    chosen = filled.http.get("/history", params={"job": 6, "coordinate": "precision=bf16"}).json()
    assert chosen["coordinates"]["precision"] == "bf16"
    found = page(filled, "/ui/history?job=6")
    links = [reference for reference in found.references if reference.startswith("/ui/history?case=")]
    assert len(links) == 2
    assert all(filled.http.get(link).status_code == 200 for link in links)


def test_the_page_of_a_history(filled: Any) -> None:
    found = page(filled, "/ui/history?job=3")
    assert {f"/ui/jobs/{job}" for job in range(1, 6)} <= set(found.references)
    assert "/ui/compare?job=3&job=4" in found.references
    assert "/ui/baselines/main" in found.references
    assert COMMITS[3][:8] in found.text
    assert "oom" in found.text
    for query in ("metric=tflops", "device=1x test CPU"):
        assert filled.http.get(f"/ui/history?case={KEY}&{query}").status_code == 200


def test_pages_lead_to_histories(filled: Any) -> None:
    assert "/ui/history?job=3" in page(filled, "/ui/jobs/3").references
    assert "/ui/history?job=3" in page(filled, "/ui/history").references


def test_baselines_have_a_page(filled: Any) -> None:
    listed = page(filled, "/ui/baselines")
    assert "ada" in listed.text
    assert {"/ui/baselines/main", "/ui/jobs/2"} <= set(listed.references)
    own = page(filled, "/ui/baselines/main")
    [history] = [reference for reference in own.references if reference.startswith("/ui/history?")]
    assert filled.http.get(history).status_code == 200
    compared = page(filled, "/ui/compare?baseline_name=main&job=3")
    assert "Compare with baseline main" in " ".join(compared.text.split())
    assert "/compare?baseline_name=main&candidate=3&format=csv" in compared.references
    assert "There is no baseline" in page(filled, "/ui/compare?baseline_name=gone&job=3", 404).text
    assert filled.http.get("/ui/baselines/none").status_code == 404


def test_a_job_is_compared_with_the_one_before_and_no_side_of_a_comparison() -> None:
    of = ((1, None), (2, "baseline"), (2, "candidate"), (3, None))
    points: Any = [SimpleNamespace(job=job, side=side, device_key="CPU") for job, side in of]
    addresses = [row["compared"] for row in history._rows(points)]
    assert addresses == ["/ui/compare?job=1&job=3", None, None, None]


def test_a_single_point_has_minutes_around_it() -> None:
    def across(*times: str) -> Any:
        points = [
            HistoryPoint(job, None, f"2026-03-01T{time}Z", "cpu", "a", 2.0, 1.0, 3.0, 9, "ok", "valid", *[None] * 4, [])
            for job, time in enumerate(times)
        ]
        shown = History("k", "benchmark", {}, "step_ms", "ms", "less", [], ["cpu"], ["a"], False, "", points)
        return figure(shown)["layout"]["xaxis"].get("range")

    assert across("10:00:00") == ["2026-03-01T09:55:00+00:00", "2026-03-01T10:05:00+00:00"]
    assert across("10:00:00", "10:09:00") == ["2026-03-01T09:59:30+00:00", "2026-03-01T10:09:30+00:00"]
    assert across("10:00:00", "10:10:00") is None
    assert across() is None
