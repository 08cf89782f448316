"""The entry point of a job's process: it runs one unit and reports to the agent (see workers/messages.py)."""

import atexit
import contextlib
import importlib
import os
import random
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

from app.importing import without_collector
from workers import uploaded
from workers.jobs import RUNNERS, runner_for
from workers.jobs._base import Collecting, Unit, parse_spec
from workers.jobs._ranks import serve_node
from workers.messages import Ended, Message, Started, to_line
from workers.outcome import EXIT_CODES, RunnerError, ending_forks, failure_code
from workers.processes import last_words, probe
from workers.processes.keeper import READY, Request
from workers.reporter import Reporter
from workers.working_directory import enter_empty

PRELOADED = ("torch", "torch._dynamo")
"""What a new interpreter imports before anything is measured; optimizers import the second."""


class MessagePipe:
    """Writes messages to a pipe, each with one write, so that lines never mix."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._process = os.getpid()

    def send(self, message: Message) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("only the unit's own process reports: a fork of it must not")
        view = memoryview(to_line(message))
        while view:
            view = view[os.write(self.descriptor, view) :]


def run_request(request: Request, messages: int, *, new_interpreter: bool = False) -> int:
    """Execute the request's task and report on the descriptor `messages`; returns the exit code."""
    send = MessagePipe(messages).send
    reporter = Reporter(send, scratch=Path(request.scratch), ceilings=Path(request.ceilings))
    # Forks of one parent start with the same state of the random generator.
    random.seed()
    send(Started())
    if new_interpreter:
        _import_torch(request)
    try:
        with ending_forks():
            enter_empty(reporter.scratch)
            sys.argv = sys.argv[:1]  # the user's code may parse it
            if request.task == "node":
                serve_node(int(request.unit["params"]["node"]), reporter.scratch)
            if request.task == "probe":
                probe.run()
                send(Ended(None, ""))
                return 0
            runner, spec, unit = runner_for(request.kind), parse_spec(request.spec), Unit(**request.unit)
            if request.task == "run":
                runner.run(spec, unit, reporter)
            elif isinstance(runner, Collecting):
                runner.collect(spec, unit, reporter.scratch, reporter)
    except RunnerError as error:
        code, detail = error.code, str(error)
        sys.stderr.write(f"{code}: {detail}\n")
    except BaseException as error:  # noqa: BLE001 - a runner and the user's model in it may raise anything
        code, detail = failure_code(error), uploaded.describe(error)
        traceback.print_exception(error)
    else:
        send(Ended(None, ""))
        return 0
    send(Ended(code, detail))
    return EXIT_CODES[code]


def main(messages: int, gate: int | None = None) -> NoReturn:
    """`python -m workers child`: the request is the one line on standard input. With a gate, the unit waits there after
    its imports (see `keeper`).

    The process ends without the interpreter's clean-up, as forked units do: the keeper ends what is left. Torch's own
    clean-up waits for seconds for the processes that compile.
    """
    os.set_inheritable(messages, False)
    request = Request.from_line(sys.stdin.buffer.readline())
    with Path(os.devnull).open("rb") as null:
        os.dup2(null.fileno(), 0)
    last_words.keep(Path(request.scratch))
    if gate is not None:
        _import_torch(request)
        with socket.socket(fileno=gate) as opening:
            opening.sendall(READY)
            opening.recv(1)  # also returns when the agent is gone, and the keeper ends this process
    _exit(run_request(request, messages, new_interpreter=True))


def main_wrapped(file: Path) -> int:
    """`python -m workers wrapped`: the request is in a file, the messages go to the FIFO that it names."""
    request = Request.from_line(file.read_bytes())
    # The wrapper may have dropped these variables.
    os.environ.update(request.environment)
    last_words.keep(Path(request.scratch))
    return leave(run_request(request, _open_messages(request), new_interpreter=True))


def _import_torch(request: Request) -> None:
    """Import torch without the garbage collector, as the warm parent does: it takes a sixth of the time.

    If that fails, the runner's own import fails, too, and gives the reason.
    """
    if request.task == "run" and getattr(RUNNERS.get(request.kind), "needs_torch", True):
        with without_collector(), contextlib.suppress(Exception):
            for name in PRELOADED:
                importlib.import_module(name)


def _open_messages(request: Request) -> int:
    # Do not wait for a reader: if the agent is gone, there is none.
    messages = os.open(request.fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(messages, True)
    return messages


def leave(code: int) -> int:
    """End this process after its exit handlers, which profilers need, even if the unit has left threads running."""
    if any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate()):
        # The interpreter would wait for those threads, maybe for ever.
        sys.stderr.write("the unit is done; threads that it left running end here\n")
        atexit._run_exitfuncs()
        _exit(code)
    return code


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
