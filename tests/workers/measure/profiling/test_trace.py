from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from pathlib import Path

import pytest

from workers.measure.profiling import trace
from workers.measure.profiling.trace import Kept, TooSmall

STEPS = ["step_1", "step_2", "step_3"]
PER_STEP = 2000


def write_raw(path: Path, rng: random.Random) -> None:
    """Three steps of a second each, with strings that look like the end of the list."""
    events = [{"ph": "M", "name": "thread_name", "pid": 1, "ts": 9e9, "args": {"name": 'python ] } "x'}}]
    for number, name in enumerate(STEPS):
        begin = 1e6 * number
        events.append({"ph": "X", "cat": "user_annotation", "name": name, "ts": begin, "dur": 9e5})
        # The GPU's range of the same name is another event.
        events.append({"ph": "X", "cat": "gpu_user_annotation", "name": name, "ts": begin, "dur": 5e6})
        for index in range(PER_STEP):
            args = {"noise": rng.getrandbits(64), "text": '"traceEvents": [],'}
            ts = begin + index * 4e5 / PER_STEP
            events.append({"ph": "X", "cat": "kernel", "name": f"k{index}", "ts": ts, "dur": 1, "args": args})
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events, "traceName": "x"}, indent=1))


@pytest.fixture
def raw(tmp_path: Path, rng: random.Random) -> Path:
    write_raw(tmp_path / "raw.json", rng)
    return tmp_path / "raw.json"


def read(path: Path) -> list[dict[str, object]]:
    with gzip.open(path, "rt") as file:
        loaded = json.load(file)
    assert loaded["traceName"] == "x", "what stands behind the events stays"
    return list(loaded["traceEvents"])


def test_a_trace_that_fits_is_whole(raw: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.json.gz"
    assert trace.write(raw, target, 1 << 20, STEPS) == Kept(3, 100.0)
    with gzip.open(target, "rb") as file:
        assert file.read() == raw.read_bytes()


@pytest.mark.parametrize("share", [1.0, 0.5], ids=["whole", "cut"])
def test_neither_the_hosts_name_nor_its_folders_remain(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    loaded = json.loads(raw.read_text())
    loaded = {"host_name": "gpu-7", "traceEvents": loaded["traceEvents"], "traceName": f"{tmp_path}/x"}
    loaded["traceEvents"][1]["args"] = {"kernel_file": "/home/me/cache/kernel.py"}
    raw.write_text(json.dumps(loaded, indent=1))
    target = tmp_path / "trace.json.gz"
    monkeypatch.syspath_prepend(tmp_path.parent)
    trace.write(raw, target, 1 << 20, STEPS)
    trace.write(raw, target, int(share * target.stat().st_size), STEPS)
    with gzip.open(target, "rt") as file:
        written = json.load(file)
    assert (written["host_name"], written["traceName"]) == ("", "x")
    assert written["traceEvents"][1]["args"] == {"kernel_file": "kernel.py"}


@pytest.mark.parametrize(("share", "steps"), [(0.8, 2), (0.45, 1)])
def test_a_trace_that_is_too_large_loses_whole_steps(raw: Path, tmp_path: Path, share: float, steps: int) -> None:
    target = tmp_path / "trace.json.gz"
    trace.write(raw, target, 1 << 20, STEPS)
    limit = int(share * target.stat().st_size)
    kept = trace.write(raw, target, limit, STEPS)
    assert target.stat().st_size <= limit
    assert kept.steps == steps
    assert kept.percent == pytest.approx(100 * steps / 3, rel=0.01)
    events = read(target)
    assert sum(event["cat"] == "kernel" for event in events[1:]) == steps * PER_STEP
    assert events[0]["ph"] == "M", "names of threads stay"


def test_within_one_step_events_go(raw: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.json.gz"
    trace.write(raw, target, 1 << 20, STEPS)
    limit = int(0.1 * target.stat().st_size)
    kept = trace.write(raw, target, limit, STEPS)
    assert target.stat().st_size <= limit
    assert kept.steps == 0
    assert 1 < kept.percent < 12
    assert 10 < len(read(target)) < PER_STEP


def test_events_are_whole_wherever_a_piece_of_the_file_ends(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is longer than a piece, and names beyond ASCII."""
    loaded = json.loads(raw.read_text())
    loaded["traceEvents"][1:1] = [{"ph": "X", "name": "größer π 🐢", "ts": 0.5, "dur": 1, "args": {"text": "é" * 5000}}]
    raw.write_text(json.dumps(loaded, ensure_ascii=False), encoding="utf-8")
    kept = []
    for index, size in enumerate((1 << 20, 1000, 1009)):
        monkeypatch.setattr(trace, "READ_BYTES", size)
        target = tmp_path / f"{index}.json.gz"
        kept.append((trace.write(raw, target, 60_000, STEPS), read(target)))
    assert 0 < kept[0][0].percent < 100
    assert kept[1:] == kept[:1] * 2
    assert loaded["traceEvents"][1] in kept[0][1]


@pytest.mark.parametrize("sabotage", [False, True], ids=["as it is", "read at once"])
def test_a_cut_needs_less_memory_than_the_trace_has_bytes(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sabotage: bool
) -> None:
    monkeypatch.setattr(trace, "READ_BYTES", 1 << 30 if sabotage else 1 << 14)
    tracemalloc.start()
    try:
        trace.write(raw, tmp_path / "trace.json.gz", 60_000, STEPS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (peak > raw.stat().st_size) == sabotage, peak


def test_a_size_that_nothing_fits_into_leaves_no_file(raw: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.json.gz"
    with pytest.raises(TooSmall, match="100 bytes hold nothing"):
        trace.write(raw, target, 100, STEPS)
    assert not target.exists()


def test_what_is_no_trace_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "raw.json").write_text(json.dumps({"noise": [random.random() for _ in range(1000)]}))
    with pytest.raises(ValueError, match="no traceEvents"):
        trace.write(tmp_path / "raw.json", tmp_path / "trace.json.gz", 100, STEPS)
