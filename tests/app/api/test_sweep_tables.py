"""GET /sweeps/{id}/tables/{name}: the tables that a sweep's jobs reported, in one."""

from typing import Any

import pytest

from app.results import unit_tables
from flopwatch import Flopwatch

KERNELS = {"kernel": "string", "total_ms": "number"}


@pytest.fixture
def swept(fresh_site: Any, reported: Any) -> str:
    """The path to the tables of a sweep: two jobs have one, the second's with a column more, and the third waits."""
    site = fresh_site
    site.worker.register()
    base = {"kind": "benchmark", "model": {"size": "tiny"}}
    answer = site.http.post("/sweeps", json={"base": base, "grid": {"context_length": [16, 32, 64]}})
    for number, more in ((1, {}), (2, {"bytes": "integer"})):
        rows = [["gemm", 2.0 * number, *[7] * len(more)], ["relu", 0.5 * number, *[8] * len(more)]]
        site.worker.finish(site.worker.claim(), tables=[reported("kernels", rows, **KERNELS, **more)])
    return f"/sweeps/{answer.json()['id']}/tables"


def test_each_row_has_its_job_and_its_values_of_the_grid(fresh_site: Any, swept: str) -> None:
    answer = fresh_site.http.get(f"{swept}/kernels?sort=-total_ms").json()
    rows = [{name: row[name] for name in ("job", "context_length", *KERNELS, "bytes")} for row in answer["rows"]]
    assert [tuple(row.values()) for row in rows] == [
        (2, 32, "gemm", 4.0, 7),
        (1, 16, "gemm", 2.0, None),
        (2, 32, "relu", 1.0, 8),
        (1, 16, "relu", 0.5, None),
    ]
    assert [column["type"] for column in answer["columns"][:2]] == ["integer", "integer"]


def test_in_pages_and_columns_and_for_people(fresh_site: Any, swept: str) -> None:
    first = fresh_site.http.get(f"{swept}/kernels?limit=3").json()
    rest = fresh_site.http.get(f"{swept}/kernels?limit=3&after={first['next']}").json()
    assert (len(first["rows"]), len(rest["rows"]), rest["next"]) == (3, 1, None)
    text = fresh_site.http.get(f"{swept}/kernels?columns=kernel&format=markdown").text
    assert [cell.strip() for cell in text.splitlines()[0].split("|")[1:-1]] == ["job", "context_length", "kernel"]
    assert '<a href="/ui/jobs/2">2</a>' in fresh_site.http.get(f"{swept}/kernels?format=html").text
    assert f'href="{swept}/kernels?format=html"' in fresh_site.http.get("/ui/sweeps/1").text


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("limit_per_job=1&sort=-total_ms", [(2, "gemm"), (1, "gemm")]),
        ("limit_per_job=2&limit=3", [(1, "gemm"), (1, "relu"), (2, "gemm")]),
        ("where=kernel=r*l?", [(1, "relu"), (2, "relu")]),
        ("where=context_length=32&columns=total_ms", [(2, "gemm"), (2, "relu")]),
        ("where=kernel=relu&where=kernel=gemm&where=job=1", [(1, "gemm"), (1, "relu")]),
        ("where=bytes=8", [(2, "relu")]),
    ],
)
def test_rows_are_chosen_by_value_and_of_each_job(fresh_site, swept, query, found) -> None:
    rows = fresh_site.http.get(f"{swept}/kernels?{query}").json()["rows"]
    names = {4.0: "gemm", 2.0: "gemm", 1.0: "relu", 0.5: "relu"}
    assert [(row["job"], names[row["total_ms"]]) for row in rows] == found


def test_jobs_without_the_table_are_named(fresh_site: Any, swept: str) -> None:
    http, worker = fresh_site.http, fresh_site.worker
    assert http.get(f"{swept}/kernels").json()["missing"] == ["1 queued"]
    worker.finish(worker.claim(), "failed")
    with Flopwatch(fresh_site.url) as client:
        assert client.sweep_table(1, "kernels", limit=3).attrs["missing"] == ["job 3: failed"]
    assert "- Without rows here: job 3: failed." in http.get(f"{swept}/kernels?format=markdown").text


def test_a_column_may_be_named_as_a_path_of_the_grid(fresh_site: Any, swept: str, reported: Any) -> None:
    site = fresh_site
    site.worker.finish(
        site.worker.claim(), tables=[reported("ranks", [[7, 0]], context_length="integer", job="integer")]
    )
    (row,) = site.http.get(f"{swept}/ranks").json()["rows"]
    assert row | {"table.context_length": 7, "context_length": 64, "job": 3, "table.job": 0} == row


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/kernel", 404, "No finished job of sweep 1 has a table 'kernel'; they have: kernels."),
        ("/kernels?sort=nose", 422, "no column 'nose' to sort by"),
        ("/kernels?columns=nose", 422, "There is no column 'nose'"),
        ("/kernels?attempt=1", 422, "'attempt'"),
        ("/kernels?where=phase=forward", 422, "These results have no column 'phase'; there is job, "),
        (f"/kernels?where=kernel={900 * 'x'}", 422, "No row has kernel=xxx"),
        ("/kernels?where=kernel=softmax", 422, "No row has kernel=softmax; there is gemm, relu."),
        ("/kernels?where=kernel", 422, "must be written coordinate=value"),
    ],
)
def test_what_is_not_there_is_refused(fresh_site: Any, swept: str, path: str, status: int, words: str) -> None:
    answer = fresh_site.http.get(f"{swept}{path}")
    assert (answer.status_code, words in answer.json()["detail"]) == (status, True), answer.text


def test_too_many_jobs_are_refused(fresh_site: Any, swept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_tables, "MAX_JOBS_OF_TABLE", 1)
    answer = fresh_site.http.get(f"{swept}/kernels")
    assert (answer.status_code, "1 at most" in answer.json()["detail"]) == (422, True)
