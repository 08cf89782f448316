"""The lines of the user's own code: how often a step runs each, and the host's and device's time that it takes.

A line stands for its whole statement, by the number of the statement's first line. Its own time includes the libraries
that it calls; its total, also the user's own functions that it calls, once however deep they recurse.
"""

import ast
import bisect
import functools
import re
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from kernels.clock import unix_ns
from workers.measure.profiling.recording import HostEvent, Recording
from workers.measure.profiling.sampling import Samples
from workers.measure.timing import Observer

INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of packages, which are nobody's own even inside of the user's folder."""
COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
"""Names of functions that are part of a statement; later versions of Python have none for most of them."""
RESUMED = re.compile(r"torch_dynamo_resume_in_(\w+?)_at_\d+")
"""The name of the rest of a function."""
MAX_EVENTS = 1_000_000
"""Most lines whose runs are counted in a step; a second's worth."""
ATTENTION = "scaled_dot_product"
"""Part of the names of torch's operators that compute attention."""
MAX_CODE = 100
"""Most characters of a line's text."""
OUTSIDE = "outside of your code"
"""The function of the row with the time that is no line's."""


class Place(NamedTuple):
    """A statement: the file as users name it, the number of its first line, and the function."""

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


Stack = Sequence[Place | None]
"""Open lines, the outermost first; or None alone."""


@dataclass
class Use:
    """What a line takes in one step; times in ms. Without a GPU, the device's are None."""

    place: Place | None
    """None: the time outside of the user's own code."""
    code: str = ""
    self_ms: float = 0.0
    margin_ms: float | None = None
    """By how much `self_ms` may be wrong, since it is from samples (95 %)."""
    total_ms: float = 0.0
    python_ms: float | None = None
    """Of `self_ms`, the processor's time in which Python itself ran, and no operator, about; None: the system does not
    tell, or there were too many runs to follow."""
    device_self_ms: float | None = None
    device_total_ms: float | None = None
    calls: int | None = None
    """None: there were too many to count."""
    operators: int | None = None
    """Calls of operators by the line, without those that operators call; None: likewise."""


@dataclass
class Launched:
    """What one line had the operators and the device do in one step, itself and with the functions that it calls."""

    operators: int = 0
    operators_ns: int = 0
    typical_ns: float = 0.0
    """Half of `operators_ns` is of operators that take no longer; the few longest, which others on the host may have
    interrupted, do not count."""
    double_ns: int = 0
    """Of `operators_ns`, the time of operators whose inputs are in float64."""
    attention_ns: int = 0
    """Likewise, of attention in one operator."""
    wall_ns: int = 0
    """Of the line itself. Tracing has slowed down Python in it, and the profiler its operators."""
    device_self_ns: int = 0
    device_total_ns: int = 0


class Loop(NamedTuple):
    """A loop, or a statement with a comprehension: its first line, the first and last of what is repeated (of loops in
    loops, by the innermost), and whether a round needs what the one before has computed."""

    first: int
    body: int
    last: int
    carries: bool


@dataclass
class _File:
    shown: str
    first_lines: Mapping[int, int]
    """The first line of the statement that a line belongs to."""
    withs: Set[int]
    """The first lines of `with` statements, which run again at their ends."""
    loops: Mapping[int, Sequence[Loop]]
    """The loops that a statement is in, the outermost first, by its first line."""
    text: Sequence[str]


@dataclass
class OwnCode:
    """Tells the user's own code from all other. `name_of`: returns a file's name as users know it, by the name that its
    code has; None: it is not the user's own. `text_of`: returns the lines of such a file."""

    name_of: Callable[[str], str | None]
    text_of: Callable[[str], Sequence[str]]
    _files: dict[str, _File | None] = field(default_factory=dict)
    _places: dict[tuple[str, str, int], Place | None] = field(default_factory=dict)

    def is_own(self, name: str) -> bool:
        """Return True if the user wrote the code of this file."""
        return self._file(name) is not None

    def place(self, name: str, function: str, line: int) -> Place | None:
        """Return the statement that a line of a function, by its qualified name, in a file belongs to; None if the file
        is not the user's own."""
        if (key := (name, function, line)) not in self._places:
            file = self._file(name)
            self._places[key] = (
                None if file is None else Place(file.shown, file.first_lines.get(line, line), readable(function))
            )
        return self._places[key]

    def text(self, place: Place) -> str:
        file = self._file_of(place)
        known = file is not None and 0 < place.line <= len(file.text)
        return file.text[place.line - 1].strip()[:MAX_CODE] if file is not None and known else ""

    def calls(self, place: Place, runs: int) -> int:
        """Return how often a statement ran, by the runs of its line."""
        file = self._file_of(place)
        return (runs + 1) // 2 if file is not None and place.line in file.withs else runs

    def loops(self, place: Place) -> Sequence[Loop]:
        """Return the loops of its function that a statement is in, the outermost first."""
        file = self._file_of(place)
        return () if file is None else file.loops.get(place.line, ())

    def _file(self, name: str) -> _File | None:
        if name not in self._files:
            shown = None if INSTALLED & set(Path(name).parts) else self.name_of(name)
            text = [] if shown is None else self.text_of(name)
            self._files[name] = None if shown is None else _File(shown, *first_lines(text), loops(text), text)
        return self._files[name]

    def _file_of(self, place: Place) -> _File | None:
        return next((file for file in self._files.values() if file is not None and file.shown == place.file), None)


def readable(function: str) -> str:
    """Return a function's qualified name for people; comprehensions, and what torch.compile makes of the rest of a
    function behind a break of its graph, have that of the function itself."""
    names = RESUMED.sub(r"\1", function).split(".")
    while len(names) > 1 and names[-1] in COMPREHENSIONS:
        names = names[:-2] if names[-2] == "<locals>" else names[:-1]
    return ".".join(name for name in names if name != "<locals>")


def first_lines(text: Sequence[str]) -> tuple[dict[int, int], set[int]]:
    """Return the first line of the statement of each line, and the first lines of all `with` statements.

    The statement of `if`, `for`, `def`, … is its head alone.
    """
    try:
        tree = ast.parse("".join(text))
    except (SyntaxError, ValueError):  # another version's, or changed since it was loaded
        return {}, set()
    first: dict[int, int] = {}
    withs: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt):
            continue
        if isinstance(node, ast.With | ast.AsyncWith):
            withs.add(node.lineno)
        body = getattr(node, "body", None) or getattr(node, "cases", None)
        last = node.end_lineno or node.lineno
        if isinstance(body, list):
            last = min(last, max(node.lineno, getattr(body[0], "lineno", node.lineno) - 1))
        first |= dict.fromkeys(range(node.lineno, last + 1), node.lineno)
    return first, withs


def loops(text: Sequence[str]) -> dict[int, list[Loop]]:
    """Return the loops that each statement of a function is in, the outermost first, by its first line."""
    try:
        tree = ast.parse("".join(text))
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, list[Loop]] = {}

    def visit(node: ast.AST, outer: list[Loop]) -> None:
        for child in ast.iter_child_nodes(node):
            inside = outer
            if isinstance(child, ast.For | ast.AsyncFor | ast.While):
                repeated = child.body[0]
                while isinstance(repeated, ast.For | ast.AsyncFor | ast.While):
                    repeated = repeated.body[0]
                inside = [
                    *outer,
                    Loop(child.lineno, repeated.lineno, child.end_lineno or child.lineno, _carries(child)),
                ]
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inside = []
            elif isinstance(child, ast.stmt) and not hasattr(child, "body") and _comprehends(child):
                inside = [*outer, Loop(child.lineno, child.lineno, child.end_lineno or child.lineno, False)]
            if isinstance(child, ast.stmt) and inside:
                found[child.lineno] = inside
            visit(child, inside)

    visit(tree, [])
    return found


def _comprehends(statement: ast.stmt) -> bool:
    return any(isinstance(part, ast.comprehension) for part in ast.walk(statement))


def _carries(loop: ast.For | ast.AsyncFor | ast.While) -> bool:
    """Return True if a round reads a variable before it sets it anew, other than to add to it, or calls a method
    `step`, as an optimizer's."""
    if any(isinstance(one, ast.Call) and getattr(one.func, "attr", "") == "step" for one in ast.walk(loop)):
        return True
    is_set = set() if isinstance(loop, ast.While) else {ast.unparse(one) for one in _variables([loop.target])}
    read: set[str] = set()
    statements = (one for part in loop.body for one in ast.walk(part) if isinstance(one, ast.stmt))
    for statement in sorted(statements, key=lambda one: (one.lineno, one.col_offset)):
        parts = [one for one in ast.iter_child_nodes(statement) if isinstance(one, ast.expr | ast.withitem)]
        inside = [one for part in parts for one in ast.walk(part)]
        targets = [one.target for one in inside if isinstance(one, ast.comprehension)]
        arguments = [one for one in inside if isinstance(one, ast.arg)]
        local = {ast.unparse(one) for one in (*arguments, *_variables(targets))}
        own = [one for one in _variables(parts) if ast.unparse(one) not in local]
        stored = {ast.unparse(one) for one in own if isinstance(one.ctx, ast.Store)}
        value = getattr(statement, "value", None)
        while isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Sub):
            own = [one for one in own if one not in (value.left, value.right) or ast.unparse(one) not in stored]
            value = value.left
        scales = isinstance(statement, ast.AugAssign) and not isinstance(statement.op, ast.Add | ast.Sub)
        read |= {ast.unparse(one) for one in own if scales or isinstance(one.ctx, ast.Load)} - is_set
        is_set |= stored
    return bool(read & is_set)


def _variables(parts: Sequence[ast.AST]) -> list[ast.Name | ast.Attribute]:
    return [one for part in parts for one in ast.walk(part) if isinstance(one, ast.Name | ast.Attribute)]


def typical(times_ns: Sequence[int]) -> float:
    """Return the time up to which operators take half of the time of all, without the longest of every 64."""
    kept = sorted(times_ns)[: len(times_ns) - len(times_ns) // 64]
    return kept[bisect.bisect_left(list(accumulate(kept)), sum(kept) / 2)] if kept else 0.0


class LineTrace(Observer):
    """An observer of one step that follows the user's own code in the step's thread, line by line.

    It counts the runs of each line, and keeps which lines were open at what time, by which `launched` finds the lines
    of a profiler's events. It slows the step down, so it takes no times itself.
    """

    def __init__(self, own: OwnCode) -> None:
        self._own = own
        self.calls = Counter[Place]()
        self.rounds = Counter[Place]()
        """How often each line jumped back within itself: the rounds of a loop or comprehension that is one line."""
        self.entries = Counter[tuple[str, str]]()
        """How often each of the user's own functions began, by file and name."""
        self.ran = set[Place]()
        """The lines that ran, and those with which a function began or went on."""
        self.called = set[CodeType]()
        """The functions in Python that ran, whoever wrote them."""
        self.complete = True
        """False if there were more than MAX_EVENTS runs of lines: those after them are unknown."""
        self._events = 0
        self._open: list[Place | None] = []
        self._times = array("q")
        """When the open lines changed, by the Unix clock; first before, then after the profiler's range of the step
        has begun."""
        self._stacks: list[tuple[Place | None, ...]] = []
        self._before: Any = None

    def step_begins(self) -> None:
        self._note()

    def phase_begins(self, name: str) -> None:
        if len(self._times) == 1:  # the step's first
            self._note()
            self._before = sys.gettrace()
            sys.settrace(self._enter)

    def step_ends(self) -> None:
        sys.settrace(self._before)
        self._open.clear()
        self._note()

    def _enter(self, frame: FrameType, event: str, _argument: object) -> Any:
        """Follow a function that begins, or goes on after a `yield`, if it is the user's own."""
        code = frame.f_code
        self.called.add(code)
        if event != "call" or not self._own.is_own(code.co_filename):
            return None
        counts = code.co_name not in COMPREHENSIONS
        # At its beginning a function is in its own line; a generator goes on in the line that yielded.
        begins = frame.f_lineno == code.co_firstlineno
        head = self._own.place(code.co_filename, code.co_qualname, frame.f_lineno)
        last = None if begins else head
        line = 0
        if head is not None:
            self.ran.add(head)
        if head is not None and not counts:
            self.rounds[head] += 1
        elif head is not None and begins:
            self.entries[head.file, head.function] += 1
        self._open.append(last)
        self._note()

        def follow(frame: FrameType, event: str, _argument: object) -> Any:
            nonlocal last, line
            if event == "line":
                self._events += 1
                if self._events > MAX_EVENTS:
                    self.complete = False
                    sys.settrace(None)
                    return None
                place = self._own.place(code.co_filename, code.co_qualname, frame.f_lineno)
                if place != last:
                    last = self._open[-1] = place
                    if place is not None:
                        self.ran.add(place)
                        self.calls[place] += counts
                    self._note()
                elif place is not None and frame.f_lineno <= line:
                    self.rounds[place] += 1
                line = frame.f_lineno
            elif event == "return":
                self._open.pop()
                self._note()
            return follow

        return follow

    def _note(self) -> None:
        self._times.append(unix_ns())
        self._stacks.append(tuple(self._open))

    def launched(
        self, recording: Recording, begun_ns: int, lines: Callable[[Stack], Stack] = lambda stack: stack[-1:]
    ) -> dict[Place | None, Launched]:
        """Return the operators and the device's work of the step by the line that launched them. `begun_ns`: when the
        step began by the profiler's clock. `lines`: tells for which of the open lines something counts."""
        stack_at, shift = self.stacks(begun_ns), self._shift(begun_ns)

        def moved(event: HostEvent) -> bool:
            """Return True if own lines ran in it, as in an autograd.Function, named by its class: they take its
            time."""
            may = event.kind == "backward" or "::" not in event.name
            return may and self._index(event.begin_ns - shift) != self._index(event.end_ns - shift)

        lines = functools.cache(lines)
        found: dict[Place | None, Launched] = defaultdict(Launched)
        for number, (begin, end) in enumerate(pairwise(self._times)):
            for place in lines(tuple(stack_of(self._stacks[number]))):
                found[place].wall_ns += end - begin
        times_ns: dict[Place | None, list[int]] = defaultdict(list)
        for event in outermost(recording.host, begun_ns, lambda one: not moved(one)):
            for place in lines(tuple(stack_at(event.begin_ns))):
                line = found[place]
                line.operators += event.kind == "operator"
                line.operators_ns += event.end_ns - event.begin_ns
                times_ns[place].append(event.end_ns - event.begin_ns)
        for place, each in times_ns.items():
            found[place].typical_ns = typical(each)
        for event in outermost(recording.host, begun_ns, lambda one: one.double or ATTENTION in one.name):
            for place in lines(tuple(stack_at(event.begin_ns))):
                if event.double:
                    found[place].double_ns += event.end_ns - event.begin_ns
                else:
                    found[place].attention_ns += event.end_ns - event.begin_ns
        launches = {event.id: event.begin_ns for event in recording.host if event.kind == "launch"}
        for work in recording.device:
            stack = stack_at(launches.get(work.launch, work.begin_ns))
            taken = work.end_ns - work.begin_ns
            for place in lines(tuple(stack)):
                found[place].device_self_ns += taken
            for place in dict.fromkeys(stack):
                found[place].device_total_ns += taken
        return found

    def stacks(self, begun_ns: int) -> Callable[[int], list[Place | None]]:
        """Return a function that gives the user's own lines, the outermost first, that were open at a moment of the
        profiler's clock; or None alone, where none was. `begun_ns`: when the step began by the profiler's clock."""
        shift = self._shift(begun_ns)

        def stack_at(time_ns: int) -> list[Place | None]:
            index = self._index(time_ns - shift)
            return stack_of(self._stacks[index] if index >= 0 else ())

        return stack_at

    def _shift(self, begun_ns: int) -> int:
        """Return what the profiler's clock is ahead of ours."""
        before, after = self._times[:2]
        return 0 if before - MAX_SHIFT_NS <= begun_ns <= after + MAX_SHIFT_NS else begun_ns - before

    def _index(self, time_ns: int) -> int:
        return bisect.bisect_right(self._times, time_ns) - 1


def stack_of(places: Iterable[Place | None]) -> list[Place | None]:
    """Return the user's own lines among these, or None alone."""
    return [place for place in places if place is not None] or [None]


MAX_SHIFT_NS = 50_000
"""A profiler's clock that differs by less from the Unix time is the same clock."""


def outermost(
    events: Sequence[HostEvent], begun_ns: int, which: Callable[[HostEvent], bool] = lambda _event: True
) -> Iterator[HostEvent]:
    """Yield the operators and calls of the driver that no other one called, of the step's thread and of autograd's.
    `events`: in the order in which they began. `begun_ns`: when the step began: the range that began then tells its
    thread. `which`: tells which events count: of these, the ones that no other one of them called."""
    thread = next((event.thread for event in events if event.kind == "range" and event.begin_ns == begun_ns), None)
    of_autograd = {event.thread for event in events if event.kind == "backward"}
    until: dict[int, int] = defaultdict(int)
    for event in events:
        if event.kind in ("range", "python") or event.begin_ns < begun_ns or not which(event):
            continue
        outer = event.begin_ns >= until[event.thread]
        if outer:
            until[event.thread] = event.end_ns
        if outer and (event.thread == thread or event.kind == "backward" or event.thread in of_autograd):
            yield event


def uses(
    samples: Samples,
    own: OwnCode,
    step_ms: float,
    trace: LineTrace,
    launched: Mapping[Place | None, Launched],
    *,
    on_gpu: bool,
) -> list[Use]:
    """Return what each line takes in one step, those that take the most time themselves first; lines that take too
    little to be seen are left out.

    The own times of all rows add up to `step_ms`; the last row is that of all other code, if it ran.

    Args:
        samples: Of steps without a profiler.
        step_ms: A step's time without a profiler, of which the samples give the lines' shares.
        trace: Of one step.
        launched: What the lines launched in that step, as `LineTrace.launched` returns it.
    """
    wall, processor, total = Counter[Place | None](), Counter[Place | None](), Counter[Place | None]()
    for (_phase, frames), sample in samples.stacks.items():
        places = stack_of(own.place(*frame) for frame in frames)
        wall[places[-1]] += sample.wall_ns
        processor[places[-1]] += sample.processor_ns
        total.update(dict.fromkeys(places, sample.wall_ns))
    scale = step_ms / (wall.total() or 1)
    found = []
    took = [place for place, did in launched.items() if did.device_total_ns]
    for place in dict.fromkeys([*total, *took]):
        use = Use(place, "" if place is None else own.text(place), scale * wall[place], total_ms=scale * total[place])
        if (margin := samples.margin(use.self_ms / step_ms)) is not None:
            use.margin_ms = margin * step_ms
        did = launched.get(place, Launched())
        if trace.complete:
            use.calls, use.operators = None if place is None else own.calls(place, trace.calls[place]), did.operators
            if samples.knows_processor:
                python = 1 - min(1.0, did.operators_ns / did.wall_ns) if did.wall_ns else 1.0
                use.python_ms = scale * processor[place] * python
            if on_gpu:
                use.device_self_ms, use.device_total_ms = 1e-6 * did.device_self_ns, 1e-6 * did.device_total_ns
        found.append(use)
    return sorted(found, key=lambda use: (use.place is None, -max(use.self_ms, use.device_self_ms or 0), -use.total_ms))
