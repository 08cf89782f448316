"""Runs the commands of docs/courses.md, and writes the report on an assignment: the page's text, tables and plots.

    flopwatch up                                  # in another terminal
    python -m benchmarks.courses cs336            # on a host with GPUs
    python -m benchmarks.courses cs336 model.size=small,2.7b context_length=256,512 sequence_lengths=1024,16384
    python -m benchmarks.courses cs336 model.size=tiny context_length=16,32 sequence_lengths=64 checkpoint_blocks=1,2
    python -m benchmarks.courses cs149

A word `field=values` takes the place of the page's: of several values there, all of these; of a single one, the last.
All jobs are submitted at once; the report grows as they end. Without a GPU the jobs run on the CPU, and ranks are
processes there; what needs more GPUs than there are says so. `--only ddp,collective` takes the sections that contain
one of these words.
"""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flopwatch import Flopwatch

PAGE = Path(__file__).parents[1] / "docs" / "courses.md"
SUBMITTING = ("submit", "sweep")
NEEDS = re.compile(r"# (\d) GPUs?$")
"""The comment of a command that runs on GPUs only."""


@dataclass
class Work:
    """A command of the page that submits, and what became of it."""

    words: list[str]
    answer: str = ""
    kind: str = ""
    number: int | None = None
    """Of the job or sweep; None: it was left out or refused, and `answer` says why."""


@dataclass
class Section:
    """A section of the page: its lines, and its commands that submit, in order."""

    lines: list[str]
    works: list[Work] = field(default_factory=list)


def flopwatch(*words: str) -> tuple[int, str]:
    """Run the command, and return its exit code and what it prints: also its errors if it fails."""
    done = subprocess.run([sys.executable, "-m", "app.cli", *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr


def sections(course: str, only: Sequence[str] = ()) -> list[Section]:
    """Return the course's sections of the page that contain one of the words; without words, all."""
    (chapter,) = re.findall(
        rf"^## {course}\b.*?\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.IGNORECASE | re.MULTILINE
    )
    parts = re.split(r"^(?=### )", chapter, flags=re.MULTILINE)[1:]
    return [Section(part.splitlines()) for part in parts if not only or any(word in part for word in only)]


def commands(lines: Iterable[str]) -> Iterable[str]:
    """Yield the commands of a block, each on one line."""
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.startswith("flopwatch "):
            yield line.removeprefix("flopwatch ")


def adapted(command: str, values: Mapping[str, Sequence[str]], gpus: int) -> list[str]:
    """Return the words of a command of the page for this host, with the chosen values."""
    words = [word for word in shlex.split(command, comments=True) if word != "--wait"]
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in values:
            words[index] = f"{name}={','.join(values[name]) if ',' in value else values[name][-1]}"
    if not gpus:
        ranks = "backend=nccl" in words
        words = ["backend=gloo" if word == "backend=nccl" else word for word in words]
        if not ranks and words[1] != "estimate" and not any(word.startswith("device=") for word in words):
            words.append("device=cpu")
    return words


def needed(command: str) -> int:
    needs = NEEDS.search(command)
    return int(needs[1]) if needs else 0


def submit(command: str, values: Mapping[str, Sequence[str]], gpus: int) -> Work:
    """Submit a command of the page, unless it needs more GPUs than there are."""
    work = Work(adapted(command, values, gpus))
    least = needed(command) or (2 if gpus and "backend=nccl" in command else 0)
    if gpus < least:
        work.answer = f"Left out: it needs {least} GPU(s), and this host has {gpus}."
        return work
    _, work.answer = flopwatch(*work.words)
    if found := re.search(r"^(job|sweep) (\d+) ", work.answer, re.MULTILINE):
        work.kind, work.number = found[1], int(found[2])
    return work


def numbered(command: str, work: Work, jobs: Sequence[int]) -> list[str]:
    """Return the words of a command of the page, with the numbers of the work above it."""
    numbers = {"SWEEP": work.number, "JOB": jobs[0], **{f"JOB{index}": job for index, job in enumerate(jobs, start=1)}}
    return [str(numbers.get(word, word)) for word in shlex.split(command, comments=True)]


def shown(words: Sequence[str], work: Work, folder: Path) -> str:
    if words[0] != "plot":
        return flopwatch(*words)[1].strip()
    picture = folder / f"{work.kind}-{work.number}-{Path(words[-1]).name}"
    picture.unlink(missing_ok=True)
    code, printed = flopwatch(*words[:-1], str(picture))
    return f"![{picture.stem}]({picture.name})" if code == 0 else printed


def filled(section: Section, server: Flopwatch, folder: Path, gpus: int) -> Iterable[str]:
    """Wait for a section's jobs, and yield its lines with what each command prints."""
    works = iter(section.works)
    work, jobs = Work([]), list[int]()
    block: list[str] | None = None
    for line in section.lines:
        if line == "```sh":
            block = []
        elif block is None:
            yield line
        elif line != "```":
            block.append(line)
        else:
            for command in commands(block):
                if command.startswith(SUBMITTING):
                    work = next(works)
                    yield from ("```sh", f"flopwatch {shlex.join(work.words)}", "```", "")
                    if work.number is None:
                        yield from (work.answer.strip(), "")
                    jobs = ended(work, server)
                elif work.number is not None and gpus >= needed(command):
                    words = numbered(command, work, jobs)
                    yield from ("```sh", f"flopwatch {shlex.join(words)}", "```", "", shown(words, work, folder), "")
            block = None


def ended(work: Work, server: Flopwatch) -> list[int]:
    """Wait for the jobs of a command, and return their ids in the order of their points."""
    if work.number is None:
        return []
    if work.kind == "job":
        server.wait(work.number, check=False)
        return [work.number]
    server.wait_for_sweep(work.number)
    return sorted(job["id"] for job in server.jobs_of_sweep(work.number))


def report(arguments: argparse.Namespace, server: Flopwatch) -> Path:
    """Submit the chosen sections, and write each when its jobs are done. Returns the report's path."""
    values = {name: value.split(",") for name, _, value in (word.partition("=") for word in arguments.values)}
    workers = server.list_workers(state="active")
    gpus = max((sum(device["type"] == "cuda" for device in worker["devices"]) for worker in workers), default=0)
    folder = Path(arguments.output)
    folder.mkdir(parents=True, exist_ok=True)
    path, lines = folder / "report.md", [f"# {arguments.course.upper()}", ""]
    chosen = sections(arguments.course, arguments.only.split(",") if arguments.only else ())
    for section in chosen:
        found = [one for one in commands(section.lines) if one.startswith(SUBMITTING)]
        section.works = [submit(command, values, gpus) for command in found]
    for section in chosen:
        lines += filled(section, server, folder, gpus)
        path.write_text("\n".join(lines) + "\n")
        sys.stderr.write(f"{section.lines[0]}\n")
    return path


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write the report on an assignment.")
    parser.add_argument("course", choices=("cs336", "cs149"))
    parser.add_argument("values", nargs="*", metavar="field=values", help="take the place of the page's values")
    parser.add_argument("--only", help="words of the sections to run; by default all")
    parser.add_argument("--output", default="report", help="the report's folder")
    return parser.parse_intermixed_args(words)


if __name__ == "__main__":
    with Flopwatch() as service:
        sys.stdout.write(f"{report(parse(), service)}\n")
