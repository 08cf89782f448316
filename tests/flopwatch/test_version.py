"""Flopwatch's version in a checkout that is not installed."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import fastapi

from flopwatch.packages import FOLDER


def test_a_checkout_that_is_not_installed_has_its_version(tmp_path: Path) -> None:
    """`flopwatch up` ended with PackageNotFoundError there, and `flopwatch doctor` found no fault."""
    installed = Path(fastapi.__file__).parents[1]
    for path in installed.iterdir():
        if "flopwatch" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), FOLDER])}
    ran = subprocess.run(
        [sys.executable, "-S", "-m", "flopwatch", "--version"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    version = tomllib.loads((Path(FOLDER) / "pyproject.toml").read_text())["project"]["version"]
    assert (ran.returncode, ran.stdout.split()[-1:]) == (0, [version]), ran.stderr
    assert "PackageNotFoundError" in missing(environment), "the control: nothing is installed"


def missing(environment: dict[str, str]) -> str:
    program = [sys.executable, "-S", "-c", "import importlib.metadata as installed; installed.version('flopwatch')"]
    return subprocess.run(program, env=environment, capture_output=True, text=True, check=False).stderr
