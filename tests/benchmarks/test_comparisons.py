"""Comparisons of processes whose noise and slowdown are known."""

from __future__ import annotations

import math
import random
from typing import Any

import pandas as pd

from benchmarks import comparisons
from benchmarks.comparisons import LONG, SHORT, Process, judge, processes


def test_comparisons_find_the_planted_difference() -> None:
    rng = random.Random(3)
    factors = {SHORT: 1.0, LONG: 1.03}
    series = [  # the second server's core is slow: one draw must not mix them
        [
            Process(1, unit, length, slower * factors[length] * math.exp(rng.gauss(0, 0.01)))
            for unit in range(80)
            for length in [(SHORT, LONG, LONG, SHORT)[unit % 4]]
        ]
        for slower in (1.0, 1.5)
    ]
    rows = judge(series, 20, rng)
    equal = [row for title, row in rows if title == "Equal sides"]
    assert [int(row["processes of a side"]) for row in equal] == list(comparisons.SIZES)
    assert all(float(row["in turns, from anywhere"].rstrip("%")) <= 25 for row in equal), "of 20 draws"
    assert all(float(row["found worse"].rstrip("%")) >= 60 for _, row in rows[-2:])
    assert rows[-1][1]["turns"] == "80"


def test_processes_of_all_jobs_stand_in_order() -> None:
    class Server:
        def list_jobs(self, **_: Any) -> list[dict[str, int]]:
            return [{"id": 7}, {"id": 3}]

        def measurements(self, job: dict[str, int]) -> pd.DataFrame:
            metrics = {"metric": ["forward_ms", "tflops", "forward_ms"], "unit_index": [1, 0, 0]}
            return pd.DataFrame({**metrics, "sequence_length": [LONG, SHORT, SHORT], "min": [2.0, 9.0, job["id"]]})

    found = processes(Server())  # type: ignore[arg-type]
    assert found == [
        Process(3, 0, SHORT, 3.0),
        Process(3, 1, LONG, 2.0),
        Process(7, 0, SHORT, 7.0),
        Process(7, 1, LONG, 2.0),
    ]
