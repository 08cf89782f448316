import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workers.outcome import EXIT_CODES
from workers.processes import child
from workers.processes.keeper import Request

LEAVES_A_THREAD = """
import atexit, sys, threading, time
from pathlib import Path
from workers.processes import child

def run_request(_request, _messages, **_options):
    threading.Thread(target=time.sleep, args=(3600,)).start()
    atexit.register(print, "said goodbye")
    return 69

child.run_request = run_request
"""


@pytest.mark.parametrize(
    ("start", "printed"),
    [
        ("child.main(int(sys.argv[1]))", b""),
        ("sys.exit(child.main_wrapped(Path(sys.argv[2])))", b"said goodbye\n"),  # profilers write their files then
    ],
)
def test_a_unit_ends_despite_a_running_thread(start: str, printed: bytes, tmp_path: Path) -> None:
    reader, messages = os.pipe()
    request = Request("benchmark", {}, {}, str(tmp_path))
    request.file.write_bytes(request.to_line())
    os.mkfifo(request.fifo)
    fifo = os.open(request.fifo, os.O_RDONLY | os.O_NONBLOCK)
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_A_THREAD + start, str(messages), str(request.file)],
        input=request.to_line(),
        capture_output=True,
        pass_fds=[messages],
        timeout=60,
        check=False,
    )
    for descriptor in (reader, messages, fifo):
        os.close(descriptor)
    assert done.returncode == 69, done.stderr
    assert done.stdout == printed


class Leaving:
    """A runner whose unit raises what no `except Exception` catches."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def run(self, _spec: Any, _unit: Any, _reporter: Any) -> None:
        raise self.error


def outcome_of(error: BaseException, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    """Run a unit that raises the error; its exit code and its last message."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(child, "runner_for", lambda _kind: Leaving(error))
    reader, writer = os.pipe()
    unit = {"title": "unit", "params": {}, "start": "fork", "environment": {}}
    code = child.run_request(Request("benchmark", {"kind": "benchmark"}, unit, str(folder)), writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as messages:
        return code, json.loads(messages.read().splitlines()[-1])


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (SystemExit("no such data set"), "SystemExit: no such data set (sys.exit was called before the work"),
        (SystemExit(0), "SystemExit: 0 (sys.exit was called"),
        (SystemExit(), "SystemExit (sys.exit was called"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (GeneratorExit("of its own"), "GeneratorExit: of its own"),
        (StopIteration(), "StopIteration"),
        (ValueError("word " * 10**6), "ValueError: word word"),
    ],
    ids=repr,
)
def test_a_unit_that_leaves_says_why(tmp_path, monkeypatch, capfd, error, detail) -> None:
    code, message = outcome_of(error, tmp_path, monkeypatch)
    assert code == EXIT_CODES["failed"]
    assert message["type"] == "outcome"
    assert message["code"] == "failed"
    assert message["detail"].startswith(detail)
    assert len(message["detail"]) < 5000
    log = capfd.readouterr().err
    assert re.search(rf"raise self\.error\n(\S+\.)?{type(error).__name__}", log), "the log has the traceback"
