"""The script behind the figures on comparisons judges processes whose noise and slowdown are known."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from benchmarks import comparisons


def test_it_finds_what_was_planted_and_little_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(3)
    lengths = {0: comparisons.SHORT, 1: comparisons.LONG}
    factors = {comparisons.SHORT: 1.0, comparisons.LONG: 1.03}
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    for path, slower in zip(paths, (1.0, 1.5), strict=True):  # the second core is slow: one draw must not mix them
        processes = [
            {"job": 1, "unit": unit, "length": length, "ms": slower * factors[length] * math.exp(rng.gauss(0, 0.01))}
            for unit in range(80)
            for length in [lengths[unit % 2]]
        ]
        path.write_text(json.dumps({"host": "none", "processes": processes}))
    comparisons.judge(paths, draws=20)
    told = capsys.readouterr().out
    assert "160 processes: 80 with 128 positions, 80 with 130" in told
    tables = [[line for line in part.splitlines() if line.startswith("|")] for part in told.split("\n\n")]
    equal, scaled, planted = (
        [[cell.strip() for cell in row.strip("|").split("|")] for row in table[2:]] for table in tables if table
    )
    assert [int(row[0]) for row in equal] == list(comparisons.SIZES)
    assert all(float(row[2].rstrip("%")) <= 25 for row in equal), "of 20 draws"
    assert float(scaled[0][2].rstrip("%")) >= 60
    assert float(planted[0][-1].rstrip("%")) >= 60
