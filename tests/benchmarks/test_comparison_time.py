"""Where a comparison's time goes, by a real one on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import comparison_time
from tests.forked import ForkedService

SPEC = {"kind": "benchmark", "model": {"size": "tiny"}, "context_length": 8, "device": "cpu", "replicates": 2}


@pytest.mark.long
def test_each_process_has_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_time, "Service", ForkedService)  # the units are new interpreters all the same
    seconds, processes = comparison_time.measure(SPEC, tmp_path)
    assert len(processes) == 2
    assert all(process["import torch"] > 0 and process["steps"] > 0 for process in processes)
    assert max(sum(process.values()) for process in processes) < seconds


@pytest.mark.parametrize(
    ("stack", "part"),
    [
        ("workers/processes/child.py:main\tchild.py:_import_torch\ttorch/_dynamo/x.py:f", "import torch"),
        ("workers/processes/child.py:main\tchild.py:run_request\ttiming.py:step\ttorch/_dynamo/x.py:f", "compile"),
        ("workers/processes/child.py:main\tchild.py:run_request\ttiming.py:step", "steps"),
        ("workers/processes/child.py:main", "wait for its turn"),
        ("workers/processes/child.py:main\tchild.py:run_request", "rest"),
    ],
)
def test_parts(stack: str, part: str) -> None:
    assert comparison_time.part_of(stack) == part
