"""Figures of results: what is drawn, on which axes, in which units. No browser."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from app.results.sheet import NOT_MEASURED, Cell, Column, Sheet
from app.web.pages.plots import PlotsQuery, figures, first_metric
from app.web.plots.chart import MAX_SERIES, draw_chart
from app.web.plots.drawing import EMPTY, OUTCOMES
from app.web.plots.heat_map import draw_heat_map
from app.web.plots.points import Axes, Point, axes_of, points_of, varying
from app.web.plots.ratios import Ratio, draw_ratios


def sheet(rows: Sequence[Sequence[Any]]) -> Sheet:
    """A sheet of attention: implementation, length, time, verdict, job."""
    return Sheet(
        columns=[
            Column("implementation", "string", role="coordinate"),
            Column("sequence_length", "integer", role="coordinate"),
            Column("job", "integer", role="coordinate"),
            Column("forward_ms", "number", "ms", role="metric"),
            Column("validity", "string"),
        ],
        rows=rows,
    )


def grid(outcomes: dict[tuple[str, int], str] | None = None) -> list[Point]:
    """Two implementations at four lengths."""
    missing = outcomes or {}
    return [
        Point(
            {"implementation": name, "sequence_length": length, "causal": True},
            None if (name, length) in missing else length * factor,
            spread=None if (name, length) in missing else 0.5,
            n=8,
            outcome=missing.get((name, length), "ok"),
            low=None if (name, length) in missing else length * factor - 0.5,
            high=None if (name, length) in missing else length * factor + 0.5,
        )
        for name, factor in (("eager", 0.25), ("flash", 0.125))
        for length in (4096, 256, 1024, 512)
    ]


def drawn(figure: dict[str, Any]) -> dict[str, Any]:
    """The traces by name; the figure is JSON."""
    assert json.loads(json.dumps(figure, allow_nan=False)) == figure
    return {trace["name"]: trace for trace in figure["data"]}


def test_points_have_coordinates_verdict_and_job() -> None:
    found = points_of(
        sheet(
            [
                ["eager", 256, 7, Cell(1.5, 0.1, 10, "ok"), "valid"],
                ["flash", 256, 8, Cell(None, None, None, "oom"), "suspect"],
                ["flash", 512, None, NOT_MEASURED, None],
            ]
        ),
        "forward_ms",
    )
    assert found[0] == Point(
        {"implementation": "eager", "sequence_length": 256}, 1.5, 0.1, 10, "ok", "valid", "/ui/jobs/7"
    )
    assert (found[1].value, found[1].outcome, found[1].validity, found[1].url) == (None, "oom", "suspect", "/ui/jobs/8")
    assert (found[2].outcome, found[2].url) == (None, None)
    with pytest.raises(KeyError, match="sequence_length"):
        points_of(sheet([]), "sequence_length")
    two = Cell(1.5, None, 2, "ok", least=1.0, greatest=2.0)
    (few,) = points_of(sheet([["eager", 256, 7, two, "valid"]]), "forward_ms")
    assert (few.low, few.high) == (1.0, 2.0), "of few numbers the error bar is their range"
    figure = draw_chart([few], Axes("sequence_length"), "forward_ms", "ms")
    assert figure["table"]["rows"] == [[256, 1.5, 1.0, 2.0, 2, "ok", "valid"]], "its numbers have it, too"
    assert "1.5 (1–2) (n = 2)" in figure["data"][0]["customdata"][0][0]


def test_the_number_with_most_values_goes_along_x() -> None:
    assert axes_of(grid()) == Axes("sequence_length", ("implementation",), ("implementation", "sequence_length"))
    assert axes_of(grid(), "implementation").by == ("sequence_length",)
    with pytest.raises(KeyError, match="causal"):
        axes_of(grid(), "causal")


def test_an_error_bar_has_the_ends_of_the_interval() -> None:
    """A median of 1662 ms with 814 to 3715 ms was drawn down to -391 ms."""
    point = Point({"x": 1}, 1662.0, spread=2053.0, low=814.0, high=3715.0)
    (trace,) = draw_chart([point], Axes("x"), "step_ms", "ms")["data"]
    assert (trace["error_y"]["array"], trace["error_y"]["arrayminus"]) == ([2053.0], [848.0])


def test_lines_in_order_with_error_bars_log_axes_and_units() -> None:
    figure = draw_chart(grid(), axes_of(grid()), "forward_ms", "ms")
    eager = drawn(figure)["eager"]
    assert (eager["x"], eager["y"]) == ([256, 512, 1024, 4096], [64, 128, 256, 1024])
    assert eager["error_y"]["array"] == eager["error_y"]["arrayminus"] == [0.5] * 4
    across, up = figure["layout"]["xaxis"], figure["layout"]["yaxis"]
    assert (across["type"], across["tickvals"], up["type"]) == ("log", [256, 512, 1024, 4096], "log")
    assert (across["title"]["text"], up["title"]["text"]) == ("Sequence length", "Forward (ms)")
    assert eager["marker"]["color"] != drawn(figure)["flash"]["marker"]["color"]
    assert eager["customdata"][0][0] == "eager, sequence_length=256, causal<br>64 ± 0.5 (n = 8)"


def test_points_without_a_value_are_marked() -> None:
    points = grid({("eager", 4096): "oom", ("eager", 1024): "oom", ("flash", 256): "wrong"})
    traces = drawn(draw_chart(points, axes_of(points), "forward_ms", "ms"))
    assert (traces["eager"]["x"], traces["oom"]["x"], traces["oom"]["yaxis"]) == ([256, 512], [1024, 4096], "y2")
    assert traces["oom"]["marker"]["color"] == OUTCOMES["oom"] != traces["wrong"]["marker"]["color"]
    assert "oom" in traces["oom"]["customdata"][0][0]


def test_texts_make_bars_that_start_at_zero() -> None:
    points = [Point({"precision": name, "batch_size": 4}, value) for name, value in (("fp32", 90.0), ("bf16", 60.0))]
    points += [Point({"precision": "fp16", "batch_size": 4}, None, outcome="unsupported")]
    figure = draw_chart(points, axes_of(points), "step_ms", "ms")
    bars = figure["data"][0]
    assert (bars["type"], bars["x"], bars["y"]) == ("bar", ["fp32", "bf16"], [90.0, 60.0])
    assert figure["layout"]["yaxis"]["rangemode"] == "tozero"
    assert figure["layout"]["xaxis"]["categoryarray"] == ["fp32", "bf16", "fp16"]
    assert drawn(figure)["unsupported"]["x"] == ["fp16"]


def test_no_series_hides_another() -> None:
    points = [Point({"top_k": k, "length": at}, at * 1.0) for k, at in ((1, 1), ("1", 2), (2, 3))]
    figure = draw_chart(points, Axes("length", ("top_k",)), "step_ms", "ms")
    assert [value for trace in figure["data"] for value in trace["y"]] == [1.0, 2.0, 3.0]


def test_no_bar_hides_another() -> None:
    points = [Point({"precision": name}, value) for name, value in (("fp32", 90.0), ("bf16", 60.0), ("bf16", 70.0))]
    dots = draw_chart(points, axes_of(points), "step_ms", "ms")["data"][0]
    assert (dots["mode"], dots["x"], dots["y"]) == ("markers", ["fp32", "bf16", "bf16"], [90.0, 60.0, 70.0])


def test_doubtful_points_are_open() -> None:
    points = [
        Point({"length": 1}, 1.0, validity="valid"),
        Point({"length": 2}, 2.0, validity="suspect"),
        Point({"length": 2}, 3.0),
    ]
    trace = draw_chart(points, Axes("length"), "step_ms", "ms")["data"][0]
    assert (trace["marker"]["symbol"], trace["mode"]) == (["circle", "circle-open", "circle"], "markers")
    assert trace["customdata"][1][0].endswith("suspect")


def test_left_out_series_are_reported() -> None:
    points = [Point({"x": x, "series": f"s{at}"}, 1.0) for at in range(30) for x in (1, 2, 3)]
    figure = draw_chart(points, axes_of(points), "m", None)
    assert len(figure["data"]) == MAX_SERIES
    assert "of 30 series" in figure["note"]


def test_markup_in_names_is_text() -> None:
    points = [Point({"x": x, "name": name}, 1.0) for name in ("<b>a</b>", "b") for x in (1, 2)]
    figure = draw_chart(points, Axes("x", ("name",)), "m", None)
    assert "<b>" not in json.dumps([figure["data"], figure["layout"]])
    assert figure["table"]["rows"][0][0] == "<b>a</b>", "the table's cells are set as text"


def test_heat_map_with_outcomes_in_their_own_colours() -> None:
    points = grid({("eager", 4096): "oom", ("flash", 256): "wrong"})
    figure = draw_heat_map(points, "sequence_length", "implementation", "forward_ms", "ms")
    values, cells = figure["data"][0], drawn(figure)
    assert (values["x"], values["y"]) == (["256", "512", "1024", "4096"], ["eager", "flash"])
    assert (values["z"][0], values["text"][0]) == ([64, 128, 256, None], ["64", "128", "256", ""])
    assert cells["oom"]["z"] == [[None, None, None, 1], [None] * 4]
    assert (cells["oom"]["colorscale"][0][1], cells["wrong"]["z"][1][0]) == (OUTCOMES["oom"], 1)


def test_a_heat_map_says_how_many_cases_it_hides() -> None:
    points = [*grid(), *grid()[:2]]
    figure = draw_heat_map(points, "sequence_length", "implementation", "forward_ms", "ms")
    assert figure["note"] == "Not drawn: 2 of 10 cases, whose place a later one has"
    assert draw_heat_map(grid(), "sequence_length", "implementation", "forward_ms", "ms")["note"] == ""


def test_figures_have_their_numbers_as_a_table() -> None:
    points = grid({("eager", 4096): "oom"})
    for figure in (
        draw_chart(points, axes_of(points), "forward_ms", "ms"),
        draw_heat_map(points, "implementation", "sequence_length", "forward_ms", "ms"),
    ):
        table = figure["table"]
        assert table["columns"][:2] == ["Implementation", "Sequence length"]
        assert ["eager", 256, 64, 63.5, 64.5, 8, "ok", None] in table["rows"]
        assert ["eager", 4096, None, None, None, 8, "oom", None] in table["rows"]
    empty = draw_heat_map([], "a", "b", "m", None)
    assert (empty["data"], empty["empty"]) == ([], EMPTY)


def strategies(**sizes: int | None) -> list[Point]:
    return [Point({"strategy": n, "bucket_size_mb": s, "batch_size": b}, 1.0) for n, s in sizes.items() for b in (1, 2)]


def test_a_field_that_follows_from_another_is_no_axis() -> None:
    assert list(varying(strategies(bucketed=25, fsdp=None, flat=None))) == ["strategy", "batch_size"]
    two = [*strategies(bucketed=25, fsdp=None), *strategies(bucketed=50)]
    assert list(varying(two)) == ["strategy", "bucket_size_mb", "batch_size"], "it varies by itself"
    both = [Point({"compile": flag, "compile_scope": scope}, 1.0) for flag, scope in ((True, "blocks"), (False, None))]
    assert list(varying(both)) == ["compile"]


@pytest.mark.parametrize(
    ("depths", "wide", "x", "along", "by"),
    [
        ((1, 2, 4), (False,), None, "model.num_layers", ("batch_size",)),
        ((1, 2, 4), (False,), "model", "model", ("batch_size",)),
        ((1, 2, 4), (False,), "batch_size", "batch_size", ("model.num_layers",)),
        ((1, 2, 4), (False, True), None, "batch_size", ("model",)),
    ],
)
def test_a_models_field_stands_for_it(depths, wide, x, along, by) -> None:
    """Along layers each series had a single value, since `model` differed, too."""
    models = [{"model": f"l{d}{'-wide' * w}", "model.num_layers": d} for d in depths for w in wide]
    points = [Point({**model, "batch_size": size}, 1.0) for model in models for size in (1, 2)]
    axes = axes_of(points, x)
    assert (axes.x, axes.by) == (along, by)


def test_the_better_side_of_ratios_is_named() -> None:
    times = [Ratio("a", 0.5, 0.4, 0.6, "better", "less"), Ratio("b", 2.0, None, None, "worse", "less")]
    assert draw_ratios(times)["layout"]["xaxis"]["title"]["text"].endswith("left of 1 is better")
    mixed = draw_ratios([*times, Ratio("c", 1.1, 1.0, 1.2, "better", "more")])
    assert mixed["layout"]["yaxis"]["categoryarray"] == ["c →", "b ←", "a ←"]


def test_a_sweep_opens_on_the_metric_by_which_its_best_is_chosen() -> None:
    measured = ["exposed_communication_ms", "peak_memory_mib", "step_ms"]
    on_paper = {"base": {"kind": "estimate"}, "fit": {"axis": "batch_size"}}
    assert first_metric(on_paper, ["total_gib", "step_peak_gib"]) == "step_peak_gib"
    first = [
        first_metric({"base": {"kind": kind}, "fit": fit}, measured)
        for kind, fit in (("ddp", None), ("benchmark", None), ("benchmark", {"axis": "batch_size"}))
    ]
    assert first == ["step_ms", "step_ms", "peak_memory_mib"]


def test_filters_take_values_as_tables_write_them() -> None:
    points = [Point({"compile": on, "size_mb": size}, size) for on in (False, True) for size in (1.0, 2.0)]
    view = figures(points, "step_ms", "ms", PlotsQuery(where=["compile=false", "size_mb=1"]), "Step (ms)")
    assert json.loads(view["chart"]["json"])["table"]["rows"] == [[1.0, 1.0, None, None, None, "ok", None]]
    assert view["filters"] == [("compile", ["none", "true"], "none"), ("size_mb", ["1.0", "2.0"], "1.0")]


def test_filters_that_no_case_meets_together_leave_the_panel() -> None:
    points = [Point({"precision": "fp32", "batch_size": 1}, 1.0), Point({"precision": "bf16", "batch_size": 2}, 2.0)]
    view = figures(points, "step_ms", "ms", PlotsQuery(where=["precision=fp32", "batch_size=2"]), "Step (ms)")
    assert view["chart"] is None
    assert view["filters"] == [("precision", ["fp32", "bf16"], "fp32"), ("batch_size", ["1", "2"], "2")]
