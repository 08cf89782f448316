"""`flopwatch run`: one job in this very process, without a queue."""

import gc
import gzip
import hashlib
import json
import os
import re
import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flopwatch import steps
from tests.forked import forkserver
from tests.workers.conftest import UNFREEZE
from workers import run_here as run_here_module
from workers.jobs._training import building
from workers.reporter import Reporter
from workers.run_here import run_here

PROJECT = Path(__file__).resolve().parents[2]
Run = Callable[..., tuple[int, str, str]]
SPEC = {
    "kind": "benchmark",
    "model": {"size": "tiny"},
    "context_length": 8,
    "batch_size": 1,
    "mode": "forward",
    "warmup_steps": 0,
    "measure_steps": 3,
    "device": "cpu",
}


def written(folder: Path, spec: Any) -> Path:
    path = folder / "spec.json"
    path.write_text(spec if isinstance(spec, str) else json.dumps(spec))
    return path


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The same in this process, which has torch already: its exit code, standard output and standard error."""
    monkeypatch.setattr(steps, "_listener", None)  # a job of the user's own code leaves one
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # locks of its own

    def here(spec: Any, *options: str) -> tuple[int, str, str]:
        code = run_here([str(written(tmp_path, spec)), "--output", str(tmp_path), *options])
        return (code, *capfd.readouterr())

    return here


def test_measurements_are_printed_and_files_written(tmp_path: Path, run: Run) -> None:
    code, out, err = run({**SPEC, "new_tokens": 9})
    assert code == 0, err
    assert "without effect here: new_tokens\n" in err
    assert "independent" not in out + err, "a single unit shares its process with nothing"
    assert "median of the samples of one process" in out
    head, _, *rows = [re.split(r" *\| *", line) for line in out.splitlines() if line.startswith("|")]
    assert head[1:5] == ["model", "context_length", "forward_ms", "step_ms"]
    assert [[row[1].rstrip(" †‡"), row[2]] for row in rows] == [["tiny", "8"]]
    assert "mfu" not in out, "reasons of what is not shown are not told"
    assert out.splitlines()[-1].startswith("validity: ")
    assert "3/3 measuring" in err
    assert f"\nfiles:\n{tmp_path / 'samples.csv.gz'}\n" in out
    with gzip.open(tmp_path / "samples.csv.gz", "rt") as file:
        lines = file.read().splitlines()
    assert lines[0].split(",")[:3] == ["step", "forward_ms", "step_ms"]
    assert len(lines) == 1 + 3


def test_json_has_everything(run: Run) -> None:
    code, out, err = run({**SPEC, "replicates": 2}, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert {row["unit_index"] for row in result["measurements"]} == {0, 1}
    assert {row["metric"] for row in result["measurements"]} >= {"forward_ms", "step_ms", "tokens_per_s"}
    assert result["environment"]["software"]["python"]
    assert result["validity"]["verdict"] in {"valid", "suspect", "invalid"}
    assert sum(result["validity"]["counts"].values()) == 2
    assert [artifact["name"] for artifact in result["artifacts"]] == ["samples.csv.gz", "samples-unit-1.csv.gz"]
    assert all(Path(artifact["path"]).stat().st_size for artifact in result["artifacts"])
    titles = [unit["title"] for unit in result["units"]]
    assert titles == ["tiny, context 8, replicate 1 of 2", "tiny, context 8, replicate 2 of 2"]


def test_replicates_are_said_to_share_the_process_and_leave_nothing_to_the_next(run, monkeypatch) -> None:
    models: list[weakref.ref[Any]] = []
    alive: list[int] = []
    build = building.build

    def watched(*arguments: Any) -> building.Training:
        alive.append(sum(model() is not None for model in models))
        training = build(*arguments)
        vars(training.model)["itself"] = training.model  # a cycle, as compiled models have: only the collector frees it
        models.append(weakref.ref(training.model))
        return training

    monkeypatch.setattr(building, "build", watched)
    monkeypatch.setattr(gc, "unfreeze", UNFREEZE)
    code, out, err = run({**SPEC, "replicates": 2})
    gc.freeze()
    assert code == 0, err
    assert alive == [0, 0]
    told = "flopwatch run: all replicates run in this process, so they are no independent samples: `flopwatch submit`"
    assert err.count(f"{told} gives each a process of its own\n") == err.count("independent") == 1
    assert err.index("3/3 measuring") < err.index(told), "the first unit is as good as one of a queue"
    assert "repetitions in one process, which are no independent samples, the median of these" in out
    assert "2 processes" not in out


class Writer:
    """A run that writes files, of one unit after the other, into a folder that others use, too."""

    def __init__(self, scratch: Path, output: Path) -> None:
        scratch.mkdir()
        self.scratch = scratch
        self.results = run_here_module.LocalResults(output)

    def unit(self, *names: str) -> None:
        index = len(self.results.spool.units)
        self.results.spool.begin_unit(index, f"unit {index}")
        reporter = Reporter(self.results.take, scratch=self.scratch, ceilings=self.scratch)
        for name in names:
            path = self.scratch / name
            path.write_text(f"{self.scratch.name}, {index}, {name}")
            reporter.artifact(path, name=name, kind="samples", media_type="text/plain")

    def files(self) -> dict[str, str]:
        """What each file is called, with its content."""
        paths = [Path(artifact["path"]) for artifact in self.results.result()["artifacts"]]
        return {path.name: path.read_text() for path in paths}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "output"
    folder.mkdir()
    return folder


def test_no_file_is_overwritten(tmp_path: Path, output: Path) -> None:
    for name in ("trace.json.gz", "trace-2.json.gz"):
        (output / name).write_text("somebody's")
    (output / "link").symlink_to("nowhere")
    writer = Writer(tmp_path / "run", output)
    writer.unit("new.json", "trace.json.gz", "link", "folder")
    names = ["new.json", "trace-3.json.gz", "link-2", "folder"]
    assert list(writer.files()) == names
    assert {(output / name).read_text() for name in ("trace.json.gz", "trace-2.json.gz")} == {"somebody's"}
    assert {path.name for path in output.iterdir()} == {
        *names, "trace.json.gz", "trace-2.json.gz", "link",
    }, "nothing is left of the names that were tried"  # fmt: skip


def test_a_name_is_taken_before_the_file_is_moved(tmp_path, output, monkeypatch) -> None:
    """Another run that writes meanwhile gets another name. A name that was only looked up would be both runs'."""
    one, other = (Writer(tmp_path / name, output) for name in ("one", "other"))
    move = shutil.move

    def moved(source: str, target: Path) -> None:
        monkeypatch.undo()
        other.unit("samples.csv.gz")
        move(source, target)

    monkeypatch.setattr(run_here_module.shutil, "move", moved)
    one.unit("samples.csv.gz")
    assert one.files() == {"samples.csv.gz": "one, 0, samples.csv.gz"}
    assert other.files() == {"samples-2.csv.gz": "other, 0, samples.csv.gz"}


@pytest.mark.parametrize(
    ("spec", "code", "message"),
    [
        ({**SPEC, "context_length": "many"}, 2, "context_length"),
        ("{", 2, "Expecting"),
        ({"spec": SPEC}, 2, "only what stands under its key spec"),
        ({"model": {"size": "tiny"}}, 2, "kind is missing; known kinds: attention, benchmark"),
        ({**SPEC, "attention": "no_such"}, 69, "unsupported: unknown attention implementation 'no_such'"),
        ({"kind": "kernel", "kernel": "swiglu", "implementations": ["torhc"]}, 69, "liger; did you mean torch?"),
    ],
)
def test_failures_have_their_exit_code_and_say_why(run: Run, spec: Any, code: int, message: str) -> None:
    found, out, err = run(spec)
    assert (found, out) == (code, "")
    assert message in err


def test_a_wrong_result_has_an_exit_code_of_its_own(tmp_path: Path, run: Run) -> None:
    """A softmax that forgets the mask; the right one beside it is measured."""
    file = tmp_path / "wrong.py"
    file.write_text("def unmasked(q, k, v, is_causal):\n    return ((q @ k.mT) / q.shape[-1] ** 0.5).softmax(-1) @ v\n")
    spec = {
        "kind": "attention",
        "implementations": ["eager"],
        "code": {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "function": "unmasked"},
        "sequence_lengths": [64],
        "head_dims": [16],
        "num_heads": 1,
        "dtypes": ["fp32"],
        "warmup_steps": 0,
        "measure_steps": 3,
        "device": "cpu",
    }
    code, out, err = run(spec, "--code", str(file))
    assert (code, out.endswith("\nvalidity: wrong\n")) == (8, True), err
    assert run({**spec, "code": None})[0] == 0

    file.write_text("def unmasked(q, k, v, is_causal):\n    raise LookupError('no kernel today')\n")
    spec["code"] = {**spec["code"], "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    code, out, _ = run(spec, "--code", str(file))
    assert (code, "failed: LookupError: no kernel today" in out) == (0, True), "the right one beside it is a result"
    code, out, err = run({**spec, "implementations": []}, "--code", str(file))
    assert (code, "flopwatch run: failed: no case was measured" in err) == (1, True), err


ENDS = """
import os, posix, sys, threading

def make(device):
    def step():
        {end}
    return step
"""


def own(folder: Path, source: str) -> tuple[dict[str, Any], list[str]]:
    """The spec of a step of the user's own, and the options that hand its code over."""
    file = folder / "step.py"
    file.write_text(source)
    code = {"sha256": hashlib.sha256(source.encode()).hexdigest(), "function": "make", "file": "step.py"}
    spec = {"kind": "benchmark", "step_code": code, "warmup_steps": 1, "measure_steps": 2, "device": "cpu"}
    return spec, ["--code", str(file)]


def test_notes_are_printed(tmp_path: Path, run: Run) -> None:
    spec, options = own(
        tmp_path,
        ENDS.format(end="return float('nan') if (calls := calls + 1) == 1 else 1.0").replace(
            "    def step():", "    calls = 0\n    def step():\n        nonlocal calls"
        ),
    )
    assert "\nnote: finite: step 1: value is nan, and later finite\n" in run(spec, *options)[1]


@pytest.mark.parametrize(
    ("end", "called"),
    [
        ("posix._exit(8)", "_exit"),
        pytest.param(
            "threading.Thread(target=os._exit, args=(0,)).start(); threading.Event().wait(9)",
            "_exit",
            marks=pytest.mark.long,
        ),
        pytest.param("os.fork() and os._exit(0)", "_exit", marks=pytest.mark.long),
        ("os.execlp('true', 'true')", "execv"),
    ],
)
def test_a_step_that_ends_the_process_is_a_failure(tmp_path: Path, end: str, called: str) -> None:
    """In a fork of this process, which has torch already."""
    spec, options = own(tmp_path, ENDS.format(end=end))
    forked = os.fork()
    if not forked:
        sys.stderr = (tmp_path / "err").open("w")
        torch.set_num_threads(1)  # the threads of the pool are not in a fork
        code = 0
        try:
            code = run_here([str(written(tmp_path, spec)), "--output", str(tmp_path), *options])
        finally:
            os._exit(code)
    _, status = os.waitpid(forked, 0)
    told = (tmp_path / "err").read_text()
    assert os.waitstatus_to_exitcode(status) == 70, told
    assert f"flopwatch run: crashed: the code called os.{called} before the job's work was done" in told


def test_forks_of_the_step_end_as_they_like(tmp_path: Path, run: Run) -> None:
    end = "(pid := os.fork()) or os._exit(5); assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5"
    before = os._exit
    spec, options = own(tmp_path, ENDS.format(end=end))
    code, _, err = run(spec, *options)
    assert code == 0, err
    assert os._exit is before


@pytest.mark.parametrize("closed", ["", "sys.stdout.close()"])
def test_what_the_code_leaves_behind_hides_no_results_and_keeps_no_process(tmp_path: Path, closed: str) -> None:
    end = "sys.stdout = open(os.devnull, 'w'); threading.Thread(target=threading.Event().wait).start(); " + closed
    spec, options = own(tmp_path, ENDS.format(end=end))
    arguments = ["-m", "workers", "run", str(written(tmp_path, spec)), "--output", str(tmp_path), *options]
    variables = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(PROJECT)}
    out, err = tmp_path / "out", tmp_path / "err"
    assert forkserver().start(arguments, variables, out, errors=err).wait(120) == 0, err.read_text()
    assert "| step_ms |" in re.sub(" +", " ", out.read_text())
