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


@pytest.mark.parametrize("name", ["inner", "q", "torch"])
def test_a_name_that_the_file_lacks_is_noticed(tmp_path: Path, name: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CONTENT)
    lacks = f"defines no '{name}'; it defines: attention, Model$"
    with pytest.raises(ValueError, match=lacks):
        OwnCode.read(f"{file}:{name}")


def test_the_nearest_name_is_suggested(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CONTENT)
    with pytest.raises(ValueError, match=r"defines no 'atention'; did you mean attention\?$"):
        OwnCode.read(f"{file}:atention")


def test_a_star_import_may_bring_any_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from fast import *")
    assert OwnCode.read(f"{file}:attention").function == "attention"
