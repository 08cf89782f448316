"""Lines of the user's own code: planted ones, whose times, calls and operators are known."""

import functools
import linecache
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kernels.ranges import record_ranges
from workers.measure.profiling import lines
from workers.measure.profiling.lines import Launched, LineTrace, OwnCode, Place, Use, first_lines, loops, typical, uses
from workers.measure.profiling.recording import DeviceEvent, HostEvent, Recording, record
from workers.measure.profiling.sampling import Sampler
from workers.measure.ranges import Ranges
from workers.measure.timing import run_step

SOURCE = """\
from library import rest, spin, twice


def decorated(function):
    return twice(function)


@decorated
def short(ms):
    spin(ms)


def recursive(depth):
    if depth == 0:
        spin(4)
    else:
        recursive(depth - 1)


def batches():
    while True:
        spin(2)
        yield 1


SOURCE_OF_BATCHES = batches()


def step():
    spin(
        8
        - 2,
    )
    for index in range(3):
        spin(1)
    recursive(5)
    short(1.5)
    next(SOURCE_OF_BATCHES)
    with open(__file__):
        total = sum([len(str(spin(0.5))) for _ in range(4)])
    action = lambda: spin(2.5)
    action()
    rest(4.25)
"""
PLANTED = {
    "spin(": 6,
    "spin(1)": 1,
    "spin(4)": 4,
    "spin(ms)": 1.5,
    "spin(2)": 2,
    "total = sum([len(str(spin(0.5))) for _ in range(4)])": 0.5,
    "action = lambda: spin(2.5)": 2.5,
    "rest(4.25)": 4.25,
}
"""The lines that take time, by their code, with the argument that they give to the library."""
STEP_MS = 27.0


class Library:
    """Functions that take time, and note how much: others may take the processor away."""

    def __init__(self) -> None:
        self.spent, self.used = Counter[float](), Counter[float]()

    def spin(self, ms: float) -> None:
        """Let Python itself run for so long."""
        begin, used = time.perf_counter(), time.thread_time()
        while time.perf_counter() < begin + 1e-3 * ms:
            pass
        self.spent[ms] += time.perf_counter() - begin
        self.used[ms] += time.thread_time() - used

    def rest(self, ms: float) -> None:
        """Wait for so long."""
        begin = time.perf_counter()
        time.sleep(1e-3 * ms)
        self.spent[ms] += time.perf_counter() - begin


def twice(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def call(*arguments: Any) -> None:
        function(*arguments)
        function(*arguments)

    return call


class Script:
    """A script of the user's own, whose step calls a library."""

    def __init__(self, folder: Path, source: str) -> None:
        self.library = Library()
        self.spent: Mapping[float, float] = {}
        self.used: Mapping[float, float] = {}
        """The seconds that the library's functions took in the sampled steps, by their arguments; and those that they
        had the processor."""
        self.file = folder / "train.py"
        self.file.write_text(source)
        self.own = OwnCode(lambda name: "train.py" if name == str(self.file) else None, linecache.getlines)
        source = source.replace("from library import rest, spin, twice", "")
        library = {"rest": self.library.rest, "spin": self.library.spin, "twice": twice}
        self.names: dict[str, Any] = {"__file__": str(self.file), **library}
        exec(compile(source, str(self.file), "exec"), self.names)

    def run(self, *observers: Any) -> None:
        run_step({"forward": self.names["step"]}, observers)

    def followed(self) -> tuple[LineTrace, Recording]:
        """A step whose lines are followed, and its recording."""
        trace, ranges = LineTrace(self.own), Ranges()
        ranges.counting = True
        with record_ranges():
            return trace, record(lambda: self.run(trace, ranges), on_gpu=False).recording

    def uses(self, steps: int = 1, step_ms: float = STEP_MS) -> list[Use]:
        """What the lines take, by samples of so many steps, and by one that is followed."""
        sampler = Sampler()
        self.library.spent.clear()
        self.library.used.clear()
        with sampler.running():
            for _ in range(steps):
                self.run(sampler)
        self.spent, self.used = dict(self.library.spent), dict(self.library.used)
        trace, recording = self.followed()
        launched = trace.launched(recording, begin_of(recording))
        return uses(sampler.samples, self.own, step_ms, trace, launched, on_gpu=False)


def begin_of(recording: Recording) -> int:
    return next(event.begin_ns for event in recording.host if event.name == "step_1")


@pytest.fixture
def planted(tmp_path: Path) -> Script:
    return Script(tmp_path, SOURCE)


def by_code(found: list[Use]) -> dict[str, Use]:
    return {use.code: use for use in reversed(found)}


def test_planted_lines_have_their_shares_of_the_step(planted: Script) -> None:
    found = planted.uses(steps=20)
    assert sum(use.self_ms for use in found) == pytest.approx(STEP_MS)
    assert [use.self_ms for use in found[:-1]] == sorted((use.self_ms for use in found[:-1]), reverse=True)
    for code, argument in PLANTED.items():
        share = planted.spent[argument] / sum(planted.spent.values())
        # 540 samples or more: a share of 25 % is known to 2 %.
        assert by_code(found)[code].self_ms / STEP_MS == pytest.approx(share, abs=0.05), code


def test_a_total_counts_what_a_line_calls_once_however_deep_it_recurses(planted: Script) -> None:
    found = planted.uses(steps=4)
    places = {(use.place.function, use.code): use for use in found if use.place is not None}
    caller = places["step", "recursive(5)"]
    inside = [use.self_ms for (function, _), use in places.items() if function == "recursive"]
    assert caller.total_ms == pytest.approx(caller.self_ms + sum(inside))
    assert places["recursive", "spin(4)"].self_ms > 0.5 * sum(inside), "and its lines take little else"
    assert places["recursive", "recursive(depth - 1)"].total_ms <= sum(inside) * (1 + 1e-9)
    assert all(use.self_ms <= use.total_ms * (1 + 1e-9) <= STEP_MS * (1 + 1e-6) for use in found)


def test_each_statement_is_counted_once_for_each_of_its_runs(planted: Script) -> None:
    trace, _ = planted.followed()
    places = [place for place in trace.calls if place is not None]
    calls = {planted.own.text(place): planted.own.calls(place, trace.calls[place]) for place in places}
    assert calls["spin("] == calls["total = sum([len(str(spin(0.5))) for _ in range(4)])"] == 1
    assert (calls["spin(1)"], calls["spin(ms)"], calls["spin(4)"]) == (3, 2, 1)
    assert calls["recursive(depth - 1)"] == 5
    assert {place.function for place in places} >= {"step", "recursive", "short", "batches"}


@pytest.mark.parametrize(
    ("line", "rounds"),
    [
        ("[abs(n) for n in range(300)]", 300),
        ("sum(abs(n) for n in range(300))", 300),
        ("for n in range(300): abs(n)", 300),
        ("max(\n        1,\n        2,\n    )", 1),
    ],
)
def test_the_rounds_of_a_loop_that_is_one_statement_are_counted(tmp_path: Path, line: str, rounds: int) -> None:
    script = Script(tmp_path, f"def step():\n    {line}\n")
    trace = LineTrace(script.own)
    script.run(trace)
    assert max(trace.rounds.values(), default=0) == pytest.approx(rounds, abs=2)


def test_python_itself_is_told_from_waits(planted: Script) -> None:
    found, whole = by_code(planted.uses(steps=30)), sum(planted.spent.values())
    assert found["rest(4.25)"].python_ms < 0.03 * STEP_MS  # type: ignore[operator]
    for code in ("spin(", "spin(4)"):
        used = planted.used[PLANTED[code]] / whole
        assert found[code].python_ms / STEP_MS == pytest.approx(used, abs=0.05), code  # type: ignore[operator]
        assert used > 0


OPERATORS = """\
import torch

x = torch.ones(4, 4, requires_grad=True)


def square(y):
    return (
        y * y
    )


def step():
    for index in range(5):
        square(x).exp()
    loss = (x * x + x - 1).sum()
    loss.backward()
"""


def launched_by(script: Script) -> dict[int, Launched]:
    """Return what each line of a step launched."""
    script.run()
    trace, recording = script.followed()
    return {place.line: did for place, did in trace.launched(recording, begin_of(recording)).items() if place}


def test_operators_belong_to_the_line_that_calls_them(tmp_path: Path) -> None:
    launched = launched_by(Script(tmp_path, OPERATORS))
    # `square` multiplies, its caller takes the exponential, the loss has four operators.
    assert [launched[line].operators for line in (7, 14, 15)] == [5, 5, 4]
    assert launched[16].operators_ns > 0
    assert all(did.operators_ns <= did.wall_ns for did in launched.values())


def with_kernels(recording: Recording) -> Recording:
    """A recording in which each multiplication has launched a kernel of 3 µs, which runs long after the step."""
    host, device = list(recording.host), []
    end = max(event.end_ns for event in host) + 10_000_000
    for number, event in enumerate(event for event in recording.host if event.name == "aten::mul"):
        host.append(
            HostEvent("cudaLaunchKernel", "launch", event.thread, event.begin_ns, event.end_ns, 10_000 + number)
        )
        device.append(DeviceEvent("k", "kernel", 7, end, end + 3_000, 10_000 + number, event.id))
    return Recording(sorted(host, key=lambda event: (event.begin_ns, -event.end_ns)), device)


def test_device_time_belongs_to_the_line_that_launched_the_work(tmp_path: Path) -> None:
    script = Script(tmp_path, OPERATORS)
    sampler, (trace, recording) = Sampler(), script.followed()
    recording = with_kernels(recording)
    launched = trace.launched(recording, begin_of(recording))
    found = {
        use.place.line: use for use in uses(sampler.samples, script.own, 1.0, trace, launched, on_gpu=True) if use.place
    }
    assert found[7].device_self_ms == found[7].device_total_ms == pytest.approx(5 * 3e-3)
    assert (found[14].device_self_ms, found[14].device_total_ms) == (0, pytest.approx(5 * 3e-3))
    assert found[15].device_self_ms == pytest.approx(3e-3)
    assert found[16].device_self_ms > 0  # type: ignore[operator]  # gradients of products are products


def test_too_many_runs_of_lines_are_not_counted(planted: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_EVENTS", 4)
    found = planted.uses()
    assert {use.calls for use in found} == {use.operators for use in found} == {None}
    assert sum(use.self_ms for use in found) == pytest.approx(STEP_MS)


def test_packages_are_nobodys_own() -> None:
    own = OwnCode(lambda name: "x.py" if name.startswith("/project") else None, lambda name: [])
    files = ["/project/x.py", "/project/.venv/lib/site-packages/torch.py"]
    assert [own.is_own(file) for file in files] == [True, False]
    assert own.place(files[0], "f", 1) == Place("x.py", 1, "f")
    assert own.place(files[1], "f", 1) is None


def test_the_statement_of_each_line() -> None:
    text = ["@dec\n", "def f(\n", "    x,\n", "):\n", "    if (\n", "        x\n", "    ):\n", "        g(x,\n"]
    text += ["          x)\n", "    with x: pass\n", "    match x:\n", "        case 1:\n", "            pass\n"]
    first, withs = first_lines(text)
    assert [first.get(line) for line in range(2, 14)] == [2, 2, 2, 5, 5, 5, 8, 8, 10, 11, None, 13]
    assert withs == {10}
    assert first_lines(["this is\n", "no Python\n"]) == ({}, set())


def test_the_loops_that_a_line_is_in_and_whether_their_rounds_need_each_other() -> None:
    text = """
for x in xs:
    loss = loss + f(x); h = 0
    for t in x:
        h = g(t, h)
        hs.append(h)
    def later():
        return 1
while i < n:
    i, self.h = i + 1, g(self.h)
for x in xs:
    y = [one * two for one, (two, _) in f(x, lambda y: y)]
    x = g(x); total -= y
z = stack([f(x)
           for x in xs])
for x in xs:
    for t in x:
        f(t)
for x in xs:
    f(x)
    optimizer.step()
"""
    found = loops(text.splitlines(keepends=True))
    outer, inner = (2, 3, 8, False), (4, 5, 6, True)
    assert found[3] == [outer]
    assert found[4] == found[6] == [outer, inner]
    assert 8 not in found, "it runs later"
    assert found[10] == [(9, 10, 10, True)]
    assert found[13] == [(11, 12, 13, False)]
    assert found[14] == [(14, 14, 15, False)]
    assert found[20] == [(19, 20, 21, True)]
    assert found[18] == [(16, 18, 18, False), (17, 18, 18, False)]
    assert loops(["no Python\n"]) == {}


def test_small_operators_are_those_that_take_half_of_the_time_and_one_that_was_interrupted_does_not_count() -> None:
    assert typical([5] * 127 + [10_000]) == 5
    assert typical([5] * 100 + [1000] * 12) == 1000, "views around a few products"
    assert typical([]) == 0
