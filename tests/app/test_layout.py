"""How measurements are laid out for people."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from app.layout import (
    CUT_NOTE,
    LONGEST,
    STATISTICS,
    age,
    case_text,
    doubts,
    duration,
    moment,
    moment_of,
    notes,
    ran,
    shortened,
    varying_columns,
    verdict,
)
from app.store import tables
from workers.measure.statistics import Summary


@pytest.mark.parametrize(
    ("coordinates", "text"),
    [
        ({"implementation": "triton", "dtype": "fp32", "br": None}, "triton, fp32"),
        ({"causal": True, "head_dim": 64}, "causal, head_dim=64"),
        ({"causal": False}, "causal=false"),
        ({"causal": "True/False", "head_dim": "16/32"}, "causal=true/false, head_dim=16/32"),
        ({"implementation": "/".join("abcd")}, "a/b/c/d"),
        (
            {"implementation": "/".join("abcde"), "sequence_length": "1/2/3/4/5"},
            "5 implementations, 5 sequence lengths",
        ),
        ({"model": "2.7b", "factor": 0.5}, "2.7b, factor=0.5"),
        ({"precision": "fp32 → bf16", "compile": "False → True"}, "precision=fp32 → bf16, compile=false → true"),
        ({"compile_scope": "None → blocks"}, "compile_scope=none → blocks"),
        ({"precision": "bf16", "parameter_dtype": "bf16"}, "bf16, parameter_dtype=bf16"),
        ({}, ""),
    ],
)
def test_cases_in_words(coordinates: dict[str, Any], text: str) -> None:
    assert case_text(coordinates) == text


class TestValidity:
    def test_one_case_is_its_verdict(self) -> None:
        assert verdict({"verdict": "suspect", "counts": {"suspect": 1}}) == "suspect"

    def test_several_are_counted(self) -> None:
        assert (
            verdict({"verdict": "suspect", "counts": {"valid": 298, "suspect": 2}}) == "suspect (298 valid, 2 suspect)"
        )

    def test_what_failed_is_told_with_its_unit_and_case(self) -> None:
        check = {"name": "drift", "ok": False, "detail": "9 %"}
        checks = [
            check,
            check | {"case": "triton"},
            check | {"case": "flex", "unit": "replicate 1"},
            check | {"ok": True},
        ]
        assert doubts({"verdict": "suspect", "checks": checks}) == [
            "drift: 9 %",
            "triton: drift: 9 %",
            "replicate 1: flex: drift: 9 %",
        ]

    def test_a_note_is_no_doubt(self) -> None:
        check = {"name": "host_bound", "ok": False, "detail": "by far", "severity": "note"}
        validity = {"verdict": "valid", "checks": [check, {"name": "drift", "ok": False, "detail": "9 %"}]}
        assert doubts(validity) == ["drift: 9 %"]
        assert notes(validity) == ["note: host_bound: by far"]
        assert notes({"verdict": "valid", "checks": [check | {"ok": True}]}) == []

    def test_of_many_the_first_are_told(self) -> None:
        checks = [{"name": str(number), "ok": False, "detail": "x"} for number in range(7)]
        assert doubts({"checks": checks})[3:] == ["3: x", "4: x", "and 2 more"]

    @pytest.mark.parametrize("stored", [{}, {"checks": None, "counts": None}, {"checks": [{}]}, {"valid": True}])
    def test_of_an_older_flopwatch(self, stored: dict[str, Any]) -> None:
        assert verdict(stored) == "unknown"
        doubts(stored)
        assert notes(stored) == []


def test_what_tells_measurements_apart() -> None:
    names = ["model", "length", "case_key", "device_key", "unit_title", "unit_index", "metric", "mean"]
    rows = [
        dict(zip(names, values, strict=True))
        for values in (["tiny", 1, "a", "cpu", "r 0", 0, "x", 1.0], ["tiny", True, "b", "gpu", "r 1", 1, "y", 2.0])
    ]
    measurements = {"columns": [{"name": name} for name in names], "rows": rows}
    assert varying_columns(measurements) == ["length", "device_key", "unit_title"]


def test_statistics_are_those_that_measurements_have() -> None:
    """Three lists that no import can join: the workers' know nothing of the service, the tables' are columns."""
    assert tuple(field.name for field in fields(Summary)) == STATISTICS
    stored = [column.name for column in tables.measurement.columns]
    assert tuple(stored[stored.index("n") : stored.index("samples")]) == STATISTICS


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 ms"), (0.0004, "0 ms"), (0.85, "850 ms"), (4.21, "4.2 s"), (9.96, "10 s"), (59.4, "59 s"),
        (60, "1 min"), (192, "3 min 12 s"), (3600, "1 h"), (18_600, "5 h 10 min"), (86_400 * 12 + 3 * 3600, "12 d 3 h"),
    ],
)  # fmt: skip
def test_time_spans(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0 s"), (59, "59 s"), (150, "2 min"), (7300, "2 h"), (200_000, "2 d")]
)
def test_ages(seconds: int, text: str) -> None:
    now = datetime(2026, 3, 1, 14, 5, 9, tzinfo=UTC)
    assert age((now - timedelta(seconds=seconds)).isoformat(), now) == f"{text} ago"


def test_how_long_a_job_ran() -> None:
    began, ended = "2026-03-01T14:05:09.000001Z", "2026-03-01T14:05:10.500001Z"
    assert ran({"started_at": None, "finished_at": None}) is None
    assert ran({"started_at": began, "finished_at": ended}) == "1.5 s"
    assert ran({"started_at": began, "finished_at": None}, datetime(2026, 3, 1, 15, 5, 9, 1, UTC)) == "1 h"
    assert moment(began) == "2026-03-01 14:05:09 UTC"
    assert (moment(None), age(None)) == (None, None)


class TestShortened:
    def test_the_middle_of_long_cells_goes_and_columns_stay_aligned(self) -> None:
        name = "void at::native::" + "x" * 300 + r"<4\|float>"
        rows = [f"| {name} |  1.5 |", f"| {'a'.ljust(len(name))} | 22.5 |"]
        table = "\n".join([f"| {'name'.ljust(len(name))} |   ms |", f"|:{'-' * (len(name) + 1)}|-----:|", *rows])
        text = shortened(f"kernels:\n\n{table}\n\n- a note\n")
        title, _, *lines = text.splitlines()
        assert title == "kernels:"
        assert len({len(line) for line in lines[:4]}) == 1, "aligned"
        assert len(lines[0]) == LONGEST + len("|  |      |"), lines[0]
        assert lines[2].startswith("| void at::native::xxx")
        assert lines[2].endswith("xx<4\\|float> |  1.5 |")
        assert "…" in lines[2]
        assert lines[3].startswith("| a  ")
        assert lines[3].endswith("| 22.5 |")
        assert lines[1].endswith("|-----:|")
        assert "- a note" in text
        assert text.endswith(f"\n\n{CUT_NOTE}\n")

    @pytest.mark.parametrize(
        "text", ["| a |\n|:--|\n| b |\n\n- note\n", "| a… |\n|:--|\n| b |\n", "No results.\n", "x" * 200 + "\n"]
    )
    def test_what_fits_stays_as_it_is(self, text: str) -> None:
        assert shortened(text) == text


NOW = datetime(2026, 3, 10, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("90min", datetime(2026, 3, 10, 10, 30, tzinfo=UTC)),
        ("12h", datetime(2026, 3, 10, 0, tzinfo=UTC)),
        ("7d", datetime(2026, 3, 3, 12, tzinfo=UTC)),
        ("2w", datetime(2026, 2, 24, 12, tzinfo=UTC)),
        ("2026-03-01", datetime(2026, 3, 1, tzinfo=UTC)),
        ("2026-03-01T14:00:00Z", datetime(2026, 3, 1, 14, tzinfo=UTC)),
        ("2026-03-01T14:00:00+02:00", datetime(2026, 3, 1, 12, tzinfo=UTC)),
    ],
)
def test_moments_as_people_name_them(text: str, moment: datetime) -> None:
    assert moment_of(text, NOW) == moment


@pytest.mark.parametrize("text", ["", "7", "d", "yesterday", "7y", "-7d", "2026-13-01", "999999999w"])
def test_what_is_no_moment(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as|year 1"):
        moment_of(text, NOW)
