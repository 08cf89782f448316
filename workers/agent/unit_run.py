"""Drains one unit's process until it ends: passes on messages and output as they arrive, and ends the process when it
must."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from workers.agent.log import CappedLog
from workers.measure.table import TooLarge
from workers.messages import Ended, Message, cut, parse
from workers.outcome import Abandoned, Cancelled, Failed, GivenBack, Outcome, RunnerError, Succeeded, failure_code
from workers.processes.launch import Process, Report

logger = logging.getLogger(__name__)

FLUSH_S = 0.5
"""Seconds between two writes of progress and log lines to the queue; each write costs the measured host CPU time."""
MAX_MESSAGE_BYTES = 256 << 20
READ_BYTES = 1 << 20
WRAPPER_START_S = 300.0
"""Seconds within which a wrapper must start its unit, also on a slow disk with a cold cache."""
RECORD_S = 5.0
"""Seconds for which a worker that ends tries to record how its jobs ended."""
KEEPER_S = 3.0
"""Seconds that a keeper gets to obey a kill; then the agent ends it and its unit's processes itself."""
LAST_WORDS_BYTES = 1000
"""Bytes of a failed wrapper's last output that go into the job's error."""
OUTPUT_BYTES = 64 << 10
"""Bytes that are kept of the head, and as many of the tail, of the output of a wrapper and its unit."""


class StopSignal:
    """The reason why a job must end before its time, and a descriptor that becomes readable when there is one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.reason: Cancelled | GivenBack | Abandoned | None = None
        self.record_until = float("inf")
        """The time, on the clock, at which a worker that ends stops trying to record the outcome; until it ends,
        infinity."""
        self.descriptor, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._guard = threading.Lock()

    @property
    def worker_ends(self) -> bool:
        """Return True if the worker is ending and its grace is over. Then a cancelled job has no more time either."""
        return self.record_until < float("inf")

    def set(self, reason: Cancelled | GivenBack | Abandoned) -> None:
        """Ask the job to end; a lost lease outranks the other reasons. Any thread may call this, again and again."""
        with self._guard:
            worker_ends = isinstance(reason, GivenBack) and not self.worker_ends
            if worker_ends:
                self.record_until = self._clock() + RECORD_S
            outranks = isinstance(reason, Abandoned) and not isinstance(self.reason, Abandoned)
            if self.reason is None or outranks:
                self.reason = reason
            elif not worker_ends:
                return
            os.write(self._write_end, b"s")

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self._write_end)


@dataclass(frozen=True)
class Listener:
    """The functions that take a unit's messages and output."""

    message: Callable[[Message], None]
    """Gets every message but the last."""
    output: Callable[[bytes], None]
    """Gets standard output and error."""
    flush: Callable[[], None]
    """Called every FLUSH_S; may raise TooLarge, which ends the unit."""


class UnitRun:
    """Drains one unit's pipes until both end and its keeper is gone."""

    def __init__(
        self,
        process: Process,
        listener: Listener,
        stop: StopSignal,
        *,
        timeout: Timeout,
        grace_s: float,
        wrapper: Wrapper | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process = process
        self._listener = listener
        self._stop = stop
        self._timeout = timeout
        self._grace_s = grace_s
        self._wrapper = wrapper
        self._clock = clock
        self._pending = bytearray()
        self._ended: Succeeded | Failed | None = None
        self._failure: Failed | None = None
        self._ending: Outcome | None = None
        self._killed = self._left_alone = False
        self._kill_at = self._kill_keeper_at = float("inf")

    @property
    def told(self) -> bool:
        """Return True if the unit itself has told how it ended."""
        return self._ended is not None

    def run(self) -> Outcome:
        """Drain and watch the unit; returns when none of its processes is left, or the kernel does not end them."""
        next_flush = self._clock() + FLUSH_S
        with selectors.DefaultSelector() as selector:
            for descriptor, take in {
                self._process.messages: lambda: self._drain(self._process.messages, self._take_messages),
                self._process.log: lambda: self._drain(self._process.log, self._take_output),
                self._process.control.fileno(): self._process.read_report,
                self._stop.descriptor: lambda: self._drain(self._stop.descriptor, lambda _data: None),
            }.items():
                selector.register(descriptor, selectors.EVENT_READ, take)
            while len(selector.get_map()) > 1 and not self._left_alone:
                ends = (self._kill_at, self._kill_keeper_at) if self._ending is not None else (self._deadline(),)
                until = min(next_flush, *ends)
                for key, _ in selector.select(max(0.0, until - self._clock())):
                    if not key.data():
                        selector.unregister(key.fd)
                self._end_if_due()
                if self._clock() >= next_flush:
                    self._flush()
                    next_flush = self._clock() + FLUSH_S
        return self._outcome(Report(None, None) if self._left_alone else self._process.report())

    @staticmethod
    def _drain(descriptor: int, take: Callable[[bytes], None]) -> bool:
        """Read the bytes that have arrived; returns False at the end of the pipe."""
        data = os.read(descriptor, READ_BYTES)
        if data:
            take(data)
        return bool(data)

    def _end_if_due(self) -> None:
        now = self._clock()
        if self._ending is None:
            timed_out = Failed("timeout", self._timeout.detail) if now >= self._timeout.deadline else None
            not_started = self._wrapper.not_started if self._wrapper and now >= self._wrapper.start_by else None
            self._ending = self._stop.reason or self._failure or timed_out or not_started
            if self._ending is None:
                return
            self._process.terminate()
            # A unit that is cancelled or has timed out gets time to end by itself. A shutdown has waited already.
            self._kill_at = now + self._grace_s
        at_once = self._stop.worker_ends or isinstance(self._stop.reason, Abandoned)
        if not self._killed and (at_once or now >= self._kill_at):
            self._process.kill()
            self._killed, self._kill_at, self._kill_keeper_at = True, float("inf"), now + KEEPER_S
        if now >= self._kill_keeper_at:
            self._left_alone = not self._process.kill_with_keeper()
            if self._left_alone:
                logger.error("its processes do not end, although they were killed, and keep its devices: see dmesg")
            self._kill_keeper_at = float("inf")

    def _deadline(self) -> float:
        return min(self._timeout.deadline, self._wrapper.start_by if self._wrapper else float("inf"))

    def _flush(self) -> None:
        try:
            self._listener.flush()
        except TooLarge as error:
            self._fail(failure_code(error), str(error))

    def _take_output(self, data: bytes) -> None:
        if self._wrapper is not None:
            self._wrapper.output.write(data)
        self._listener.output(data)

    def _take_messages(self, data: bytes) -> None:
        self._pending += data
        if b"\n" not in data:
            if len(self._pending) > MAX_MESSAGE_BYTES:
                self._fail("failed", f"the job's process sent a message of more than {MAX_MESSAGE_BYTES} bytes")
                self._pending.clear()
            return
        *lines, rest = self._pending.split(b"\n")
        self._pending = bytearray(rest)
        for line in lines:
            self._take_message(bytes(line))

    def _take_message(self, line: bytes) -> None:
        try:
            message = parse(line)
            logger.debug("message: %s", message.type)
            if self._wrapper is not None:
                self._wrapper.started = True
            if isinstance(message, Ended):
                self._ended = Succeeded() if message.code is None else Failed(message.code, message.detail)
            else:
                self._listener.message(message)
        except (RunnerError, TooLarge) as error:
            self._fail(failure_code(error), str(error))
        except (ValueError, OSError) as error:
            self._fail("failed", cut(f"the job's process sent a message that makes no sense: {error}"))

    def _fail(self, code: str, detail: str) -> None:
        self._failure = self._failure or Failed(code, detail)

    def _outcome(self, report: Report) -> Outcome:
        done = isinstance(self._ended, Succeeded) and self._failure is None and self._wrapper is None
        if self._stop.reason is not None and not (done and isinstance(self._stop.reason, GivenBack)):
            return self._stop.reason
        if self._failure is not None:
            return self._failure
        if self._wrapper is not None and not isinstance(self._ended, Failed):
            return self._ending or self._wrapper.failure(report, unit_succeeded=self._ended is not None) or Succeeded()
        if isinstance(self._ended, Succeeded):
            return self._ended  # even if the timeout came while it ended
        return self._ending or self._ended or _crash(report)


class Wrapper:
    """Watches whether the command that a unit runs under starts the unit, and whether it succeeds."""

    def __init__(self, command: str, now: float) -> None:
        self._command = command
        self._start_by = now + WRAPPER_START_S
        self.output = CappedLog(OUTPUT_BYTES, OUTPUT_BYTES, live_bytes=0)
        """What the command and its unit print."""
        self.started = False
        """True once the unit has sent a message."""

    @property
    def start_by(self) -> float:
        """Return the time by which the command must have started the unit, on the clock of the run."""
        return float("inf") if self.started else self._start_by

    @property
    def not_started(self) -> Failed:
        """Return the failure of a command that did not start its unit in time."""
        return self._fail(f"did not start the unit within {WRAPPER_START_S:g} s")

    def failure(self, report: Report, *, unit_succeeded: bool) -> Failed | None:
        """Return the failure of a command that ended by itself while its unit has not failed; None if there is none."""
        how = f"ended with exit code {report.exit_code}"
        if report.signal is not None:
            how = f"was killed by {_name_of(report.signal)}"
        elif report.exit_code is None:
            how = "was killed together with its keeper"
        if unit_succeeded:
            done = report.exit_code == 0
            return None if done else self._fail(f"{how}, although the unit had succeeded")
        if not self.started:
            return self._fail(f"{how} and never started the unit")
        detail = f"the unit's process died before its work was done; {self._command!r}, under which it ran, {how}"
        return Failed("crashed", detail, {"signal": None, "exit_code": report.exit_code})

    def _fail(self, what: str) -> Failed:
        words = self.output.tail(LAST_WORDS_BYTES).strip()
        last = f"; its last words: {words}" if words else ", and said nothing"
        return Failed("invalid_environment", f"{self._command!r}, under which the unit is to run, {what}{last}")


@dataclass(frozen=True)
class Timeout:
    """The time at which a job's timeout is over, on the clock of the run."""

    deadline: float
    detail: str
    """The error's detail. Its title says that the job ran longer than its timeout_s, so the detail does not."""

    @classmethod
    def after(cls, timeout_s: float | None, now: float) -> Timeout:
        """Start the timeout; None means that there is none."""
        if timeout_s is None:
            return cls(float("inf"), "")
        return cls(now + timeout_s, f"its time was over after {timeout_s:g} s")

    def later(self, seconds: float) -> Timeout:
        """Return this timeout, over so many seconds later."""
        return replace(self, deadline=self.deadline + seconds)


def _crash(report: Report) -> Failed:
    if report.signal is not None:
        name = _name_of(report.signal)
        hint = " (often by the kernel, out of memory)" if report.signal == signal.SIGKILL else ""
        return Failed("crashed", f"the job's process was killed by {name}{hint}", {"signal": name, "exit_code": None})
    if report.exit_code is not None:
        detail = f"the job's process ended with exit code {report.exit_code} before its work was done"
        return Failed("crashed", detail, {"signal": None, "exit_code": report.exit_code})
    return Failed("crashed", "the job's process and its keeper were killed", {"signal": "SIGKILL", "exit_code": None})


def _name_of(signum: int) -> str:
    """Return a signal's name, as `kill -l` shows it: Python knows only two of the real-time signals."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"SIGRTMIN+{signum - signal.SIGRTMIN}" if signum > signal.SIGRTMIN else f"signal {signum}"
