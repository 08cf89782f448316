"""docs/recipes.md, executed: its commands run in their order, and print what the page says but for the numbers."""

from __future__ import annotations

import re
import resource
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from app.cli.commands import cli

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
SKIPPED = "…"
WORKERS_MEMORY = 1 << 30
"""Bytes beside those that the warm parent has, as the page says."""
JOBS = ("show", "compare", "rerun", "download", "baseline", "check")
"""Commands whose plain numbers are ids of jobs."""


@dataclass(frozen=True)
class Step:
    """A command of the page, and the lines that it prints there."""

    command: str
    expected: tuple[str, ...]


def steps() -> Iterator[Step]:
    for block in re.findall(r"```console\n(.*?)```", PAGE, flags=re.DOTALL):
        for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            command, *expected = part.rstrip("\n").split("\n")
            yield Step(" ".join(command.split()), tuple(expected))


def structure(line: str) -> str:
    """What has to be the same in every run: the line without numbers, verdicts, marks, and the width of columns."""
    line = re.sub(r" ?†\d*|\\textsuperscript\{[^}]*\{\}[^}]*\}", "", line)
    line = re.sub(r"\\textbf\{([^}]*)\}", r"\1", line)
    line = re.sub(r"\b(in)?valid\b|\bsuspect\b", "VERDICT", line)
    line = re.sub(r"http://[\d.]+:\d+", "URL", line)
    line = re.sub(r"@[0-9a-f]{8}\b", "@HASH", line)
    line = re.sub(r":?-{3,}:?", "---", line)
    line = re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", line)
    line = re.sub(r"# ± #|# \$\\pm\$ #", "#", line)
    line = re.sub(r"(# (ms|s|min|h)\b ?)+(ago)?", "# ", line)
    line = re.sub(r"\| … \|$", "|", line)
    return " ".join(line.split())


def check_output(step: Step, printed: str) -> None:
    """Every line of the page is there, in order; "…" stands for any number of others, or the rest of a row."""
    actual = [structure(line) for line in printed.splitlines() if line.strip()]
    at, may_skip = 0, False
    for line in filter(str.strip, step.expected):
        if line == SKIPPED:
            may_skip = True
            continue
        wanted, prefix = structure(line), line.endswith("| … |")
        found = next(
            (
                index
                for index, candidate in enumerate(actual[at:], start=at)
                if candidate == wanted or (prefix and candidate.startswith(wanted))
            ),
            None,
        )
        assert found is not None, f"{step.command}: no line like {line!r} in\n{printed}"
        assert may_skip or found == at, f"{step.command}: between the lines of the page there are others:\n{printed}"
        at, may_skip = found + 1, False
    assert may_skip or at == len(actual), f"{step.command}: prints more than the page says:\n{printed}"


def words_of(command: str, jobs: int, sweeps: int) -> list[str]:
    """The words of a command of the page, with the ids that the shared service gives where the page's are 1, 2, …"""
    words = shlex.split(command)[1:]
    job_at = {index + 1 for index, word in enumerate(words) if word == "--job"}
    sweep_at = {index + 1 for index, word in enumerate(words) if word == "--sweep"}
    if words[0] in JOBS:
        job_at |= {index for index, word in enumerate(words) if word.isdigit()}
    if words[:2] == ["export", "sweep"]:
        sweep_at.add(2)
    moved = {**dict.fromkeys(job_at, jobs), **dict.fromkeys(sweep_at, sweeps)}
    return [str(int(word) + moved[index]) if index in moved else word for index, word in enumerate(words)]


def last_id(client: Any, path: str) -> int:
    found: Sequence[dict[str, int]] = client.get(path, params={"limit": 1}).json()["data"]
    return found[0]["id"] if found else 0


@pytest.fixture
def little_memory(site: Any) -> Iterator[None]:
    """What the worker starts gets no more address space than the page says."""
    (warm,) = (one for one in psutil.Process(site.worker.pid).children() if "warm" in one.cmdline())
    former = resource.prlimit(warm.pid, resource.RLIMIT_AS)
    resource.prlimit(warm.pid, resource.RLIMIT_AS, (warm.memory_info().vms + WORKERS_MEMORY, former[1]))
    yield
    resource.prlimit(warm.pid, resource.RLIMIT_AS, former)


def test_the_recipes(site: Any, little_memory: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = re.findall(r"`my_attention.py`:\n\n```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "my_attention.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    jobs, sweeps = last_id(site.client, "/jobs"), last_id(site.client, "/sweeps")
    environment = {"FLOPWATCH_URL": str(site.client.base_url).rstrip("/")}
    for step in steps():
        command, tells_code = re.subn(r"; echo \$\?$", "", step.command)
        result = CliRunner().invoke(cli, words_of(command, jobs, sweeps), env=environment)
        assert tells_code or result.exit_code == 0, f"{step.command}: {result.output}"
        check_output(step, result.output + (f"{result.exit_code}\n" if tells_code else ""))
    assert "<svg" in (tmp_path / "warm-up.html").read_text()
    assert [path.name for path in tmp_path.glob("job-*/*")] == ["samples.csv.gz"]


def test_there_are_ten_recipes() -> None:
    assert re.findall(r"^## (\d+)\.", PAGE, flags=re.MULTILINE) == [str(number) for number in range(1, 11)]
    assert len(list(steps())) >= 15
