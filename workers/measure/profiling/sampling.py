"""Samples where a step's thread is, about every millisecond, from a thread beside it: no profiler slows the step down.

Each sample stands for the time since the one before it, so that their times add up to that of the steps. The step's
thread may be in an operator, which lets other threads run Python: then the sample comes at once. While it interprets
Python, it is asked to pause, and does so within microseconds. What holds Python's lock for longer (a sort, a regular
expression) delays the sample, which then counts for more.

On a busy host the sampling thread must not wait for its turn on a processor, since the step's thread goes on meanwhile:
where it may, it asks for real-time priority.

Other threads count by the processor's time that they take: those that wait take none.
"""

import contextlib
import gc
import itertools
import math
import operator
import os
import random
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from kernels.clock import TELLS_PROCESSOR, now_s, processor_ns, sleep
from workers.measure.timing import Observer, run_step

INTERVAL_S = 1e-3
"""Mean time between samples; it varies, so that samples do not keep step with loops."""
SWITCH_INTERVAL_S = 2e-5
"""For how long a thread may interpret Python while the sampling one waits."""
LATE_S = 1e-3
"""A sample that comes later than this is late, and so may stand for time of the lines before."""
MOST_READINGS = 5
"""How often a stack is read until the step's thread has stood still meanwhile."""
Z = 1.96
"""Of the standard normal distribution, 95 % lie within so many standard deviations."""
MAX_DEPTH = 200
"""Most frames of a stack, the innermost ones."""
Frames = tuple[tuple[str, str, int], ...]
"""Functions, by file and qualified name, each with the line that it is in, the outermost first. (Codes themselves are
equal if only their files differ.)"""


@dataclass
class Sample:
    """The time of one stack, in ns over all steps."""

    wall_ns: int = 0
    processor_ns: int = 0
    """The processor's time that the step's thread used in it: none while it waits."""


@dataclass
class Samples:
    """What was sampled in several steps."""

    stacks: dict[tuple[str, Frames], Sample] = field(default_factory=lambda: defaultdict(Sample))
    """By phase and the frames inside of the step, of the step's thread."""
    others_ns: dict[tuple[str, Frames], int] = field(default_factory=lambda: defaultdict(int))
    """The processor's time of other threads, by their names and all of their frames."""
    steps: int = 0
    count: int = 0
    """How many samples there were."""
    squares: int = 0
    """Sum of the squares of the times, in ns, that they stand for."""
    prompt: bool = False
    """Whether the sampling thread went before all others: the system lets privileged processes ask for that. Else, on a
    busy host, it waits until the step's thread has used up its turn."""
    late_ns: int = 0
    """By how much samples came too late, in all."""
    knows_processor: bool = TELLS_PROCESSOR
    """Whether the system tells a thread's time on the processor."""

    def margin(self, share: float) -> float | None:
        """Return by how much a share of the time, from 0 to 1, may be wrong: half of Wilson's 95 % interval of a
        binomial proportion, which is above 0 for shares of 0 and 1, too. None without samples.

        Samples that stand for very different times tell less than their number (Kish's effective sample size).
        """
        if not self.squares:
            return None
        number = sum(sample.wall_ns for sample in self.stacks.values()) ** 2 / self.squares
        spread = share * (1 - share) / number + (Z / (2 * number)) ** 2
        return Z * math.sqrt(spread) / (1 + Z**2 / number)


class Sampler(Observer):
    """An observer of steps that samples them inside of `running`. Its steps run in the thread that makes it."""

    def __init__(self) -> None:
        self.samples = Samples()
        self._thread = threading.get_ident()
        self._now: tuple[int, int, str] | None = None
        """Of the running step: the time of all steps before it, when it began, and its last phase. None between
        steps."""
        self._done_ns = 0
        self._sampled_ns = 0
        """How much of the steps' time the samples so far stand for."""
        self._used_ns: dict[int, int] = {}
        """The processor's time that each thread had used at the last sample."""
        self._random = random.Random(0)  # the step's own random numbers stay what they are
        self._stop = threading.Event()

    def step_begins(self) -> None:
        self._now = (self._done_ns, _now_ns(), "")

    def phase_begins(self, name: str) -> None:
        if self._now is not None:
            self._now = (*self._now[:2], name)

    def step_ends(self) -> None:
        assert self._now is not None
        before, begun, _ = self._now
        self._now = None
        self._done_ns = before + _now_ns() - begun
        self.samples.steps += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        before = sys.getswitchinterval()
        thread = threading.Thread(target=self._sample_all, name="flopwatch-sampler", daemon=True)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
            sys.setswitchinterval(before)

    def _sample_all(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # not allowed, or another system
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
            self.samples.prompt = True
        while not self._stop.is_set():
            due = now_s() + (pause := INTERVAL_S * self._random.uniform(0.5, 1.5))
            sleep(pause)
            late = now_s() - due
            if self._now is not None and late > LATE_S:
                self.samples.late_ns += round(1e9 * late)
            self._sample()

    def _sample(self) -> None:
        now = self._now
        read_at = _now_ns()
        running, mine = self._stacks()
        used = {thread: processor_ns(thread) for thread in running}
        gained = {thread: max(0, ns - self._used_ns.get(thread, ns)) for thread, ns in used.items()}
        self._used_ns = used
        if now is None or self._thread not in running:
            return
        before, begun, phase = now
        reached = before + read_at - begun
        if reached <= self._sampled_ns:
            return
        sample = self.samples.stacks[phase, mine]
        wall = reached - self._sampled_ns
        self._sampled_ns = reached
        sample.wall_ns += wall
        self.samples.count += 1
        self.samples.squares += wall**2
        me = threading.get_ident()
        for thread in running:
            if thread not in (me, self._thread) and gained[thread]:
                self.samples.others_ns[_name_of(thread), _frames_of(_stack(thread))] += min(gained[thread], wall)
        sample.processor_ns += min(gained[self._thread], wall)

    def _stacks(self) -> tuple[list[int], Frames]:
        """Return all threads, and the step's frames, of one moment.

        While this thread reads them it may have to pause, too. Then the step goes on, and its outer frames are further
        on than the inner ones: they are read again.
        """
        mine: Frames = ()
        for _ in range(MOST_READINGS):
            stack = _stack(self._thread)
            at = stack[0].f_lasti if stack else None
            mine = _frames_of(stack, until=run_step.__code__)
            frame = sys._current_frames().get(self._thread)
            if not stack or (frame is stack[0] and frame.f_lasti == at):
                break
        return list(sys._current_frames()), mine


def _stack(thread: int) -> list[FrameType]:
    """Return a thread's frames, the innermost first; none of a thread that has ended.

    One call of C reads them all, so that this thread keeps Python's lock: CPython 3.11 crashes, or returns a tuple, if
    it is asked for the caller of a frame whose thread has continued meanwhile. No garbage is collected in
    between either: its callbacks run Python code, which may give the lock away.
    """
    frames: list[Any] = []
    collects = gc.isenabled()
    gc.disable()
    innermost = itertools.islice(map(operator.itemgetter(thread), iter(sys._current_frames, None)), 1)
    try:
        with contextlib.suppress(AttributeError, KeyError):  # no caller of the outermost one; no such thread
            frames.extend(
                itertools.accumulate(itertools.chain(innermost, itertools.repeat("f_back", MAX_DEPTH)), getattr)
            )
    finally:
        if collects:
            gc.enable()
    return [frame for frame in frames if frame is not None]


def _now_ns() -> int:
    return round(1e9 * now_s())


def _name_of(thread: int) -> str:
    return next((one.name for one in threading.enumerate() if one.ident == thread), "unnamed")


def _frames_of(stack: Sequence[FrameType], until: CodeType | None = None) -> Frames:
    """Return the innermost of a stack's frames, down to that of `until`, which is left out."""
    inside = itertools.takewhile(lambda frame: frame.f_code is not until, stack[:MAX_DEPTH])
    places = [(frame.f_code, frame.f_lineno) for frame in inside]
    return tuple((code.co_filename, code.co_qualname, line or code.co_firstlineno) for code, line in reversed(places))
