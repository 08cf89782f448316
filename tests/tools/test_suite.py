"""Every test runs, together with others or alone, and every failure counts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.suite import exit_code_of

ROOT = Path(__file__).parents[2]
TESTS = """
import os
import signal
import time

import pytest

def processes():
    with open("ran") as file:
        return {line.split()[1] for line in file if line.endswith("\\n")}

@pytest.mark.parametrize("number", range(7))
def test_together(number, rng):
    with open("ran", "a") as file:
        file.write(f"{number} {os.getpid()}\\n")
    while number == 0 and len(processes()) < PROCESSES:
        time.sleep(0.01)
    if number == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.alone
@pytest.mark.parametrize("number", range(4))
def test_alone(number):
    with open("ran", "a") as file:
        file.write(f"alone {os.getpid()}\\n")
    if number == FAILS:
        failed = os.path.exists("failed")
        os.close(os.open("failed", os.O_CREAT))
        assert ONCE and failed
"""

NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Those that are installed take half of the start of each pytest."""
TWO_PROCESSES = ("-q", "--processes=2")


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A small suite with the project's settings and its tests/conftest.py."""
    folder = tmp_path / "tests"
    folder.mkdir()
    for name in ("pyproject.toml", "tests/conftest.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    write(folder)
    return tmp_path


def write(
    folder: Path, killed: int | None = None, fails: int | None = None, once: bool = False, processes: int = 1
) -> None:
    """Write the tests: which one kills its process or fails, perhaps but once, and for how many processes the first
    one waits."""
    text = TESTS.replace("KILLED", str(killed)).replace("FAILS", str(fails)).replace("ONCE", str(once))
    (folder / "test_small.py").write_text(text.replace("PROCESSES", str(processes)))


def run(folder: Path, module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A module of Python's in `folder`, as a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **NO_PLUGINS, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def collected(folder: Path, *arguments: str) -> list[str]:
    done = run(folder, "pytest", "--collect-only", "-q", *arguments)
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_every_test_is_in_one_part(suite: Path) -> None:
    alone = collected(suite, "--share=alone")
    assert alone == [f"tests/test_small.py::test_alone[{number}]" for number in range(4)]
    slices = [collected(suite, "--share=together", f"--slice={number}/2") for number in (1, 2)]
    together = [f"tests/test_small.py::test_together[{number}]" for number in range(7)]
    assert sorted(name for part in slices for name in part) == together


def counted(done: subprocess.CompletedProcess[str], what: str) -> list[int]:
    """How many tests passed, or failed, in each run of pytest."""
    return [int(count) for count in re.findall(rf"(\d+) {what}", done.stdout)]


def test_tests_run_together_and_those_alone_afterwards(suite: Path) -> None:
    write(suite / "tests", processes=2)
    done = run(suite, "tools.suite", *TWO_PROCESSES, "-rP")
    assert done.returncode == 0, done.stdout + done.stderr
    assert counted(done, "passed") == [11]
    seeds = re.findall(r"^random seed: (\d+)$", done.stdout, re.MULTILINE)
    assert (len(seeds), len(set(seeds))) == (7, 1)
    lines = [line.split() for line in (suite / "ran").read_text().splitlines()]
    names, processes = zip(*lines[:7], strict=True)
    assert sorted(names) == [str(number) for number in range(7)]
    assert len(set(processes)) == 2
    ((name, process),) = {tuple(line) for line in lines[7:]}
    assert name == "alone"
    assert process not in processes


@pytest.mark.long
def test_failures_in_either_run_count(suite: Path) -> None:
    write(suite / "tests", killed=3, fails=1)
    done = run(suite, "tools.suite", *TWO_PROCESSES)
    assert done.returncode == 1, done.stdout + done.stderr
    assert (counted(done, "passed"), counted(done, "failed")) == ([9], [2, 2])
    assert "FAILED tests/test_small.py::test_together[3]" in done.stdout
    assert "FAILED tests/test_small.py::test_alone[1]" in done.stdout
    assert "UNSTABLE" not in done.stdout


def test_what_passes_when_it_runs_once_more_is_named(suite: Path) -> None:
    write(suite / "tests", fails=1, once=True)
    done = run(suite, "tools.suite", *TWO_PROCESSES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (counted(done, "passed"), counted(done, "failed")) == ([10, 1], [1])
    assert done.stdout.endswith("passed alone:\n  tests/test_small.py::test_alone[1]\n")


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([0, 5], 0),
        ([5, 5], 5),
        ([0, 1], 1),
        ([5, 1], 1),
        ([-9, 0], -9),
    ],
)
def test_one_exit_code_of_all(codes: list[int], code: int) -> None:
    assert exit_code_of(*codes) == code


def test_without_a_gpu_the_gpus_tests_fail(suite: Path) -> None:
    """`make gpu-test` on a host where CUDA does not work must not look as if all were well."""
    small = suite / "tests/test_small.py"
    small.write_text(small.read_text().replace("alone", "gpu"))
    done = run(suite, "tools.suite", "gpu", "-q", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1, done.stdout + done.stderr
    assert counted(done, "passed") == []
