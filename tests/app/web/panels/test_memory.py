"""What the panels of a memory job draw, from rows as its tables have them."""

from types import SimpleNamespace
from typing import Any

from app.web.panels.memory import CATEGORIES, as_they_begin, draw_peaks, draw_timeline, entry_text, snapshots


def point(entry: int, phase: str = "forward", **usage: Any) -> dict[str, Any]:
    sizes = {f"{name}_mib": usage.pop(name, 0.0) for name in CATEGORIES}
    cause = {"change_mib": None, "category": None, "name": None, "stack": None, **usage}
    return {"entry": entry, "step": 1, "phase": phase, "total_mib": sum(sizes.values()), **sizes, **cause}


def test_categories_are_stacked_below_the_total() -> None:
    rows = [
        point(0, parameter=2.0),
        point(1, parameter=2.0, activation=1.0, change_mib=1.0, category="activation", stack="a.py:1 f < b.py:2 g"),
        point(2, "backward", parameter=2.0, change_mib=-1.0, category="activation", name="x"),
    ]
    figure = draw_timeline(rows)
    *areas, total = figure["data"]
    assert [(it["name"], it["y"]) for it in areas] == [("parameter", [2.0, 2.0, 2.0]), ("activation", [0.0, 1.0, 0.0])]
    assert {trace["stackgroup"] for trace in areas} == {"memory"}
    assert total["y"] == [2.0, 3.0, 2.0]
    assert total["customdata"] == [
        "forward",
        "forward: +1 MiB activation<br>a.py:1 f<br>b.py:2 g",
        "backward: −1 MiB activation, x<br>no line of code outside torch",
    ]
    assert [shape["x0"] for shape in figure["layout"]["shapes"]] == [2], "where the backward pass begins"
    assert (figure["table"]["columns"][-1], len(figure["table"]["rows"])) == ("stack", 3)


def test_phases_with_room_for_their_names_have_them() -> None:
    ends = {"rest": 200, "forward": 285, "backward": 580, "optimizer": 915, "zero": 930}
    phases: list[str] = []
    for name, end in ends.items():
        phases += [name] * (end - len(phases))
    figure = draw_timeline([point(entry, phase, parameter=1.0) for entry, phase in enumerate(phases)])
    assert [it["text"] for it in figure["layout"]["annotations"]] == ["rest", "forward", "backward", "optimizer"]


def test_lines_of_code_are_no_markup() -> None:
    assert "&lt;module&gt;" in entry_text(point(1, change_mib=1.0, category="input", stack="a.py:1 <module>"))


def test_bars_of_peaks_leave_out_what_was_lost() -> None:
    tables = {
        "forward": [{"category": "parameter", "peak_mib": 2.0}, {"category": "input", "peak_mib": 0.0}],
        "backward": [{"category": "parameter", "peak_mib": None}, {"category": "input", "peak_mib": None}],
    }
    figure = draw_peaks(tables)
    assert [(trace["name"], trace["x"]) for trace in figure["data"]] == [("parameter", [2.0, None])]


def test_peaks_come_in_the_order_of_the_phases() -> None:
    names = ["backward", "optimizer", "oom", "forward", "initialisation"]
    rows = [point(0), point(1, "backward"), point(2, "optimizer"), point(3)]
    results: Any = SimpleNamespace(has=lambda name: name == "timeline", rows=lambda _: rows)
    assert as_they_begin(names, results) == ["initialisation", "forward", "backward", "optimizer", "oom"]
    figure = draw_peaks({"forward": [{"category": "optimizer_state", "peak_mib": 2.0}]})
    assert [(it["name"], it["marker"]["color"]) for it in figure["data"]] == [("optimizer state", "var(--plot-3)")]


def test_snapshots_whose_files_are_gone_are_not_offered() -> None:
    rows = [{"snapshot": "snapshot-forward.pickle"}, {"snapshot": "snapshot-oom.pickle"}]
    files = {"snapshot-forward.pickle": {"url": "/x"}}
    assert snapshots(rows, files) == [{"snapshot": "snapshot-forward.pickle", "file": {"url": "/x"}}]
