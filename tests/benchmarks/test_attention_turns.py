"""Implementations of attention that take turns, with small shapes on the CPU."""

from typing import Any

import pytest
from torch import Tensor

from benchmarks import attention_turns
from benchmarks.attention_turns import Row
from kernels.attention.library import HALF
from kernels.registry import ATTENTION, Implementation


def test_a_table_has_a_line_for_each_implementation_of_a_row(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_documents(*given: Any, document_ends: Tensor) -> Any:
        return 2 * ATTENTION.load("eager").function(*given)

    wrong = Implementation("wrong", without_documents, {"cpu": HALF})
    load = ATTENTION.load
    monkeypatch.setattr(ATTENTION, "load", lambda name: wrong if name == "wrong" else load(name))
    monkeypatch.setattr(attention_turns, "ROWS", [Row(1, 2, 600, 16, "documents"), Row(1, 2, 30, 16, "no mask")])
    names = ["tiled", "flash_attn_4", "eager", "wrong"]
    attention_turns.main(["--device", "cpu", "--turns", "2", "--only", "documents", "--implementations", *names])
    printed = capsys.readouterr().out.splitlines()
    assert "flash_attn_4: 1, 2, 600, 16, documents: No available kernel" in printed[2]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed[3:]]
    assert [(row, name) for row, name, *_ in cells] == [
        ("1, 2, 600, 16, documents", name) for name in names if "_" not in name
    ]
    differences = [float(line[-1]) for line in cells]
    assert differences[0] == 0 < differences[1] < 0.02
    assert differences[2] > 0.5
    for *_, ratios, _difference in cells[1:]:
        for text in ratios.split(" / "):
            median, low, _to, high = text.replace("(", "").replace(")", "").split()
            assert float(low) <= float(median) <= float(high)
