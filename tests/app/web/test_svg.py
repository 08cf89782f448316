"""Figures as SVG: what a reader must find in the picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from app.web import plots, svg
from app.web.export import STYLES
from app.web.panels import ddp

POINTS = [
    plots.Point({"context_length": length, "precision": precision}, value, spread=1.0, n=5)
    for precision, factor in (("fp32", 2.0), ("bf16", 1.0))
    for length, value in ((128, 10.0 * factor), (256, 20.0 * factor), (512, 80.0 * factor))
]
WEB = Path(plots.__file__).parent
TAG = "{http://www.w3.org/2000/svg}"


def parsed(figure: Any, title: str = "a title") -> ET.Element:
    """The picture as a browser reads it. Inside HTML the name space goes without saying."""
    text = svg.drawn(figure, title).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return ET.fromstring(text)  # our own text


def texts(picture: ET.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{TAG}text")]


def chart(points: list[plots.Point]) -> Any:
    return plots.chart(points, plots.axes_of(points), "step_ms", "ms")


def test_lines_have_axes_a_legend_and_markers() -> None:
    picture = parsed(chart(POINTS))
    assert {"Step (ms)", "Context length", "fp32", "bf16", "128", "256", "512"} <= set(texts(picture))
    assert len(list(picture.iter(f"{TAG}polyline"))) == 2
    assert picture.get("role") == "img"
    assert picture.get("aria-label") == "a title"


def test_greater_values_are_higher_and_faster_lines_lower() -> None:
    picture = parsed(chart(POINTS))
    heights = [
        [float(pair.split(",")[1]) for pair in str(line.get("points")).split()]
        for line in picture.iter(f"{TAG}polyline")
    ]
    for line in heights:
        assert line == sorted(line, reverse=True), "y grows downwards"
    assert all(slow < fast for slow, fast in zip(*heights, strict=True))


def test_every_mark_lies_inside_the_picture() -> None:
    picture = parsed(chart(POINTS))
    _, _, width, height = map(float, str(picture.get("viewBox")).split())
    for circle in picture.iter(f"{TAG}circle"):
        assert 0 < float(str(circle.get("cx"))) < width
        assert 0 < float(str(circle.get("cy"))) < height


def test_what_was_not_measured_is_a_cross_and_no_number() -> None:
    points = [*POINTS, plots.Point({"context_length": 1024, "precision": "fp32"}, None, outcome="oom")]
    picture = parsed(chart(points))
    assert "oom" in texts(picture)
    assert len(list(picture.iter(f"{TAG}path"))) == 1


def test_doubtful_markers_are_open() -> None:
    doubtful = [plots.Point({"n": n}, 1.0 + n, validity="suspect" if n == 2 else "valid") for n in (1, 2, 3)]
    fills = [circle.get("fill") for circle in parsed(chart(doubtful)).iter(f"{TAG}circle")]
    assert len(set(fills)) == 2
    assert fills[1] not in (fills[0], fills[2])


def test_marks_are_drawn_however_many_there_are() -> None:
    """Only those are left out that a line leads to."""
    number = 2 * svg.MAX_MARKERS
    points = [
        plots.Point({"n": at}, None, outcome="oom") if at % 2 else plots.Point({"n": at}, 5.0)
        for at in range(1, 2 * number)
    ]
    points[1].validity = "suspect"
    figure = chart(points)
    picture = parsed(figure)
    crosses = list(picture.iter(f"{TAG}path"))
    assert len(crosses) == number
    assert len(list(picture.iter(f"{TAG}circle"))) == 1, "the doubtful one"
    figure["data"][0]["mode"] = "markers"
    assert len(list(parsed(figure).iter(f"{TAG}circle"))) == number - 1


def test_maps_of_one_scale_have_one_colour_for_one_value() -> None:
    groups = [
        [plots.Point({"x": x, "y": y, "of": factor}, factor * (10.0 + x)) for x in range(3) for y in range(2)]
        for factor in (1, 2)
    ]
    every = [point for group in groups for point in group]
    pictures = [svg.drawn(plots.heat_map(group, "x", "y", "step_ms", "ms", every), "") for group in groups]
    cells = [re.findall(r'height="[0-9]{2,}\.[0-9]" fill="(#\w+)"', text) for text in pictures]
    assert len(cells[0]) == len(cells[1]) == 6
    assert not set(cells[0]) & set(cells[1])


def test_texts_become_bars() -> None:
    points = [plots.Point({"implementation": name}, value) for name, value in (("eager", 4.0), ("<flash>", 1.0))]
    picture = parsed(chart(points))
    heights = sorted(float(str(rect.get("height"))) for rect in picture.iter(f"{TAG}rect"))
    assert heights[-1] == pytest.approx(4 * heights[-2], rel=0.01), "a bar starts at 0"
    assert {"eager", "<flash>"} <= set(texts(picture))


def test_heat_maps_write_their_values_and_outcomes() -> None:
    points = [*POINTS, plots.Point({"context_length": 1024, "precision": "bf16"}, None, outcome="oom")]
    picture = parsed(plots.heat_map(points, "context_length", "precision", "step_ms", "ms"))
    assert {"20", "160", "oom", "fp32", "bf16", "1024"} <= set(texts(picture))


def test_one_colour_means_one_value_in_all_heat_maps() -> None:
    maps = [
        parsed(plots.heat_map([point], "context_length", "precision", "step_ms", "ms", POINTS)) for point in POINTS[:2]
    ]
    squares = [max(picture.iter(f"{TAG}rect"), key=lambda rect: float(str(rect.get("height")))) for picture in maps]
    assert squares[0].get("fill") != squares[1].get("fill"), "20 and 40 ms, each alone in its map"
    assert all({"10", "160"} <= set(texts(picture)) for picture in maps), "the ends of both colour bars"


def test_boxes_of_two_sides() -> None:
    groups = [
        plots.Samples(side, "tiny", (), processes=values)
        for side, values in (("baseline", [1.0, 2.0, 3.0]), ("candidate", [2.0]))
    ]
    picture = parsed(plots.distributions(groups, "step_ms", "ms", of="processes"))
    assert {"baseline", "candidate", "tiny"} <= set(texts(picture))
    assert len(list(picture.iter(f"{TAG}circle"))) == 4


def test_ratios_with_intervals_and_a_line_at_one() -> None:
    figure = plots.ratios(
        [plots.Ratio("step_ms", 0.8, 0.75, 0.85, "better"), plots.Ratio("mfu", 1.1, None, None, "changed")]
    )
    picture = parsed(figure)
    assert {"step_ms", "mfu"} <= set(texts(picture))
    assert any(line.get("stroke-dasharray") for line in picture.iter(f"{TAG}line"))


@pytest.mark.parametrize("values", [[5.0], [0.0, 0.0], [1e-9, 2e-9], [-3.0, 3.0], [1e9, 1.0]])
def test_any_numbers_can_be_drawn(values: list[float]) -> None:
    points = [plots.Point({"n": number}, value) for number, value in enumerate(values)]
    assert "NaN" not in svg.drawn(chart(points), "x")
    samples = [plots.Samples("", "case", values)]
    assert "nan" not in svg.drawn(plots.over_steps(samples, "step_ms", "ms"), "x").lower()


def test_nothing_to_draw_is_a_sentence() -> None:
    assert svg.drawn({"data": [], "layout": {}, "empty": "Nothing <yet>."}, "x") == "<p>Nothing &lt;yet&gt;.</p>"


def test_what_it_cannot_draw_is_named() -> None:
    traces = [{"type": "scatter", "x": [1, 2], "y": [1, 2]}, {"type": "sankey"}]
    assert svg.drawn({"data": traces, "layout": {}}, "x").endswith("<p>Not drawn here: sankey.</p>")


def test_no_text_becomes_markup() -> None:
    points = [
        plots.Point({"implementation": "<script>alert(1)</script>"}, 1.0),
        plots.Point({"implementation": "b"}, 2.0),
    ]
    drawn = svg.drawn(chart(points), '"><script>')
    assert not re.search("<script", drawn)


def test_exports_define_every_colour_that_figures_name() -> None:
    sources = [*WEB.glob("plots.py"), *WEB.glob("svg.py"), *WEB.glob("panels/*.py")]
    named = {name for path in sources for name in re.findall(r"var\((--[a-z0-9-]+)[,)]", path.read_text())}
    named |= {name[4:-1] for name in plots.PALETTE}
    styles = "".join((WEB / "static" / name).read_text() for name in STYLES)
    assert "--good" in named
    assert named <= set(re.findall(r"^  (--[a-z0-9-]+):", styles, flags=re.MULTILINE))


def test_each_colour_is_defined_once() -> None:
    defined = [
        (name, path.name)
        for path in (WEB / "static").glob("*.css")
        for name in re.findall(r"^  (--(?!pico-)[a-z0-9-]+): (?:#|light-dark)", path.read_text(), flags=re.MULTILINE)
    ]
    assert len(defined) > 15
    assert {place for _, place in defined} == {"colours.css"}
    assert len(dict(defined)) == len(defined)


def test_bars_start_where_the_figure_says() -> None:
    """As spans of a timeline do."""
    trace = {"type": "bar", "orientation": "h", "y": ["a", "a"], "x": [2.0, 1.0], "base": [1.0, 6.0], "name": "spans"}
    picture = parsed({"data": [trace], "layout": {"barmode": "overlay"}})
    bars = [element for element in picture.iter(f"{TAG}rect") if element.get("rx") is None]
    starts, widths = ([float(str(bar.get(name))) for bar in bars] for name in ("x", "width"))
    assert widths[0] == pytest.approx(2 * widths[1], rel=0.01)
    assert starts[1] - starts[0] == pytest.approx(5 * widths[1], rel=0.01)


def corners(polygon: ET.Element) -> list[tuple[float, float]]:
    pairs = (pair.split(",") for pair in str(polygon.get("points")).split())
    return [(float(x), float(y)) for x, y in pairs]


def test_a_timeline_has_filled_blocks_in_the_rows_of_their_ranks() -> None:
    """The first row is at the top, as the axis runs downwards."""
    trace = ddp.blocks("computation", "var(--good)", [(0, 0.0, 2.0), (1, 3.0, 4.0)])
    trace["customdata"] = ["of rank 0"] * 6 + ["of rank 1"] * 6
    names = ["rank 0, computation", "rank 1, communication"]
    picture = parsed(ddp.rows_of_time([trace], names, "Time (ms)"))
    first, second = picture.iter(f"{TAG}polygon")
    assert [block.get("fill") for block in (first, second)] == ["var(--good)"] * 2
    assert [block.findtext(f"{TAG}title") for block in (first, second)] == ["of rank 0", "of rank 1"]
    heights = {element.text: float(str(element.get("y"))) for element in picture.iter(f"{TAG}text")}
    assert heights[names[0]] < heights[names[1]]
    for block, name in zip((first, second), names, strict=True):
        assert min(y for _, y in corners(block)) < heights[name] < max(y for _, y in corners(block))
    widths = [max(x for x, _ in corners(block)) - min(x for x, _ in corners(block)) for block in (first, second)]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2)
    for element in picture.iter(f"{TAG}text"):
        if element.text in names:
            assert float(str(element.get("x"))) - len(str(element.text)) * svg.LETTER > 0, "no name is cut off"


@pytest.mark.parametrize("kind", ["linear", "log"])
def test_an_axis_keeps_to_the_range_of_the_figure(kind: str) -> None:
    trace = {"type": "scatter", "mode": "markers", "x": [1, 2], "y": [10.0, 100.0]}
    given = {"type": kind, "range": [3.0, 0.0] if kind == "log" else [1000.0, 0.0]}
    picture = parsed({"data": [trace], "layout": {"yaxis": given}})
    low, high = (float(str(circle.get("cy"))) for circle in picture.iter(f"{TAG}circle"))
    assert low < high, "a greater value is further down"
    assert "1,000" in texts(picture)


def test_a_pile_of_areas_does_not_count_a_place_twice() -> None:
    """A history of memory has an entry twice where a phase ends and the next one begins; values last until the next."""
    pile = [
        {"type": "scatter", "stackgroup": "m", "x": [0, 5, 5, 9], "y": [value] * 4, "line": {"shape": "hv"}}
        for value in (1.0, 2.0)
    ]
    bottom, top = (corners(polygon) for polygon in parsed({"data": pile}).iter(f"{TAG}polygon"))
    assert len({y for _, y in bottom}) == len({y for _, y in top}) == 2, "both are level"
    step = {"type": "scatter", "mode": "lines", "x": [0, 4], "y": [1.0, 2.0], "line": {"shape": "hv"}}
    [line] = parsed({"data": [step]}).iter(f"{TAG}polyline")
    assert len({y for _, y in corners(line)[:2]}) == 1


def test_remarks_of_a_figure_are_written() -> None:
    trace = {"type": "scatter", "x": [1, 2], "y": [1, 2]}
    above = {"text": "backward", "x": 2, "xref": "x", "y": 1, "yref": "paper", "yanchor": "bottom"}
    figure = {"data": [trace], "layout": {"annotations": [above]}}
    assert "backward" in texts(parsed(figure))
    assert svg.drawn({**figure, "note": "The first 8 of 16 <ranks>"}, "t").endswith(
        "<p>The first 8 of 16 &lt;ranks&gt;.</p>"
    )
