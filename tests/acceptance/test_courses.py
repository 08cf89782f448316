"""docs/courses.md, executed by the script that makes reports of it, on a CPU and with small sizes."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli.commands import cli
from benchmarks import courses
from flopwatch import Flopwatch

SMALL = (
    *("model.size=tiny", "context_length=8,16", "batch_size=1", "warmup_steps=0,1", "measure_steps=2"),
    *("sequence_lengths=32,64", "head_dims=16", "size_mb=0.25,0.5,1", "br=16,32", "bc=16,32", "bucket_size_mb=1,10"),
    *("world_size=2", "new_tokens=4", "checkpoint_blocks=1,2"),
)
QUICK = "### Checkpoints,### Communication,### Parallelism on paper"
"""Sections that take seconds."""

Ran = list[tuple[str, int, str]]


@pytest.fixture
def ran(site: Any, monkeypatch: pytest.MonkeyPatch) -> Ran:
    """The commands that the script ran, in this process, with exit codes and outputs."""
    commands: Ran = []

    def flopwatch(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(cli, list(words), env={"FLOPWATCH_URL": str(site.client.base_url).rstrip("/")})
        commands.append((shlex.join(words), result.exit_code, result.output))
        return result.exit_code, result.output

    monkeypatch.setattr(courses, "flopwatch", flopwatch)
    return commands


def make_report(site: Any, folder: Path, course: str, *options: str) -> str:
    with Flopwatch(str(site.client.base_url)) as server:
        return courses.report(courses.parse([course, *SMALL, "--output", str(folder), *options]), server).read_text()


@pytest.mark.parametrize(("course", "gpus"), [("cs336", 0), ("cs336", 2), ("cs149", 1)])
def test_every_job_of_the_page_is_accepted(ran: Ran, course: str, gpus: int) -> None:
    for section in courses.sections(course):
        for command in courses.commands(section.lines):
            if command.startswith(courses.SUBMITTING):
                words, mark, needs = command.partition("#")
                courses.submit(f"{words} --dry-run {mark}{needs}", {}, gpus)
    assert len(ran) >= (5 if course == "cs149" else 10 if gpus == 1 else 20)
    assert [(command, output) for command, code, output in ran if code] == []


@pytest.mark.long
def test_the_report_has_the_pages_text_with_tables_and_pictures(site: Any, tmp_path: Path, ran: Ran) -> None:
    text = make_report(site, tmp_path, "cs336", "--only", QUICK)
    check(text, tmp_path, ran)
    assert "model.size=tiny" in text
    assert "backend=gloo" in text
    assert "| `gradient_checkpointing` (a)" in text
    assert "### Benchmarking" not in text


@pytest.mark.long
@pytest.mark.parametrize("course", ["cs336", "cs149"])
def test_the_whole_page_runs_on_a_cpu(site: Any, tmp_path: Path, ran: Ran, course: str) -> None:
    check(make_report(site, tmp_path, course), tmp_path, ran)


def check(text: str, folder: Path, ran: Ran) -> None:
    """Every command succeeded and printed something, and every picture of the report is there."""
    assert [(command, output) for command, code, output in ran if code or not output.strip()] == []
    pictures = re.findall(r"!\[[^\]]*\]\((.*)\)", text)
    assert sorted(pictures) == sorted(path.name for path in folder.glob("*.svg"))
    assert all((folder / picture).read_text().lstrip().startswith("<?xml") for picture in pictures)
    plots = [command for command, _, _ in ran if command.startswith("plot ")]
    assert len(pictures) == len(plots) > 0
    assert not any(re.search(r"\b(SWEEP|JOB\d*)\b", command) for command, _, _ in ran)


@pytest.mark.parametrize(
    ("command", "gpus", "adapted"),
    [
        ("sweep benchmark model.size=small,xl context_length=512", 1, "model.size=a,b context_length=16"),
        ("submit profile model.size=xl", 0, "model.size=b device=cpu"),
        ("submit ddp backend=nccl model.size=xl", 0, "backend=gloo model.size=b"),
        ("submit ddp backend=nccl model.size=xl", 2, "backend=nccl model.size=b"),
        ("submit estimate model.size=xl", 0, "model.size=b"),
    ],
)
def test_chosen_values_and_the_host_change_a_command(command: str, gpus: int, adapted: str) -> None:
    values: dict[str, list[str]] = {"model.size": ["a", "b"], "context_length": ["8", "16"]}
    assert courses.adapted(command, values, gpus)[2:] == adapted.split()
