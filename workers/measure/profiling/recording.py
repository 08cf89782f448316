"""Runs work under torch's profiler and returns the recorded events as plain data.

On a GPU the profiler records each kernel, copy and fill through CUPTI, the driver's tracing interface, which serves one
profiler at a time. On the host the profiler records operators and named ranges itself.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity

from kernels.device_events import synchronize
from workers.measure.paths import without_folders
from workers.measure.profiling.products import FACTORS, Product, product_of

HostKind = Literal["operator", "backward", "range", "launch", "python"]
DeviceKind = Literal["kernel", "copy", "fill"]

NODE = "autograd::engine::evaluate_function: "
"""Head of the name of the event in which autograd runs one node of the backward pass."""
BACKWARD_SCOPE = 1
"""Number of the scope `BACKWARD_FUNCTION` of torch's RecordFunction: the node's own function."""
LAUNCH = re.compile(r"(cuda|cu)[A-Z]\w+")
"""Names of calls of the CUDA runtime and driver."""
MEMORY = "[memory]"
"""Name of the event of an allocation or a release."""
OVERHEAD = re.compile(
    r"\[memory\]|Activity Buffer Request|Instrumentation|Lazy Function Loading|Command Buffer Full|.* Sync"
)
"""Names of the profiler's own events, which are neither operators nor work."""
ANOTHER_PROFILER = (
    "the step opens a torch.profiler of its own, and torch runs one at a time: leave it out for this job (open it only "
    "where the script runs by itself), or measure the step with it by kind benchmark"
)
FLOATS = {"double": "f64", "c10::BFloat16": "bf16", "c10::Half": "f16"}
"""The types of inputs that their shapes name; float32 is not named."""
MAX_SHAPES = 200
"""Most characters of the shapes of an operator's inputs: an optimizer's operator takes hundreds of tensors."""
ADDRESS = re.compile(r" object at 0x[0-9a-f]+|\(\) at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class HostEvent:
    """Something that ran on a thread of the host."""

    name: str
    kind: HostKind
    thread: int
    begin_ns: int
    end_ns: int
    id: int = 0
    """Of an operator or range: device events refer to it. Of a launch: the device events that it launched have it as
    their `launch`."""
    sequence: int = -1
    """Of a forward operator: the number of the autograd node that it made last. Of a backward one: of its node."""
    forward_thread: int = 0
    """Of a backward event: the thread that made its node. Nodes are numbered by thread."""
    product: Product | None = None
    """The matrix product that an operator computes; None for other events, and if the shapes were not recorded."""
    given_out: bool = False
    """True of a product whose result is written into a tensor that the caller gives."""
    double: bool = False
    """True of an operator with an input in float64, if the shapes were recorded. The number of `0.9 * m` is a tensor in
    float64 without dimensions, and does not count: the operator computes in the type of `m`."""
    shapes: str = ""
    """Those of an operator's inputs, `[4, 16] f64[16]`, if they were recorded."""


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """A kernel, copy or fill on a GPU."""

    name: str
    kind: DeviceKind
    stream: int
    begin_ns: int
    end_ns: int
    launch: int
    """The launch's `id`. A replayed CUDA graph has one launch for all its kernels."""
    operator: int
    """The `id` of the operator or range that launched it; 0: none is known."""


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """An allocation, or with a negative size a release, by torch's allocator."""

    thread: int
    at_ns: int
    bytes: int
    on_gpu: bool


@dataclass(frozen=True)
class Recording:
    """Everything that the profiler saw, in the order in which it began."""

    host: list[HostEvent]
    device: list[DeviceEvent]
    memory: Sequence[MemoryEvent] = ()
    """Empty with Python's functions."""


@dataclass(frozen=True)
class Profile:
    """A recording, and the function that writes it as a Chrome trace, uncompressed JSON."""

    recording: Recording
    save: Callable[[Path], None]


class AnotherProfiler(RuntimeError):
    """The work uses torch's profiler itself, which serves one user at a time."""


@contextmanager
def refused_to_others() -> Iterator[None]:
    """Raise AnotherProfiler, where the work of the context opens torch's profiler itself: it would end ours. Raises
    AnotherProfiler: also if it is open already."""
    inner: Any = torch.autograd.profiler.profile
    opens = inner._prepare_trace

    def refuse(_profiler: Any) -> None:
        raise AnotherProfiler(ANOTHER_PROFILER)

    inner._prepare_trace = refuse
    try:
        yield
    finally:
        inner._prepare_trace = opens


class _Unseen:
    """Stands for the method of torch's optimizers by which its profiler knows their steps."""

    __code__ = (lambda: None).__code__

    def __call__(self) -> None: ...


@contextmanager
def states_unread() -> Iterator[None]:
    """Keep torch's profiler, which follows Python's functions, from reading optimizers' states: where `state[p]` is a
    tensor, and no dictionary, it raises in the step."""
    known: Any = Optimizer
    method, known._optimizer_step_code = known._optimizer_step_code, _Unseen()
    try:
        yield
    finally:
        known._optimizer_step_code = method


def record(work: Callable[[], None], *, on_gpu: bool, python: bool = False, shapes: bool = True) -> Profile:
    """Run the work under the profiler, until the device has finished it. Raises AnotherProfiler: the work uses torch's
    profiler itself; RuntimeError: the profiler failed. `on_gpu`: record a GPU's work, too. `python`: Python's
    functions, too, which slows down the host several times. `shapes`: also the shapes of operators' inputs, which
    determine matrix products; not with `python`."""
    if torch.autograd.profiler._is_profiler_enabled:
        raise AnotherProfiler(ANOTHER_PROFILER)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's warnings are about its use over several cycles
        # Only stacks need the tree of Python's functions.
        shapes = shapes and not python
        with torch.profiler.profile(
            activities=activities, with_stack=python, record_shapes=shapes, profile_memory=not python
        ) as profiler:
            with refused_to_others(), states_unread():
                work()
            if on_gpu:
                synchronize()
    inner: Any = profiler.profiler
    results = inner.kineto_results
    events = results.events()
    # Only the tree has Python's functions in every version of torch.
    host = tree_events(results.experimental_event_tree()) if python else host_events(events)
    recording = Recording(
        sorted(host, key=lambda event: (event.begin_ns, -event.end_ns)),
        sorted(device_events(events), key=lambda event: event.begin_ns),
        [
            MemoryEvent(one.start_thread_id(), one.start_ns(), one.nbytes(), one.device_type() == DeviceType.CUDA)
            for one in events
            if one.name() == MEMORY
        ],
    )
    return Profile(recording, lambda path: results.save(str(path)))


def host_events(events: Iterable[Any]) -> Iterator[HostEvent]:
    """Yield the host's events of torch's profiler, without Python's functions."""
    for event in events:
        if event.device_type() != DeviceType.CPU or event.is_async():
            continue
        if event.start_thread_id() != event.end_thread_id() or _is_python(event):
            continue
        name, linked, is_range = event.name(), event.linked_correlation_id(), event.is_user_annotation()
        if OVERHEAD.fullmatch(name) and not is_range:
            continue
        kind: HostKind = "operator"
        if linked > 0 or (LAUNCH.fullmatch(name) and not is_range):
            kind = "launch"
        elif is_range:
            kind = "range"
        elif event.scope() == BACKWARD_SCOPE or name.startswith(NODE):
            kind = "backward"
        shapes, dtypes = ([], []) if is_range else (event.shapes(), event.dtypes())
        yield HostEvent(
            name,
            kind,
            event.start_thread_id(),
            event.start_ns(),
            event.start_ns() + event.duration_ns(),
            event.correlation_id(),
            event.sequence_nr(),
            event.fwd_thread_id(),
            product_of(name, shapes, dtypes) if name in FACTORS and not is_range else None,
            name in FACTORS and (name.endswith("_") or (len(shapes) > FACTORS[name] + 2 and bool(shapes[-1]))),
            _in_double(shapes, dtypes),
            _shapes_text(shapes, dtypes),
        )


def _in_double(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> bool:
    return any(dtype == "double" and shape for dtype, shape in zip(dtypes, shapes, strict=False))


def _shapes_text(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> str:
    """Write the shapes of tensors, and types but float32; numbers have no shape."""
    types = [*dtypes, *[""] * (len(shapes) - len(dtypes))]
    text = " ".join(
        FLOATS.get(dtype, "") + str(list(shape)) for shape, dtype in zip(shapes, types, strict=False) if shape
    )
    return text if len(text) <= MAX_SHAPES else f"{text[:MAX_SHAPES]}…"


def _is_python(event: Any) -> bool:
    tell = getattr(event, "is_python_function", None)  # newer than torch 2.11
    return bool(tell()) if tell is not None else False


def device_events(events: Iterable[Any]) -> Iterator[DeviceEvent]:
    """Yield the device's events of torch's profiler, without the ranges that annotations name."""
    for event in events:
        if event.device_type() != DeviceType.CUDA or event.is_user_annotation():
            continue
        name = event.name()
        if OVERHEAD.fullmatch(name):
            continue
        kind: DeviceKind = "copy" if name.startswith("Memcpy") else "fill" if name.startswith("Memset") else "kernel"
        begin = event.start_ns()
        yield DeviceEvent(
            name,
            kind,
            event.device_resource_id(),
            begin,
            begin + event.duration_ns(),
            event.correlation_id(),
            event.linked_correlation_id(),
        )


def tree_events(roots: Iterable[Any]) -> Iterator[HostEvent]:
    """Yield the events of the profiler's tree: operators, ranges, and Python's functions."""
    from torch._C._profiler import RecordScope, _EventType

    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag in (_EventType.PyCall, _EventType.PyCCall):
            kind: HostKind = "python"
        elif event.tag == _EventType.TorchOp:
            scope = event.typed[1].scope
            is_node = scope == RecordScope.BACKWARD_FUNCTION or event.name.startswith(NODE)
            kind = "range" if scope == RecordScope.USER_SCOPE else "backward" if is_node else "operator"
        else:
            continue
        name = without_folders(ADDRESS.sub("", event.name))
        yield HostEvent(name, kind, event.start_tid, event.start_time_ns, event.end_time_ns, event.correlation_id)
