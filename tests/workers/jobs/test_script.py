"""The runner of `script`: scripts that measure their step, and scripts that do not."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.specs.script import ScriptSpec
from tests.workers.reporting import Report, reported
from workers.jobs.script import RUNNER
from workers.outcome import RunnerError

TRAIN = """
import sys
from pathlib import Path

import torch

import flopwatch

model = torch.nn.Linear(16, 16)
print("arguments:", sys.argv[1:])
assert Path(__file__).exists(), "what lies beside the script is found by its place"


def step():
    with flopwatch.phase("forward"):
        loss = model(torch.randn(8, 16)).sum()
    with flopwatch.phase("backward"):
        loss.backward()
    flopwatch.work(tokens=8)


if __name__ == "__main__":
    flopwatch.measure(step, warmup_steps=1, measure_steps=4)
    print("done")
"""
Run = Callable[..., Report]


@pytest.fixture
def run(tmp_path: Path, upload) -> Run:
    def run(source: str | None, **fields: Any) -> Report:
        code = None if source is None else upload(source, "__main__", None)
        spec = ScriptSpec(**{"script_code": code, "device": "cpu", **fields})
        return reported(spec, tmp_path, *RUNNER.plan(spec))  # of one unit

    return run


def test_the_step_is_measured_with_its_phases(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    main, argv = sys.modules["__main__"], sys.argv
    report = run(TRAIN, arguments="--lr '1e-3 or so'")
    rows = {(row["metric"], row["phase"]): row for row in report.rows}
    for name in ("forward", "backward", "rest", "step"):
        assert rows[f"{name}_ms", name]["n"] == 4
    assert "samples.csv.gz" in report.files
    assert rows["parameters", None]["median"] == 16 * 16 + 16
    assert rows["tokens_per_s", None]["median"] == pytest.approx(8e3 / rows["step_ms", "step"]["median"])
    assert capsys.readouterr().out == "arguments: ['--lr', '1e-3 or so']\ndone\n"
    assert (sys.modules["__main__"], sys.argv) == (main, argv)
    assert {check["name"] for check in next(iter(report.verdicts.values()))["checks"]} >= {"variation", "host_load"}


def test_the_example_runs(run: Run) -> None:
    assert {row["metric"]: row["outcome"] for row in run(None).rows}["tflops"] == "ok"


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("print('no step')\n", RunnerError, "has not measured: it must call flopwatch.measure.step. in its"),
        (f"{TRAIN}    flopwatch.measure(step)\n", RunnerError, "a second time"),
        ("import sys\nsys.exit(3)\n", RunnerError, "ended itself with exit code 3"),
        ("import sys\nsys.exit('no data')\n", RunnerError, "ended itself and said: no data"),
        ("def step(:\n", RunnerError, "SyntaxError: invalid syntax, line 1"),
        ("import flopwatch\nflopwatch.measure(3)\n", TypeError, "a function that does one step"),
    ],
    ids=["nothing", "twice", "exit", "exit with a message", "syntax", "no step"],
)
def test_what_is_wrong_with_a_script_is_said(run: Run, source: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        run(source)


@pytest.mark.parametrize("where", ["before", "in the step"])
def test_out_of_memory_is_a_result(run: Run, where: str) -> None:
    fail = "raise torch.OutOfMemoryError('CUDA out of memory')"
    body = fail if where == "before" else f"def step():\n    {fail}\nflopwatch.measure(step)\nprint('never here')"
    report = run(f"import torch, flopwatch\n{body}\n")
    assert {row["outcome"] for row in report.rows} == {"oom"}
    assert report.rows[0]["reason"].startswith(f"out of memory in {'step 1' if where != 'before' else 'the script'}: ")
    assert report.verdict_on()["verdict"] == "suspect"


def test_the_numbers_of_the_steps_are_kept_and_a_script_draws_the_same_twice(run: Run) -> None:
    source = "import flopwatch, random, torch\n"
    source += "flopwatch.measure(lambda: (torch.rand(()), random.random()), warmup_steps=1, measure_steps=2)"
    one, again = (run(source).table_rows("values") for _ in range(2))
    assert one == again
    returned = [row for row in one if row["what"] == "returned"]
    assert [(row["step"], row["name"]) for row in returned] == [
        (step, name) for step in (1, 2, 3) for name in ("0", "1")
    ]
    assert len({row["value"] for row in returned}) == 6
    assert [row["value"] for row in one if row["what"] == "steps"] == [3]
