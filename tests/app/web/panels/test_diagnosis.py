"""What the panels of a diagnosis draw, from rows as its tables have them."""

from typing import Any

import pytest

from app.web.panels.diagnosis import again, draw_waterfall, ratios


def cause(rank: int, kind: str, lost_ms: float, bound_ms: float | None = None, where: str | None = None) -> Any:
    known = {"rank": rank, "cause": kind, "where": where, "lost_ms": lost_ms, "lost_percent": lost_ms}
    if bound_ms is None:
        return {**known, "bound_ms": 100 - lost_ms, "bound_is": "ceiling"}
    return {**known, "bound_ms": bound_ms, "bound_is": "measured"}


def change(name: str, verdict: str, ratio: float | None, how: str = "", **ends: float) -> dict[str, Any]:
    known = {"change": name, "cause": "input", "verdict": verdict, "how": how, "ratio": ratio}
    return {**known, "step_ms": ratio and 100 * ratio, "ratio_low": None, "ratio_high": None, **ends}


def test_the_step_falls_by_its_causes_to_the_floor_and_the_models_own_work_stands_below() -> None:
    causes = [
        cause(1, "kernels", 40.0, where="train.py:3-9 Model.forward"),
        cause(2, "optimizer", 30.0, 65.0, "train.py:51-55 SlowAdam.step (line 52: 900 times a step)"),
        cause(3, "input", 15.0),
        cause(4, "unexplained", 5.0),
    ]
    figure = draw_waterfall(causes, [change("together", "better", 0.5, "a + b")])
    assert figure["table"]["rows"] == [
        ["step", "time of a step", 0.0, 100.0, ""],
        ["2 optimizer, SlowAdam.step", "measured without it", 65.0, 35.0, causes[1]["where"]],
        ["3 input", "at most", 50.0, 15.0, ""],
        ["4 unexplained", "unexplained", 45.0, 5.0, ""],
        ["floor", "time of a step", 0.0, 45.0, ""],
        ["1 kernels, Model.forward", "the model's own work", 5.0, 40.0, causes[0]["where"]],
        ["the rest", "time of a step", 0.0, 5.0, ""],
        ["all together", "time of a step", 0.0, 50.0, "a + b"],
    ]
    looks = {trace["name"]: trace["marker"] for trace in figure["data"]}
    assert looks["measured without it"] != looks["at most"] != looks["unexplained"]


def test_causes_that_overlap_end_at_nothing() -> None:
    figure = draw_waterfall([cause(1, "host", 80.0, 10.0), cause(2, "input", 20.0), cause(3, "kernels", 5.0, 120.0)])
    assert [row[2:4] for row in figure["table"]["rows"]] == [[0, 100], [10, 90], [2, 8], [0, 2], [0, 2]]
    assert figure["note"].startswith("What only the profile saw is drawn at 40 %")
    assert draw_waterfall([cause(1, "host", 60.0, 30.0), cause(2, "input", 20.0)])["note"] == ""


def test_bars_whose_bounds_are_not_known_are_told_to_be_rough() -> None:
    causes = [cause(1, "host", 30.0, 70.0), cause(2, "input", 20.0), cause(3, "kernels", 50.0)]
    rough = [causes[0], *({**row, "bound_ms": None} for row in causes[1:])]
    figure = draw_waterfall(rough)
    assert [row[:2] for row in figure["table"]["rows"][1:4]] == [
        ["1 host", "measured without it"],
        ["2 input", "not known"],
        ["floor, rough", "time of a step"],
    ]
    assert figure["note"].startswith("Bars of what was not measured are rough")
    assert draw_waterfall(rough[2:])["note"], "also of a step that has nothing but its own work"
    assert draw_waterfall([causes[0], rough[1], causes[2]])["note"] == "", "one cause alone is doubted"


@pytest.mark.parametrize("label", ["update: garbage collection", "garbage collection"])
def test_a_bars_label_tells_garbage_collection(label: str) -> None:
    place = f"train.py:63 {label}" if ":" in label else label
    rows = draw_waterfall([cause(2, "host", 40.0, where=f"{place} (not in every step)")])["table"]["rows"]
    assert rows[1][0] == f"2 host, {label}"


def test_a_loader_in_two_places_is_drawn_once() -> None:
    """Tables of earlier versions have the bound of the whole loader beside the first one."""
    causes = [cause(1, "input", 27.8, 58.1), cause(2, "input", 18.5), cause(3, "kernels", 40.0)]
    rows = draw_waterfall(causes)["table"]["rows"]
    assert [row[2:4] for row in rows[1:4]] == [[58.1, pytest.approx(41.9)], [0.0, 58.1], [pytest.approx(18.1), 40.0]]
    assert [row[0] for row in rows[1:4]] == ["1 input", "floor", "3 kernels"]


@pytest.mark.parametrize("note", ["line 8: 640 times a step; small operators", "the others wait for it"])
def test_a_loop_over_small_operators_is_no_part_of_the_floor_nor_what_a_late_rank_does_longer(note: str) -> None:
    loop = cause(1, "kernels", 80.0, where=f"train.py:8 penalty ({note})")
    large = cause(2, "precision", 15.0, where="train.py:9 Model.forward (line 9: 100 times a step)")
    rows = {row[0]: row[1:4] for row in draw_waterfall([loop, large])["table"]["rows"]}
    assert (rows["1 kernels, penalty"], rows["floor"]) == (["at most", 20.0, 80.0], ["time of a step", 0.0, 20.0])
    assert rows["2 precision, Model.forward"] == ["the model's own work", 5.0, 15.0]


def test_changes_are_points_around_1_the_fastest_first_and_bounds_are_marked() -> None:
    rows = [
        change("threads", "no_difference", 1.0, ratio_low=0.99, ratio_high=1.01),
        change("tf32", "refused", None),
        change("loader_workers", "better", 0.8, ratio_low=0.7, ratio_high=0.9),
        change("batches_from_memory", "better", 0.75),
        change("together", "better", 0.8, "loader_workers"),
    ]
    found = ratios(rows, {"batches_from_memory"})
    assert [(one.label, one.finding, one.low) for one in found] == [
        ("batches_from_memory (bound)", "bound", None),
        ("loader_workers", "better", 0.7),
        ("threads", "no_difference", 0.99),
    ]


@pytest.mark.parametrize(
    ("row", "command"),
    [
        (change("tf32", "better", 0.9), "flopwatch why 7 --change tf32"),
        (change("together", "better", 0.9, "tf32 + threads"), "flopwatch why 7 --change tf32 --change threads"),
    ],
)
def test_a_change_is_measured_again_by_a_command(row: dict[str, Any], command: str) -> None:
    assert again(7, row) == command
