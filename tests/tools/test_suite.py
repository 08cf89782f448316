"""Every test runs, in one of several processes or alone, and what becomes of each counts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.processes import groups
from tools.suite import worst

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
def test_together(number):
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
    print("what a test prints")
    assert number != FAILS
"""

NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Those that are installed take half of the start of each pytest."""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A small suite with the project's settings and its tests/conftest.py."""
    folder = tmp_path / "tests"
    folder.mkdir()
    for name in ("pyproject.toml", "tests/conftest.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    write(folder)
    return tmp_path


def write(folder: Path, killed: int | None = None, fails: int | None = None, processes: int = 1) -> None:
    """Write the tests: which one kills its process or fails, and for how many processes the first one waits."""
    text = TESTS.replace("KILLED", str(killed)).replace("FAILS", str(fails)).replace("PROCESSES", str(processes))
    (folder / "test_small.py").write_text(text)


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


def test_processes_share_the_tests_and_those_alone_run_afterwards_in_the_first(suite: Path) -> None:
    write(suite / "tests", processes=2)
    done = run(suite, "tools.suite", "-q", "--processes=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert counted(done, "passed") == [11]
    lines = [line.split() for line in (suite / "ran").read_text().splitlines()]
    assert sorted(what for what, _ in lines[:7]) == [str(number) for number in range(7)]
    processes = {process for _, process in lines[:7]}
    assert len(processes) == 2
    ((what, first),) = {tuple(line) for line in lines[7:]}
    assert what == "alone"
    assert first not in processes


def test_a_process_that_dies_fails_its_test_only_and_failures_are_shown(suite: Path) -> None:
    write(suite / "tests", killed=3, fails=1)
    done = run(suite, "tools.suite", "-q", "--processes=2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert (counted(done, "passed"), counted(done, "failed")) == ([9], [2])
    assert "the process that ran this test has ended with signal 9" in done.stdout
    assert "FAILED tests/test_small.py::test_together[3]" in done.stdout
    assert "FAILED tests/test_small.py::test_alone[1]" in done.stdout
    assert "what a test prints" in done.stdout


WITH_A_SERVICE = """
import os
import time
from pathlib import Path

import pytest

@pytest.fixture(scope="module")
def service():
    started = Path(f"service-{os.getpid()}")
    started.touch()
    yield
    started.unlink()

@pytest.mark.parametrize("number", range(9))
def test_with_a_service(service, number):
    Path(f"test-{os.getpid()}").touch()
    time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_nor_what_fixtures_started_when_the_first_ends(suite: Path, how: signal.Signals) -> None:
    (suite / "tests/test_small.py").write_text(WITH_A_SERVICE)
    ignoring = ["env", "--ignore-signal=INT"] if how == signal.SIGKILL else []  # as a shell's job does
    with subprocess.Popen(
        [*ignoring, sys.executable, "-m", "pytest", "-p", "tools.processes", "--processes=2"],
        cwd=suite,
        env={**os.environ, "PYTHONPATH": str(ROOT), **NO_PLUGINS},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as first:
        wait_for(lambda: len([*suite.glob("test-*")]) == 2)
        services = {path.name for path in suite.glob("service-*")}
        first.send_signal(how)
        first.communicate(timeout=60)
        assert first.returncode in (2, -signal.SIGKILL)
    wait_for(lambda: not any(suite.glob("service-*")))
    wait_for(lambda: not any(Path(f"/proc/{name.removeprefix('service-')}").exists() for name in services))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_test_may_end_the_run(suite: Path) -> None:
    (suite / "tests/test_small.py").write_text(
        "import pytest\n\ndef test_ends():\n    pytest.exit('all over', returncode=9)\n\ndef test_other(): pass\n"
    )
    done = run(suite, "tools.suite", "-q", "--processes=2")
    assert done.returncode == 9, done.stdout + done.stderr
    assert "all over" in done.stdout


def test_a_process_that_cannot_begin_is_an_error_and_not_started_forever(suite: Path) -> None:
    (suite / "tests/test_small.py").write_text(
        "import tools.processes\n\ndef broken(*arguments):\n    raise OSError('the disk is full')\n\n"
        "tools.processes._run_tests = broken\n\ndef test_one(): pass\n\ndef test_two(): pass\n"
    )
    done = run(suite, "tools.suite", "-q", "--processes=2")
    assert done.returncode == pytest.ExitCode.INTERNAL_ERROR, done.stdout + done.stderr
    assert "the disk is full" in done.stdout + done.stderr


def test_why_a_process_ended_is_told(suite: Path) -> None:
    with (suite / "tests/conftest.py").open("a") as file:
        file.write("\ndef pytest_runtest_protocol(item):\n    raise RuntimeError('a broken hook')\n")
    done = run(suite, "tools.suite", "-q", "--processes=2", "-k", "together and 3")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "RuntimeError: a broken hook" in done.stdout


def test_processes_do_not_empty_each_others_folders(suite: Path) -> None:
    (suite / "tests/test_small.py").write_text(
        "import time\n\nimport pytest\n\n"
        "@pytest.mark.parametrize('number', range(8))\n"
        "def test_folder(tmp_path, number):\n"
        "    (tmp_path / 'file').touch()\n"
        "    time.sleep(0.1 + number / 100)\n"
        "    assert (tmp_path / 'file').exists()\n"
    )
    done = run(suite, "tools.suite", "-q", "--processes=2", f"--basetemp={suite / 'base'}")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("chosen", "counts", "code"), [("together", [7], 0), ("alone and 2", [1], 0), ("no", [], 5)])
def test_there_may_be_no_tests_of_either_kind(suite: Path, chosen: str, counts: list[int], code: int) -> None:
    done = run(suite, "tools.suite", "-q", "--processes=2", "tests", "-k", chosen)
    assert counted(done, "passed") == counts, done.stdout + done.stderr
    assert done.returncode == code


def test_groups_are_files_or_undivided_folders_and_long_ones_begin() -> None:
    files = ["app/test_a", "app/test_b", "browser/test_c", "browser/test_d", "acceptance/test_e", "workers/x/test_f"]
    nodeids = [f"tests/{file}.py::test_{number}" for file in files for number in range(3)]
    found = groups([None, *nodeids[1:]])
    assert [group.name.removeprefix("tests/") for group in found] == [
        "browser",
        "acceptance/test_e.py",
        "workers/x/test_f.py",
        "app/test_a.py",
        "app/test_b.py",
    ]
    assert sorted(number for group in found for number in group.numbers) == list(range(1, 18))
    half = found[0].half()
    assert ([*found[0].numbers], [*half.numbers]) == ([6, 7, 8], [9, 10, 11])


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([0, 5], 0),
        ([5, 0], 0),
        ([5, 5], 5),
        ([1, 0], 1),
        ([0, 1], 1),
        ([5, 1], 1),
        ([4, 1], 4),
        ([-9, 0], -9),
    ],
)
def test_one_exit_code_of_all(codes: list[int], code: int) -> None:
    assert worst(*codes) == code


def test_without_a_gpu_the_gpus_tests_fail(suite: Path) -> None:
    """`make gpu-test` on a host where CUDA does not work must not look as if all were well."""
    small = suite / "tests/test_small.py"
    small.write_text(small.read_text().replace("alone", "gpu"))
    done = run(suite, "tools.suite", "gpu", "-q", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1, done.stdout + done.stderr
    assert counted(done, "passed") == []
