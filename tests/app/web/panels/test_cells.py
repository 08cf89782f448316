"""Charts of a job's cells."""

from dataclasses import replace
from typing import Any

from app.results.sheet import NOT_MEASURED, Cell, Column, Sheet
from app.web.panels import JobResults
from app.web.panels.cells import MAX_CHARTS, Lines, charts, panels

LINES = Lines("sequence_length", "Sequence length (tokens)", "implementation", of_series=("br",))


def ok(value: float) -> Cell:
    return Cell(value, 0.1, 5, "ok")


def sheet(rows: list[list[Any]], **options: Any) -> Sheet:
    coordinates = [
        Column("implementation", "string", role="coordinate"),
        Column("causal", "boolean", role="coordinate"),
        Column("br", "integer", role="coordinate"),
        Column("sequence_length", "integer", role="coordinate"),
    ]
    return Sheet(columns=[*coordinates, Column("forward_ms", "number", "ms", role="metric")], rows=rows, **options)


class Known(JobResults):
    """Results whose cases are known; `whole` is what a query for one metric finds."""

    def __init__(self, sheet: Sheet, whole: Sheet | None = None) -> None:
        self.sheet = sheet  # type: ignore[misc]  # instead of reading it
        self.whole = whole or sheet
        names = {"causal": "causal", "br": "br", "sequence_lengths": "sequence_length"}
        spec = {field: [v for v in dict.fromkeys(self.whole.column(n)) if v is not None] for field, n in names.items()}
        self.job = {"kind": "attention", "spec": spec}

    def metric(self, name: str) -> Sheet:
        return self.whole


def test_cases_beyond_the_first_are_drawn_without_panels_of_ones_own() -> None:
    rows = [["eager", True, None, length, ok(float(length))] for length in (64, 128, 256)]
    (panel,) = panels(Known(sheet(rows[:2], is_cut=True), sheet(rows)))
    assert panel.draw()["data"][0]["y"] == [64, 128, 256]


def test_lines_per_implementation_charts_per_mask() -> None:
    rows = [
        [name, causal, br, length, ok(length * (1 + causal))]
        for causal in (True, False)
        for name, br in (("eager", None), ("cpu_flash", 32))
        for length in (64, 128)
    ]
    (first,) = charts(Known(sheet(rows)), LINES, "forward_ms", "Forward pass", "How to read it.")
    (second,) = first.more
    assert (first.title, second.title) == ("Forward pass (ms): causal", "Forward pass (ms): not causal")
    assert (first.name, second.name) == ("forward_ms", "forward_ms-2")
    assert (first.folded, second.folded) == (False, True)
    figure = first.draw()
    assert [(trace["name"], trace["x"], trace["y"]) for trace in figure["data"]] == [
        ("eager", [64, 128], [128, 256]),
        ("cpu_flash", [64, 128], [128, 256]),
    ]
    assert figure["layout"]["xaxis"]["title"]["text"] == "Sequence length (tokens)"


def test_implementations_at_one_length_are_bars() -> None:
    """Their points would stand above each other."""
    rows = [["eager", True, None, 64, ok(1.0)], ["cpu_flash", True, None, 64, ok(2.0)]]
    (panel,) = charts(Known(sheet(rows)), LINES, "forward_ms", "Forward pass")
    figure = panel.draw()
    assert [(trace["type"], trace["x"], trace["y"]) for trace in figure["data"]] == [
        ("bar", ["eager", "cpu_flash"], [1.0, 2.0])
    ]
    assert figure["layout"]["xaxis"]["title"]["text"] == "Implementation"


def test_cells_without_a_number_are_marked() -> None:
    rows = [["eager", True, None, 64, ok(1.0)], ["eager", True, None, 128, Cell(None, None, None, "oom")]]
    (panel,) = charts(Known(sheet(rows)), LINES, "forward_ms", "Forward pass")
    assert [trace["name"] for trace in panel.draw()["data"]] == ["eager", "oom"]


def test_a_metric_without_values_has_no_chart() -> None:
    rows = [["eager", True, None, 64, Cell(None, None, None, "oom")], ["eager", True, None, 128, NOT_MEASURED]]
    assert charts(Known(sheet(rows)), LINES, "forward_ms", "Forward pass") == []
    assert charts(Known(sheet(rows)), LINES, "tflops", "Rate") == []


def test_the_first_of_very_many_charts_are_drawn() -> None:
    rows = [[name, True, br, 64, ok(1.0)] for br in range(30) for name in ("one", "two")]
    lines = replace(LINES, of_series=())
    (panel,) = charts(Known(sheet(rows)), lines, "forward_ms", "Forward pass", "How to read it.")
    assert len(panel.more) == MAX_CHARTS - 1
    assert panel.text == "How to read it. The first 24 of 30 charts; the table has all cells."
