from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from workers.measure.profiling import trace
from workers.measure.profiling.trace import TooLarge


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    events = [{"ph": "X", "cat": "kernel", "name": f"k{index} größer", "ts": index, "dur": 1} for index in range(2000)]
    events[1]["args"] = {"kernel_file": "/home/me/cache/kernel.py"}
    written = {"host_name": "gpu-7", "traceEvents": events, "traceName": f"{tmp_path}/x"}
    path = tmp_path / "raw.json"
    path.write_text(json.dumps(written, indent=1, ensure_ascii=False), encoding="utf-8")
    return path


@pytest.mark.parametrize("read_bytes", [1 << 20, 100])
def test_a_trace_is_whole_but_for_the_host(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(trace, "READ_BYTES", read_bytes)
    monkeypatch.syspath_prepend(tmp_path.parent)
    trace.write(raw, tmp_path / "trace.json.gz", 1 << 20)
    with gzip.open(tmp_path / "trace.json.gz", "rt", encoding="utf-8") as file:
        written = json.load(file)
    before = json.loads(raw.read_text(encoding="utf-8"))
    assert (written["host_name"], written["traceName"]) == ("", "x")
    assert written["traceEvents"][1].pop("args") == {"kernel_file": "kernel.py"}
    before["traceEvents"][1].pop("args")
    assert written["traceEvents"] == before["traceEvents"]


def test_a_trace_that_is_too_large_leaves_no_file(raw: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.json.gz"
    trace.write(raw, target, 1 << 20)
    size = target.stat().st_size
    trace.write(raw, target, size)
    with pytest.raises(TooLarge, match="raise it, or take fewer steps"):
        trace.write(raw, target, size - 1)
    assert not target.exists()
