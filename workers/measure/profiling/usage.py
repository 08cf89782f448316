"""Sums work up: by name, by class and by named range, all per step."""

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from workers.measure.profiling.attention import Part
from workers.measure.profiling.attribution import OUTSIDE, Call, RecordedWork
from workers.measure.profiling.classes import CLASSES, classify
from workers.measure.profiling.products import Product
from workers.model.accounting import Cost

Key = TypeVar("Key", bound=Hashable)
LAYER = re.compile(r"\w+\.\d+")
UNLISTED = re.compile(r"aten::\w*(conv|rnn)")
"""Operators that multiply matrices of sizes that their inputs do not show: of a convolution or recurrent layer."""


@dataclass(frozen=True)
class Usage:
    """The time and calls of kernels or operators of one name, over several steps."""

    name: str
    class_name: str
    total_ms: float
    """Per step."""
    share_percent: float | None
    """Of all of the phase; None if that used no time."""
    calls: float
    """Per step."""
    mean_us: float
    median_us: float
    min_us: float
    max_us: float
    std_us: float | None
    """None for a single call."""
    launch_to_start_us: float | None
    """Median; None where it is not known."""


@dataclass(frozen=True)
class OperatorUsage:
    """An operator's own time and calls over several steps, without the operators that it calls, and what it takes with
    them."""

    name: str
    class_name: str
    device_ms: float | None
    """Per step, of the device work that it launched itself; None on a CPU."""
    host_ms: float
    """Per step, its own time on the host."""
    device_total_ms: float | None
    """Per step, with the operators that it calls; so are the following."""
    host_total_ms: float
    cpu_mib: float
    """Allocated on the host, less what was released."""
    device_mib: float | None
    share_percent: float | None
    """Of the device's time in the phase; on a CPU, of the operators' own times."""
    calls: float
    mean_us: float
    median_us: float
    min_us: float
    max_us: float
    std_us: float | None


@dataclass(frozen=True)
class ClassUsage:
    """The time, share and calls of one class of work in some phases."""

    class_name: str
    total_ms: float
    """Per step."""
    share_percent: float | None
    calls: float
    """Per step."""


@dataclass(frozen=True)
class ProductUsage:
    """The calls of products of one shape by one operator in one phase, per step."""

    operator: str
    product: Product
    calls: float
    part: Part
    """Their time, and what they compute and move, together."""


def kernels(work: Iterable[RecordedWork], steps: int, total_ns: int | None = None) -> list[Usage]:
    """Return the usage of each name and class, the largest first; shares are of `total_ns`, or of all this work."""
    groups = grouped(work, lambda one: (one.name, classify(one)))
    total = sum(one.time_ns for group in groups.values() for one in group) if total_ns is None else total_ns
    usages = []
    for (name, class_name), group in groups.items():
        times = [one.time_ns for one in group]
        delays = [one.launch_to_start_us for one in group if one.launch_to_start_us is not None]
        usages.append(
            Usage(
                name,
                class_name,
                1e-6 * sum(times) / steps,
                share(sum(times), total),
                len(times) / steps,
                *spread_us(times),
                statistics.median(delays) if delays else None,
            )
        )
    return sorted(usages, key=lambda one: -one.total_ms)


def by_range_and_name(work: Iterable[RecordedWork], steps: int) -> list[tuple[str, str, Usage]]:
    """Return (phase, range, usage) of the kernels of each name in each range, the largest first.

    The ranges around work are joined, and layers are one: `layers.*/softmax`. Shares are of the whole phase.
    """
    found = []
    for phase, of_phase in grouped(work, lambda one: one.phase).items():
        total = time_of(of_phase)
        for path, group in grouped(of_phase, lambda one: "/".join(map(_any_layer, one.ranges)) or OUTSIDE).items():
            found += [(phase, path, usage) for usage in kernels(group, steps, total)]
    return sorted(found, key=lambda one: -one[2].total_ms)


def by_place(work: Iterable[RecordedWork], steps: int) -> list[tuple[str, str, str, str, Usage]]:
    """Return (phase, range, operator, shapes of its inputs, usage) of the kernels of each name, the largest first: by
    what launched them, which stays the same where a compiler or a library chooses another kernel."""

    def place(one: RecordedWork) -> tuple[str, str, str, str]:
        return one.phase, "/".join(map(_any_layer, one.ranges)) or OUTSIDE, one.operator or "", one.shapes

    found = [(*key, usage) for key, group in grouped(work, place).items() for usage in kernels(group, steps)]
    return sorted(found, key=lambda one: -one[-1].total_ms)


def _any_layer(name: str) -> str:
    return f"{name.rpartition('.')[0]}.*" if LAYER.fullmatch(name) else name


def operators(
    calls: Iterable[Call], steps: int, class_of: Callable[[str], str], *, on_gpu: bool
) -> list[OperatorUsage]:
    """Return the usage of each operator: on a GPU by the device's time, on a CPU by its own; the largest first."""
    groups = grouped(calls, lambda call: call.name)
    total = sum(call.device_ns if on_gpu else call.self_ns for group in groups.values() for call in group)
    usages = []
    for name, group in groups.items():
        times = [call.device_ns if on_gpu else call.self_ns for call in group]
        host_ms = 1e-6 * sum(call.self_ns for call in group) / steps
        device_ms = 1e-6 * sum(times) / steps if on_gpu else None
        usages.append(
            OperatorUsage(
                name,
                class_of(name),
                device_ms,
                host_ms,
                1e-6 * sum(call.device_total_ns for call in group) / steps if on_gpu else None,
                1e-6 * sum(call.total_ns for call in group) / steps,
                sum(call.cpu_bytes for call in group) / 2**20 / steps,
                sum(call.device_bytes for call in group) / 2**20 / steps if on_gpu else None,
                share(sum(times), total),
                len(times) / steps,
                *spread_us(times),
            )
        )
    return sorted(usages, key=lambda one: (-(one.device_ms or 0.0), -one.host_ms))


def products(calls: Iterable[Call], phase: str, steps: int, *, on_gpu: bool) -> list[ProductUsage]:
    """Return the products of a phase by operator and shape, those that take the most time first.

    Their time is that of the device; on a CPU, the operators' own.
    """
    known = (call for call in calls if call.phase == phase and call.product is not None)
    usages = []
    for (operator, product), group in grouped(known, lambda call: (call.name, call.product)).items():
        if product is None:
            continue
        time_ms = 1e-6 * sum(call.device_ns if on_gpu else call.self_ns for call in group) / steps
        cost, often = product.cost, len(group) / steps
        cost = Cost(round(cost.flops * often), round(cost.bytes * often))
        usages.append(ProductUsage(operator, product, often, Part(product.size, phase, time_ms, time_ms, cost)))
    return sorted(usages, key=lambda one: -one.part.time_ms)


def unlisted_ms(calls: Iterable[Call], steps: int, *, on_gpu: bool) -> float:
    """Return the time per step of the convolutions and recurrent layers, which are not in `products`."""
    unlisted = (call for call in calls if call.product is None and UNLISTED.match(call.name))
    return 1e-6 * sum(call.device_ns if on_gpu else call.self_ns for call in unlisted) / steps


def classes(work: Iterable[RecordedWork], steps: int) -> list[ClassUsage]:
    """Return the usage of every class, in the order of CLASSES; a class without work has none."""
    times, counts = Counter[str](), Counter[str]()
    for one in work:
        name = classify(one)
        times[name] += one.time_ns
        counts[name] += 1
    total = times.total()
    return [
        ClassUsage(name, 1e-6 * times[name] / steps, share(times[name], total), counts[name] / steps)
        for name in CLASSES
    ]


def by_range(work: Iterable[RecordedWork], phases: Sequence[str], steps: int) -> list[tuple[str, dict[str, float]]]:
    """Return the time in ms per step of each named range, by phase: (range, {phase: ms}).

    A layer's time includes that of the parts inside it. A part is listed with its layer (`layers.0/softmax`), and again
    by itself, summed over all layers. `outside` is the work outside all ranges.
    """
    order: list[str] = []
    times: dict[str, dict[str, float]] = {}
    for one in work:
        for name in range_names(one.ranges):
            if name not in times:
                order.append(name)
                times[name] = dict.fromkeys(phases, 0.0)
            times[name][one.phase] += 1e-6 * one.time_ns / steps
    return [(name, times[name]) for name in sorted(order, key=_natural)]


def range_names(path: Sequence[str]) -> list[str]:
    """Return the names under which work with this path of ranges is summed up."""
    if not path:
        return [OUTSIDE]
    names = ["/".join(path[: depth + 1]) for depth in range(len(path))]
    names += [part for part in dict.fromkeys(path) if not LAYER.fullmatch(part) and part not in names]
    return names


def work_in(work: Iterable[RecordedWork], name: str, phase: str) -> list[RecordedWork]:
    """Return all work of a phase that belongs to a range of this name."""
    return [one for one in work if one.phase == phase and name in one.ranges]


def time_of(work: Iterable[RecordedWork], class_name: str | None = None) -> int:
    """Return the time in ns of work, or of those of one class."""
    return sum(one.time_ns for one in work if class_name is None or classify(one) == class_name)


def top_calls(work: Iterable[RecordedWork], phase: str, steps: int) -> tuple[str, float] | None:
    """Return the name that takes the most time in a phase, and its calls per step; None if the phase has no work."""
    usages = kernels((one for one in work if one.phase == phase), steps)
    return (usages[0].name, sum(one.calls for one in usages if one.name == usages[0].name)) if usages else None


def in_phases(work: Iterable[RecordedWork], phases: Collection[str]) -> list[RecordedWork]:
    return [one for one in work if one.phase in phases]


Item = TypeVar("Item")


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group items by a key, in the order in which keys first appear."""
    groups: dict[Key, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def share(part: float, total: float) -> float | None:
    """Return a part in percent of the total; None of nothing."""
    return 100 * part / total if total else None


def spread_us(times_ns: Sequence[int]) -> tuple[float, float, float, float, float | None]:
    """Return mean, median, least, greatest and standard deviation in µs; the last is None for a single time."""
    times = [1e-3 * time for time in times_ns]
    deviation = statistics.stdev(times) if len(times) > 1 else None
    return statistics.fmean(times), statistics.median(times), min(times), max(times), deviation


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort by the numbers in names: layers.2 before layers.10; layers first, `outside` last."""
    if name == OUTSIDE:
        return [(2, 0, "")]
    if not LAYER.match(name):
        return [(1, 0, name)]
    return [(0, int(part), "") if part.isdigit() else (0, -1, part) for part in re.split(r"(\d+)", name)]
