"""flopwatch plot: which plots there are, and the files that it writes."""

import re
from typing import Any

import pytest

from tests.app.cli.test_commands import ended

pytest.importorskip("matplotlib", reason="pip install -e .[dev]")


@pytest.fixture
def job(site: Any, measured: Any) -> str:
    found = [measured(f"{phase}_ms", 2.0, model="tiny", phase=phase) for phase in ("forward", "step")]
    return str(site.run(measurements=found))


def test_the_plots_of_a_job_and_one_as_a_file(flopwatch, job, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.search(r"^phases +Where a step's time goes", ended(flopwatch("plot", job)), re.MULTILINE)
    told = ended(flopwatch("plot", job, "phases"))
    file = tmp_path / f"job-{job}-phases.svg"
    assert told == f"job-{job}-phases.svg: {file.stat().st_size} bytes\n"
    assert file.read_text().startswith("<?xml")
    assert "is there already" in ended(flopwatch("plot", job, "phases"), 2)
    for name, start in (("c.html", b"<!doctype html>"), ("d.JSON", b'{"data"')):
        ended(flopwatch("plot", job, "phases", "-o", name))
        assert (tmp_path / name).read_bytes().startswith(start)
    ended(flopwatch("plot", job, "phases", "--format", "png", "--output", "picture.of.it"))
    assert (tmp_path / "picture.of.it").read_bytes().startswith(b"\x89PNG")
    assert ended(flopwatch("plot", job, "phases", "-o", "-", "--format", "json")).startswith('{"data"')


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "give the number of a JOB, or --sweep"),
        (("JOB", "phases", "memory"), 2, "give one NAME"),
        (("JOB", "-o", "a.svg"), 2, "give a NAME"),
        (("JOB", "phases", "-o", "a.gif"), 2, "gif is no format of plots"),
        (("JOB", "phases", "-o", "missing/a.json"), 2, "missing/a.json: No such file"),
        (("JOB", "nose"), 1, "it has: phases"),
        (("--sweep", "999"), 1, "no sweep 999"),
        (("JOB", "ratios", "--against", "999"), 1, "no job 999"),
    ],
)
def test_mistakes(flopwatch: Any, job: str, arguments: tuple[str, ...], code: int, words: str) -> None:
    assert words in ended(flopwatch("plot", *(job if word == "JOB" else word for word in arguments)), code)
