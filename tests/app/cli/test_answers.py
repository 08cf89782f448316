"""What `submit --wait` prints of profiles and comparisons, from a server's answers."""

from types import SimpleNamespace
from typing import Any

import pytest

from app.cli.output import MOST_KERNELS, print_answer, print_answers, print_results


def serving(
    tables: dict[str, list[dict[str, Any]]] | None = None, compared: Any = None, files: Any = (), missing: Any = ()
) -> Any:
    """A client of a server that has these tables and this comparison."""
    tables = tables or {}
    return SimpleNamespace(
        has_measurements=lambda _job: False,
        missing=lambda _job: list(missing),
        units=lambda _job: [],
        list_tables=lambda _job: [{"name": name, "rows": len(rows)} for name, rows in tables.items()],
        job_table_rows=lambda _job, name: tables[name],
        list_files=lambda _job: [{"name": name} for name in files],
        compare_text=lambda jobs, **_question: SimpleNamespace(text={(7,): "the comparison\n"}[tuple(jobs)]),
        get=lambda path, job: {("/compare", 7): compared}[path, job],
    )


DISTURBED = {"verdict": "suspect", "checks": [{"name": "steady", "ok": False, "detail": "the times drift"}]}


def printed(capsys: pytest.CaptureFixture[str], kind: str, answers: Any, **spec: Any) -> list[str]:
    print_answer(answers, {"id": 7, "kind": kind, "state": "succeeded", "spec": spec, "validity": DISTURBED})
    return capsys.readouterr().out.strip().splitlines()


def test_sentences_and_tables_that_answer_are_printed_first(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [{"name": name} for name in ("unit_index", "answer", "fits")]
    tables = [
        {"name": "answer", "columns": columns[:2], "units": [0], "answers": True},
        {"name": "fits", "columns": columns, "units": [0, 1], "answers": True},
        {"name": "details", "columns": columns, "units": [0], "answers": False},
    ]
    answers = serving({name: [{"unit_index": 0, "answer": "It fits.", "fits": True}] for name in ("answer", "fits")})
    answers.list_tables = lambda _job: tables
    print_answers(answers, {"id": 7})
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines[0] == "It fits."
    assert lines[1].split() == ["unit_index", "answer", "fits"]
    assert len(lines) == 3


def kernel(name: str, total_ms: float) -> dict[str, Any]:
    return {"name": name, "class": "matmul", "total_ms": total_ms, "calls": 2}


def test_a_profiles_kernels_are_added_up_over_the_phases(capsys: pytest.CaptureFixture[str]) -> None:
    forward = [kernel("gemm", 3.0), *(kernel(f"small_{index}", 0.01) for index in range(20))]
    lines = printed(capsys, "profile", serving({"kernels-forward": forward, "kernels-backward": [kernel("gemm", 6.0)]}))
    assert lines[0].startswith(f"{MOST_KERNELS} of 21 kernels, by their time in the whole step")
    assert lines[2].split() == ["gemm", "matmul", "9", "97.8", "%", "4"]
    assert "flopwatch table --job 7 --name kernels-forward" in lines[2 + MOST_KERNELS]


@pytest.mark.parametrize("kind", ["profile", "memory"])
def test_the_files_are_named(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    answers = serving({"kernels-forward": [kernel("gemm", 3.0)]}, files=["trace.json.gz", "flamegraph.svg"])
    text = "\n".join(printed(capsys, kind, answers))
    assert "files: trace.json.gz, flamegraph.svg; `flopwatch download 7` fetches them" in text


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


@pytest.mark.parametrize(
    ("phase", "complete", "said"),
    [
        ("backward", True, "at the peak of memory, in phase backward; "),
        ("backward", False, "in phase backward (the history is cut: "),
        ("oom", False, "when memory ran out; "),
    ],
)
def test_a_memorys_peak_names_its_phase_and_lines(capsys, monkeypatch, phase, complete, said) -> None:
    rows = [allocation(phase, 9.0, 1, 1), allocation(phase, 8.0, 1, 2), allocation(phase, 7.0, 1, 3)]
    rows += [allocation(phase, 3.0, 4, 4), allocation("initialisation", 99.0, 1, 5)]
    monkeypatch.setitem(DISTURBED, "checks", [{"name": "history", "ok": complete, "detail": "truncated"}])
    lines = printed(capsys, "memory", serving({"allocations": rows}))
    assert said in lines[0]
    assert [line.split("train.py:")[1][0] for line in lines[2:5]] == ["4", "1", "2"]
    assert "flopwatch table --job 7 --name allocations" in lines[5]


def test_a_comparison_is_printed_as_compare_does(capsys: pytest.CaptureFixture[str]) -> None:
    answers = serving(missing=["mine (2 cells): failed"])
    assert printed(capsys, "compare", answers) == ["the comparison", "", "mine (2 cells): failed"]


def test_what_is_shown_of_a_comparison_begins_with_its_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    label = {"name": "step_code.revision.label", "baseline": "main", "candidate": "."}
    answers = serving(compared={"sentence": "step_ms: 1.20× slower", "spec_differences": [label]})
    print_results(answers, {"id": 7, "kind": "compare", "state": "succeeded"})
    assert capsys.readouterr().out.strip().startswith(". against main: step_ms: 1.20× slower.")
