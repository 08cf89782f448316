"""The jobs behind the published GPU tables are jobs that the service takes, and their results fit the tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.specs import spec_adapter
from benchmarks.gpu_tables import TABLES, Table, cell, rows_of, run
from tests.benchmarks.here import run_here


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_a_valid_spec_with_the_tables_columns(name: str) -> None:
    table = TABLES[name]
    keys = []
    for spec in table.specs:
        parsed = spec_adapter.validate_json(json.dumps(spec))
        for case in parsed.cases():
            assert set(table.coordinates) <= set(case.coordinates)
            keys.append(case.key)
    assert len(keys) == len(set(keys)), "no case is measured twice"


def test_a_job_of_a_fresh_process_fills_its_row() -> None:
    spec = {
        "kind": "benchmark",
        "model": {"size": "tiny"},
        "context_length": 16,
        "device": "cpu",
        "warmup_steps": 1,
        "measure_steps": 2,
    }
    table = Table("Tiny", [spec], ("model", "warmup_steps"), ("forward_ms", "parameters", "prefill_ms", "host_us"))
    result = run(spec, timeout_s=120)
    ((model, warmup, forward, parameters, prefill, host, verdict),) = rows_of(result, table)
    assert (model, warmup, parameters, prefill, host) == ("tiny", "1", "3.085e+06", "", "unknown")
    assert "±" in forward
    assert verdict in {"valid", "suspect"}


def test_a_rate_of_the_whole_work_is_shown_and_not_a_phases() -> None:
    whole = {"case": {"model": "a"}, "case_key": "k", "metric": "tflops", "phase": None, "median": 5.0, "std": None}
    phase = {**whole, "phase": "forward", "median": 7.0}
    result = {"measurements": [whole, phase], "validity": {"verdict": "valid"}}
    assert list(rows_of(result, Table("", [], ("model",), ("tflops",)))) == [["a", "5", "valid"]]


def test_a_phases_value_is_shown_under_the_phases_name() -> None:
    whole = {
        "case": {"model": "a"},
        "case_key": "k",
        "metric": "peak_memory_mib",
        "phase": None,
        "median": 5.0,
        "std": None,
    }
    phase = {**whole, "phase": "forward", "median": 4.0}
    result = {"measurements": [whole, phase], "validity": {"verdict": "valid"}}
    table = Table("", [], ("model",), ("peak_memory_mib", "forward_peak_memory_mib", "backward_peak_memory_mib"))
    assert list(rows_of(result, table)) == [["a", "5", "4", "", "valid"]]


def test_a_row_of_the_memory_table_is_filled_by_a_smaller_model_on_a_cpu(tmp_path: Path) -> None:
    table = TABLES["memory"]
    (spec,) = [
        one
        for one in table.specs
        if (one["context_length"], one["mode"], one["precision"]) == (128, "train_step", "bf16")
    ]
    small = {**spec, "model": {"size": "tiny"}, "device": "cpu", "context_length": 32}
    (row,) = rows_of(run_here(tmp_path)(small, 120.0), table)
    shown = dict(zip((*table.coordinates, *table.metrics, "validity"), row, strict=True))
    on_gpus_only = {"rounding_mib", "fragmentation_mib"}
    assert {name for name, text in shown.items() if text in {"", "unknown"}} == on_gpus_only
    assert (shown["unknown_percent"], shown["parameter_mib"], shown["validity"]) == ("0", "11.77", "valid")
    assert shown["residual_stream_mib"] == shown["residual_stream_seen_mib"] == "0.0625"


def test_cells_say_why_they_are_empty() -> None:
    assert cell(None) == ""
    assert cell({"median": None, "outcome": "oom", "std": None}) == "oom"
    assert cell({"median": 12.345, "std": 0.1234}) == "12.35 ± 0.12"


def test_a_job_that_fails_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"exit code 2: .*does not match any of the expected tags"):
        run({"kind": "none"}, timeout_s=60)
