"""The user's own code, before it is uploaded: it is parsed, and never imported."""

from pathlib import Path

import pytest

from flopwatch.own_code import OwnCode

CONTENT = """
raise RuntimeError("it was imported")
import torch.nn as nn
try:
    from fast import attention as fast
except ImportError:
    fast = None
def attention(q, k, v, is_causal):
    def inner(): ...
class Model: ...
first, second = attention, Model
"""


@pytest.mark.parametrize("name", ["attention", "Model", "fast", "first", "second", "nn"])
def test_a_name_that_the_file_defines_is_taken(tmp_path: Path, name: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CONTENT)
    assert OwnCode.read(f"{file}:{name}").function == name


THERE = "it defines: attention, Model"


@pytest.mark.parametrize(
    ("name", "words"), [("inner", THERE), ("q", THERE), ("torch", THERE), ("atention", r"did you mean attention\?")]
)
def test_a_name_that_the_file_lacks_is_noticed(tmp_path: Path, name: str, words: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CONTENT)
    with pytest.raises(ValueError, match=f"defines no '{name}'; {words}$"):
        OwnCode.read(f"{file}:{name}")


def test_a_star_import_may_bring_any_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from fast import *")
    assert OwnCode.read(f"{file}:attention").function == "attention"
