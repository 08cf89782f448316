from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_benchmark_prints_its_table(tmp_path: Path) -> None:
    sizes = "--submissions 20 --threads 2 --claims 20 --processes 1 2 --queued 50 --latencies 10 --measurements 1500"
    command = [sys.executable, "-m", "benchmarks.store_throughput", "--folder", str(tmp_path), *sizes.split(" ")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if "|" in line]
    assert [name for name, _ in rows[2:]] == [
        "submissions/s, 1 thread",
        "submissions/s, 2 threads",
        "claims/s, 1 process",
        "claim p50 / p99 / max, 1 process",
        "claims and finishes/s, 1 process",
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
