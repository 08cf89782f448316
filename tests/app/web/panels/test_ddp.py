"""What the panels of a data-parallel job draw, from rows as its tables have them."""

from typing import Any

import pytest

from app.results.sheet import Cell, Column, Sheet
from app.web.panels.ddp import draw_exposed, draw_timeline, parts_of_steps, tied


def span(rank: int, stream: str, begin: float, end: float) -> dict[str, Any]:
    return {"step": 1, "rank": rank, "stream": stream, "start_ms": begin, "end_ms": end}


def sheet(*rows: tuple[str, float | None, float | None]) -> Sheet:
    columns = [
        Column("strategy", "string", role="coordinate"),
        Column("step_ms", "number", "ms", role="metric"),
        Column("exposed_communication_ms", "number", "ms", role="metric"),
        Column("validity", "string"),
    ]
    cells = [[name, *(Cell(v, None, 1, "ok" if v is not None else "oom") for v in of), "valid"] for name, *of in rows]
    return Sheet(columns=columns, rows=cells)


def test_a_row_for_each_rank_and_stream() -> None:
    own = [span(0, "compute", 0, 4), span(0, "communication", 3, 6), span(0, "exposed", 4, 6), span(1, "compute", 0, 6)]
    figure = draw_timeline(own)
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


def test_a_bar_for_each_strategy_with_its_exposed_share() -> None:
    found = parts_of_steps(sheet(("naive", 10.0, 4.0), ("fsdp", 8.0, -1.0), ("none", 5.0, None), ("naive", 9.0, 3.0)))
    assert found == {
        "naive": {"computation": 6.0, "exposed communication": 4.0},
        "fsdp": {"computation": 8.0, "exposed communication": 0.0},
        "naive (2)": {"computation": 6.0, "exposed communication": 3.0},
    }
    wrong = sheet(("flat", 8.0, 1.0))
    wrong.rows[0][-1] = "wrong"  # type: ignore[index]
    assert list(parts_of_steps(wrong)) == ["flat: wrong"]
    figure = draw_exposed(found)
    assert [row[-1] for row in figure["table"]["rows"]] == [pytest.approx(40.0), 0.0, pytest.approx(100 / 3)]


def test_strategies_whose_steps_overlap_have_no_fastest() -> None:
    found = sheet(("naive", 10.0, 4.0), ("fsdp", 8.0, 1.0), ("flat", 8.2, 1.0))
    assert tied(found) == "", "single values, which differ"
    for (_, step, *_), (low, high) in zip(found.rows, ((9.0, 11.0), (7.8, 8.3), (8.1, 8.4)), strict=True):
        step.low, step.high = low, high
    assert tied(found) == "The step of flat cannot be told from the shortest, fsdp: the intervals overlap"
    assert draw_exposed(parts_of_steps(found), tied(found))["note"] == tied(found)
