"""Running the command as users do."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from typer.testing import CliRunner

from app.cli.commands import cli

PROJECT = Path(__file__).resolve().parents[3]


def environment(**settings: Any) -> dict[str, str]:
    """A command's: with tests/plugins, whose `sitecustomize` lets workers start sooner."""
    path = os.pathsep.join([str(PROJECT), str(PROJECT / "tests" / "plugins")])
    return {**os.environ, "PYTHONPATH": path, **{name: str(value) for name, value in settings.items()}}


@pytest.fixture(scope="session", autouse=True)
def commands_made_once() -> Iterator[None]:
    """Typer makes all commands anew for each call, which takes longer than most of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.testing._get_command))
        yield


@pytest.fixture
def flopwatch(site: Any) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run a command to its end against the module's server; in this process, which is quicker. What waits there after
    the test is cancelled."""

    def run(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        result = CliRunner().invoke(cli, arguments, env={"FLOPWATCH_URL": site.url, **settings})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return subprocess.CompletedProcess(arguments, result.exit_code, result.stdout, result.stderr)

    yield run
    site.http.post("/jobs/cancel", params={"state": "queued"})


@pytest.fixture
def start() -> Any:
    """Start a command; what still runs at the test's end is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, **settings: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", *arguments],
            env=environment(**settings),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()
