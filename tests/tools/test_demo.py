"""`make demo` ends with a table, and leaves nothing behind however it ends."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import typer

from app.cli.commands import cli
from tools.waiting import wait_until

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "tests" / "plugins"
"""Its `sitecustomize` lets the demo's worker start sooner; jobs that train take longer then."""
DEADLINE_S = 200.0


@pytest.fixture
def demo(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """The demo, with `tmp_path` as its folder for temporary files, and the fields of the parameter if it is to end."""
    fields = getattr(request, "param", None)
    path = [ROOT, PLUGINS] if fields is None else [ROOT]
    with subprocess.Popen(
        [sys.executable, "-m", "tools.demo", *(fields or [])],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(map(str, path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        process.kill()
        for left in processes_of(tmp_path):
            left.kill()


def processes_of(folder: Path) -> list[psutil.Process]:
    """Live processes that were started with `folder` for their temporary files."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.long
@pytest.mark.acceptance
@pytest.mark.parametrize(
    "demo",
    [["model.size=tiny", "context_length=16,32", "batch_size=1", "warmup_steps=0", "measure_steps=1"]],
    indirect=True,
)
def test_it_prints_a_table(demo: subprocess.Popen[str], tmp_path: Path) -> None:
    output, _ = demo.communicate(timeout=DEADLINE_S)
    assert demo.returncode == 0, output
    rows = [line for line in output.splitlines() if line.startswith("|")]
    heads, _rule, *cases = [re.split(r"\s*\|\s*", row.strip("| ")) for row in rows]
    # A dagger marks what was measured while other tests had the processors.
    assert [[re.sub(r" [†‡]\d*$", "", case[0]), case[1]] for case in cases] == [["tiny", "16"], ["tiny", "32"]]
    for name in ("forward_ms", "backward_ms", "optimizer_ms", "step_ms"):
        assert all(float(case[heads.index(name)].split()[0]) > 0 for case in cases), name
    last = output.rpartition("To keep yours:")[2]
    assert re.search(r"flopwatch up  ", last), "it says what to do next"
    told = [line.split("#")[0].split()[1:] for line in last.splitlines() if "#" in line]
    assert [words[0] for words in told] == ["up", "submit", "sweep", "table", "specs"]
    assert {words[0] for words in told} <= set(vars(typer.main.get_command(cli))["commands"])
    assert not processes_of(tmp_path)
    assert not list(tmp_path.glob("flopwatch-demo-*"))


@pytest.mark.long
@pytest.mark.acceptance
@pytest.mark.parametrize(
    ("moment", "processes", "signum", "code"),
    [("1 running", 3, signal.SIGINT, 130), ("Starting server", 1, signal.SIGTERM, 143)],
    ids=["while a job runs", "while it starts"],
)
def test_nothing_is_left_of_an_interrupted_demo(demo, tmp_path, moment, processes, signum, code) -> None:
    assert demo.stdout is not None
    assert any(moment in line for line in demo.stdout), "the demo's own fields are accepted"
    assert len(processes_of(tmp_path)) >= processes  # what is gone in the end was there
    os.killpg(demo.pid, signum)  # as a terminal does
    assert demo.wait(DEADLINE_S) == code
    wait_until(lambda: not processes_of(tmp_path), timeout_s=10, what="the end of all processes", poll_s=0.05)
    assert not list(tmp_path.glob("flopwatch-demo-*"))
