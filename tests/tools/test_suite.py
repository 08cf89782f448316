"""Every test runs in one of the suite's parts, and what either part says counts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.suite import worst

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.parametrize("number", range(7))
def test_together(number):
    pass

@pytest.mark.alone
@pytest.mark.parametrize("number", range(4))
def test_alone(number):
    assert number != FAILS
"""
PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
"""The others that are installed take half of the start of each pytest."""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A small suite with the project's settings and its tests/conftest.py."""
    folder = tmp_path / "tests"
    folder.mkdir()
    for name in ("pyproject.toml", "tests/conftest.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (folder / "test_small.py").write_text(TESTS.replace("FAILS", "None"))
    return tmp_path


def run(folder: Path, module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A module of Python's in `folder`, as a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **PLUGINS, **environment},
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


def passed(done: subprocess.CompletedProcess[str]) -> list[int]:
    """How many tests passed in each run of pytest."""
    return [int(count) for count in re.findall(r"(\d+) passed", done.stdout)]


def test_both_parts_are_run(suite: Path) -> None:
    done = run(suite, "tools.suite", "-q")
    assert passed(done) == [7, 4], done.stdout + done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(("chosen", "counts"), [("together", [7]), ("alone and 2", [1])])
def test_one_part_may_have_no_tests(suite: Path, chosen: str, counts: list[int]) -> None:
    done = run(suite, "tools.suite", "-q", "--numprocesses=1", "tests", "-k", chosen)
    assert passed(done) == counts, done.stdout + done.stderr
    assert done.returncode == 0


def test_a_failure_of_the_second_part_counts(suite: Path) -> None:
    (suite / "tests/test_small.py").write_text(TESTS.replace("FAILS", "1"))
    done = run(suite, "tools.suite", "-q", "--numprocesses=1")
    assert passed(done) == [7, 3], done.stdout + done.stderr
    assert done.returncode == 1


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
    (suite / "tests/test_small.py").write_text(TESTS.replace("FAILS", "None").replace("alone", "gpu"))
    done = run(suite, "tools.suite", "gpu", "-q", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1, done.stdout + done.stderr
    assert passed(done) == []
