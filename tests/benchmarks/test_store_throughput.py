from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.store_throughput import main


def test_the_benchmark_prints_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--submissions 20 --threads 2 --claims 20 --processes 2 --queued 50 --latencies 10 --measurements 1500"
    main(["--folder", str(tmp_path), *sizes.split(" ")])
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
        if "|" in line
    ]
    assert [name for name, _ in rows[2:]] == [
        "submissions/s, 1 thread",
        "submissions/s, 2 threads",
        "claims/s, 2 processes",
        "claim p50 / p99 / max, 2 processes",
        "claims and finishes/s, 2 processes",
        "claim p50 / p99 / max, 50 queued",
        "finish with 1,500 measurements",
        "submission p50 / p99 / max, beside a finish with 1,500 measurements",
        "renewal p50 / p99 / max, beside a finish with 1,500 measurements",
    ]
    for _, value in rows[2:]:
        assert re.fullmatch(r"[\d,]+|[\d.]+ s|[\d.]+ / [\d.]+ / [\d.]+ ms", value), value
    assert list(tmp_path.iterdir()) == []
