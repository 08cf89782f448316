from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from app.errors import InvalidRequest, NotFound, job_problem
from app.layout import STATISTICS
from app.specs.benchmark import BenchmarkSpec
from app.store import results
from app.store.engine import Database
from app.store.queue import Queue
from app.store.reading import Reading
from app.store.records import Finish, MeasurementRecord, NewJob
from app.store.results import local_table, render, table

TIMEOUT = Finish("failed", error=job_problem("timeout", "longer than 1 s"))


@pytest.fixture
def measure(shop: Any, queue: Queue, record: Callable[..., MeasurementRecord]) -> Callable[..., int]:
    """Submits a job, runs it and records the measurements given: (metric, changes) pairs of its case."""

    def run(*measured: tuple[str, dict[str, Any]], spec: dict[str, Any] | None = None, finish: Any = None) -> int:
        claim = shop.running_job(spec=spec)
        case = {**BenchmarkSpec.model_validate(spec or {}).coordinates(), "device": "cpu"}
        records = [
            record(metric, **{**changes, "case": {**case, **changes.get("case", {})}}) for metric, changes in measured
        ]
        ending = finish or Finish("succeeded")
        queue.finish(claim, Finish(ending.state, error=ending.error, measurements=records))
        return int(claim.job_id)

    return run


def lengths(measure: Callable[..., int], *context_lengths: int) -> list[int]:
    return [
        measure(("step_ms", {"mean": float(length)}), ("forward_ms", {}), spec={"context_length": length})
        for length in context_lengths
    ]


def without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def json_rows(database: Database, **arguments: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(render(table(database, **arguments), "json"))["rows"]
    return rows


class TestLayout:
    def test_the_kinds_own_rows_and_columns_in_the_order_of_submission(
        self, database: Database, measure: Callable[..., int]
    ) -> None:
        lengths(measure, 512, 128, 256)
        frame = table(database)
        assert frame.attrs["coordinates"] == ["model", "context_length"]
        assert frame.attrs["metrics"] == ["forward_ms", "step_ms"]  # table_columns' order, and only what was measured
        assert list(frame["context_length"]) == [512, 128, 256]
        assert list(frame["step_ms"]) == [512.0, 128.0, 256.0]

    def test_every_coordinate_that_varies_is_shown(self, database: Database, measure: Callable[..., int]) -> None:
        measure(("step_ms", {}), spec={"precision": "fp32", "batch_size": 4})
        measure(("step_ms", {}), spec={"precision": "bf16", "batch_size": 4})
        assert table(database).attrs["coordinates"] == ["model", "context_length", "precision"]

    def test_a_coordinate_that_some_cases_lack_varies(self, database: Database, measure: Callable[..., int]) -> None:
        measure(("step_ms", {}))
        measure(("step_ms", {"case": {"tile": 64}}))
        rows = json_rows(database)
        assert [row["tile"] for row in rows] == [None, 64]

    def test_the_same_case_of_two_jobs_is_two_rows(self, database: Database, measure: Callable[..., int]) -> None:
        first, second = measure(("step_ms", {"mean": 1.0})), measure(("step_ms", {"mean": 3.0}))
        assert [(row["job"], row["step_ms"]) for row in json_rows(database)] == [(first, 1.0), (second, 3.0)]

    def test_rows_asked_for_come_first_and_hide_no_difference(
        self, database: Database, measure: Callable[..., int]
    ) -> None:
        lengths(measure, 128, 256)
        assert table(database, rows=["precision"]).attrs["coordinates"] == ["precision", "context_length"]
        assert table(database, rows=["job", "model"]).attrs["coordinates"] == ["job", "model", "context_length"]

    def test_columns_asked_for_in_their_order(self, database: Database, measure: Callable[..., int]) -> None:
        lengths(measure, 128)
        frame = table(database, columns=["step_ms", "forward_ms", "backward_ms"])
        assert frame.attrs["metrics"] == ["step_ms", "forward_ms", "backward_ms"]
        (row,) = json_rows(database, columns=["step_ms", "backward_ms"])
        assert (row["step_ms"], row["backward_ms"], row["backward_ms_outcome"]) == (128.0, None, None)

    @pytest.mark.parametrize(
        ("arguments", "pointer"), [({"rows": ["nose"]}, "/rows"), ({"columns": ["x"]}, "/columns")]
    )
    def test_unknown_names_are_refused(
        self, database: Database, measure: Callable[..., int], arguments: dict[str, Any], pointer: str
    ) -> None:
        lengths(measure, 128)
        with pytest.raises(InvalidRequest) as caught:
            table(database, **arguments)
        assert caught.value.errors[0].pointer == pointer

    def test_a_metric_measured_in_several_phases_has_a_column_of_each(
        self, database: Database, measure: Callable[..., int]
    ) -> None:
        measure(("peak_memory_mib", {"phase": "forward"}), ("peak_memory_mib", {"phase": "backward"}), ("step_ms", {}))
        frame = table(database, columns=["forward_peak_memory_mib", "backward_peak_memory_mib"])
        assert list(frame["forward_peak_memory_mib_outcome"]) == ["ok"]

    def test_a_metric_that_no_case_knows_is_no_column(self, database: Database, measure: Callable[..., int]) -> None:
        unknown, refused = {"outcome": "unknown"}, {"outcome": "unsupported"}
        measure(("step_ms", {}), ("mfu", unknown), ("tflops", {}))
        measure(("step_ms", refused), ("mfu", refused), ("tflops", unknown), spec={"context_length": 512})
        assert table(database).attrs["metrics"] == ["step_ms", "tflops"]

    def test_a_job_in_no_database_has_the_same_table(self, database: Database, measure: Callable[..., int]) -> None:
        job_id = measure(("step_ms", {"mean": 1.0}), ("forward_ms", {}), ("step_ms", {"mean": 3.0}))
        rows = Reading(database).measurements(job_id)["rows"]
        facts = ("phase", "metric", "unit", "outcome", "reason", "partial", "n", "mean", "std")
        wire = [{**{name: row[name] for name in facts}, "case": without(row, *facts, *STATISTICS)} for row in rows]
        local = local_table(BenchmarkSpec(), wire)
        assert render(local, "markdown") == render(table(database), "markdown")
        assert local["step_ms"].tolist() == [2.0]


class TestChoice:
    def test_by_kind_sweep_and_job(self, database: Database, queue: Queue, measure: Callable[..., int]) -> None:
        first, second = lengths(measure, 128, 256)
        assert len(table(database, kind="benchmark")) == 2
        assert len(table(database, kind="profile")) == 0
        assert [row["context_length"] for row in json_rows(database, jobs=[second])] == [256]
        assert len(table(database, jobs=[first, second])) == 2
        sweep = queue.submit_sweep(None, {}, {}, {}, [], [NewJob(BenchmarkSpec())]).response["id"]
        assert len(table(database, sweep=sweep)) == 0

    @pytest.mark.parametrize("arguments", [{"sweep": 7}, {"sweep": 2**70}, {"jobs": [7]}, {"jobs": [2**70]}])
    def test_unknown_ones_are_not_found(self, database: Database, arguments: dict[str, Any]) -> None:
        with pytest.raises(NotFound):
            table(database, **arguments)

    def test_too_many_are_refused_and_not_cut(
        self, database: Database, measure: Callable[..., int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lengths(measure, 128, 256)
        monkeypatch.setattr(results, "MAX_JOBS", 1)
        with pytest.raises(InvalidRequest, match="more than 1 jobs"):
            table(database)


class TestCells:
    def test_one_process_gives_its_samples_statistics(self, database: Database, measure: Callable[..., int]) -> None:
        measure(("step_ms", {"mean": 2.5, "std": 0.25, "n": 10}))
        (row,) = json_rows(database)
        assert (row["step_ms"], row["step_ms_std"], row["step_ms_n"]) == (2.5, 0.25, 10)

    def test_replicates_combine_as_the_mean_of_process_means(
        self, database: Database, measure: Callable[..., int]
    ) -> None:
        replicates = [
            ("step_ms", {"mean": mean, "n": n, "case": {"replicate": number}})
            for number, (mean, n) in enumerate([(1.0, 1000), (2.0, 10), (6.0, 10)])
        ]
        measure(*replicates)
        (row,) = json_rows(database)
        assert (row["step_ms"], row["step_ms_std"], row["step_ms_n"]) == (3.0, pytest.approx(7**0.5), 3)

    def test_nothing_is_averaged_over_a_missing_replicate(
        self, database: Database, measure: Callable[..., int]
    ) -> None:
        measure(
            ("step_ms", {"mean": 1.0, "case": {"replicate": 0}}),
            ("step_ms", {"outcome": "oom", "case": {"replicate": 1}}),
        )
        (row,) = json_rows(database)
        assert (row["step_ms"], row["step_ms_std"], row["step_ms_outcome"]) == (None, None, "oom")

    def test_nor_over_those_that_a_failed_job_did_not_get_to(
        self, database: Database, measure: Callable[..., int]
    ) -> None:
        measure(("step_ms", {"mean": 1.0, "case": {"replicate": 0}}), spec={"replicates": 3}, finish=TIMEOUT)
        (row,) = json_rows(database)
        assert (row["step_ms"], row["step_ms_outcome"]) == (None, "timeout")

    def test_a_job_that_measured_nothing_has_a_row_of_its_outcome(
        self, database: Database, measure: Callable[..., int]
    ) -> None:
        lengths(measure, 128)
        measure(spec={"context_length": 256}, finish=TIMEOUT)
        frame = table(database)
        assert frame.attrs["coordinates"] == ["model", "context_length"]
        assert list(frame["step_ms_outcome"]) == ["ok", "timeout"]
        assert list(frame["context_length"]) == [128, 256]

    def test_nothing_but_failures_is_a_table_too(self, database: Database, measure: Callable[..., int]) -> None:
        measure(finish=TIMEOUT)
        assert "timeout" in render(table(database), "markdown")

    def test_a_metric_that_nobody_knows_is_left_out_unless_asked_for(
        self, database: Database, measure: Callable[..., int]
    ) -> None:
        measure(("step_ms", {}), ("mfu", {"outcome": "unknown"}))
        assert table(database).attrs["metrics"] == ["step_ms"]
        assert list(table(database, columns=["mfu"])["mfu_outcome"]) == ["unknown"]

    def test_a_stored_spec_of_another_version_is_no_error(
        self, database: Database, measure: Callable[..., int]
    ) -> None:
        job_id = measure(finish=TIMEOUT)
        with database.write() as connection:
            connection.exec_driver_sql('UPDATE job SET spec = \'{"kind": "benchmark", "was": 1}\'')
        assert [row["forward_ms_outcome"] for row in json_rows(database, jobs=[job_id])] == ["timeout"]


class TestRender:
    @pytest.fixture
    def mixed(self, database: Database, measure: Callable[..., int]) -> Database:
        measure(("forward_ms", {"mean": 21.3456, "std": 0.0123}), ("step_ms", {"mean": 1234.5678, "std": 23.4}))
        measure(
            ("forward_ms", {"mean": 21.3456, "std": None, "n": 1}),
            ("step_ms", {"outcome": "oom"}),
            spec={"context_length": 512},
        )
        measure(finish=TIMEOUT, spec={"context_length": 1024})
        return database

    def test_markdown(self, mixed: Database) -> None:
        lines = render(table(mixed), "markdown").splitlines()
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        assert cells[0] == ["model", "context_length", "forward_ms", "step_ms"]
        assert cells[2:] == [
            ["small", "256", "21.346 ± 0.012", "1235 ± 23"],
            ["small", "512", "21.35", "oom"],
            ["small", "1024", "timeout", "timeout"],
        ]

    def test_latex(self, mixed: Database) -> None:
        text = render(table(mixed), "latex")
        assert r"small & 256 & 21.346 $\pm$ 0.012 & 1235 $\pm$ 23 \\" in text
        assert r"context\_length" in text
        assert r"\begin{tabular}{llrr}" in text

    def test_csv_is_numeric(self, mixed: Database) -> None:
        rows = list(csv.DictReader(io.StringIO(render(table(mixed), "csv"))))
        assert float(rows[0]["forward_ms"]) == 21.3456
        assert float(rows[0]["forward_ms_std"]) == 0.0123
        assert (rows[1]["forward_ms_std"], rows[1]["step_ms"], rows[1]["step_ms_outcome"]) == ("", "", "oom")

    def test_json_is_numeric_and_described(self, mixed: Database) -> None:
        answer = json.loads(render(table(mixed), "json"))
        assert answer["columns"][:4] == [
            {"name": "model", "type": "string", "unit": None},
            {"name": "context_length", "type": "integer", "unit": None},
            {"name": "forward_ms", "type": "number", "unit": "ms"},
            {"name": "forward_ms_std", "type": "number", "unit": "ms"},
        ]
        assert [list(row) for row in answer["rows"]] == [[column["name"] for column in answer["columns"]]] * 3
        assert answer["rows"][0]["step_ms"] == 1234.5678
        assert answer["rows"][1]["step_ms"] is None
        assert answer["rows"][1]["step_ms_n"] is None

    def test_html_has_no_style_and_marks_numbers(self, mixed: Database) -> None:
        text = render(table(mixed), "html")
        assert not re.search(r"style|border|dataframe", text)
        assert '<tr><th>model</th><th class="number">context_length</th>' in text
        assert '<th class="number">step_ms</th></tr>' in text
        assert '<tr><td>small</td><td class="number">512</td><td class="number">21.35</td><td>oom</td></tr>' in text

    def test_html_escapes_and_markdown_too(self, database: Database, measure: Callable[..., int]) -> None:
        measure(("step_ms", {"case": {"device": "<script>|"}}))
        frame = table(database, rows=["device"])
        assert "<script>" not in render(frame, "html")
        assert "&lt;script&gt;|" in render(frame, "html")
        assert r"<script>\|" in render(frame, "markdown")

    def test_no_results(self, database: Database) -> None:
        frame = table(database)
        assert json.loads(render(frame, "json")) == {"columns": [], "rows": []}
        assert render(frame, "markdown") == "No results.\n"
        for name in ("csv", "latex", "html"):
            render(frame, name)

    def test_no_such_format(self, database: Database) -> None:
        with pytest.raises(InvalidRequest, match="markdown"):
            render(table(database), "pdf")

    @pytest.mark.parametrize(
        ("mean", "std", "n", "text"),
        [
            (0.0, None, 1, "0"),
            (5.0, 0.0, 3, "5.000 ± 0.000"),
            (0.000123456, 0.0000012, 5, "0.000123 ± 0.000001"),
            (2.346e-7, None, 1, "2.35e-07"),
            (0.000572, 2.4e-7, 5, "0.000572 ± 2.4e-07"),
            (123456.0, 0.5, 5, "123456.00 ± 0.50"),
            (1e9, 3.2e6, 5, "1000000000 ± 3200000"),
            (-3.5, 0.25, 2, "-3.50 ± 0.25"),
        ],
    )
    def test_digits(self, mean: float, std: float | None, n: int, text: str) -> None:
        assert results._cell_text(mean, std, n, "ok") == text


def test_the_rest_of_the_store_does_without_pandas() -> None:
    program = (
        "import sys, app.store.queue, app.store.reading, app.store.artifacts, app.store.lease, app.store.engine\n"
        "assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
