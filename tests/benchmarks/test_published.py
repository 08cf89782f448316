"""The published attention rows, as a user measures them again."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import published

README = Path(__file__).parents[2] / "README.md"


def test_readmes_rows_are_among_them() -> None:
    problem = r"^\| (\d+), (\d+), (\d+), (\d+), (causal|no mask)"
    rows = re.findall(problem + r" \| ([\d.]+) ms \|.* ([\d.]+) \|$", README.read_text(), re.MULTILINE)
    of_readme = {(*map(int, row[:4]), row[4] == "causal"): (float(row[5]), float(row[6])) for row in rows}
    measured = {
        (row.batch, row.heads, row.length, row.head_dim, row.is_causal): (row.triton_ms, row.cudnn_ms)
        for row in published.ROWS
    }
    assert of_readme
    assert of_readme.items() <= measured.items()


def test_the_table_has_the_ratio_beside_the_published_one() -> None:
    row = published.Row(1, 2, 64, 64, True, 1.0, 2.0)
    assert published.table([(row, (3.0, 4.0))]).splitlines()[-1] == (
        "| 1, 2, 64, 64, causal | 3.000 | 4.000 | 0.750 | 0.500 |"
    )
