"""docs/recipes.md, executed: its commands run in their order, and print what the page says but for the numbers."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli.commands import cli

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
SKIPPED = "…"
JOBS = ("show", "compare", "rerun", "download", "baseline", "check")
"""Commands whose plain numbers are ids of jobs."""


@dataclass(frozen=True)
class Step:
    """A command of the page, and the lines that it prints there."""

    command: str
    expected: tuple[str, ...]


def steps() -> Iterator[Step]:
    for block in re.findall(r"```console\n(.*?)```", PAGE, flags=re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            found = re.fullmatch(r"((?:[^\n]*\\\n)*[^\n]*)\n(.*)", part, flags=re.DOTALL)
            yield Step(" ".join(found[1].replace("\\\n", " ").split()), tuple(found[2].splitlines()))


NOISE = ("- ‡ noisy", "noisy host: ")
"""Lines that depend on how busy the host is."""


def structure(line: str) -> str:
    """What is the same in every run: the line without numbers, verdicts, marks, sides in turns, widths of columns."""
    line = re.sub(r" ?[†‡]\d*|\\textsuperscript\{[^}]*\{\}[^}]*\}", "", line)
    line = re.sub(r"\\textbf\{([^}]*)\}", r"\1", line)
    line = re.sub(r"\b(in)?valid\b|\bsuspect\b", "VERDICT", line)
    line = re.sub(r"\b(baseline|candidate)(?=, replicate)", "SIDE", line)  # whose turn comes last is drawn
    line = re.sub(r"http://[\d.]+:\d+", "URL", line)
    line = re.sub(r":?-{3,}:?", "---", line)
    line = re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", line)
    line = re.sub(r"# ± #|# \$\\pm\$ #", "#", line)
    line = re.sub(r"(# (ms|s|min|h)\b ?)+(ago)?", "# ", line)
    return " ".join(line.split())


def check_output(step: Step, printed: str) -> None:
    """Every line of the page is there, in order; "…" stands for any number of others, or for the rest of a line."""
    actual = [structure(line) for line in printed.splitlines() if line.strip() and not line.startswith(NOISE)]
    at, may_skip = 0, False
    for line in (line for line in step.expected if line.strip() and not line.startswith(NOISE)):
        if line == SKIPPED:
            may_skip = True
            continue
        wanted = structure(line.removesuffix(SKIPPED))
        same = str.startswith if line.endswith(SKIPPED) else str.__eq__
        found = next((index for index, one in enumerate(actual[at:], start=at) if same(one, wanted)), None)
        assert found is not None, f"{step.command}: no line like {line!r} in\n{printed}"
        assert may_skip or found == at, f"{step.command}: between the lines of the page there are others:\n{printed}"
        at, may_skip = found + 1, False
    assert may_skip or at == len(actual), f"{step.command}: prints more than the page says:\n{printed}"


class Ids:
    """The ids that the shared service gives where the page, on a service of its own, has 1, 2, …"""

    def __init__(self, jobs: int, sweeps: int) -> None:
        self._before = {"job": jobs, "sweep": sweeps}
        self._known: dict[tuple[str, int], int] = {}

    def note(self, step: Step, printed: str) -> None:
        """Learn what a submission became."""
        for what, number in re.findall(r"^(job|sweep) (\d+) (?:queued|with)", "\n".join(step.expected), re.MULTILINE):
            found = re.search(rf"^{what} (\d+) (?:queued|with)", printed, re.MULTILINE)
            self._known[what, int(number)] = int(found[1])

    def words_of(self, command: str) -> list[str]:
        """Return the words of a command of the page, with this service's ids."""
        words = shlex.split(command)[1:]
        kinds = {index + 1: word[2:] for index, word in enumerate(words) if word in ("--job", "--sweep")}
        if words[0] in JOBS:
            kinds |= {index: "job" for index, word in enumerate(words) if word.isdigit()}
        return [self._moved(kinds[index], int(word)) if index in kinds else word for index, word in enumerate(words)]

    def _moved(self, what: str, number: int) -> str:
        return str(self._known.get((what, number), number + self._before[what]))


def last_id(client: Any, path: str) -> int:
    found: Sequence[dict[str, int]] = client.get(path, params={"limit": 1}).json()["data"]
    return found[0]["id"] if found else 0


def test_the_recipes(site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = re.findall(r"`my_attention.py`:\n\n```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "my_attention.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    ids = Ids(last_id(site.client, "/jobs"), last_id(site.client, "/sweeps"))
    environment = {"FLOPWATCH_URL": str(site.client.base_url).rstrip("/"), "LOGNAME": "ada"}
    for step in steps():
        command, tells_code = re.subn(r"; echo \$\?$", "", step.command)
        fewer = command.replace("measure_steps=100", "warmup_steps=1 measure_steps=10")  # not read
        fewer = fewer.replace("--replicates=4", "--replicates=2")
        result = CliRunner().invoke(cli, ids.words_of(fewer), env=environment)
        assert tells_code or result.exit_code == 0, f"{step.command}: {result.output}"
        ids.note(step, result.output)
        check_output(step, result.output + (f"{result.exit_code}\n" if tells_code else ""))
    assert "data-plot=" in (tmp_path / "warm-up.html").read_text()
    assert [path.name for path in tmp_path.glob("job-*/*")] == ["samples.csv.gz"]
