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
def test_a_trace_is_whole_but_for_the_host(raw, tmp_path, monkeypatch, read_bytes) -> None:
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


def test_the_trace_of_all_ranks_is_on_the_clock_of_the_first(tmp_path: Path) -> None:
    """Rank 1's trace counts from 5 µs later, and its clock is 2 ms ahead."""
    raws = []
    for rank in range(2):
        spans = [{"ph": "X", "name": "k", "pid": pid, "tid": 7, "ts": 10.0, "dur": 1} for pid in (0, 4000 + rank)]
        named = [{"ph": "M", "name": name, "pid": 0, "tid": 7, "args": {}} for name in ("process_name", "thread_name")]
        others = [{"ph": "s", "id": 3, "name": "ac2g", "pid": 0, "tid": 7, "ts": 10.0}]
        others += [{"ph": "X", "name": "Trace Window", "pid": "Traces", "tid": "Trace", "ts": 1.0, "dur": 9}]
        raws.append(tmp_path / f"{rank}.json")
        about = {"baseTimeNanoseconds": 1_000_000 + 5_000 * rank, "host_name": "gpu-7"}
        raws[-1].write_text(json.dumps({**about, "traceEvents": [*named, *spans, *others]}))
    target = tmp_path / "all.json.gz"
    trace.together(raws, [0.0, 2.0], target, 1 << 20)
    written = gzip.decompress(target.read_bytes())
    events = json.loads(written)["traceEvents"]
    assert [(one["pid"], one["tid"], one["ts"]) for one in events if one["name"] == "k"] == [
        (0, 0, 10.0), (0, 1, 10.0), (1, 0, 10.0 + 5 - 2000), (1, 1, 10.0 + 5 - 2000)
    ]  # fmt: skip
    names = [(one["pid"], one["args"].get("name")) for one in events if one["ph"] == "M"]
    assert names == [(0, "rank 0"), (0, None), (1, "rank 1"), (1, None)]
    assert len({one["id"] for one in events if one["name"] == "ac2g"}) == 2
    assert "Trace Window" not in {one["name"] for one in events}
    assert not list(tmp_path.glob("*.raw"))
    with pytest.raises(TooLarge, match="raise it"):
        trace.together(raws, [0.0, 2.0], target, target.stat().st_size - 1)
    with pytest.raises(TooLarge, match="the ranks' traces have 0 MiB together"):
        trace.together(raws, [0.0, 2.0], target, 10)
