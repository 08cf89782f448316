"""What the panels of a profile draw, from rows as its tables have them."""

from types import SimpleNamespace
from typing import Any

import pytest

from app.web.panels.profile import (
    draw_classes,
    draw_lines,
    draw_roofline,
    draw_waits,
    panels,
    phase_times,
    roofline_text,
)


def classes(**scopes: dict[str, float]) -> list[dict[str, Any]]:
    return [{"scope": at, "class": it, "total_ms": ms} for at, times in scopes.items() for it, ms in times.items()]


def product(**fields: Any) -> dict[str, Any]:
    row = {"phase": "forward", "operator": "aten::mm", "product": "2×3 · 3×4", "dtype": "fp32", "total_ms": 4.0}
    rates = {"tflops": 0.5, "intensity": 10.0, "limit_percent": 50.0, "bound": "memory-bound"}
    return {**row, **rates, **fields}


def ceilings(compute: float | None = 1.0, copy: float | None = 100.0, peak: float | None = 2.0) -> list[dict[str, Any]]:
    values = {"products": compute, "copies": copy, "vendor's peak": peak}
    return [
        {"limit": limit, "precision": "fp32", "value": value, "unit": "", "source": "none is on record"}
        for limit, value in values.items()
    ]


def test_each_phase_has_what_its_scope_adds() -> None:
    rows = classes(
        forward={"matmul": 2.0, "other": 1.0},
        forward_backward={"matmul": 6.0, "other": 1.5},
        step={"matmul": 6.0, "other": 1.5, "optimizer": 3.0},
    )
    assert phase_times(rows) == {
        "forward": {"matmul": 2.0, "other": 1.0},
        "backward": {"matmul": 4.0, "other": 0.5},
        "optimizer": {"matmul": 0.0, "other": 0.0, "optimizer": 3.0},
    }


@pytest.mark.parametrize(
    ("scopes", "phases"),
    [
        ({"forward": {"copy": 1.0}}, ["forward"]),
        ({"step": {"copy": 1.0}}, ["step"]),
        ({"prefill": {"copy": 1.0}, "decode": {"copy": 2.0}, "step": {"copy": 3.0}}, ["prefill", "decode"]),
    ],
)
def test_phases_of_other_modes(scopes: dict[str, dict[str, float]], phases: list[str]) -> None:
    found = phase_times(classes(**scopes))
    assert list(found) == phases
    assert found == {phase: scopes[phase] for phase in phases}


def test_without_any_ceiling_there_are_the_reasons_and_no_plot() -> None:
    rows = {"products": [product()], "ceilings": ceilings(None, None, None)}
    results: Any = SimpleNamespace(has=rows.__contains__, rows=rows.get, tables=rows, artifacts={})
    (panel,) = panels(results)
    assert panel.draw is None
    assert panel.text.startswith("Not known of this device: products: none is on record")
    rows["ceilings"] = ceilings(None, None)
    (panel,) = panels(results)
    assert panel.draw is not None


def test_bars_of_classes_have_shares_and_numbers() -> None:
    figure = draw_classes(classes(forward={"matmul": 3.0, "copy": 1.0, "softmax": 0.0}))
    assert [(trace["name"], trace["x"]) for trace in figure["data"]] == [("matmul", [3.0]), ("copy", [1.0])]
    assert figure["data"][0]["customdata"] == [", 75.0 %"]
    assert figure["table"]["rows"] == [["forward", 3.0, 1.0]]


def test_the_roofline_bends_where_both_limits_meet() -> None:
    figure = draw_roofline([product(), product(phase="backward", total_ms=1.0)], [], ceilings())
    *points, measured, peak = figure["data"]
    assert [trace["name"] for trace in points] == ["products, forward", "products, backward"]
    assert (points[0]["x"], points[0]["y"]) == ([10.0], [0.5])
    assert points[0]["marker"]["size"][0] > points[1]["marker"]["size"][0], "the longer one is larger"
    assert measured["x"][1] == pytest.approx(10.0)  # 1 TFLOP/s by 100 GB/s
    assert measured["y"][1:] == [1.0, 1.0]
    assert measured["y"][0] / measured["x"][0] == pytest.approx(0.1)
    assert peak["y"] == [2.0, 2.0]
    assert figure["layout"]["xaxis"]["type"] == figure["layout"]["yaxis"]["type"] == "log"


@pytest.mark.parametrize(
    ("known", "lines"),
    [({"copy": None}, 2), ({"compute": None}, 2), ({"peak": None}, 1), (dict.fromkeys(("compute", "copy", "peak")), 0)],
)
def test_unknown_limits_are_named(known: dict[str, None], lines: int) -> None:
    rows = ceilings(**known)
    assert len(draw_roofline([product()], [], rows)["data"]) == 1 + lines
    assert roofline_text(rows).count("none is on record") == len(known)
    assert "Not known of this device" not in roofline_text(ceilings())


def test_operators_of_unknown_cost_have_no_point() -> None:
    part = {**product(), "part": "scores"}
    unknown = {**part, "tflops": None, "intensity": None}
    figure = draw_roofline([], [part, unknown], [])
    assert [trace["name"] for trace in figure["data"]] == ["attention, forward"]
    assert len(figure["table"]["rows"]) == 1
    assert draw_roofline([], [unknown], ceilings())["data"] == []


def test_names_of_a_worker_are_no_markup() -> None:
    assert "&lt;b&gt;mm" in draw_roofline([product(operator="<b>mm</b>")], [], [])["data"][0]["customdata"][0]


def test_phases_of_ones_own_step_are_shown_as_they_are() -> None:
    """Unlike our model's, its scopes do not include the phases before them."""
    rows = classes(forward={"matmul": 2.0}, backward={"matmul": 3.0}, optimizer={"other": 1.0}, step={"matmul": 5.0})
    assert phase_times(rows) == {"forward": {"matmul": 2.0}, "backward": {"matmul": 3.0}, "optimizer": {"other": 1.0}}


def test_points_above_the_roof_say_that_it_is_too_low() -> None:
    rows = ceilings()
    assert "above" not in roofline_text(rows)
    rows[1]["source"] = "measured at noon; too low, since work reached 324 % of it"
    assert roofline_text(rows).endswith(
        "Points above a roof say that it is too low. copies: measured at noon; too low, since work reached 324 % of it."
    )
    figure = draw_roofline([product(limit_percent=324.0)], [], ceilings())
    assert "324 % of its limit, memory-bound, so the roof is too low" in figure["data"][0]["customdata"][0]


def test_lines_are_bars_of_python_and_the_rest() -> None:
    row = {"file": "train.py", "line": 49, "function": "SlowAdam.step", "self_ms": 4.0, "self_percent": 80.0}
    row |= {"total_ms": 4.0, "python_ms": 3.0, "device_self_ms": None, "device_total_ms": None, "calls": 7, "code": "a"}
    outside = {**row, "file": None, "line": None, "function": "make.<lambda>", "python_ms": 0.0, "self_ms": 1.0}
    figure = draw_lines([row, outside])
    assert {it["name"]: it["x"] for it in figure["data"]} == {"Python": [3.0, 0.0], "operators and waits": [1.0, 1.0]}
    assert "train.py:49" in figure["data"][0]["y"][0]
    assert figure["data"][0]["y"][1] == "make.&lt;lambda&gt;"
    assert (figure["table"]["rows"][0][:3], figure["table"]["rows"][0][-1]) == (["train.py", 49, "SlowAdam.step"], "a")


def test_what_a_gpu_waits_for_is_one_bar_with_the_largest_gaps_in_its_numbers() -> None:
    running = {"class": "running", "total_ms": 6.0, "share_percent": 60.0, "largest_ms": 1.0, "operator": None}
    waits = {"class": "input", "total_ms": 4.0, "share_percent": 40.0, "largest_ms": 3.0, "operator": "aten::stack"}
    figure = draw_waits([{"unit_index": 0, **row, "kernel": "sgemm"} for row in (running, waits)])
    assert [(trace["name"], trace["x"]) for trace in figure["data"]] == [("running", [6.0]), ("input", [4.0])]
    assert figure["table"]["rows"][1] == ["input", 4.0, 40.0, 3.0, "aten::stack", "sgemm"]
