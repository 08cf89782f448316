"""What `submit --wait` prints of profiles and comparisons, from a server's answers."""

from types import SimpleNamespace
from typing import Any

import pytest

from app.cli.output import MOST_KERNELS, print_answer


def serving(tables: dict[str, list[dict[str, Any]]]) -> Any:
    """A client of a server that has these tables."""
    return SimpleNamespace(
        has_measurements=lambda _job: False,
        missing=lambda _job: [],
        units=lambda _job: [],
        list_tables=lambda _job: [{"name": name, "rows": len(rows)} for name, rows in tables.items()],
        job_table_rows=lambda _job, name: tables[name],
        list_files=lambda _job: [],
    )


DISTURBED = {"verdict": "suspect", "checks": [{"name": "steady", "ok": False, "detail": "the times drift"}]}


def printed(capsys: pytest.CaptureFixture[str], kind: str, answers: Any, **spec: Any) -> list[str]:
    print_answer(answers, {"id": 7, "kind": kind, "state": "succeeded", "spec": spec, "validity": DISTURBED})
    return capsys.readouterr().out.strip().splitlines()


def kernel(name: str, total_ms: float) -> dict[str, Any]:
    return {"name": name, "class": "matmul", "total_ms": total_ms, "calls": 2}


def test_a_profiles_kernels_are_added_up_over_the_phases(capsys: pytest.CaptureFixture[str]) -> None:
    forward = [kernel("gemm", 3.0), *(kernel(f"small_{index}", 0.01) for index in range(20))]
    lines = printed(capsys, "profile", serving({"kernels-forward": forward, "kernels-backward": [kernel("gemm", 6.0)]}))
    assert lines[0].startswith(f"{MOST_KERNELS} of 21 kernels, by their time in the whole step")
    assert lines[2].split() == ["gemm", "matmul", "9", "97.8", "%", "4"]
    assert "flopwatch table --job 7 --name kernels-forward" in lines[2 + MOST_KERNELS]


def test_the_lines_of_ones_own_code_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"file": "train.py", "line": 49, "function": "SlowAdam.step", "self_ms": 4.0, "self_percent": 80.0}
    row |= {"total_ms": 4.5, "python_ms": 3.0, "device_self_ms": None, "device_total_ms": None, "calls": 7}
    rows = [{**row, "code": "a = b"}, {**row, "file": None, "line": None, "code": None, "function": "outside"}]
    lines = printed(capsys, "profile", serving({"kernels-forward": [kernel("gemm", 3.0)], "lines": rows}))
    assert lines[0] == "lines of your code by their own time in an unprofiled step:"
    assert lines[2].split()[:6] == ["train.py", "49", "SlowAdam.step", "4", "80", "4.5"]
    assert lines[2].endswith("a = b")
    assert "flopwatch table --job 7 --name lines" in lines[4]


def allocation(phase: str, mib: float, count: int, line: int) -> dict[str, Any]:
    site = f"train.py:{line} step"
    row = {"at_peak_of": phase, "size_mib": mib, "count": count, "total_mib": mib * count, "site": site}
    return row | {"category": "activation", "name": None, "made_in": "forward"}


def test_a_memorys_peak_names_its_phase_and_lines(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [allocation("oom", 9.0, 1, 1), allocation("oom", 8.0, 1, 2), allocation("oom", 7.0, 1, 3)]
    rows += [allocation("oom", 3.0, 4, 4), allocation("initialisation", 99.0, 1, 5)]
    lines = printed(capsys, "memory", serving({"allocations": rows}))
    assert "when memory ran out; " in lines[0]
    assert [line.split("train.py:")[1][0] for line in lines[2:5]] == ["4", "1", "2"]
    assert "flopwatch table --job 7 --name allocations" in lines[5]
