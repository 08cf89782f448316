"""Texts of jobs and other users cannot send commands to the terminal that shows them."""

import ast
import json
import logging
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import logs
from app.cli import terminal
from app.errors import job_problem
from app.store.records import NewEvent, UnitRecord
from flopwatch.text import characters
from flopwatch.text.characters import one_line, shown

CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4=\x07"
"""OSC 52: it puts a text on the clipboard."""
HOSTILE = f"{CLIPBOARD}\x1b[2J\x9b31m\rover\b\x7f\u202etxt.exe\u2066\u2028end"
SHOWN = r"\x1b]52;c;cm0gLXJmIH4=\x07\x1b[2J\x9b31m\rover\x08\x7f\u202etxt.exe\u2066\u2028end"


def commands_in(text: str) -> set[str]:
    """The characters in it that a terminal could obey."""
    return {
        character
        for character in text
        if character not in "\t\n"
        and (
            unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(character) in BIDI
        )
    }


BIDI = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def test_every_control_character_of_unicode_is_shown() -> None:
    everything = "".join(map(chr, (*range(0x3000), *range(0xD800, 0x10000))))
    assert commands_in(shown(everything)) == set()
    assert commands_in(one_line(everything)) == set()
    assert not {"\t", "\n"} & set(one_line(everything))
    assert shown(HOSTILE) == SHOWN


def test_other_characters_are_printed_unchanged() -> None:
    text = "a\tb\n größer → 模型 👩‍🔬 \\x1b"
    assert shown(text) == text
    assert shown("of Windows\r\nlines\r\n") == "of Windows\nlines\n"
    assert one_line("two\nlines\r\n") == r"two\nlines\r\n"


def test_output_is_utf8_in_every_locale(site: Any, start: Any) -> None:
    job = site.submit(priority=90, name="größer → 模型")
    process = start("show", str(job["id"]), FLOPWATCH_URL=site.url, PYTHONIOENCODING="latin-1")
    process.wait()
    assert process.returncode == 0, process.stderr.read()
    assert "größer → 模型" in process.stdout.buffer.read().decode()


@pytest.fixture
def hostile(site: Any, measured: Any, reported: Any) -> int:
    """A failed job that wrote control characters wherever it could, on a worker that has them in its id."""
    job = site.submit(priority=90, labels={"a": "b"})
    worker = replace(site.worker, id=f"worker{HOSTILE}", claims=[])
    claim = worker.claim_job(job["id"])
    worker.report(claim, "log", text=f"{HOSTILE}\n")
    worker.services.queue.report(claim, [NewEvent("progress", {"done": 1, "total": 2, "message": HOSTILE})])
    worker.finish(
        claim,
        "failed",
        error=job_problem("failed", HOSTILE),
        measurements=[
            measured("step_ms", 1.0, model=HOSTILE, context_length=8),
            measured("step_ms", None, HOSTILE, model=f"other{HOSTILE}", context_length=16),
        ],
        units=[UnitRecord(index, f"{index}{HOSTILE}", "failed", reason=HOSTILE) for index in range(2)],
        tables=[reported(f"kernels{HOSTILE}", [[HOSTILE, 1.0]], kernel="string", total_ms="number")],
        validity={"verdict": "suspect", "reasons": [HOSTILE]},
        log=f"{HOSTILE}\n",
    )
    return int(job["id"])


def printed(done: Any) -> str:
    assert done.returncode == 0, done.stderr
    return str(done.stdout + done.stderr)


def test_control_characters_of_a_job_are_escaped(flopwatch: Any, hostile: int) -> None:
    commands = [
        ("logs", str(hostile)),
        ("logs", str(hostile), "--follow"),
        ("show", str(hostile)),
        ("jobs",),
        *(("table", "--job", str(hostile), "--format", form) for form in ("markdown", "csv", "latex", "html")),
        ("table", "--job", str(hostile), "--name", f"kernels{HOSTILE}"),
    ]
    for command in commands:
        assert commands_in(printed(flopwatch(*command))) == set(), command
    assert printed(flopwatch("logs", str(hostile))) == f"{SHOWN}\n"
    assert printed(flopwatch("show", str(hostile))).count(SHOWN) > 5


def test_raw(flopwatch: Any, hostile: int) -> None:
    assert printed(flopwatch("logs", str(hostile), "--raw")) == f"{HOSTILE}\n"
    assert HOSTILE in printed(flopwatch("show", str(hostile), "--raw"))


def test_json_stays_json(site: Any, flopwatch: Any, hostile: int) -> None:
    text = printed(flopwatch("show", str(hostile), "--json"))
    assert commands_in(text) == set()
    assert json.loads(text) == site.job(hostile)
    text = printed(flopwatch("table", "--job", str(hostile), "--format", "json"))
    assert commands_in(text) == set()
    assert json.loads(text) == site.http.get("/tables", params={"job": hostile}).json()


def test_control_of_the_shown_characters(flopwatch: Any, hostile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(characters, "_IN_TEXT", {})
    assert CLIPBOARD in printed(flopwatch("logs", str(hostile)))


def test_a_refusal_is_shown(flopwatch: Any, site: Any) -> None:
    refused = flopwatch("submit", "benchmark", f"{HOSTILE}=1")
    assert refused.returncode != 0
    assert commands_in(refused.stderr) == set()


def test_nothing_prints_past_it() -> None:
    """Every command prints through app.cli.terminal. The server's line with its address holds nobody's text."""
    prints = set()
    for path in Path(terminal.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("typer.echo", "print", "sys.stdout.write"):
                prints.add(path.name)
    assert prints == {"terminal.py"}


def test_the_servers_log_has_a_message_in_one_line() -> None:
    formatter = logs.ConsoleFormatter()
    record = logging.LogRecord("x", logging.WARNING, "here", 1, "job %s", (f"{HOSTILE}\n2026 forged line",), None)
    assert formatter.format(record).endswith(rf"WARNING job {SHOWN}\n2026 forged line")


@pytest.mark.parametrize("on_terminal", [True, False])
def test_long_texts_are_shortened_on_a_terminal_only(on_terminal, monkeypatch, capsys) -> None:
    table = f"| name |\n|:-----|\n| {'x' * 300} |\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: on_terminal)
    terminal.echo_table(table)
    printed = capsys.readouterr().out
    assert ("x" * 300 in printed) is not on_terminal
    assert (printed == table) is not on_terminal
