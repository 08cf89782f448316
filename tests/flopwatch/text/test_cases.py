"""Cases in words."""

from typing import Any

import pytest

from flopwatch.text.cases import case_text


@pytest.mark.parametrize(
    ("coordinates", "text"),
    [
        ({"implementation": "triton", "dtype": "fp32", "br": None}, "triton, fp32"),
        ({"causal": True, "head_dim": 64}, "causal, head_dim=64"),
        ({"causal": "True/False", "head_dim": "16/32"}, "causal=true/false, head_dim=16/32"),
        ({"implementation": "a/b/c/d/e", "sequence_length": "1/2/3/4/5"}, "5 implementations, 5 sequence lengths"),
        ({"model": "2.7b", "factor": 0.5}, "2.7b, factor=0.5"),
        ({"precision": "fp32 → bf16", "compile": "False → True"}, "precision=fp32 → bf16, compile=false → true"),
        ({"precision": "bf16", "parameter_dtype": "bf16"}, "bf16, parameter_dtype=bf16"),
        ({"model": "make_step@train.py", "version": "a4a1c496"}, "make_step@train.py, version=a4a1c496"),
        ({"script": "train.py", "arguments": "--data /a/b/c/d/e"}, "train.py, --data /a/b/c/d/e"),
        ({"script": "a/b/c/d/train.py", "code.file": "a/b/c/d/e/f.py"}, "a/b/c/d/train.py, a/b/c/d/e/f.py"),
        ({"implementation": "eager/mine@a/b/c/d/e.py/tiled"}, "eager/mine@a/b/c/d/e.py/tiled"),
        ({}, ""),
    ],
)
def test_cases_in_words(coordinates: dict[str, Any], text: str) -> None:
    assert case_text(coordinates) == text
