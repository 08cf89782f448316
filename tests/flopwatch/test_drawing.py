"""Pictures for print: every figure of the pages as SVG, PDF and PNG, small, with its words, and nothing left out."""

import html
import itertools
import math
import re
import sys
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest

from app.results.history import History, HistoryPoint
from app.web.history_plot import figure as history_figure
from app.web.panels._bars import bars_of
from app.web.panels.ddp import draw_timeline as draw_ranks
from app.web.panels.memory import CATEGORIES
from app.web.panels.memory import draw_timeline as draw_memory
from app.web.panels.profile import draw_roofline
from app.web.pictures import light
from app.web.plots.chart import draw_chart
from app.web.plots.heat_map import draw_heat_map
from app.web.plots.points import Axes, Point
from app.web.plots.ratios import Processes, Ratio, draw_distributions, draw_ratios
from app.web.stacks import draw_flames, tree
from flopwatch import ClientError
from flopwatch.drawing import draw
from tests.app.web.panels.test_ddp import span
from tests.app.web.panels.test_memory import point as moment_of_memory
from tests.app.web.panels.test_profile import ceilings, product

pytest.importorskip("matplotlib", reason="pip install -e .[dev]")

LARGEST_SVG = 300_000
LONG_NAME = "step_ms, case 1: " + "implementation=of_a_very_long_name, " * 5


def points(number: int = 3, **changes: Any) -> list[Point]:
    return [
        Point(
            {"length": 2**at, "precision": precision},
            None if at == 1 and precision == "bf16" else (at + 1.0) * (1 if precision == "bf16" else 2.5),
            spread=0.25,
            low=at + 0.5,
            high=at + 4.0,
            outcome="oom" if at == 1 and precision == "bf16" else "ok",
            validity="suspect" if at == 2 else "valid",
            **changes,
        )
        for precision in ("fp32", "bf16")
        for at in range(number)
    ]


def memory(number: int) -> dict[str, Any]:
    """A history whose least use changes at each entry, with one peak."""
    rows = []
    for entry in range(number):
        sizes = dict.fromkeys(CATEGORIES, float(entry % 7))
        sizes["activation"] = 900.0 if entry == number // 2 else 5.0 + math.sin(entry)
        phase = "forward" if entry < number // 3 else "backward"
        rows.append(moment_of_memory(entry, phase, **sizes, change_mib=1.0, category="activation", stack="a.py:1 f"))
    return draw_memory(rows)


def ranks(number: int) -> dict[str, Any]:
    spans = [(at + 0.0, at + 0.6) for at in range(number)]
    names = itertools.product(range(4), ("compute", "communication", "exposed"), spans)
    return draw_ranks([span(rank, stream, *ends) for rank, stream, ends in names])


def roofline() -> dict[str, Any]:
    products = [product(total_ms=4.0 * at) for at in (1, 2)]
    return draw_roofline(products, [{**products[0], "part": "scores"}], ceilings())


def moments() -> dict[str, Any]:
    def point(job: int) -> HistoryPoint:
        least, most = job - 0.1, 2.0 * job + 3
        value = (f"2026-03-0{job}T10:00:00Z", "cpu", "a", 2.0 * job, least, most, 9, "ok", "valid")
        return HistoryPoint(job, None, *value, "v1", "v1", None, None, ["main"] if job == 2 else [])

    own = [point(job) for job in (1, 2, 3)]
    return history_figure(History("k", "benchmark", {}, "step_ms", "ms", "less", [], ["cpu"], ["a"], False, "", own))


def sides() -> dict[str, Any]:
    of = [Processes(side, "step", [1.0 + at, 2.0, 3.5, 2.5]) for at, side in enumerate(("baseline", "candidate"))]
    return draw_distributions(of, "step_ms", "ms")


FIGURES: dict[str, tuple[Callable[[], dict[str, Any]], list[str]]] = {
    "chart": (
        lambda: draw_chart(points(), Axes("length", ("precision",)), "step_ms", "ms"),
        ["fp32", "bf16", "suspect", "oom", "Step (ms)", "Length"],
    ),
    "bars": (
        lambda: draw_chart(points(), Axes("precision", ("length",)), "step_ms", "ms"),
        ["oom", "suspect"],
    ),
    "heat map": (
        lambda: draw_heat_map(points(), "length", "precision", "step_ms", "ms"),
        ["Step (ms)", "7.5 †", "oom", "bf16"],
    ),
    "large heat map": (
        lambda: draw_heat_map(
            [Point({"a": a, "b": b}, a * b + 1.0) for a in range(90) for b in range(90)], "a", "b", "x", None
        ),
        ["A", "B"],
    ),
    "distributions": (sides, ["baseline", "candidate", "Step (ms)"]),
    "ratios": (
        lambda: draw_ratios(
            [Ratio("step_ms, $x$ <b>", 0.5, 0.4, 0.6, "better", "less"), Ratio("b", 2, 1, 3, "worse", "more")]
        ),
        ["better", "worse", "step_ms, $x$ <b> ←", "arrows: the better side"],
    ),
    "long names": (
        lambda: draw_ratios([Ratio(f"{LONG_NAME} {at}", 1.0 + at, 0.9, 3, "better", "less") for at in range(3)]),
        ["step_ms, case 1:"],
    ),
    "deep flames": (
        lambda: draw_flames(tree(";".join(f"frame_{at}" for at in range(95)).encode() + b" 900")),
        ["frame_0", "frame_94"],
    ),
    "stacked bars": (
        lambda: bars_of(
            ["a", "b"], {"one": {"a": 1.0, "b": 2.0}, "a long name, of two lines": {"a": 3.0}}, "Time (ms)", "ms"
        ),
        ["a", "one", "a long name,", "Time (ms)"],
    ),
    "memory": (lambda: memory(4000), ["forward", "backward", "total", "optimizer state", "Memory (MiB)"]),
    "ranks": (lambda: ranks(1000), ["rank 3, exposed", "exposed communication", "Time in the step (ms)"]),
    "roofline": (roofline, ["FLOPs per byte", "TFLOP/s", "products, forward", "vendor's peak: 2 TFLOP/s in fp32"]),
    "flames": (
        lambda: draw_flames(tree("\n".join(f"step;f{at % 40};g<{at}> {9 + at % 5}" for at in range(4000)).encode())),
        ["Share of the time (%)", "step"],
    ),
    "history": (moments, ["Finished (UTC)", "Step (ms)", "main", "in a baseline"]),
}


def titled(figure: dict[str, Any]) -> Any:
    return light({**figure, "title": "The title", "caption": "Job 17 (benchmark); tiny; costs $5 and $6."})


def words(svg: bytes) -> set[str]:
    """The texts of a picture: each stands before its letters."""
    texts = re.findall(r"<!-- (.*?) -->", svg.decode(), flags=re.DOTALL)
    return {line.strip() for text in texts for line in html.unescape(text).replace("\\$", "$").splitlines()}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_becomes_a_small_picture_with_its_words(name: str) -> None:
    make, texts = FIGURES[name]
    svg = draw(titled(make()), "svg")
    assert len(svg) < LARGEST_SVG, f"{len(svg)} bytes"
    root = ElementTree.fromstring(svg)
    addresses = [value for element in root.iter() for key, value in element.attrib.items() if key.endswith("href")]
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in addresses), "it needs no other file"
    assert not re.search(rb"<script|url\((?!#)|var\(", svg)
    assert not {*texts, "The title"} - words(svg), words(svg)
    assert any(line.startswith("Job 17 (benchmark); tiny; costs $5 and $6.") for line in words(svg))


def test_the_formats_and_that_the_same_figure_gives_the_same_file() -> None:
    figure = titled(FIGURES["chart"][0]())
    assert draw(figure, "png").startswith(b"\x89PNG")
    assert draw(figure, "pdf").startswith(b"%PDF")
    assert draw(figure, "svg") == draw(figure, "svg")


SCATTER = {"type": "scatter", "mode": "lines+markers", "line": {"color": "#111111"}}


@pytest.mark.parametrize(
    ("values", "kind", "note"),
    [
        ([1, 10.0, 0, -3], "log", "Values along y that are not above zero, or infinite, and left out: 2."),
        ([1, math.inf, -math.inf, None], "linear", "Values along y that are infinite, and left out: 2."),
        ([1, None, 2, 3], "log", ""),
    ],
)
def test_a_number_without_a_place_is_named(values: list[float], kind: str, note: str) -> None:
    figure = {"data": [{**SCATTER, "x": [1, 2, 3, 4], "y": values}], "layout": {"yaxis": {"type": kind}}}
    found = " ".join(words(draw({**figure, "caption": "Job 1."}, "svg")))
    assert note in found
    assert ("left out" in found) == bool(note)


def test_the_edge_of_an_area_counts_once() -> None:
    edges = [{**SCATTER, "x": [1, 2, 3], "y": values} for values in ([0, 1, 2], [3, 4, 5])]
    figure = {"data": [edges[0], {**edges[1], "fill": "tonexty"}], "layout": {"yaxis": {"type": "log"}}}
    assert "left out: 1." in " ".join(words(draw({**figure, "caption": "Job 1."}, "svg")))


BOX = {"type": "box", "name": "a", "line": {"color": "#111111"}}
AREA = {"type": "scatter", "name": "a", "stackgroup": "one", "line": {"color": "#111111"}, "fillcolor": "#222222"}


@pytest.mark.parametrize(
    "trace",
    [
        {**BOX, "x": ["a", "a", "b"], "y": [1.0, None, 2.0]},
        {**BOX, "x": ["a", "b"], "y": [None, None]},
        {**AREA, "x": [], "y": []},
        {**AREA, "x": [1, 2, 3], "y": [None, 2.0, None]},
    ],
)
def test_boxes_and_areas_may_have_gaps(trace: dict[str, Any]) -> None:
    axis = {"type": "category"} if trace["type"] == "box" else {}
    assert draw({"data": [trace], "layout": {"xaxis": axis}}, "svg").lstrip().startswith(b"<?xml")


def test_a_series_of_bars_may_have_no_value() -> None:
    bars = [Point({"kernel": kernel, "size": size}, None, outcome="oom") for kernel in "ab" for size in ("s", "l")]
    bars += [Point({"kernel": "c", "size": size}, 1.0) for size in ("s", "l")]
    figure = light(draw_chart(bars, Axes("size", ("kernel",)), "step_ms", "ms"))
    assert "oom" in " ".join(words(draw(figure, "svg")))


@pytest.mark.parametrize(
    "trace",
    [
        {**BOX, "x": ["a"], "y": [1.0, 2.0]},
        {**BOX, "x": ["a"], "y": ["many"]},
        {**SCATTER, "x": [1, 2], "y": [1.0]},
        {**SCATTER, "x": [1], "y": [1.0], "marker": {"symbol": "cross"}},
    ],
)
def test_values_that_cannot_be_drawn_are_an_error(trace: dict[str, Any]) -> None:
    axis = {"type": "category"} if trace["type"] == "box" else {}
    with pytest.raises(ClientError, match=r"A: this version of Flopwatch cannot draw these values .*; the format html"):
        draw({"data": [trace], "layout": {"xaxis": axis}, "title": "A"}, "svg")


def test_areas_of_a_group_are_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = []
    monkeypatch.setattr("matplotlib.axes.Axes.fill_between", lambda _, x, low, high, **__: edges.append((low, high)))
    areas = [{**AREA, "x": [1, 2], "y": [1.0, 2.0]}, {**AREA, "name": "b", "x": [1, 2], "y": [3.0, None]}]
    draw({"data": areas, "layout": {}}, "svg")
    assert edges == [([0.0, 0.0], [1.0, 2.0]), ([1.0, 2.0], [4.0, 2.0])]


def test_what_cannot_be_drawn_is_an_error() -> None:
    with pytest.raises(ClientError, match="does not draw traces of type 'pie'; the format html does"):
        draw({"data": [{"type": "pie", "values": [1]}], "layout": {}}, "svg")
    of_line = {"type": "scatter", "mode": "lines", "x": [1], "y": [1]}
    with pytest.raises(ClientError, match="does not draw fill 'tozeroy'"):
        draw({"data": [{**of_line, "fill": "tozeroy"}], "layout": {}}, "svg")
    with pytest.raises(ClientError, match="does not draw selectedpoints of scatter"):
        draw({"data": [{**of_line, "selectedpoints": [0]}], "layout": {}}, "svg")
    with pytest.raises(ClientError, match="Roofline: nothing is known"):
        draw({"data": [], "layout": {}, "title": "Roofline", "empty": "nothing is known"}, "svg")


def test_without_matplotlib_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ClientError, match=r"pip install 'flopwatch\[plots\]'"):
        draw(titled(FIGURES["chart"][0]()), "svg")
