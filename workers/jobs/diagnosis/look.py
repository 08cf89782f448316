"""The first unit of a diagnosis: times the step as it is, profiles it, and says what its time is lost to."""

from __future__ import annotations

import functools
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from app.specs.diagnosis import DiagnosisSpec
from workers.changes import CHANGES
from workers.changes._base import Change, Elsewhere, Look
from workers.jobs import _reference
from workers.jobs._base import Unit
from workers.jobs._profiled import profile_steps
from workers.jobs._training import building, measuring, metrics
from workers.jobs.diagnosis import turn
from workers.jobs.profile import own_lines
from workers.measure.table import Column, Scalar
from workers.reporter import Reporter
from workers.uploaded import BrokenCode

if TYPE_CHECKING:
    from app.specs._training import TrainingSpec
    from app.specs.benchmark import BenchmarkSpec
    from workers.jobs._training.building import Training
    from workers.jobs._values import Values
    from workers.measure.profiling.lines import Launched, LineTrace, OwnCode, Place
    from workers.measure.profiling.recording import Profile
    from workers.measure.profiling.sampling import Samples
    from workers.measure.profiling.waits import Stretch

SEEN, CANDIDATES, GAPS = "seen", "candidates", "gaps"
SEEN_COLUMNS = Column.parse("cause, where, lost_ms: number ms")
CANDIDATE_COLUMNS = Column.parse("change, cause, why_not, removes: boolean, how, fields")
"""`fields`: those of our model's spec that change, as JSON."""
GAP_COLUMNS = Column.parse("begin_ms: number ms, gap_ms: number ms, cause, next, where")
MOST_GAPS = 10
PROFILED = 3
"""Steps of a GPU that are profiled; of a CPU one, which samples tell apart."""
LEAST = 0.01
"""A smaller share of the step is no cause: nobody gains from it."""
MANY = 100
"""A line that a step runs as often is a loop that somebody should know of."""
OPTIMIZER, INPUT = "optimizer", "input"
OF_LIBRARIES = (
    ("torch/utils/data/", INPUT),
    ("torch/optim/", OPTIMIZER),
    ("torch/distributed/", "communication"),
)
"""Parts of files' names in a stack, with the cause that they stand for."""
Lost = defaultdict[tuple[str, str], float]
"""ms by (cause, where)."""


def run(spec: DiagnosisSpec, unit: Unit, report: Reporter) -> None:
    """Time and profile the step. Running out of memory, and a wrong part of the model, are results."""
    from workers.measure import environment
    from workers.measure.errors import NotMeasured
    from workers.measure.profiling.recording import AnotherProfiler
    from workers.measure.validity import Monitor

    step: BenchmarkSpec = spec.step  # type: ignore[assignment]
    device, build_model = building.prepare(step)
    report.environment(environment.fingerprint(device))
    monitor, case = Monitor(device), spec.case()
    lost: Lost = defaultdict(float)
    candidates: list[list[Scalar]] = []
    gaps: list[list[Scalar]] = []
    with building.known_errors():
        try:
            parts = _reference.check_parts(step, device)
            training = building.build(step, device, build_model)
            values, checks = measuring.measure(training, monitor, report, pacing=step.pacing)
            checks += parts + metrics.add_rates(values, training, report.ceilings)
        except NotMeasured as error:
            monitor.watch(last=True)
            values, checks = _reference.not_measured(metrics.metrics_of(step, step.pacing), error)
        else:
            try:
                lost, gaps, products = _lost(training, values, report)
            except AnotherProfiler as error:
                raise BrokenCode(str(error)) from error
            candidates = _candidates(spec, training, products, lost)
    report.validity(monitor.conclude(checks), case.key, unit.title)
    values.report(case, environment.device_key(device), report)
    rows: list[list[Scalar]] = [[*of, ms] for of, ms in sorted(lost.items(), key=lambda one: -one[1]) if ms > 0]
    report.table(SEEN, SEEN_COLUMNS, rows)
    if samples := values.samples("step_ms", "step"):
        report.table(turn.TURNS, turn.COLUMNS, [turn.row_of("look", (), samples, device)])
    report.table(CANDIDATES, CANDIDATE_COLUMNS, candidates)
    report.table(GAPS, GAP_COLUMNS, gaps)


def _lost(training: Training, values: Values, report: Reporter) -> tuple[Lost, list[list[Scalar]], Counter[str]]:
    """Return what the median step's time is lost to, its largest gaps, and its matrix products by data type."""
    from workers.measure.profiling.lines import LineTrace

    step_ms = statistics.median(values.samples("step_ms", "step") or ())
    own = _own_code(training.spec)
    trace = LineTrace(own)
    traced, _, _ = profile_steps(training, 1, report, warm=True, trace=trace)
    products = Counter(event.product.dtype for event in traced.recording.host if event.product is not None)
    places = Places(own, trace, traced)
    if training.device.type == "cuda":
        plain, _, _ = profile_steps(training, PROFILED, report, warm=True)
        return *_on_gpu(training, plain, places, step_ms), products
    samples, _ = own_lines.sample(training, report)
    return _on_cpu(training, samples, places, step_ms), [], products


def _own_code(spec: TrainingSpec) -> OwnCode:
    """Return what tells the code whose lines are shown: the user's own, or for our model's step that model's."""
    from workers.measure.profiling.lines import OwnCode

    own = own_lines.own_code(spec)
    if own is not None:
        return own
    import linecache

    from workers import model

    folder = model.__path__[0]
    return OwnCode(lambda file: file.removeprefix(folder).lstrip("/") if file.startswith(folder) else None,
                   linecache.getlines)  # fmt: skip


class Places:
    """Tells where in the user's code the time of a traced step went.

    Args:
        own: Tells the user's own code.
        trace: Followed a step.
        profile: Of that step.
    """

    def __init__(self, own: OwnCode, trace: LineTrace, profile: Profile) -> None:
        (begun,) = [event.begin_ns for event in profile.recording.host if event.name == "step_1"]
        self.own, self.profile, self._trace = own, profile, trace
        self.launched: Mapping[Place | None, Launched] = trace.launched(profile.recording, begun)
        self._stack_at = trace.stacks(begun)

    def runs(self, place: Place) -> int:
        """Return how often a step runs a line; 0 if it is not known."""
        return self.own.calls(place, self._trace.calls[place]) if self._trace.complete else 0

    def at(self, time_ns: int) -> Place | None:
        """Return the line in which the traced step was at a moment of the profiler's clock."""
        return self._stack_at(time_ns)[-1]

    @functools.cached_property
    def made(self) -> Mapping[Place | None, Mapping[Place | None, float]]:
        """The shares of the forward pass's lines in the operators that lines with a backward pass ran."""
        events = self.profile.recording.host
        makers = {(one.thread, one.sequence): one for one in events if one.kind == "operator" and one.sequence >= 0}
        found: dict[Place | None, Counter[Place | None]] = defaultdict(Counter)
        until: dict[int, int] = defaultdict(int)
        for one in events:
            if one.kind != "backward" or one.begin_ns < until[one.thread]:
                continue
            until[one.thread] = one.end_ns
            maker = makers.get((one.forward_thread, one.sequence)) if one.sequence >= 0 else None
            here = self.at(one.begin_ns)
            found[here][here if maker is None else self.at(maker.begin_ns)] += one.end_ns - one.begin_ns
        return {here: {place: ns / of.total() for place, ns in of.items()} for here, of in found.items() if of.total()}


def _where(lost: Mapping[tuple[str, Place | None], float], places: Places) -> Lost:
    """Join the lines of each function: "train.py:51-55 SlowAdam.step (line 52: 17260 times a step)"."""
    found: Lost = defaultdict(float)
    functions: dict[tuple[str, str, str], list[Place]] = defaultdict(list)
    for (cause, place), ms in lost.items():
        if place is not None and ms >= LEAST * sum(lost.values()) / 10:
            functions[cause, place.file, place.function].append(place)
    for (cause, place), ms in lost.items():
        found[cause, "" if place is None else _named(functions[cause, place.file, place.function], place, places)] += ms
    return found


def _named(lines: Sequence[Place], place: Place, places: Places) -> str:
    first, last = (min(one.line for one in lines), max(one.line for one in lines)) if lines else (place.line,) * 2
    span = str(first) if first == last else f"{first}-{last}"
    often = max(lines, key=places.runs, default=place)
    runs = places.runs(often)
    repeated = f" (line {often.line}: {runs} times a step)" if runs >= MANY else ""
    return f"{place.file}:{span} {place.function}{repeated}"


def _on_cpu(training: Training, samples: Samples, places: Places, step_ms: float) -> Lost:
    """Return what samples of unprofiled steps say. A line's time outside of loaders and optimizers is that of its
    operators, in so far as these ran in it under the profiler, and else the host's. Operators of a backward pass count
    for the lines of the forward pass that made them."""
    lost: dict[tuple[str, Place | None], float] = defaultdict(float)
    optimizers = {f"{type(one).__qualname__}.step" for one in training.own.optimizers} if training.own else set()
    wall: Counter[tuple[str, Place | None]] = Counter()
    for (phase, frames), sample in samples.stacks.items():
        at = next((found for frame in reversed(frames) if (found := places.own.place(*frame)) is not None), None)
        wall[_cause_of(phase, frames, optimizers), at] += sample.wall_ns
    scale = step_ms / (wall.total() or 1)
    for (cause, at), ns in wall.items():
        if cause:
            lost[cause, at] += scale * ns
            continue
        for part, share in _parts(places.launched.get(at)).items():
            if part == "host" or at not in places.made:
                lost[part, at] += scale * ns * share
                continue
            for maker, of_maker in places.made[at].items():
                lost[_same_part(part, places.launched.get(maker)), maker] += scale * ns * share * of_maker
    return _where(lost, places)


def _same_part(part: str, did: Launched | None) -> str:
    """Return what a line's backward pass is lost to: what most of its forward pass is."""
    if did is None or not did.operators_ns:
        return part
    if 2 * did.double_ns > did.operators_ns:
        return "precision"
    return "attention" if 2 * did.attention_ns > did.operators_ns else "kernels"


def _cause_of(phase: str, frames: Sequence[tuple[str, str, int]], optimizers: set[str]) -> str:
    """Return the cause that a stack itself tells; "" if it is the code's own work."""
    from workers.measure.profiling.overlap import INPUT_PHASES

    if phase in INPUT_PHASES:
        return INPUT
    for file, function, _ in frames:
        if function in optimizers:
            return OPTIMIZER
        for part, cause in OF_LIBRARIES:
            if part in file.replace("\\", "/"):
                return cause
    return OPTIMIZER if phase == OPTIMIZER else ""


def _parts(did: Launched | None) -> dict[str, float]:
    """Return the shares of a line's time by cause."""
    if did is None or not did.wall_ns:
        return {"host": 1.0}
    operators = min(1.0, did.operators_ns / did.wall_ns)
    precision = min(operators, did.double_ns / did.wall_ns)
    attention = min(operators - precision, did.attention_ns / did.wall_ns)
    kernels = operators - precision - attention
    return {"precision": precision, "attention": attention, "kernels": kernels, "host": 1 - operators}


def _on_gpu(training: Training, plain: Profile, places: Places, step_ms: float) -> tuple[Lost, list[list[Scalar]]]:
    """Return what the device's timeline says, and its largest gaps. The profiler lengthens gaps, so idle time is scaled
    to that of unprofiled steps."""
    from workers.measure.profiling.attribution import Attribution
    from workers.measure.profiling.waits import RUNNING, of_steps, stretches

    phases = training.phases
    attribution = Attribution(plain.recording, phases, on_gpu=True)
    _, times = of_steps(plain.recording, attribution.windows, step_ms)
    traced = Attribution(places.profile.recording, phases, on_gpu=True)
    in_trace = stretches(places.profile.recording, traced.windows[0])
    lost: dict[tuple[str, Place | None], float] = defaultdict(float)
    device: Lost = defaultdict(float)
    for cause, ms in times.items():
        if cause == RUNNING:
            _running(device, traced, ms)
        else:
            _by_line(lost, cause, ms, in_trace, places)
    gaps = sorted((one for one in in_trace if one.cause != RUNNING), key=lambda one: -one.ns)[:MOST_GAPS]
    begin = traced.windows[0].begin_ns
    return _where(lost, places) | device, [
        [
            1e-6 * (one.begin_ns - begin),
            1e-6 * one.ns,
            one.cause,
            one.next,
            None if (at := places.at(one.at_ns)) is None else _named([at], at, places),
        ]
        for one in gaps
    ]


def _by_line(
    lost: dict[tuple[str, Place | None], float], cause: str, ms: float, traced: Sequence[Stretch], places: Places
) -> None:
    """Add a cause's time by the lines that were to blame in the traced step."""
    by_line: Counter[Place | None] = Counter()
    for one in traced:
        if one.cause == cause:
            by_line[places.at(one.at_ns)] += one.ns
    total = by_line.total()
    if not total:
        lost[cause, None] += ms
    for place, ns in by_line.items():
        lost[cause, place] += ms * ns / total


def _running(lost: Lost, traced: Any, ms: float) -> None:
    """Add the time in which kernels ran, by what they compute."""
    from workers.measure.profiling import classes

    of_class: Counter[tuple[str, str]] = Counter()
    for work in traced.work:
        name = classes.classify(work)
        cause = {classes.ATTENTION: "attention", classes.SOFTMAX: "attention", classes.OPTIMIZER: OPTIMIZER}.get(
            name, "kernels"
        )
        of_class[cause, "" if cause != "kernels" else name] += work.time_ns
    total = of_class.total() or 1
    for (cause, where), ns in of_class.items():
        lost[cause, where] += ms * ns / total


def _candidates(spec: DiagnosisSpec, training: Training, products: Counter[str], lost: Lost) -> list[list[Scalar]]:
    look = Look(spec.step, training.device, training.own, training.own.loaders if training.own else (), products)  # type: ignore[arg-type]
    return candidates(spec, look, lost)


def candidates(spec: DiagnosisSpec, look: Look, lost: Lost) -> list[list[Scalar]]:
    """Return the changes that are tried, those against the largest cause first, and those that cannot be, each with the
    reason."""
    total = sum(lost.values())
    of_cause: dict[str, float] = defaultdict(float)
    for (cause, _), ms in lost.items():
        of_cause[cause] += ms
    found: list[tuple[float, list[Scalar]]] = []
    for name in spec.changes or CHANGES.names():
        change: Change = CHANGES.load(name)
        cause = max(change.causes, key=lambda one: of_cause[one])
        if spec.changes is None and of_cause[cause] < LEAST * total:
            continue
        why_not: str | None = change.why_not(look)
        if isinstance(why_not, Elsewhere) and spec.changes is None:
            continue
        fields: dict[str, Any] = {}
        if why_not is None and look.own is None:
            why_not, fields = _fields(change, look)
        how = change.how if change.removes or not fields else ", ".join(f"{one}={_text(fields[one])}" for one in fields)
        found.append((of_cause[cause], [name, cause, why_not, change.removes, how, json.dumps(fields)]))
    return [row for _, row in sorted(found, key=lambda one: -one[0])]


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
