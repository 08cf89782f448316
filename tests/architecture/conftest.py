"""The checkout, and what it has."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("app", "flopwatch", "kernels", "migrations", "parallel", "workers")


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def sources() -> list[Path]:
    """Every file of the checkout that git does not ignore."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.fixture(scope="session")
def run_python() -> Callable[..., str]:
    """Standard output of code run in a new interpreter, which finds the packages of `folder` before installed ones."""

    def run(code: str, *arguments: str, folder: Path, **environment: str) -> str:
        result = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=folder,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


@pytest.fixture(scope="session")
def commands() -> frozenset[str]:
    """The names of flopwatch's commands."""
    import typer

    from app.cli.commands import cli

    return frozenset(name for name in vars(typer.main.get_command(cli))["commands"])


@pytest.fixture(scope="session")
def settings(sources: list[Path], root: Path) -> frozenset[str]:
    """The environment variables that are read: the settings, and what the code reads beside them."""
    from app.settings import Settings

    code = [
        path.read_text() for path in sources if path.relative_to(root).parts[0] in PACKAGES and path.suffix == ".py"
    ]
    read = {name for text in code for name in re.findall(r"[\"'](FLOPWATCH_[A-Z_]+)[\"']", text)}
    return frozenset({f"FLOPWATCH_{name.upper()}" for name in Settings.model_fields} | read)
