"""The first unit of a diagnosis: times the step as it is, profiles it, and says what its time is lost to."""

from __future__ import annotations

import bisect
import functools
import inspect
import itertools
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch.utils.checkpoint import checkpoint

from app.specs._training import TrainingSpec
from app.specs.benchmark import BenchmarkSpec
from app.specs.diagnosis import RARE, SMALL, WORK, WRITTEN, DiagnosisSpec
from workers.changes import CHANGES
from workers.changes._attention import OPERATOR as ATTENTION_OPERATOR
from workers.changes._base import Change, Done, Elsewhere, Look
from workers.jobs import _reference
from workers.jobs._base import Unit
from workers.jobs._profiled import phases_of, profile_steps
from workers.jobs._training import building, measuring, metrics
from workers.jobs._training.building import Training
from workers.jobs._values import Values
from workers.jobs.diagnosis import turn
from workers.jobs.profile import own_lines
from workers.measure import environment
from workers.measure.compilation import compilation
from workers.measure.errors import NotMeasured
from workers.measure.profiling import classes, idle
from workers.measure.profiling.attribution import Attribution, Interval
from workers.measure.profiling.idle import (
    COLLECTS,
    INPUT_PHASES,
    RUNNING,
    WORKING,
    Stretch,
    collections_named,
    host_reads,
    in_a_row,
    inside,
    loading,
    reads_named,
    stretches,
    synchronisations,
    unprofiled,
    without_waiting_ms,
)
from workers.measure.profiling.lines import Launched, LineTrace, Loop, OwnCode, Place, Stack, stack_of
from workers.measure.profiling.products import Product
from workers.measure.profiling.recording import FLOATS, AnotherProfiler, HostEvent, Profile, Recording
from workers.measure.profiling.sampling import Samples
from workers.measure.spans import merged
from workers.measure.table import Column, Scalar
from workers.measure.validity import MAX_THREADS, Monitor
from workers.reporter import Reporter
from workers.uploaded import BrokenCode

SEEN, CANDIDATES, GAPS = "seen", "candidates", "gaps"
SEEN_COLUMNS = Column.parse("cause, where, lost_ms: number ms")
CANDIDATE_COLUMNS = Column.parse("change, cause, why_not, removes: boolean, done: boolean, how, way, fields")
"""`fields`: those of our model's spec that change, as JSON."""
GAP_COLUMNS = Column.parse("begin_ms: number ms, gap_ms: number ms, cause, next, where")
MOST_GAPS = 10
MOMENTS = 50
"""Moments between two calls of a traced step that tell which lines the host's own work is that of."""
PROFILED = 3
"""Steps of a GPU that are profiled; of a CPU one, which samples tell apart."""
WARMUP = 10
"""Steps of a GPU before those that are looked at: turns decide, and to wait until a GPU is steady takes long."""
MEASURED_S = 4.0
"""How long the measured steps take, at least a few of them: what slow steps take, turns tell."""
LEAST = 0.01
"""A smaller share of the step is no cause: nobody gains from it."""
LARGE = 0.05
"""What takes more comes before the step's work in the answer."""
OF_WORK = 0.5
"""About the most of its share that a change of the step's own work takes away; what waits may go whole. Those that may
bring most are tried first: time may not suffice for all."""
TOLD_BREAKS = 3
"""Most lines in which torch.compile breaks graphs that are named with launches."""
MANY = 100
"""A line that a step runs as often is a loop that somebody should know of."""
LOOP = 32
"""Rounds of a loop in one call of its function: so many small operators are worth one large one."""
REPEATED = "times a step"
"""The end of a note on such a line."""
CALLS = 4.0
"""How many times longer than small operators the host may take between them and only call them."""
SMALL_NS, SMALL_ON_GPU_NS = 20_000, 5_000
"""An operator that takes less under the profiler, or on average less of a GPU, takes hardly longer than to call it."""
WAITS, IDLE = "it waits", 0.2
"""The note on a line that has less of the processor, as a share of what all others together have."""
LONG = 20
"""By how much the longest garbage collection takes longer than one that is told apart from it: a busy host may lengthen
each."""
OPTIMIZER, INPUT, SYNCHRONISATION = "optimizer", "input", "synchronisation"
ANSWERS = "answers"
"""Work of the device for the numbers that the host reads."""
OF_LIBRARIES = (("utils/data/", INPUT), ("optim/", OPTIMIZER), ("distributed/", "communication"))
"""Folders of torch in a stack, with the cause that they stand for."""
COMPUTES = ("nn/modules/", "autograd/__init__.py")
"""Files that a step of the optimizer runs only where it is given a closure."""
NO_UPDATES = ("optim/lr_scheduler.py", "optim/swa_utils.py")
"""Files there that stand for none: a step without its optimizer has their work, too."""
OF_HOST = ("_dynamo/convert_frame.py", "_inductor/compile_fx.py", "_tensor_str.py")
"""Files of torch that compile, or write tensors as text: the operators that they run are none of the step's work."""
COMPILES = "torch.compile compiles here"
"""The note on a line in which the traced step does."""
BETWEEN_NODES_NS = 100_000
"""Two nodes of a backward pass follow each other within this time."""
DOUBLE = f"{FLOATS['double']}["
"""In the shapes of an operator with an input in float64."""
PRODUCT, SOFTMAX = "aten::bmm", "aten::_softmax"
"""Operators of attention that is written out."""
OWN_RANKS = Elsewhere("a step of your own that runs on several ranks is not changed from outside")
Lost = defaultdict[tuple[str, str], float]
"""ms by (cause, where)."""
Shares = Mapping[Place | None, Mapping[Place | None, float]]
"""Of lines, by a line with a backward pass."""


def run(spec: DiagnosisSpec, unit: Unit, report: Reporter) -> None:
    """Time and profile the step. Running out of memory, and a wrong part of the model, are results."""
    step: BenchmarkSpec = spec.step  # type: ignore[assignment]
    device, build_model = building.prepare(step)
    report.environment(environment.fingerprint(device))
    pacing = turn.pacing(step, device)
    turn.like_a_script(step)
    if device.type == "cuda" and step.warmup_steps is None:
        step = step.model_copy(update={"warmup_steps": WARMUP})
    monitor, case = Monitor(device), spec.case()
    lost: Lost = defaultdict(float)
    candidates: list[list[Scalar]] = []
    gaps: list[list[Scalar]] = []
    kept = busy_percent = profiled_ms = beside = None
    with building.known_errors():
        try:
            parts = _reference.check_parts(step, device)
            training = building.build(step, device, build_model)
            own = training.own
            noted = own.updates() if own is not None and own.optimizers else nullcontext(list[tuple[bool, ...]]())
            with turn.as_it_is(training), noted as updates:
                values, checks = measuring.measure(training, monitor, report, pacing=pacing, most_s=MEASURED_S)
            checks += parts + metrics.add_rates(values, training, report.ceilings)
        except NotMeasured as error:
            monitor.watch(last=True)
            values, checks = _reference.not_measured(metrics.metrics_of(step, pacing), error)
        else:
            try:
                named = own.updates_named() if own is not None else nullcontext()
                with turn.as_it_is(training), named, reads_named(), collections_named() as collected:
                    lost, gaps, places, busy_percent, profiled_ms, beside = _lost(training, values, collected, report)
            except AnotherProfiler as error:
                raise BrokenCode(str(error)) from error
            candidates = _candidates(
                spec, training, places, lost, collections=len(collected), uneven=len({*updates}) > 1
            )
            kept = turn.kept_kernels(places.profile)
    report.validity(monitor.conclude(checks), case.key, unit.title)
    values.report(case, environment.device_key(device), report)
    rows: list[list[Scalar]] = [[*of, ms] for of, ms in sorted(lost.items(), key=lambda one: -one[1]) if ms > 0]
    report.table(SEEN, SEEN_COLUMNS, rows)
    if samples := values.samples("step_ms", "step"):
        known = {"kept": kept, "busy_percent": busy_percent, "profiled_ms": profiled_ms, "others": beside}
        row = turn.row_of("look", (), samples, device, **known)  # type: ignore[arg-type]
        report.table(turn.TURNS, turn.COLUMNS, [row])
    report.table(CANDIDATES, CANDIDATE_COLUMNS, candidates)
    report.table(GAPS, GAP_COLUMNS, gaps)


def _lost(
    training: Training, values: Values, collected: Sequence[int], report: Reporter
) -> tuple[Lost, list[list[Scalar]], Places, float | None, float | None, str | None]:
    """Return what the median step is lost to, its largest gaps, the places of one profiled step, the percentage of it
    in which a GPU works, and of a CPU's what a step took that was sampled, and what other threads did meanwhile.

    `collected` has the ns of each garbage collection so far.
    """
    step_ms = statistics.median(values.samples("step_ms", "step") or ())
    own = _own_code(training.spec)
    trace = LineTrace(own)
    traced, _, _ = profile_steps(training, 1, report, warm=True, trace=trace, isolated=False)
    places = Places(own, trace, traced)
    if training.device.type == "cuda":
        plain, _, _ = profile_steps(training, PROFILED, report, shapes=False, isolated=False)
        lost, gaps, busy_percent = _on_gpu(training, plain, places, step_ms)
        return lost, gaps, places, busy_percent, None, None
    before = len(collected)
    samples, _ = own_lines.sample(training, report)
    lost = _on_cpu(training, samples, places, step_ms)
    wall_ns = sum(sample.wall_ns for sample in samples.stacks.values()) or 1
    where = _collecting(places, collected[before:], samples.steps)
    _collected(lost, step_ms * sum(collected[before:]) / wall_ns, where)
    return lost, [], places, None, 1e-6 * wall_ns / max(1, samples.steps), beside(samples, places.own)


def beside(samples: Samples, own: OwnCode) -> str | None:
    """Return that other threads of the code compute beside the step, and which one most; None if they hardly do."""
    share = sum(samples.others_ns.values()) / (sum(sample.wall_ns for sample in samples.stacks.values()) or 1)
    if share <= MAX_THREADS:
        return None
    of_places: Counter[str] = Counter()
    for (thread, frames), ns in samples.others_ns.items():
        place = stack_of(own.place(*frame) for frame in frames)[-1]
        of_places[f"thread {thread}" if place is None else place.text] += ns
    most = max(of_places, key=lambda one: of_places[one])
    return f"other threads compute for {100 * share:.0f} % of it, most in {most}"


def _own_code(spec: TrainingSpec) -> OwnCode:
    """Return what tells the code whose lines are shown: the user's own, or for our model's step that model's."""
    own = own_lines.own_code(spec)
    if own is not None:
        return own
    import linecache

    from workers import model

    folder = model.__path__[0]
    return OwnCode(lambda file: file.removeprefix(folder).lstrip("/") if file.startswith(folder) else None,
                   linecache.getlines)  # fmt: skip


class Places:
    """Tells where in the user's code the time of a traced step went. `own`: tells the user's own code. `trace`:
    followed a step. `profile`: of that step."""

    def __init__(self, own: OwnCode, trace: LineTrace, profile: Profile) -> None:
        # The user's code may name a range so, too, inside of ours.
        begun = min(event.begin_ns for event in profile.recording.host if event.name == "step_1")
        self.own, self.profile, self._trace = own, profile, trace
        self._stack_at = trace.stacks(begun)
        self.launched: Mapping[Place | None, Launched] = trace.launched(profile.recording, begun)
        self._idle = {place for place, did in self.launched.items() if not did.operators}
        self._loops: Mapping[Place, Loop] = {}
        found: dict[Place, Loop] = {}

        def first_lines(stack: Stack) -> list[Place]:
            found.update(of_it := dict(self._of_loops(stack)))
            return list(of_it)

        of_loops, self._loops = trace.launched(profile.recording, begun, first_lines), found
        self._loops = {place: loop for place, loop in found.items() if self._are_small(place, of_loops[place])}
        if self._loops:
            self.launched = trace.launched(profile.recording, begun, lambda stack: [self.unit(stack)])

    def _of_loops(self, stack: Stack) -> Iterator[tuple[Place, Loop]]:
        """Yield the first lines of the loops of many rounds that a stack is in, the outermost first. To one whose
        rounds need each other belong its own lines only: what they call may be a layer."""
        for place in filter(None, stack):
            for loop in self.own.loops(place):
                if self.runs(place._replace(line=loop.body)) >= LOOP and (place == stack[-1] or not loop.carries):
                    yield place._replace(line=loop.first), loop

    def unit(self, stack: Stack) -> Place | None:
        """Return the line to which the time of a stack counts: that of the outermost loop over small operators or, if
        each of its rounds is a loop of many, of that: tensors of other rounds may have other shapes. If it is in none,
        or its line runs no operator, the innermost one."""
        if stack[-1] in self._idle:
            return stack[-1]
        small = [first for first, _ in self._of_loops(stack) if first in self._loops]
        at = next(iter(small), stack[-1])
        for outer, inner in itertools.pairwise(small):
            of_outer = max(self._trace.calls[outer], self._trace.rounds[outer])  # also where its body is the inner one
            if self.runs(inner) < LOOP * of_outer:
                break
            at = inner
        return at

    def loop(self, place: Place) -> Loop:
        """Return the loop over small operators that begins in a line; else one of this line alone."""
        return self._loops.get(place, Loop(place.line, place.line, place.line, carries=False))

    def rare(self, stack: Stack) -> Place | None:
        """Return the outermost line of a stack that the traced step did not run, as one that evaluates or saves in one
        of many steps; None if it ran all, or it is not known."""
        if not self._trace.complete:
            return None
        return next((one for one in stack if one is not None and one not in self._trace.ran), None)

    def runs(self, place: Place) -> int:
        """Return how often a step runs a line, or the rounds of a loop in it; 0 if it is not known."""
        place = place._replace(line=self.loop(place).body)
        if not self._trace.complete:
            return 0
        return max(self.own.calls(place, self._trace.calls[place]), self._trace.rounds[place])

    def is_small(self, place: Place) -> bool:
        """Return True if a line is a loop over operators that take hardly longer than it takes to call them."""
        return place in self._loops or (place in self.launched and self._are_small(place, self.launched[place]))

    def _are_small(self, place: Place, did: Launched) -> bool:
        runs = self.runs(place)
        entries = self._trace.entries[place.file, place.function] or runs
        if min(did.operators, runs) < (LOOP if runs >= LOOP * entries else MANY):
            return False
        if self.profile.recording.device:
            return did.device_self_ns < SMALL_ON_GPU_NS * did.operators
        return did.typical_ns < SMALL_NS

    def calls(self, function: Callable[..., object]) -> bool:
        """Return True if the traced step called a function in Python, or may have where it was not followed."""
        return not self._trace.complete or self.surely_calls(function)

    def surely_calls(self, function: Callable[..., object]) -> bool:
        """Return True if the traced step is known to have called a function in Python."""
        return inspect.unwrap(function).__code__ in self._trace.called

    def at(self, time_ns: int) -> Place | None:
        """Return the line to which a moment of the traced step counts, by the profiler's clock."""
        return self.unit(self._stack_at(time_ns))

    def due(self, time_ns: int) -> Place | None:
        """Return the line that a moment is due to: in a backward pass, that of the forward pass which made the node
        that runs then, or next."""
        begins, nodes = self._nodes
        index = bisect.bisect_left(begins, time_ns - 1)
        for node, made_ns in nodes[max(0, index - 1) : index + 1]:
            if node.begin_ns - BETWEEN_NODES_NS <= time_ns <= node.end_ns:
                return self.at(made_ns)
        return self.at(time_ns)

    @functools.cached_property
    def _makers(self) -> Mapping[tuple[int, int], HostEvent]:
        """The operators of the forward pass by the thread and the number of the node that they made."""
        events = self.profile.recording.host
        return {(one.thread, one.sequence): one for one in events if one.kind == "operator" and one.sequence >= 0}

    @functools.cached_property
    def _nodes(self) -> tuple[list[int], list[tuple[HostEvent, int]]]:
        """The nodes of the backward pass by their beginnings, each with the moment in which it was made."""
        found = [
            (one, maker.begin_ns)
            for one in self.profile.recording.host
            if one.kind == "backward" and (maker := self._makers.get((one.forward_thread, one.sequence))) is not None
        ]
        return [one.begin_ns for one, _ in found], found

    @functools.cached_property
    def collecting(self) -> str:
        """Where garbage was collected in the traced step, for people."""
        found: Counter[Place] = Counter()
        for one in self.profile.recording.host:
            if one.name == COLLECTS and (at := self.at(one.begin_ns)) is not None:
                found[at] += one.end_ns - one.begin_ns
        place = max(found, key=lambda one: found[one], default=None)
        return COLLECTS if place is None else f"{place.text}: {COLLECTS}"

    @functools.cached_property
    def _written(self) -> Mapping[tuple[str, str], tuple[int, int]]:
        """The lines of each function, by its file and name, that write attention out: from the product before a softmax
        to the one after it, whose first factor is as large as what the softmax returns."""
        found: dict[tuple[str, str], list[tuple[HostEvent, int]]] = defaultdict(list)
        events = self.profile.recording.host
        torchs = inside(merged((one.begin_ns, one.end_ns) for one in events if one.name == ATTENTION_OPERATOR))
        for one in events:
            if one.name not in (PRODUCT, SOFTMAX) or torchs(one.begin_ns):
                continue
            if (place := self._stack_at(one.begin_ns)[-1]) is not None:
                found[place.file, place.function].append((one, place.line))
        return {
            of: (min(line for _, line in calls), max(line for _, line in calls))
            for of, calls in found.items()
            if [one.name for one, _ in calls[:3]] == [PRODUCT, SOFTMAX, PRODUCT]
            if _weighs(calls[0][0].product, calls[2][0].product)
        }

    def writes_attention(self, place: Place | None) -> bool:
        """Return True if a line is a part of attention that is written out."""
        first, last = (1, 0) if place is None else self._written.get((place.file, place.function), (1, 0))
        return place is not None and first <= place.line <= last

    @functools.cached_property
    def breaks(self) -> Set[tuple[str, int]]:
        """The files and lines in which torch.compile has broken graphs."""
        utils = sys.modules.get("torch._dynamo.utils")
        reasons: Sequence[Any] = getattr(utils, "graph_break_reasons", ())
        frames = [one.user_stack[-1] for one in reasons if one.user_stack]
        places = [self.own.place(frame.filename, frame.name, frame.lineno or 0) for frame in frames]
        return {(place.file, place.line) for place in places if place is not None}

    @functools.cached_property
    def compiling(self) -> Set[Place | None]:
        """The lines in which torch.compile compiled something in the traced step."""
        return {self.at(one.begin_ns) for one in self.profile.recording.host if one.name.endswith(idle.COMPILING)}

    @functools.cached_property
    def mallocs(self) -> int:
        """How often the traced step asked the driver for memory, as after torch.cuda.empty_cache()."""
        return sum(one.name == "cudaMalloc" for one in self.profile.recording.host)

    @functools.cached_property
    def made(self) -> tuple[Shares, Shares]:
        """The shares of the forward pass's lines in the operators that lines with a backward pass ran, and in the time
        between the nodes of these passes: a node is due to the line that made it, and so is the time before it."""
        found: dict[Place | None, Counter[Place | None]] = defaultdict(Counter)
        between: dict[Place | None, Counter[Place | None]] = defaultdict(Counter)
        until: dict[int, int] = defaultdict(int)
        for one in self.profile.recording.host:
            if one.kind != "backward" or one.begin_ns < until[one.thread]:
                continue
            maker = self._makers.get((one.forward_thread, one.sequence)) if one.sequence >= 0 else None
            here = self.at(one.begin_ns)
            made_in = here if maker is None else self.at(maker.begin_ns)
            found[here][made_in] += one.end_ns - one.begin_ns
            if (ns := one.begin_ns - until[one.thread]) <= BETWEEN_NODES_NS:
                between[here][made_in] += ns
            until[one.thread] = one.end_ns
        return _shares(found), _shares(between)


def _shares(found: Mapping[Place | None, Counter[Place | None]]) -> Shares:
    return {here: {place: ns / of.total() for place, ns in of.items()} for here, of in found.items() if of.total()}


def _weighs(scores: Product | None, values: Product | None) -> bool:
    """Return True if the first factor of a product has the shape of another product's result; or it is not known."""
    if scores is None or values is None:
        return True
    return (scores.batch, scores.rows, scores.columns) == (values.batch, values.rows, values.inner)


def _where(
    lost: Mapping[tuple[str, Place | None], float], places: Places, waiting: Set[Place | None] = frozenset()
) -> Lost:
    """Join the lines of each function, those of loops and those that wait apart: "train.py:51-55 SlowAdam.step (line
    52: 90 % of it, 17260 times a step)"."""
    found: Lost = defaultdict(float)
    functions: dict[tuple[str, str, str, Sequence[str], bool], dict[Place, float]] = defaultdict(dict)

    def notes(cause: str, place: Place | None) -> list[str]:
        if cause in ("host", *WORK) and places.rare([place]):
            return [RARE]
        if place is not None and cause in WORK and places.is_small(place):
            return [SMALL]
        if cause == "attention" and places.writes_attention(place):
            return [WRITTEN]
        if cause in ("host", "launches") and place is not None and place in places.compiling:
            return [COMPILES]
        return [WAITS] if cause in ("host", INPUT) and place in waiting and place is not None else []

    def key(cause: str, place: Place) -> tuple[str, str, str, Sequence[str], bool]:
        return cause, place.file, place.function, tuple(notes(cause, place)), places.runs(place) >= MANY

    lost = _with_calls(lost, places)
    for (cause, place), ms in lost.items():
        if place is not None and ms >= LEAST * sum(lost.values()) / 10:
            functions[key(cause, place)][place] = ms
    for (cause, place), ms in lost.items():
        where = "" if place is None else _named(functions[key(cause, place)], place, places)
        where = _noted(where, notes(cause, place))
        if cause == "launches" and "graph break" not in where:
            where = _noted(where, [f"graph breaks at {one}" for one in _shown(places.breaks)])
        if cause == "launches" and place is not None and places.mallocs:
            where = _noted(where, [f"{places.mallocs} calls of cudaMalloc a step"])
        found[cause, where] += ms
    return found


def _with_calls(
    lost: Mapping[tuple[str, Place | None], float], places: Places
) -> Mapping[tuple[str, Place | None], float]:
    """Join all of loops over small operators, with the host's time in them, and all of a line that not every step
    runs: each has one cure."""
    found: dict[tuple[str, Place | None], float] = defaultdict(float)
    rare = {place for _, place in lost if places.rare([place])}
    of_work: dict[Place | None, float] = defaultdict(float)
    for (cause, place), ms in lost.items():
        of_work[place] += ms * (cause in WORK)
    for (cause, place), ms in sorted(lost.items(), key=lambda one: -one[1]):
        of_rare = next((of for of, at in found if at == place and of in ("host", *WORK)), cause)
        is_call = cause == "attention" or (cause == "host" and ms < CALLS * of_work[place])
        calls = is_call and place is not None and places.is_small(place)
        found["kernels" if calls else of_rare if place in rare and cause in ("host", *WORK) else cause, place] += ms
    return found


def _shown(breaks: Set[tuple[str, int]]) -> list[str]:
    return [", ".join(f"{file}:{line}" for file, line in sorted(breaks)[:TOLD_BREAKS])] if breaks else []


def _named(ms: Mapping[Place, float], place: Place, places: Places) -> str:
    lines = ms or {place: 1.0}
    first, last = min(one.line for one in lines), max(places.loop(one).last for one in lines)
    span = str(first) if first == last else f"{first}-{last}"
    most = max(lines, key=lambda one: lines[one])
    runs = places.runs(most)
    share = [f"{100 * lines[most] / sum(lines.values()):.0f} % of it"] if len(lines) > 1 else []
    known = [*share, *([f"{runs} {REPEATED}"] if runs >= MANY or places.is_small(most) else [])]
    notes = [f"line {places.loop(most).body}: {', '.join(known)}"] if known else []
    broken = any((one.file, one.line) in places.breaks for one in (*lines, place))
    return _noted(f"{place.file}:{span} {place.function}", [*notes, *(["graph break"] if broken else [])])


def _noted(where: str, notes: Sequence[str]) -> str:
    """Return a place with notes in brackets: "train.py:4 step (line 4: 200 times a step; graph break)"."""
    if not notes:
        return where
    name, _, before = where.removesuffix(")").partition(" (")
    return f"{name} ({'; '.join([*filter(None, [before]), *notes])})".lstrip()


def _on_cpu(training: Training, samples: Samples, places: Places, step_ms: float) -> Lost:
    """Return what samples of unprofiled steps say. A line's time outside of loaders and optimizers is that of its
    operators, in so far as these ran in it under the profiler, and else the host's. Operators of a backward pass count
    for the lines of the forward pass that made them."""
    lost: dict[tuple[str, Place | None], float] = defaultdict(float)
    own = training.own
    optimizers = {f"{type(one).__qualname__}.step" for one in own.optimizers} if own is not None else set()
    steps = [type(one).step for one in own.plain_optimizers()] if own is not None else []
    optimizers |= {inspect.unwrap(one).__code__.co_qualname for one in steps}
    wall: Counter[tuple[str, Place | None, Place | None]] = Counter()
    ran_ns: Counter[Place | None] = Counter()
    of_line: dict[Place | None, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for (phase, frames), sample in samples.stacks.items():
        stack, cause = stack_of(places.own.place(*frame) for frame in frames), _cause_of(phase, frames, optimizers)
        ran = stack[-1] if cause else places.unit(stack)
        at = ran if cause else places.rare(stack) or ran
        wall[cause, ran, at] += sample.wall_ns
        ran_ns[ran] += sample.wall_ns
        of_line[at] = of_line[at][0] + sample.wall_ns, of_line[at][1] + sample.processor_ns
    # Others on a busy host keep all lines from the processor.
    all_taken, all_used = (sum(each) for each in zip(*of_line.values(), strict=True)) if of_line else (0, 0)
    waiting = {
        at for at, (taken, used) in of_line.items() if used * (all_taken - taken) < IDLE * taken * (all_used - used)
    }
    scale = step_ms / (wall.total() or 1)
    for (cause, ran, at), ns in wall.items():
        if cause:
            lost[cause, at] += scale * ns
            continue
        for part, share in _parts(places.launched.get(ran), 1e6 * scale * ran_ns[ran]).items():
            if part == "kernels" and places.writes_attention(at):
                part = "attention"
            of_operators, between = places.made
            made = (between if part == "host" else of_operators).get(at, {at: 1.0})
            for maker, of_maker in made.items():
                same = part if part == "host" or maker == at else _same_part(part, maker, places)
                lost[same, maker] += scale * ns * share * of_maker
    return _where(lost, places, waiting)


def _same_part(part: str, maker: Place | None, places: Places) -> str:
    """Return what a line's backward pass is lost to: what most of its forward pass is."""
    did = places.launched.get(maker)
    if did is not None and 2 * did.double_ns > did.operators_ns:
        return "precision"
    if places.writes_attention(maker):
        return "attention"
    if did is None or not did.operators_ns:
        return part
    return "attention" if 2 * did.attention_ns > did.operators_ns else "kernels"


def _cause_of(phase: str, frames: Sequence[tuple[str, str, int]], optimizers: set[str]) -> str:
    """Return the cause that a stack itself tells; "" if it is the code's own work."""
    if phase in INPUT_PHASES:
        return INPUT
    if any(file == f"{_torch_folder()}/{of_host}" for file, *_ in frames for of_host in OF_HOST):
        return "host"
    own = any(file.startswith(f"{_torch_folder()}/{folder}") for file, *_ in frames for folder in COMPUTES)
    for file, function, _ in frames:
        if function in optimizers and not own:
            return OPTIMIZER
        for folder, cause in OF_LIBRARIES:
            is_of = file.startswith(f"{_torch_folder()}/{folder}") and not file.endswith(NO_UPDATES)
            if is_of and not (own and cause == OPTIMIZER):
                return cause
    return OPTIMIZER if phase == OPTIMIZER and not own else ""


@functools.cache
def _torch_folder() -> str:
    return str(Path(torch.__file__).parent)


def _collecting(places: Places, taken: Sequence[int], steps: int) -> str:
    """Return where garbage was collected. `taken`: the ns of each collection in so many steps. If the long ones that
    took most of it are fewer, the share of a step is one of chance."""
    long = [ns for ns in taken if LONG * ns > max(taken)]
    is_rare = len(long) < steps and 2 * sum(long) > sum(taken)
    return _noted(places.collecting, [RARE] if is_rare else [])


def _collected(lost: Lost, ms: float, where: str) -> None:
    """Name the garbage collector's part of the host's time, so much in a step; a sample has it in the line in which it
    began to run or, where it came late, in one after it, whatever that does."""
    of_host = {key: time for key, time in lost.items() if key[0] == "host"}
    taken = of_host if ms <= sum(of_host.values()) else dict(lost)
    ms = min(ms, total := sum(taken.values()))
    if ms <= 0:
        return
    for key, time in taken.items():
        lost[key] = time * (1 - ms / total)
    lost["host", where] += ms


def _parts(did: Launched | None, line_ns: float) -> dict[str, float]:
    """Return the shares of a line's time by cause.

    line_ns: Its time in a step that nothing slows down. The profiler does so between operators, and other processes in
        them: the larger share of operators is the likelier one.
    """
    if did is None or not did.wall_ns:
        return {"host": 1.0}
    operators = min(1.0, did.operators_ns / min(did.wall_ns, line_ns))
    precision = operators * min(1.0, did.double_ns / (did.operators_ns or 1))
    attention = min(operators - precision, operators * did.attention_ns / (did.operators_ns or 1))
    kernels = operators - precision - attention
    return {"precision": precision, "attention": attention, "kernels": kernels, "host": 1 - operators}


def _on_gpu(
    training: Training, plain: Profile, places: Places, step_ms: float
) -> tuple[Lost, list[list[Scalar]], float]:
    """Return what the device's timeline says, its largest gaps, and the percentage of the step in which it works. The
    profiler lengthens gaps, so idle time is scaled to that of unprofiled steps."""
    phases = phases_of(training.spec, training.phases)
    windows = Attribution(plain.recording, phases, on_gpu=True).windows
    of_steps = in_a_row(plain.recording, windows)
    times, busy_percent = _times(plain.recording, windows, of_steps, step_ms)
    traced = Attribution(places.profile.recording, phases, on_gpu=True)
    moments = _same_moments(plain.recording, windows, places.profile.recording, traced.windows[0])
    found = [one for of_step in of_steps for one in of_step]
    if moments is None:  # steps differ: the traced one tells about itself
        found, moments = stretches(places.profile.recording, traced.windows[0]), lambda one: [one.at_ns]
    lost: dict[tuple[str, Place | None], float] = defaultdict(float)
    device: Lost = defaultdict(float)
    blamed = [*_with_then(found)]
    for cause, ms in times.items():
        if cause == RUNNING:
            _running(lost, device, traced, places, ms)
        elif cause == COLLECTS:
            taken = [one.end_ns - one.begin_ns for one in plain.recording.host if one.name == COLLECTS]
            device["host", _collecting(places, taken, len(windows))] += ms
        else:
            _by_line(lost, cause, ms, blamed, places, moments)
    gaps = sorted((one for one in found if one.cause != RUNNING), key=lambda one: -one.ns)[:MOST_GAPS]
    begin = found[0].begin_ns if found else 0
    joined = _where(lost, places)
    for key, ms in device.items():
        joined[key] += ms
    rows: list[list[Scalar]] = [
        [
            1e-6 * (one.begin_ns - begin),
            1e-6 * one.ns,
            one.cause,
            one.next,
            None if (at := places.due(_middle(moments(one)))) is None else _named({}, at, places),
        ]
        for one in gaps
    ]
    return joined, rows, busy_percent


def _with_then(found: Iterable[Stretch]) -> Iterator[Stretch]:
    """Yield parts of steps, each with what the host did after it had waited: replays tell how much is lost to which."""
    for one in found:
        yield one
        if one.then is not None:
            yield replace(one, cause=one.then, at_ns=one.begin_ns)


def _times(
    recording: Recording, steps: Sequence[Interval], parts: Sequence[Sequence[Stretch]], step_ms: float
) -> tuple[dict[str, float], float]:
    """Return the ms of each class in a step that no profiler has slowed down, and the percentage of it in which the
    device works. What the device works for numbers that the host reads is lost to `synchronisation`, and so is the
    idle time that a host which never waits would not leave; to `input` what one that never loads would not leave."""
    read = inside(host_reads(recording))
    totals: Counter[str] = Counter()
    for one in _with_then(one for part in parts for one in part):
        is_answer = one.cause in WORKING and read(one.at_ns)
        totals[ANSWERS if is_answer else COLLECTS if one.collects else one.cause] += one.ns
    ms = {cause: 1e-6 * ns / len(parts) for cause, ns in totals.items() if ns}
    answers, waits = ms.pop(ANSWERS, 0.0), {}
    left = max(0.0, step_ms - answers - sum(ms.get(one, 0.0) for one in WORKING))
    for cause, known in ((SYNCHRONISATION, answers), (INPUT, 0.0)):
        if ms.pop(cause, 0.0) or known:
            lost = max(0.0, step_ms - without_waiting_ms(recording, steps, step_ms, cause=cause) - known)
            waits[cause] = min(lost, left) if ms.keys() - {*WORKING} else left
            left -= waits[cause]
    times = unprofiled(ms, step_ms - answers - sum(waits.values()))
    # The profiled steps may have worked for longer than the unprofiled one took.
    busy_percent = min(100.0, 100 * (answers + sum(times.get(one, 0.0) for one in WORKING)) / step_ms)
    if SYNCHRONISATION in waits:
        waits[SYNCHRONISATION] += answers
    return times | waits, busy_percent


def _middle(moments: Sequence[int]) -> int:
    return moments[len(moments) // 2]


def _same_moments(
    plain: Recording, steps: Sequence[Interval], traced: Recording, step: Interval
) -> Callable[[Stretch], Sequence[int]] | None:
    """Return a function that tells in which moments of a traced step, which is far slower, the host did what it did in
    the moment that explains a part of a plain step: between the same two calls that launch work or wait for it. Of the
    host's own work or its loading these are several, for it may be that of several lines. None if the calls differ."""

    def calls(recording: Recording, step: Interval) -> list[HostEvent]:
        ids = {one.launch for one in recording.device} | {one.id for one in synchronisations(recording)}
        known = (one for one in recording.host if one.id in ids and one.kind == "launch")
        return [one for one in known if step.begin_ns <= one.begin_ns < step.end_ns]

    theirs, ours = [calls(plain, one) for one in steps], calls(traced, step)
    if not ours or any(len(one) != len(ours) for one in theirs):
        return None
    begins, of_steps = [[one.begin_ns for one in of] for of in theirs], [one.begin_ns for one in steps]
    loads = inside(loading(traced))
    collects = inside(merged((one.begin_ns, one.end_ns) for one in traced.host if one.name == COLLECTS))

    def moments(one: Stretch) -> Sequence[int]:
        number = bisect.bisect_right(of_steps, one.at_ns) - 1
        # Before the first step lies only a call that waits, at the end of the step before.
        at = bisect.bisect_right(begins[number], one.at_ns) - 1 if number >= 0 else len(ours) - 1
        if one.cause in (*WORKING, SYNCHRONISATION) or (at >= 0 and begins[number][at] == one.at_ns):
            return [ours[at].begin_ns]
        begin = ours[at].end_ns if at >= 0 else step.begin_ns
        end = ours[at + 1].begin_ns if at + 1 < len(ours) else step.end_ns
        if one.cause in ("launches", OPTIMIZER):
            return [end]
        if one.cause not in (INPUT, "host"):
            return [(begin + end) // 2]
        spread = [begin + (2 * number + 1) * (end - begin) // (2 * MOMENTS) for number in range(MOMENTS)]
        return [at for at in spread if loads(at) == (one.cause == INPUT) and not collects(at)] or spread

    return moments


def _by_line(
    lost: dict[tuple[str, Place | None], float],
    cause: str,
    ms: float,
    found: Sequence[Stretch],
    places: Places,
    moments: Callable[[Stretch], Sequence[int]],
) -> None:
    """Add a cause's time by the lines that were to blame in these parts of steps; `moments` tells the traced step's."""
    by_line: dict[Place | None, float] = defaultdict(float)
    for one in found:
        if one.cause == cause and not one.collects:
            of_step = moments(one)
            for at in of_step:
                by_line[places.due(at)] += one.ns / len(of_step)
    if not by_line and cause == SYNCHRONISATION:  # the device works on for it
        by_line |= Counter(places.at(one.begin_ns) for one in synchronisations(places.profile.recording))
    total = sum(by_line.values())
    if not total:
        lost[cause, None] += ms
    for place, ns in by_line.items():
        lost[cause, place] += ms * ns / total


def _running(
    lost: dict[tuple[str, Place | None], float], device: Lost, traced: Attribution, places: Places, ms: float
) -> None:
    """Add the time in which kernels ran: to `lost` by the lines that they are due to, those of the forward pass, and to
    `device`, where none is known, by what the kernels compute."""
    host = places.profile.recording.host
    read, updates = idle.inside(idle.host_reads(places.profile.recording)), idle.inside(idle.updating(host))
    kernels = [
        work
        for work in traced.work
        if (work.kind == "kernel" or idle.ON_DEVICE.match(work.name)) and not read(work.made_ns)
    ]
    total = sum(work.time_ns for work in kernels) or 1
    for work in kernels:
        name, place = classes.classify(work), places.at(work.made_ns)
        cause = "kernels"
        if name == classes.OPTIMIZER or updates(work.made_ns):
            cause = OPTIMIZER
        elif DOUBLE in work.shapes:
            cause = "precision"
        elif name == classes.ATTENTION or places.writes_attention(place):
            cause = "attention"
        share = ms * work.time_ns / total
        if place is not None:
            lost[cause, place] = lost.get((cause, place), 0.0) + share
        else:
            device[cause, name if cause == "kernels" else ""] += share


def _candidates(
    spec: DiagnosisSpec, training: Training, places: Places, lost: Lost, *, collections: int, uneven: bool
) -> list[list[Scalar]]:
    traced, compiled = places.profile.recording, compilation().graphs > 0
    look = Look(
        spec.step,  # type: ignore[arg-type]
        training.device,
        training.own,
        training.own.loaders if training.own else (),
        Counter(event.product.dtype for event in traced.host if event.product is not None),
        Counter(event.name for event in traced.host) + Counter(event.name for event in traced.device),
        compiled,
        collections,
        uneven,
        checkpoints=compiled or places.calls(checkpoint),  # a compiled step calls it no more
        doubles=any(event.double for event in traced.host),
        detects_anomalies=torch.is_anomaly_enabled()
        or places.surely_calls(torch.autograd.detect_anomaly.__init__)
        or places.surely_calls(torch.autograd.set_detect_anomaly.__init__),
        makes_loader=places.surely_calls(torch.utils.data.DataLoader.__init__),
        makes_optimizer=places.surely_calls(torch.optim.Optimizer.__init__),
    )
    return candidates(spec, look, lost)


def candidates(spec: DiagnosisSpec, look: Look, lost: Lost) -> list[list[Scalar]]:
    """Return the changes that are tried, those that may bring most first; cures before bounds, those against few causes
    before those against many, and slow ones last; and those that cannot be, each with the reason."""
    total = sum(lost.values())
    of_cause: dict[str, float] = defaultdict(float)
    for (cause, _), ms in lost.items():
        of_cause[cause] += ms
    of_cause["kernels"] += of_cause["precision"]  # what shortens operators does so in float64, too
    found: list[tuple[bool, float, bool, int, list[Scalar]]] = []
    for name in spec.changes or CHANGES.names():
        change: Change = CHANGES.load(name)
        cause = max(change.causes, key=lambda one: of_cause[one])
        if spec.changes is None and of_cause[cause] < LEAST * total:
            continue
        own_ranks = look.own is None and look.spec.step_code is not None
        why_not = OWN_RANKS if own_ranks else change.why_not(look)
        if isinstance(why_not, Elsewhere) and spec.changes is None:
            continue
        fields: dict[str, Any] = {}
        if why_not is None and look.own is None:
            why_not, fields = _fields(change, look)
        how = change.how if change.removes or not fields else ", ".join(f"{one}={_text(fields[one])}" for one in fields)
        done = isinstance(why_not, Done)
        row: list[Scalar] = [name, cause, why_not, change.removes, done, how, change.way, json.dumps(fields)]
        brings = (OF_WORK if cause in ("kernels", "attention") else 1.0) * of_cause[cause]
        found.append((change.slow, -brings, change.removes, len(change.causes), row))
    return [row for *_, row in sorted(found, key=lambda one: one[:4])]


def _fields(change: Change, look: Look) -> tuple[str | None, dict[str, Any]]:
    """Return why our model's step cannot be changed so, or None, and the fields that change."""
    if change.fields is None:
        return "our model's step has no field for it", {}
    before = look.spec.model_dump()
    fields = {name: value for name, value in change.fields(look).items() if before[name] != value}
    try:
        type(look.spec).model_validate({**before, **fields})
    except ValidationError as error:
        return "; ".join(one["msg"] for one in error.errors()), {}
    return None, fields


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
