"""How measurements are laid out for people."""

from __future__ import annotations

from typing import Any

import pytest

from app.layout import case_text, missing


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
        ({}, ""),
    ],
)
def test_cases_in_words(coordinates: dict[str, Any], text: str) -> None:
    assert case_text(coordinates) == text


def row(implementation: str, dtype: str, metric: str = "forward_ms", **changes: Any) -> dict[str, Any]:
    facts = {"outcome": "ok", "reason": None, "mean": 1.0, "metric": metric, "replicate": 0}
    return {"implementation": implementation, "dtype": dtype, **facts, **changes}


UNSUPPORTED = {"outcome": "unsupported", "reason": "no\nGPU", "mean": None}
UNKNOWN = {"outcome": "unknown", "reason": "no ceiling", "mean": None}
NAMES = ["implementation", "dtype", "replicate"]


class TestMissing:
    def test_nothing_is_missing(self) -> None:
        assert missing([row("eager", "fp32"), row("eager", "bf16")], NAMES) == []

    def test_a_reason_is_told_once_with_its_cells(self) -> None:
        rows = [
            *(row("eager", dtype) for dtype in ("fp32", "bf16")),
            *(row("triton", dtype, metric, **UNSUPPORTED) for dtype in ("fp32", "bf16") for metric in ("a", "b")),
            row("flex", "fp32"),
            row("flex", "bf16", **UNSUPPORTED | {"outcome": "oom", "reason": None}),
        ]
        assert missing(rows, NAMES) == ["triton (2 cells): unsupported: no GPU", "flex, bf16: oom"]

    def test_metrics_are_named_where_others_have_numbers(self) -> None:
        rows = [row("eager", "fp32"), row("eager", "fp32", "mfu", **UNKNOWN), row("flex", "fp32")]
        rows += [row("flex", "fp32", "mfu", **UNKNOWN), row("triton", "fp32", **UNSUPPORTED)]
        assert missing(rows, NAMES) == ["triton: unsupported: no GPU", "mfu (2 cells): unknown: no ceiling"]

    def test_all_cells(self) -> None:
        rows = [row("eager", dtype, replicate=number, **UNSUPPORTED) for dtype in ("fp32", "bf16") for number in (0, 1)]
        assert missing(rows, NAMES) == ["all 2 cells: unsupported: no GPU"]
        assert missing(rows[:2], NAMES) == ["unsupported: no GPU"], "of one cell only the reason is news"

    def test_a_value_that_is_no_number_is_unknown(self) -> None:
        assert missing([row("eager", "fp32", mean=None)], NAMES) == ["unknown"]
