"""What the panels of a data-parallel job draw, from rows as its tables have them."""

from __future__ import annotations

from typing import Any

import pytest

from app.results.sheet import Cell, Column, Sheet
from app.web.panels import _buckets
from app.web.panels.ddp import draw_exposed, draw_operations, draw_timeline, merged_spans, parts_of_steps, tied


def span(rank: int, stream: str, begin: float, end: float) -> dict[str, Any]:
    return {"step": 1, "rank": rank, "stream": stream, "start_ms": begin, "end_ms": end}


def sheet(*rows: tuple[str, float | None, float | None]) -> Sheet:
    columns = [
        Column("strategy", "string", role="coordinate"),
        Column("step_ms", "number", "ms", role="metric"),
        Column("exposed_communication_ms", "number", "ms", role="metric"),
    ]
    cells = [
        [name, *(Cell(value, None, 1, "ok" if value is not None else "oom") for value in of)] for name, *of in rows
    ]
    return Sheet(columns=columns, rows=cells)


def test_a_row_for_each_rank_and_stream() -> None:
    rows = [
        span(0, "compute", 0, 4),
        span(0, "communication", 3, 6),
        span(0, "exposed", 4, 6),
        span(1, "compute", 0, 6),
    ]
    figure = draw_timeline(rows)
    assert [trace["name"] for trace in figure["data"]] == ["computation", "communication", "exposed communication"]
    names = figure["layout"]["yaxis"]["ticktext"]
    assert names[:3] == ["rank 0, computation", "rank 0, communication", "rank 0, exposed"]
    compute = figure["data"][0]
    assert compute["x"][:6] == [0.0, 4.0, 4.0, 0.0, 0.0, None]
    assert round(compute["y"][6] or 0) == names.index("rank 1, computation")
    assert figure["table"]["rows"][:3] == [
        [0, "computation", 4.0, 1],
        [0, "communication", 3.0, 1],
        [0, "exposed communication", 2.0, 1],
    ]


def test_a_timeline_is_bounded() -> None:
    rows = [span(rank, "compute", at, at + 0.5) for rank in range(40) for at in range(300)]
    figure = draw_timeline(rows)
    assert len(figure["data"][0]["x"]) <= 6 * 3000
    assert figure["layout"]["yaxis"]["ticktext"][-1] == "rank 15, computation"
    assert "16 of 40 ranks" in figure["note"]
    assert figure["table"]["rows"][0] == [0, "computation", 150.0, 300], "the numbers are of all spans"


def test_the_closest_spans_are_joined() -> None:
    spans = [(0.0, 1.0), (1.1, 2.0), (5.0, 6.0)]
    assert merged_spans(spans, 3) == spans
    assert merged_spans(spans, 2) == [(0.0, 2.0), (5.0, 6.0)]
    assert merged_spans(spans, 1) == [(0.0, 6.0)]


def test_a_bar_for_each_strategy_with_its_exposed_share() -> None:
    found = parts_of_steps(sheet(("naive", 10.0, 4.0), ("fsdp", 8.0, -1.0), ("none", 5.0, None), ("naive", 9.0, 3.0)))
    assert found == {
        "naive": {"computation": 6.0, "exposed communication": 4.0},
        "fsdp": {"computation": 8.0, "exposed communication": 0.0},
        "naive (2)": {"computation": 6.0, "exposed communication": 3.0},
    }
    figure = draw_exposed(found)
    assert [row[-1] for row in figure["table"]["rows"]] == [pytest.approx(40.0), 0.0, pytest.approx(100 / 3)]


def test_strategies_whose_steps_overlap_have_no_fastest() -> None:
    found = sheet(("naive", 10.0, 4.0), ("fsdp", 8.0, 1.0), ("flat", 8.2, 1.0))
    assert tied(found) == "", "single values, which differ"
    for (_, step, _), (low, high) in zip(found.rows, ((9.0, 11.0), (7.8, 8.3), (8.1, 8.4)), strict=True):
        step.low, step.high = low, high
    assert tied(found) == "The step of flat cannot be told from the shortest, fsdp: the intervals overlap"
    assert draw_exposed(parts_of_steps(found), tied(found))["note"] == tied(found)


def test_operations_begin_at_the_first_of_all_ranks() -> None:
    rows = [
        {"rank": 0, "operation": "all_reduce", "size": 2048, "start_ms": 100.0, "end_ms": 103.0},
        {"rank": 1, "operation": "all_reduce", "size": 2048, "start_ms": 101.0, "end_ms": 103.0},
    ]
    (trace,) = draw_operations(rows)["data"]
    assert trace["x"][:2] == [0.0, 3.0]
    assert trace["x"][6:8] == [1.0, 3.0]
    assert trace["customdata"][0] == "all_reduce, 2,048 bytes"
    assert draw_operations([])["data"] == []


def bucket_row(what: str, size: float, predicted: float, *around: float) -> dict[str, Any]:
    names = "low_mb", "high_mb"
    row = {"what": what, "size_mb": size, "predicted_exposed_ms": predicted}
    row |= dict(zip(names, around, strict=False))
    return {**row, "predicted_low_ms": predicted - 1, "predicted_high_ms": predicted + 1}


def cells(values: dict[float, float], error: float = 0.0) -> dict[float, Cell]:
    return {size: Cell(ms, error, 9, "ok", low=ms - error, high=ms + error) for size, ms in values.items()}


def test_measured_points_stand_beside_the_predicted_line() -> None:
    rows = [bucket_row("this job", 5, 7), bucket_row("best", 4, 3, 2, 9)]
    rows += [bucket_row("curve", 1, 8), bucket_row("curve", 5, 7)]
    low, high, line, best, points = _buckets.draw(rows, cells({25.0: 6.5, 5.0: 7.5}))["data"]
    assert (low["y"], line["y"], high["y"]) == ([7, 6], [8, 7], [9, 8])
    assert (best["x"], best["error_x"]["arrayminus"], best["error_x"]["array"]) == ([4], [2], [5])
    assert (points["x"], points["y"]) == ([5.0, 25.0], [7.5, 6.5])
    assert _buckets.draw(rows, cells({5.0: 7.5}))["note"] == ""
    assert _buckets.draw(rows, cells({5.0: 7.5, 1.0: -0.25}))["note"].endswith("on this axis: -0.25 ms at 1 MB")


def test_a_prediction_that_measured_sizes_contradict_is_called_so() -> None:
    rows = [bucket_row("this job", 5, 7), {**bucket_row("best", 5, 3, 2, 9), "note": "no line"}]
    rows += [bucket_row("curve", 1, 8), bucket_row("curve", 5, 7), bucket_row("curve", 40, 9)]
    note = _buckets.draw(rows, cells({1.0: 6.0, 6.0: 7.5, 50.0: 2.5}))["note"]
    assert note.startswith("The prediction may be wrong: no line. Prediction and measurement disagree: of the measured")
    assert "50 MB is best (2.5 ms), not 6 MB (7.5 ms)" in note
    assert "disagree" not in _buckets.draw(rows, cells({1.0: 6.0, 6.0: 4.5, 50.0: 8.5}))["note"]
    assert "disagree" not in _buckets.draw(rows, cells({1.0: 6.0, 6.0: 7.5, 50.0: 2.5}, error=3.0))["note"]


def test_points_are_of_jobs_that_differ_by_their_buckets_only() -> None:
    def of(*rows: tuple[str, float | None, float]) -> Sheet:
        columns = [
            Column("strategy", "string", role="coordinate"),
            Column("bucket_size_mb", "number", "MB", role="coordinate"),
            Column("exposed_communication_ms", "number", "ms", role="metric"),
        ]
        return Sheet(columns=columns, rows=[[name, size, Cell(ms, None, 1, "ok")] for name, size, ms in rows])

    class Results:
        sheet = of(("bucketed", 5.0, 7.0))

        def sweep_sheet(self, columns: list[str], rows: list[str]) -> Sheet:
            assert (columns, rows) == (["exposed_communication_ms"], ["strategy", "bucket_size_mb"])
            return of(("bucketed", 5.0, 7.0), ("torch_ddp", 5.0, 9.0), ("bucketed", 25.0, 6.0), ("bucketed", None, 1.0))

    found = _buckets.measured(Results())  # type: ignore[arg-type]
    assert {size: cell.value for size, cell in found.items()} == {5.0: 7.0, 25.0: 6.0}
