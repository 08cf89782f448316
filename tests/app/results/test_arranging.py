"""Pivots, references, order, pages and the best of a column."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from app.errors import InvalidRequest, job_problem
from app.results import Sheet, renamed, render
from app.results.sheet import Cell
from app.store.database.engine import Database
from app.store.records import Finish
from tests.app.results.conftest import table

Measure = Callable[..., int]


@pytest.fixture
def grid(measure: Measure) -> list[int]:
    """Precision × context length; bf16 takes half the time, and 3/4 at length 256."""
    jobs = []
    for length, fp32, bf16 in ((128, 10.0, 5.0), (256, 20.0, 15.0)):
        for precision, mean in (("fp32", fp32), ("bf16", bf16)):
            spec = {"context_length": length, "precision": precision}
            jobs.append(
                measure(
                    ("step_ms", {"median": mean}),
                    ("tokens_per_s", {"median": 1000 / mean, "unit": "tokens/s"}),
                    spec=spec,
                )
            )
    return jobs


def values(sheet: Sheet, name: str) -> list[float | None]:
    return [cell.value for cell in sheet.column(name)]


def rows_of(sheet: Sheet) -> list[dict[str, Any]]:
    return json.loads(render(sheet, "json"))["rows"]


class TestPivot:
    def test_each_number_leads_to_its_job(self, database: Database, grid: list[int]) -> None:
        first = rows_of(table(database, pivot="context_length"))[0]
        assert first["step_ms_job, context_length=128"] == grid[0]
        assert (first["step_ms_job, context_length=256"], first["jobs"]) == (grid[2], f"{grid[0]}, {grid[2]}")

    def test_a_case_that_nobody_measured_is_empty(self, database: Database, measure: Measure, grid: list[int]) -> None:
        measure(("step_ms", {"median": 7.0}), spec={"context_length": 512, "precision": "fp32"})
        sheet = table(database, pivot="context_length")
        assert values(sheet, "step_ms, context_length=512") == [7.0, None]
        assert "no counterpart" not in render(sheet, "markdown")

    def test_what_depends_on_the_columns_keeps_no_row_apart(self, database: Database, measure: Measure) -> None:
        """As a block size, which only one implementation has."""
        for length in (128, 256):
            for name, more in (("eager", {}), ("blocked", {"block": 32, "warps": 4})):
                case = {"implementation": name, "length": length, **more}
                measure(("step_ms", {"case": case, "median": float(length)}))
        sheet = table(database, rows=["length"], pivot="implementation")
        assert sheet.names("coordinate") == ["length"]
        assert values(sheet, "step_ms, implementation=blocked") == [128.0, 256.0]
        assert "The columns differ in block, warps, too." in sheet.notes

    def test_cases_measured_twice_have_rows_of_their_own(self, database: Database, measure: Measure) -> None:
        for mean in (1.0, 2.0):
            for length in (128, 256):
                measure(("step_ms", {"median": mean}), spec={"context_length": length})
        sheet = table(database, pivot="context_length")
        assert sheet.column("run") == [1, 2]
        assert values(sheet, "step_ms, context_length=256") == [1.0, 2.0]

    def test_verdicts_stand_at_their_numbers(self, database: Database, measure: Measure) -> None:
        measure(("step_ms", {"validity": "valid"}), spec={"context_length": 128})
        measure(("step_ms", {"validity": "suspect"}), spec={"context_length": 256})
        sheet = table(database, pivot="context_length")
        row = rows_of(sheet)[0]
        assert (row["validity"], row["step_ms_validity, context_length=128"]) == ("suspect", "valid")
        line = render(sheet, "markdown").splitlines()[2]
        assert line.count("†") == 1
        assert line.rstrip(" |").endswith("†")

    def test_values_with_one_text_have_columns_of_their_own(self, database: Database, measure: Measure) -> None:
        """As a benchmark, which has no strategy, beside the strategy `none` of `ddp`."""
        for number, strategy in enumerate((None, "none", "naive")):
            measure(("step_ms", {"median": float(number), "case": {"strategy": strategy}}))
        (row,) = rows_of(table(database, pivot="strategy"))
        assert [row[f"step_ms, strategy={name}"] for name in ("null", '"none"', "naive")] == [0.0, 1.0, 2.0]


def test_a_bracket_in_a_pattern_is_a_bracket(database: Database, measure: Measure) -> None:
    for shape in ("[4, 128]", "4", "[8, 128]"):
        measure(("step_ms", {"case": {"shape": shape}}))
    assert table(database, where=[("shape", "[4, *]")]).column("shape") == ["[4, 128]"]


def test_a_text_with_a_star_is_no_pattern_where_a_row_has_it(database: Database, measure: Measure) -> None:
    for name in ("f(float*)", "f(float*, float*)"):
        measure(("step_ms", {"case": {"name": name}}))
    assert table(database, where=[("name", "f(float*)")]).column("name") == ["f(float*)"]


class TestFieldsOfSweeps:
    """A swept field's own name stands for the coordinate that shows it."""

    @pytest.fixture(autouse=True)
    def sizes(self, measure: Measure) -> None:
        for size, ms in (("small", 9.0), ("tiny", 3.0)):
            for dtype in ("fp32", "bf16"):
                measure(("step_ms", {"case": {"model": size, "model.vocab_size": 7, "dtype": dtype}, "median": ms}))

    def test_in_every_option(self, database: Database) -> None:
        sheet = table(database, pivot="model.size", rows=["dtypes"], where=[("model.size", "tiny")])
        assert (sheet.names("coordinate"), sheet.names("metric")) == (["dtype"], ["step_ms, model=tiny"])
        assert table(database, sort="model.size").column("model") == ["small"] * 2 + ["tiny"] * 2
        assert table(database, sort="-model.size").column("model") == ["tiny"] * 2 + ["small"] * 2
        assert values(table(database, relative_to={"model.size": "small"}), "step_ms_speedup") == [1, 1, 3, 3]
        assert "Size" in renamed(table(database), [("model.size", "Size")]).names("coordinate")


class TestRelative:
    def test_a_row_without_a_counterpart_says_so(self, database: Database, measure: Measure, grid: list[int]) -> None:
        measure(("step_ms", {"median": 1.0}), spec={"context_length": 512, "precision": "bf16"})
        sheet = table(database, relative_to={"precision": "fp32"})
        assert [cell.outcome for cell in sheet.column("step_ms_speedup")][-1] == "no counterpart"

    def test_two_references_are_none(self, database: Database, measure: Measure, grid: list[int]) -> None:
        measure(("step_ms", {"median": 12.0}), spec={"context_length": 128, "precision": "fp32"})
        sheet = table(database, relative_to={"precision": "fp32"})
        assert [cell.outcome for cell in sheet.column("step_ms_speedup")] == [
            "reference",
            "several counterparts",
            "reference",
            "ok",
            "reference",
        ]

    def test_a_missing_number_has_no_speedup(self, database: Database, measure: Measure) -> None:
        measure(("step_ms", {"outcome": "oom"}), spec={"precision": "fp32"})
        measure(("step_ms", {"median": 12.0}), spec={"precision": "bf16"})
        reference, other = table(database, relative_to={"precision": "fp32"}).column("step_ms_speedup")
        assert other.outcome is None
        assert (reference.value, reference.outcome) == (None, "oom"), "it is no 1× of a time that nobody has"

    def test_a_note_names_different_hosts(self, database: Database, measure: Measure) -> None:
        for precision, host in (("fp32", "b"), ("bf16", "a"), ("fp16", None)):
            environment = {"host": {"hostname": host}} if host else None
            measure(("step_ms", {}), spec={"precision": precision}, finish=Finish("succeeded", environment=environment))
        note = "Different hosts measured these jobs: a, b."
        assert note in table(database, relative_to={"precision": "fp32"}).notes
        assert note not in table(database, relative_to={"precision": "fp32"}, jobs=[1, 3]).notes
        assert note not in table(database).notes, "nothing is compared"

    def test_negative_numbers_have_no_ratio(self, database: Database, measure: Measure) -> None:
        """What communication adds to a step is a difference of two times."""
        for strategy, added in (("naive", 1.0), ("flat", -0.5), ("fsdp", 0.0), ("bucketed", 2.0)):
            measure(("exposed_communication_ms", {"median": added, "case": {"strategy": strategy}}))
        for reference, expected in (("naive", [1.0, None, None, 0.5]), ("flat", [None, 1.0, None, None])):
            sheet = table(database, relative_to={"strategy": reference}, columns=["exposed_communication_ms"])
            assert values(sheet, "exposed_communication_ms_speedup") == expected
        assert "unknown" in [cell.outcome for cell in sheet.column("exposed_communication_ms_speedup")]

    @pytest.mark.parametrize("verdict", ["invalid", "wrong"])
    def test_nothing_is_related_to_an_unfit_result(self, database: Database, measure: Measure, verdict: str) -> None:
        measure(("step_ms", {"median": 10.0, "validity": verdict}), spec={"precision": "fp32"})
        measure(("step_ms", {"median": 5.0}), spec={"precision": "bf16"})
        cells = table(database, relative_to={"precision": "fp32"}).column("step_ms_speedup")
        assert [cell.outcome for cell in cells] == ["reference", f"reference {verdict}"]
        measure(("step_ms", {"median": 20.0}), spec={"precision": "fp32"})
        cells = table(database, relative_to={"precision": "fp32"}).column("step_ms_speedup")
        assert [cell.value for cell in cells] == [None, 4.0, 1.0]

    def test_a_suspect_reference_that_is_not_shown_is_said(self, database: Database, measure: Measure) -> None:
        measure(("step_ms", {"median": 10.0, "validity": "suspect"}), spec={"precision": "fp32"})
        measure(("step_ms", {"median": 5.0}), spec={"precision": "bf16"})
        notes = {
            shown: "the reference, not shown, is suspect" in " ".join(sheet.notes)
            for shown in ("fp32", "bf16", "*")
            for sheet in [table(database, relative_to={"precision": "fp32"}, where=[("precision", shown)])]
        }
        assert notes == {"fp32": False, "bf16": True, "*": False}

    def test_a_cancelled_row_is_no_reference(self, database: Database, measure: Measure) -> None:
        measure(spec={"precision": "fp32"}, finish=Finish("cancelled", error=job_problem("cancelled", "asked for")))
        measure(("step_ms", {"median": 10.0}), spec={"precision": "fp32"})
        measure(("step_ms", {"median": 5.0}), spec={"precision": "bf16"})
        cells = table(database, relative_to={"precision": "fp32"}).column("step_ms_speedup")
        assert [cell.value for cell in cells] == [None, 1.0, 2.0]
        assert [cell.outcome for cell in cells] == ["cancelled", "reference", "ok"]

    def test_a_speedup_has_the_interval_of_both_medians(self, database: Database, measure: Measure) -> None:
        for precision, middle in (("fp32", 10.0), ("bf16", 5.0)):
            ends = {"median_low": middle * 0.95, "median_high": middle / 0.95}
            measure(("step_ms", {"median": middle, **ends}), spec={"precision": precision})
        sheet = table(database, relative_to={"precision": "fp32"})
        reference, gain = sheet.column("step_ms_speedup")
        assert (reference.low, gain.value) == (None, 2.0)
        assert gain.high == pytest.approx(2 * 0.95 ** -math.sqrt(2)), "equal noise of both sides adds in quadrature"
        assert gain.low * gain.high == pytest.approx(4)
        row = rows_of(sheet)[1]
        assert (row["step_ms_speedup_low"], row["step_ms_speedup_high"]) == (gain.low, gain.high)
        text = render(sheet, "markdown")
        assert f"2.00× ({gain.low:.2f}–{gain.high:.2f})" in text
        assert "Beside each ratio its 95 % interval" in text


class TestBest:
    def test_the_best_of_each_column_is_marked(self, database: Database, grid: list[int]) -> None:
        sheet = table(database, best=True)
        assert [cell.best for cell in sheet.column("step_ms")] == [False, True, False, True]
        assert [cell.best for cell in sheet.column("tokens_per_s")] == [False, True, False, True]
        assert "**5**" in render(sheet, "markdown")
        assert r"\textbf{5}" in render(sheet, "latex")
        assert "<strong>5</strong>" in render(sheet, "html")

    @pytest.mark.parametrize("pivot", ["precision", "context_length"])
    def test_with_a_pivot_it_is_the_best_way_to_do_the_same_work(self, database, grid, pivot) -> None:
        text = render(table(database, pivot=pivot, columns=["step_ms", "tokens_per_s"], best=True), "markdown")
        for fp32, bf16 in (("10", "5"), ("20", "15")):
            assert f"**{bf16}**" in text
            assert f"**{fp32}**" not in text
        assert text.count("**") == 2 * 4, "both metrics, at both lengths"

    def test_no_unfit_number_is_the_best(self, database: Database, measure: Measure) -> None:
        for number, (ms, verdict) in enumerate(((1.0, "invalid"), (1.0, "wrong"), (2.0, None), (3.0, None))):
            measure(("step_ms", {"median": ms, "validity": verdict, "case": {"tile": f"of {number}"}}))
        sheet = table(database, best=True)
        assert [cell.best for cell in sheet.column("step_ms")] == [False, False, True, False]
        (row,) = table(database, best=True, pivot="tile").rows
        assert [cell.best for cell in row if isinstance(cell, Cell)] == [False, False, True, False]

    @pytest.mark.parametrize("time", ["step_ms", "forward_backward_ms", "product_ms"])
    def test_what_cannot_be_told_from_the_best_is_marked_too(self, database, measure, time) -> None:
        """A rate has no samples of its own: it is known as well as its time."""
        for size, ms in ((1, 5.0), (2, 5.1), (4, 6.0)):
            step = (time, {"median": ms, "median_low": ms - 0.1, "median_high": ms + 0.1})
            rate = ("tokens_per_s", {"median": 1000 / ms, "n": 1, "unit": "tokens/s"})
            measure(*((metric, {**values, "case": {"tile": size}}) for metric, values in (step, rate)))
        sheet = table(database, best=True, columns=[time, "tokens_per_s"])
        assert [cell.best for cell in sheet.column(time)] == [True, True, False]
        assert [cell.best for cell in sheet.column("tokens_per_s")] == [True, True, False]
        assert any("all whose intervals overlap with it. The interval of one process" in note for note in sheet.notes)

    def test_a_batch_may_have_the_best_rate_but_no_best_time(self, database: Database, measure: Measure) -> None:
        for size, ms in ((1, 5.0), (2, 6.0)):
            rate = ("tokens_per_s", {"median": 1000 * size / ms, "unit": "tokens/s"})
            measure(("step_ms", {"median": ms}), rate, spec={"batch_size": size})
        sheet = table(database, best=True)
        assert [cell.best for cell in sheet.column("step_ms")] == [False, False]
        assert [cell.best for cell in sheet.column("tokens_per_s")] == [False, True]

    def test_arguments_of_a_step_may_change_the_work(self, database: Database, measure: Measure) -> None:
        for width in (64, 512):
            measure(("step_ms", {"median": float(width), "case": {"arguments.width": width}}))
        said = [note for note in table(database, best=True).notes if "other arguments" in note]
        assert said == ["Rows with other arguments of your own code count as doing the same: nobody knows if they do."]

    @pytest.mark.parametrize("work", ["rows", "model.vocab_size", "query_length"])
    def test_nobody_is_the_best_of_other_work(self, database: Database, measure: Measure, work: str) -> None:
        for number in (1, 2):
            measure(("step_ms", {"median": float(number), "case": {work: number}}))
        assert [cell.best for cell in table(database, best=True).column("step_ms")] == [False, False]


def test_by_a_metric_and_a_coordinate(database: Database, measure: Measure, grid: list[int]) -> None:
    measure(("step_ms", {"outcome": "oom"}), spec={"context_length": 512})
    assert values(table(database, sort="step_ms"), "step_ms") == [5.0, 10.0, 15.0, 20.0, None]
    assert values(table(database, sort="-step_ms"), "step_ms") == [20.0, 15.0, 10.0, 5.0, None], "unknown come last"
    assert table(database, sort="-context_length").column("context_length") == [512, 256, 256, 128, 128]


def test_signs_move_with_their_rows(database: Database, measure: Measure) -> None:
    measure(("step_ms", {"median": 2.0, "validity": "suspect"}), spec={"context_length": 128})
    measure(("step_ms", {"median": 1.0, "validity": "valid"}), spec={"context_length": 256})
    assert (table(database).marks, table(database, sort="step_ms").marks) == (["†", ""], ["", "†"])


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("rows", ["nose"], ""),
        ("columns", ["nose"], ""),
        ("pivot", "nose", "have no coordinate 'nose'"),
        ("sort", "nose", "no column 'nose' to sort by; there is model"),
        ("sort", "step_msx", "no column 'step_msx' to sort by; did you mean step_ms?"),
        ("relative_to", {"nose": "1"}, "These results have no coordinate 'nose'; there is model"),
        ("relative_to", {"precison": "1"}, "These results have no coordinate 'precison'; did you mean precision?"),
        ("relative_to", {"precision": "fp64"}, "No row has precision=fp64; there is fp32, bf16"),
        ("relative_to", {"precision": "fp32", "context_length": "9"}, "No row has context_length=9"),
    ],
)
def test_what_is_not_there_is_refused(database, grid, option, value, message) -> None:
    with pytest.raises(InvalidRequest) as caught:
        table(database, **{option: value})
    assert message in str(caught.value)
    assert caught.value.errors[0].pointer == f"/{option}"
