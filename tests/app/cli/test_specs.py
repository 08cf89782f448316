"""The command that answers a search on paper: the same step, and none for what has no formulas."""

from typing import Any

import pytest

from app.cli.specs import estimate_command

FIT = {"axis": "batch_size", "upto": 64, "step": 1}


@pytest.mark.parametrize(
    ("fields", "fit", "words"),
    [
        ({"batch_size": 4, "seed": 3}, {}, "precision=fp32 --fit batch_size=64"),
        ({"precision": "bf16", "device": "cuda"}, {}, "device=cuda --fit batch_size=64"),
        ({"mode": "forward"}, {"step": 8}, "mode=forward precision=fp32 --fit batch_size=64 --multiple-of 8"),
    ],
)
def test_it_estimates_the_same_step(fields: dict[str, Any], fit: dict[str, Any], words: str) -> None:
    sweep = {"base": {"kind": "benchmark", **fields}, "grid": {"model.size": ["tiny", "small"]}, "fit": FIT | fit}
    assert estimate_command(sweep) == f"flopwatch sweep estimate model.size=tiny,small {words}"


@pytest.mark.parametrize(
    ("base", "axis"),
    [
        ({"kind": "benchmark", "attention": "flex"}, "batch_size"),
        ({"kind": "benchmark", "compile": True}, "batch_size"),
        ({"kind": "benchmark", "device": "cpu"}, "batch_size"),
        ({"kind": "benchmark"}, "new_tokens"),
        ({"kind": "ddp"}, "batch_size"),
        ({"kind": "attention"}, "batch_size"),
    ],
)
def test_what_has_no_formulas_has_no_such_command(base: dict[str, Any], axis: str) -> None:
    assert estimate_command({"base": base, "grid": {}, "fit": {**FIT, "axis": axis}}) is None
