import json
from collections.abc import Callable
from typing import Any

import pytest

from app.errors import InvalidRequest, job_problem
from app.results import Cell, Sheet, local_table, render
from app.specs.attention import AttentionSpec
from app.specs.benchmark import BenchmarkSpec
from app.store.database.engine import Database
from app.store.reading.queries import STATISTICS, Reading
from app.store.records import Finish, UnitRecord
from tests.app.results.conftest import table

Measure = Callable[..., int]
TIMEOUT = Finish("failed", error=job_problem("timeout", "longer than 1 s"))
ATTENTION = {"kind": "attention", "sequence_lengths": [128], "implementations": ["eager"]}
GROUP = {"model": {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 2}}


def lengths(measure: Measure, *context_lengths: int) -> list[int]:
    return [
        measure(("step_ms", {"median": float(length)}), ("forward_ms", {}), spec={"context_length": length})
        for length in context_lengths
    ]


def json_rows(sheet: Sheet) -> list[dict[str, Any]]:
    return json.loads(render(sheet, "json"))["rows"]


def outcomes(sheet: Sheet, metric: str) -> list[str | None]:
    return [cell.outcome for cell in sheet.column(metric)]


class TestRows:
    def test_a_noisy_valid_row_has_a_light_sign(self, database: Database, measure: Measure) -> None:
        for length, high in ((8, 2.9), (16, 2.51)):
            numbers = {"median": 2.5, "median_low": 2.4, "median_high": high, "n": 10, "validity": "valid"}
            measure(("step_ms", numbers), spec={"context_length": length})
        text = render(table(database), "markdown")
        assert text.count("‡") == 2
        assert "- ‡ noisy (1 row): medians uncertain by up to ±16%, that of step_ms; use" in text, "as the cell"
        assert r"\textsuperscript{\textdaggerdbl{}}" in render(table(database), "latex")

    def test_a_label_stands_for_its_coordinates(self, database: Database, measure: Measure) -> None:
        measure(("step_ms", {}), spec={"model": {"size": "tiny"}})
        measure(("step_ms", {}), spec={"model": {"size": "small"}})
        measure(("step_ms", {}), spec={"model": {"size": "small", "rope_theta": 500_000.0}})
        sheet = table(database)
        assert sheet.names("coordinate") == ["model", "context_length", "model.rope_theta"]
        assert sheet.column("model") == ["tiny", "small", "small"]

    def test_equal_rows_show_what_their_label_stands_for(self, database: Database, measure: Measure) -> None:
        measure(("step_ms", {"case": {"model": "mine"}}), spec={"model": {"size": "tiny"}})
        measure(("step_ms", {"case": {"model": "mine"}}), spec=GROUP)
        coordinates = table(database).names("coordinate")
        assert coordinates[:2] == ["model", "context_length"]
        assert "model.d_model" in coordinates
        assert "job" not in coordinates

    def test_unused_and_useless_look_alike(self, database: Database, measure: Measure) -> None:
        measure(("step_ms", {}), spec={"mode": "forward"})  # which has nothing to recompute
        measure(("step_ms", {}), spec={"mode": "forward_backward"})
        assert table(database).names("coordinate") == ["model", "context_length", "mode"]
        measure(("step_ms", {}), spec={"mode": "forward_backward", "activation_checkpointing": True})
        assert table(database).column("activation_checkpointing") == [None, False, True]

    def test_one_and_true_are_different(self, database: Database, measure: Measure) -> None:
        measure(("step_ms", {"case": {"flag": 1}}))
        measure(("step_ms", {"case": {"flag": True}}))
        assert table(database).column("flag") == [1, True]

    def test_the_same_case_on_two_devices_is_two_rows(self, database: Database, measure: Measure) -> None:
        measure(("step_ms", {"device_key": "1x NVIDIA H200"}))
        measure(("step_ms", {"device_key": "1x NVIDIA B200"}))
        sheet = table(database)
        assert sheet.names("coordinate") == ["model", "context_length", "device"]
        assert sheet.column("device") == ["1x NVIDIA H200", "1x NVIDIA B200"]

    def test_cases_that_differ_in_nothing_shown_show_their_keys(self, database: Database, measure: Measure) -> None:
        measure(("step_ms", {"case_key": "a"}), ("step_ms", {"case_key": "b"}))
        assert table(database).column("case_key") == ["a", "b"]

    def test_a_coordinate_may_have_a_columns_name(self, database: Database, measure: Measure) -> None:
        measure(("step_ms", {"case": {"job": 3, "step_ms": "x", "validity": "y", "step_ms_n": 9}}))
        measure(("step_ms", {"case": {"job": 4, "step_ms": "x", "validity": "y", "step_ms_n": 9}}))
        sheet = table(database, rows=["case.step_ms", "case.validity", "case.step_ms_n"])
        assert (sheet.column("case.job"), sheet.column("case.step_ms")) == ([3, 4], ["x", "x"])
        assert len(set(json.loads(render(sheet, "json"))["rows"][0])) == len(json_rows(sheet)[0])

    def test_rows_asked_for_come_first_and_hide_no_difference(self, database: Database, measure: Measure) -> None:
        lengths(measure, 128, 256)
        assert table(database, rows=["precision"]).names("coordinate") == ["precision", "context_length"]
        assert table(database, rows=["job", "model"]).names("coordinate") == ["job", "model", "context_length"]


class TestColumns:
    def test_each_phase_of_a_metric_has_a_column(self, database: Database, measure: Measure) -> None:
        measure(("tflops", {"phase": "forward"}), ("tflops", {"phase": "backward"}), ("tflops", {}))
        measure(("tflops", {"phase": "forward", "median": 7.0}), spec={"context_length": 512})
        sheet = table(database, columns=["forward_tflops", "backward_tflops", "tflops"])
        assert (outcomes(sheet, "forward_tflops"), outcomes(sheet, "tflops")) == (["ok", "ok"], ["ok", None])

    def test_a_rate_says_how_the_backward_pass_counts(self, database: Database, measure: Measure) -> None:
        measure(("tflops", {"phase": "forward"}), ("tflops", {}), ("forward_ms", {}), spec=ATTENTION)

        def says(*columns: str) -> bool:
            return any("the backward pass counts as 2" in note for note in table(database, columns=columns).notes)

        assert says("tflops", "forward_ms")
        assert not says("forward_tflops", "forward_ms"), "of the forward pass all count the same"

    def test_phases_that_the_users_code_names_are_columns(self, database: Database, measure: Measure) -> None:
        phases = [(f"{name}_ms", {"phase": name}) for name in ("data", "forward", "loss", "rest", "step", "first_step")]
        measure(*phases, ("device_ms", {"phase": "step"}), ("host_us", {}))
        names = ["data_ms", "loss_ms", "forward_ms", "rest_ms", "step_ms"]
        assert table(database).names("metric") == names
        profiled = [("unprofiled_step_ms", {}), *(("unprofiled_ms", {"phase": name}) for name in ("data", "forward"))]
        measure(*profiled, ("work_ms", {"phase": "data"}), spec={"kind": "profile"})
        names = ["data_unprofiled_ms", "forward_unprofiled_ms", "unprofiled_step_ms"]
        assert table(database, kind="profile").names("metric") == names
        sides = {"baseline": {"kind": "benchmark"}, "candidate": {"kind": "benchmark", "precision": "bf16"}}
        measure(("data_ms", {"phase": "data"}), ("step_ms", {"phase": "step"}), spec={"kind": "compare", **sides})
        assert table(database, kind="compare").names("metric") == ["data_ms", "step_ms"]

    def test_what_other_kinds_time_is_no_phase_of_a_step(self, database: Database, measure: Measure) -> None:
        measure(("copy_gb_per_s", {}), ("copy_ms", {"phase": "copy"}), spec={"kind": "ceiling"})
        assert table(database).names("metric") == ["copy_gb_per_s"]

    def test_a_metric_that_ran_out_of_memory_everywhere_is_one(self, database: Database, measure: Measure) -> None:
        measure(("forward_ms", {}), ("step_ms", {"outcome": "oom"}))
        assert outcomes(table(database), "step_ms") == ["oom"]


class TestCells:
    @pytest.mark.parametrize(
        ("statistic", "alone", "together"),
        [("median", 3.0, 4.0), ("min", 1.0, 1.0), ("max", 9.0, 12.0), ("p05", 1.5, 1.6), ("p95", 8.0, 9.8)],
    )
    def test_another_statistic_is_of_the_processes_own(self, database, measure, statistic, alone, together) -> None:
        values = [
            {"median": 3.0, "min": 1.0, "max": 9.0, "p05": 1.5, "p95": 8.0},
            {"median": 4.0, "min": 2.0, "max": 12.0, "p05": 2.5, "p95": 10.0},
            {"median": 5.0, "min": 1.0, "max": 11.0, "p05": 2.5, "p95": 8.0},
        ]
        measure(("step_ms", values[0]))
        measure(*(("step_ms", {**value, "unit_index": index}) for index, value in enumerate(values)))
        sheet = table(database, statistic=statistic)
        assert [cell.value for cell in sheet.column("step_ms")] == [alone, pytest.approx(together)]
        assert [cell.n for cell in sheet.column("step_ms")] == [10, 3]
        assert "step_ms_std" not in json_rows(sheet)[0], "a deviation stands beside a mean only"
        assert "±" not in render(sheet, "markdown").partition("Cells:")[0]

    @pytest.mark.parametrize(("statistic", "is_said"), [("min", True), ("mean", True), ("median", False)])
    def test_rates_are_of_medians_whatever_the_statistic(self, database, measure, statistic, is_said) -> None:
        measure(("step_ms", {}), ("tokens_per_s", {"unit": "tokens/s", "n": 1}), ("parameters", {"n": 1, "unit": "1"}))
        notes = table(database, statistic=statistic, columns=["all"]).notes
        assert ("tokens_per_s: by the median time of each process, whatever the statistic." in notes) is is_said

    def test_a_job_that_measured_nothing_has_a_row_of_its_outcome(self, database: Database, measure: Measure) -> None:
        lengths(measure, 128)
        measure(spec={"context_length": 256}, finish=TIMEOUT)
        sheet = table(database)
        assert sheet.names("coordinate") == ["model", "context_length"], "the device that it knows nothing of is none"
        assert outcomes(sheet, "step_ms") == ["ok", "timeout"]
        assert sheet.column("context_length") == [128, 256]

    def test_a_stored_spec_of_another_version_is_no_error(self, database: Database, measure: Measure) -> None:
        job_id = measure(finish=TIMEOUT)
        with database.write() as connection:
            connection.exec_driver_sql('UPDATE job SET spec = \'{"kind": "benchmark", "was": 1}\'')
        sheet = table(database, jobs=[job_id])
        assert outcomes(sheet, "step_ms") == ["timeout"]
        assert sheet.names("metric") == ["step_ms"], "the main metric: a step of one's own has no forward_ms"

    def test_a_stored_kind_of_another_version_is_no_error(self, database: Database, measure: Measure) -> None:
        measure(("what_ms", {}))
        with database.write() as connection:
            connection.exec_driver_sql("UPDATE job SET kind = 'gone', spec = '{\"kind\": \"gone\"}'")
        assert outcomes(table(database), "what_ms") == ["ok"]

    def test_a_value_that_is_no_number_is_unknown(self, database: Database, measure: Measure) -> None:
        measure(("step_ms", {"median": float("inf")}))
        sheet = table(database)
        assert (sheet.column("step_ms"), sheet.missing) == ([Cell(None, None, 10, "ok")], ["unknown"])
        assert "unknown" not in render(sheet, "markdown")
        assert "| – |" in " ".join(render(sheet, "markdown").split())

    def test_a_case_that_knows_nothing_has_a_row_too(self, database: Database, measure: Measure) -> None:
        measure(("mfu", {"outcome": "unknown"}), ("tokens_per_s", {"outcome": "unknown"}))
        assert outcomes(table(database), "tokens_per_s") == ["unknown"]


class TestPartial:
    """Jobs that failed or were cancelled show what they measured as what it is."""

    SPEC: dict[str, Any] = {  # noqa: RUF012
        "kind": "attention",
        "implementations": ["eager", "tiled"],
        "sequence_lengths": [64, 128, 256],
        "head_dims": [16],
        "dtypes": ["fp32"],
        "causal": [True],
    }

    @pytest.fixture
    def timed_out(self, ended: Any, record: Any) -> int:
        """A job that timed out in its sixth cell of six: it had measured that cell's forward pass only."""
        cases = AttentionSpec.model_validate_json(json.dumps(self.SPEC)).cases()
        records = [
            record(metric, median=number + 1.0, case=case.coordinates, case_key=case.key)
            for number, case in enumerate(cases[:5])
            for metric in ("forward_ms", "backward_ms")
        ]
        records.append(record("forward_ms", median=6.0, case=cases[5].coordinates, case_key=cases[5].key))
        return ended(self.SPEC, TIMEOUT, measurements=records)

    def test_cells_not_measured_have_the_jobs_code(self, database: Database, timed_out: int) -> None:
        sheet = table(database, jobs=[timed_out])
        assert outcomes(sheet, "backward_ms") == ["ok"] * 5 + ["timeout"]
        assert [cell.value for cell in sheet.column("forward_ms")] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        assert sheet.column("partial") == [True] * 6
        text = render(sheet, "markdown")
        assert text.count("*") == 6 + 1
        assert f"* partial: measured before the job ended without success: timeout (job {timed_out})." in text

    def test_cells_that_it_did_not_get_to_have_rows(self, database, ended, record) -> None:
        cases = AttentionSpec.model_validate_json(json.dumps(self.SPEC)).cases()
        records = [record("forward_ms", case=case.coordinates, case_key=case.key) for case in cases[:2]]
        sheet = table(database, jobs=[ended(self.SPEC, TIMEOUT, measurements=records)])
        assert outcomes(sheet, "forward_ms") == ["ok", "ok", *["timeout"] * 4]
        assert sheet.column("partial") == [True, True, *[False] * 4]
        assert len({(row[0], row[4]) for row in sheet.rows}) == 6
        assert "device" not in sheet.names("coordinate"), "of what was not measured nobody knows the device"

    def test_keys_that_nobody_planned_leave_no_rows(self, database: Database, measure: Measure) -> None:
        measure(("forward_ms", {"case_key": "of another version"}), spec=self.SPEC, finish=TIMEOUT)
        assert len(table(database).rows) == 1


class TestValidity:
    def test_a_row_has_the_worst_verdict_of_its_processes(self, database: Database, measure: Measure) -> None:
        measure(
            ("step_ms", {"validity": "valid"}),
            ("step_ms", {"validity": "suspect", "unit_index": 1}),
            ("step_ms", {"validity": "invalid", "case": {"tile": 8}}),
            ("step_ms", {"case": {"tile": 9}}),
        )
        sheet = table(database)
        assert sheet.column("validity") == ["suspect", "invalid", None]
        assert "suspect" in render(sheet, "markdown")

    def test_of_several_cases_each_has_its_own(self, database: Database, measure: Measure) -> None:
        cases = [{"context_length": number} for number in (1, 2)]
        keys = ["first", "second"]
        checks = [{"name": "drift", "ok": False, "detail": "9 %", "severity": "suspect", "case_key": "second"}]
        unit = UnitRecord(0, "the job", "succeeded", validity={"verdict": "suspect", "checks": checks})
        rows = [
            ("step_ms", {"validity": verdict, "case": case, "case_key": key})
            for verdict, case, key in zip(("valid", "suspect"), cases, keys, strict=True)
        ]
        measure(*rows, finish=Finish("succeeded", units=[unit]))
        assert table(database).column("validity_reason") == [None, "drift: 9 %"]


class TestComparison:
    SPEC: dict[str, Any] = {  # noqa: RUF012
        "kind": "compare",
        "baseline": {"kind": "benchmark", "context_length": 64},
        "candidate": {"kind": "benchmark", "context_length": 64, "precision": "bf16"},
        "replicates": 2,
    }

    def test_a_side_is_a_coordinate(self, database: Database, measure: Measure) -> None:
        sides = ["baseline", "candidate", "baseline", "candidate"]
        units = [UnitRecord(index, f"{side} {index // 2}", "succeeded", side=side) for index, side in enumerate(sides)]
        same = {"case_key": "key", "case": {"model": "tiny", "context_length": 64}}
        times = [("step_ms", {**same, "unit_index": index, "median": float(index)}) for index in range(4)]
        others = [("host_us", {**same, "unit_index": index}) for index in range(4)]
        measure(*times, *others, spec=self.SPEC, finish=Finish("succeeded", units=units))
        sheet = table(database)
        assert (sheet.names("coordinate"), sheet.names("metric")) == (["side", "model", "context_length"], ["step_ms"])
        assert sheet.column("side") == ["baseline", "candidate"], "equal cases of two sides are two rows"
        assert [cell.value for cell in sheet.column("step_ms")] == [1.0, 2.0]


def test_reasons_come_with_the_table(database: Database, measure: Measure) -> None:
    measure(
        ("step_ms", {}),
        ("mfu", {"outcome": "unknown", "reason": "no peak is known"}),
        ("host_us", {"outcome": "unknown", "reason": "has no part in this table"}),
        ("step_ms", {"outcome": "oom", "reason": "out of memory", "case": {"context_length": 9999}}),
    )
    assert table(database).missing == ["context_length=9999: oom: out of memory"], "nothing on columns not shown"
    assert table(database, columns=["step_ms", "mfu"]).missing == [
        "context_length=9999: oom: out of memory",
        "mfu: unknown: no peak is known",
    ]
    assert table(database, columns=["host_us"]).missing == ["host_us: unknown: has no part in this table"]


def test_every_row_of_json_and_csv_names_its_job(database: Database, measure: Measure) -> None:
    jobs = lengths(measure, 128, 256)
    assert [row["job"] for row in json_rows(table(database))] == jobs
    assert ",job\n" in render(table(database), "csv")
    assert "job" not in render(table(database), "markdown").splitlines()[0]


def test_several_kinds_must_be_named(database: Database, measure: Measure) -> None:
    lengths(measure, 128)
    measure(("tflops", {}), spec={"kind": "attention", "sequence_lengths": [128], "implementations": ["eager"]})
    with pytest.raises(InvalidRequest, match=r"of several kinds.*attention, benchmark") as caught:
        table(database)
    assert caught.value.errors[0].pointer == "/kind"
    assert table(database, kind="attention").column("implementation") == ["eager"]


def test_a_note_tells_samples_of_processes_from_those_of_one(database: Database, measure: Measure) -> None:
    spec = {"kind": "diagnosis", "step": {"kind": "benchmark"}}
    measure(("answer_step_ms", {"n": 16}), ("step_ms", {"n": 91}), spec=spec)
    assert table(database, columns=["answer_step_ms"]).notes[0].startswith("Cells: median of the processes ±")
    assert (
        table(database, columns=["answer_step_ms", "step_ms"])
        .notes[0]
        .startswith("Cells: median of the samples of one process ±")
    )


def test_a_job_in_no_database_has_the_same_table(database: Database, measure: Measure) -> None:
    why = {"outcome": "unknown", "reason": "no peak is known", "validity": "suspect"}
    job_id = measure(
        ("step_ms", {"median": 1.0}), ("forward_ms", {}), ("step_ms", {"median": 3.0, "unit_index": 1}), ("mfu", why)
    )
    rows = Reading(database).measurements(job_id)["rows"]
    facts = ("case_key", "device_key", "phase", "metric", "unit", "outcome", "reason", "validity", "n", "std", "median")
    columns = {*facts, *STATISTICS, "unit_index", "unit_title", "partial"}
    wire = [
        {**{it: row[it] for it in facts}, "samples": None, "case": {it: row[it] for it in row if it not in columns}}
        for row in rows
    ]
    local = local_table(BenchmarkSpec(), wire)
    assert local.rows == [row[:-1] for row in table(database).rows], "all but the job"
    assert local.missing == table(database).missing
    assert "of 2 processes the median" in table(database).notes[0]
    assert "2 repetitions in one process, which are no independent samples," in local.notes[0]
    assert local.notes[1:] == table(database).notes[1:]
