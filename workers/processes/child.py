"""The entry point of a job's process: it runs one unit and reports to the agent in JSON lines.

    {"type": "started"}
    {"type": "progress", "done": 3, "total": 10, "message": "measuring"}
    {"type": "cell", "done": 3, "total": 10, "title": "…", "outcome": "ok", "headline": "1.2 ms", "seconds": 0.8}
    {"type": "cursor", "position": 3}
    {"type": "measurement", "measurement": {…}}
    {"type": "table", "table": {…}}
    {"type": "artifact", "path": …, "name": …, "kind": …, "media_type": …}
    {"type": "environment", "environment": {…}}
    {"type": "validity", "validity": {…}, "case_key": "…" | null, "title": "…"}
    {"type": "outcome", "code": null | "failed" | "unsupported" | …, "detail": "…"}     always the last

A process that ends without an outcome has crashed.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import random
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.importing import without_collector
from workers.jobs import RUNNERS, runner_for
from workers.jobs._base import Collecting, Unit, parse_spec
from workers.measure.table import Column, Scalar, Table
from workers.outcome import EXIT_CODES, RunnerError, failure_code, in_words
from workers.processes.keeper import Request

if TYPE_CHECKING:
    from workers.measure.measurement import Measurement


class PipeReporter:
    """A Reporter that writes JSON lines to a pipe, each with one write so that lines never mix."""

    def __init__(self, descriptor: int, scratch: Path, ceilings: Path) -> None:
        self._descriptor = descriptor
        self._scratch = scratch
        self._ceilings = ceilings
        self._process = os.getpid()
        self._names: set[tuple[str, str]] = set()

    @property
    def scratch(self) -> Path:
        return self._scratch

    @property
    def ceilings(self) -> Path:
        return self._ceilings

    def progress(self, done: int, total: int, message: str) -> None:
        self.send("progress", done=done, total=total, message=message)

    def finished(self, done: int, total: int, *, title: str, outcome: str, headline: str, seconds: float) -> None:
        self.send("cell", done=done, total=total, title=title, outcome=outcome, headline=headline, seconds=seconds)

    def cursor(self, position: int) -> None:
        self.send("cursor", position=position)

    def measure(self, measurement: Measurement) -> None:
        self.send("measurement", measurement=measurement.to_wire())

    def table(self, name: str, columns: Sequence[Column], rows: Sequence[Sequence[Scalar]]) -> None:
        table = Table(name, columns, rows)
        self._use("table", name)
        self.send("table", table=table.to_wire())

    def artifact(self, path: Path, *, name: str, kind: str, media_type: str) -> None:
        self._use("artifact", name)
        self.send("artifact", path=str(path.absolute()), name=name, kind=kind, media_type=media_type)

    def environment(self, fingerprint: Mapping[str, Any]) -> None:
        self.send("environment", environment=dict(fingerprint))

    def validity(self, verdict: Mapping[str, Any], case_key: str | None = None, title: str = "") -> None:
        self.send("validity", validity=dict(verdict), case_key=case_key, title=title)

    def _use(self, what: str, name: str) -> None:
        # The agent checks it again; an error raised here has the runner's own line in its traceback.
        if (what, name) in self._names:
            raise ValueError(f"this unit has reported the {what} {name!r} already: each needs a name of its own")
        self._names.add((what, name))

    def send(self, message_type: str, **content: Any) -> None:
        """Write one message, whole."""
        if os.getpid() != self._process:
            raise RuntimeError("only the unit's own process reports: a fork of it must not")
        text = json.dumps({"type": message_type, **content}, allow_nan=False, ensure_ascii=False)
        # The name of a file that is not UTF-8 has surrogates in it: they become question marks.
        line = text.encode(errors="replace") + b"\n"
        view = memoryview(line)
        while view:
            view = view[os.write(self._descriptor, view) :]


def run_request(request: Request, messages: int, *, new_interpreter: bool = False) -> int:
    """Execute the request's task and report on the descriptor `messages`; returns the exit code."""
    reporter = PipeReporter(messages, Path(request.scratch), Path(request.ceilings))
    # Forks of one parent start with the same state of the random generator.
    random.seed()
    reporter.send("started")
    if new_interpreter:
        _import_torch(request)
    try:
        runner, spec, unit = runner_for(request.kind), parse_spec(request.spec), Unit(**request.unit)
        if request.task == "run":
            runner.run(spec, unit, reporter)
        elif isinstance(runner, Collecting):
            runner.collect(spec, unit, reporter.scratch, reporter)
    except RunnerError as error:
        code, detail = error.code, str(error)
        sys.stderr.write(f"{code}: {detail}\n")
    except BaseException as error:  # noqa: BLE001 - a runner and the user's model in it may raise anything
        code, detail = failure_code(error), in_words(error)
        traceback.print_exc()
    else:
        reporter.send("outcome", code=None, detail="")
        return 0
    reporter.send("outcome", code=code, detail=detail)
    return EXIT_CODES[code]


def main(messages: int) -> int:
    """`python -m workers child`: the request is the one line on standard input."""
    os.set_inheritable(messages, False)
    request = Request.from_line(sys.stdin.buffer.readline())
    with Path(os.devnull).open("rb") as null:
        os.dup2(null.fileno(), 0)
    return _leave(run_request(request, messages, new_interpreter=True))


def main_wrapped(file: Path) -> int:
    """`python -m workers wrapped`: the request is in a file, the messages go to the FIFO that it names."""
    request = Request.from_line(file.read_bytes())
    # The wrapper may have dropped these variables.
    os.environ.update(request.environment)
    return _leave(run_request(request, _open_messages(request), new_interpreter=True))


def _import_torch(request: Request) -> None:
    """Import torch without the garbage collector, as the warm parent does: a sixth of the time of a new interpreter.

    If that fails, the runner's own import fails, too, and gives the reason.
    """
    if request.task == "run" and getattr(RUNNERS.get(request.kind), "needs_torch", True):
        with without_collector(), contextlib.suppress(Exception):
            importlib.import_module("torch")


def _open_messages(request: Request) -> int:
    try:
        file = request.file.with_suffix(".started")
        file.touch(exist_ok=False)
    except FileExistsError:
        # Some profilers run a program again for each group of counters: only its first run reports.
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    # Do not wait for a reader: if the agent is gone, there is none.
    messages = os.open(request.fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(messages, True)
    return messages


def _leave(code: int) -> int:
    """End this process, even if the unit has left threads running."""
    if any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate()):
        # The interpreter would wait for those threads, maybe for ever, so the process exits without its clean-up.
        sys.stderr.write("the unit is done; threads that it left running end here\n")
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
