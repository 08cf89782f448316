"""Metrics: the names of their columns, which direction is better, which one is the main one, and heads with units.

Standard library only: the command line reads it too.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Direction = Literal["less", "more"]
"""Tells whether lower or higher values of a metric are better."""

TIMES = frozenset({"ns", "µs", "us", "ms", "s", "ms/token"})
DIFFERENCES = frozenset({
    "exposed_communication_ms", "eager_exposed_communication_ms", "net_cost_ms", "rest_ms", "skew_ms",
    "uncovered_communication_ms",
})  # fmt: skip
"""Metrics whose samples are differences of two times: their smallest is no fastest."""
_SIZES = frozenset({"B", "KiB", "MiB", "GiB"})
_COUNTS = frozenset({"parameters", "buckets", "tensors", "tokens", "entries"})
_SHARES_OF_RATES = frozenset({"mfu", "ceiling_percent"})
_RATES = frozenset({"tokens/s", "GB/s", "TFLOP/s", "GFLOP/s", "samples/s", "items/s", "steps/s"})


@dataclass(frozen=True)
class MetricProperties:
    """The properties of a metric that differ from those of its unit."""

    name: str
    better: Direction | None
    """None: neither less nor more is better."""
    is_speed: bool = False
    """True if people say of it that it is faster or slower."""
    is_error: bool = False
    """True if it says how wrong a result is, which is no measure of speed or memory."""


METRICS = {
    metric.name: metric
    for metric in (
        MetricProperties("mfu", "more"),
        MetricProperties("ceiling_percent", "more"),
        MetricProperties("gpu_busy_percent", "more"),
        MetricProperties("free_gib", "more"),
        MetricProperties("saved_by_16_bits_gib", "more"),
        MetricProperties("saved_by_sharding_gib", "more"),
        # Errors with a sign, of which the smallest is no better than one near 0.
        MetricProperties("error", None, is_error=True),
        MetricProperties("rounding_error", None, is_error=True),
        MetricProperties("adding_error", None, is_error=True),
        MetricProperties("output_error", "less", is_error=True),
        MetricProperties("gradient_error", "less", is_error=True),
        MetricProperties("parameter_error", "less", is_error=True),
        MetricProperties("exposed_communication_error_ms", "less"),  # of ddp jobs up to version 0.1.0
        MetricProperties("profiler_overhead_percent", "less"),
        MetricProperties("communication_percent", "less"),
        MetricProperties("exposed_communication_percent", "less"),
        MetricProperties("unknown_percent", "less"),
        # Sizes that were asked for or observed, of which neither more nor less is better.
        MetricProperties("copy_mib", None),
        MetricProperties("tensor_mib", None),
        MetricProperties("snapshot_mib", None),
        MetricProperties("rounding_mib", None),
        MetricProperties("largest_free_mib", None),
        MetricProperties("residual_stream_seen_mib", None),
    )
}
"""Metrics whose unit does not give their direction. Of all others, less time, less memory or a higher rate is better;
numbers in other units have no direction."""


_HEADLINES = (
    "answer_step_ms", "step_ms", "decode_ms_per_token", "forward_backward_ms", "forward_ms", "unprofiled_step_ms",
)  # fmt: skip


@functools.cache
def column_name(metric: str, phase: str | None) -> str:
    """Return the name of a metric's column, which depends on nothing else: `forward_ms`, `forward_tflops`, `tflops`."""
    return metric if phase is None or metric.startswith(f"{phase}_") else f"{phase}_{metric}"


def metric_names(column: str) -> list[str]:
    """Return the metrics that may have this column, the longest first: `forward_tflops`, or `tflops` of forward."""
    words = column.split("_")
    return ["_".join(words[start:]) for start in range(len(words))]


@functools.lru_cache(maxsize=4096)
def metric_of(column: str, unit: str | None) -> MetricProperties:
    """Return the metric of a column (`step_ms`): the registered one, or one with the properties of its unit ("ms"), by
    default that at the end of the name."""
    for name in metric_names(column):
        if name in METRICS:
            return METRICS[name]
    unit = unit or _unit_in(column)
    direction: Direction | None = "less" if unit in TIMES | _SIZES else "more" if unit in _RATES else None
    return MetricProperties(column, direction, is_speed=unit in TIMES | _RATES)


def better(metric: str, unit: str | None) -> Direction | None:
    """Return whether less or more of a metric is better; None where neither is. Arguments as for `metric_of`.

    Tables, comparisons and gates all use this function.
    """
    return metric_of(metric, unit).better


def is_speed(metric: str, unit: str | None) -> bool:
    """Return True if a metric is a time or a rate, of which people say that it is faster or slower."""
    return metric_of(metric, unit).is_speed


def is_rate(metric: str, unit: str | None) -> bool:
    """Return True if a metric is work divided by a time, or a share of such a rate: it falls as the time rises."""
    if unit is None and metric.endswith("_per_s"):
        return True
    return (unit or _unit_in(metric)) in _RATES or metric_of(metric, unit).name in _SHARES_OF_RATES


def is_count(unit: str | None) -> bool:
    """Return True if a metric is counted, not measured: two counts are equal or they differ, without any chance."""
    return unit in _COUNTS


def is_error(metric: str) -> bool:
    """Return True if a metric says how wrong a result is."""
    return metric_of(metric, None).is_error


def is_size(metric: str, unit: str | None) -> bool:
    """Return True if a metric is an amount of memory, of which people say that it is larger or smaller."""
    return (unit or _unit_in(metric)) in _SIZES


def gain(reference: float, value: float, direction: Direction | None) -> float | None:
    """Return how many times better `value` is than `reference`: 2.0 for half the time or twice the rate; without a
    direction value / reference. None where that is a division by zero, or a number is negative, as the difference of
    two times may be."""
    above, below = (reference, value) if direction == "less" else (value, reference)
    return above / below if above >= 0 < below else None


def gain_name(metric: str, unit: str | None) -> str:
    """Return the name of the column that relates a metric to a reference: `step_ms_speedup` of times and rates,
    `peak_memory_mib_gain` of other metrics with a direction, and a `…_ratio` of those without one."""
    if better(metric, unit) is None:
        return f"{metric}_ratio"
    return f"{metric}_{'speedup' if is_speed(metric, unit) else 'gain'}"


def headline(metrics: Sequence[str]) -> str | None:
    """Return the main metric, for places with room for only one; None if there are no metrics."""
    return next((name for name in _HEADLINES if name in metrics), metrics[0] if metrics else None)


_UNIT_SUFFIXES = {
    "_ms_per_token": "ms/token",
    "_gb_per_s": "GB/s",
    "_tokens_per_s": "tokens/s",
    "_tflops": "TFLOP/s",
    "_percent": "%",
    "_ms": "ms",
    "_us": "µs",
    "_s": "s",
    "_mib": "MiB",
    "_gib": "GiB",
    "_mb": "MB",
}
_WHOLE = {"tokens_per_s": "Tokens/s", "tflops": "TFLOP/s", "mfu": "MFU", "gb_per_s": "GB/s"}
_WORDS = {"gpu": "GPU", "cpu": "CPU", "mfu": "MFU", "tflops": "TFLOP/s", "speedup": "speed-up"}


def _unit_in(name: str) -> str | None:
    return next((unit for suffix, unit in _UNIT_SUFFIXES.items() if f"_{name}".endswith(suffix)), None)


def readable(name: str, unit: str | None = None) -> str:
    """Write the name of a column (`step_ms`) for print, with its unit: "Step (ms)", "Peak memory (MiB)", "Context
    length". `unit` is for names that do not contain it."""
    if name in _WHOLE:
        return _WHOLE[name]
    for ending in ("_speedup", "_gain", "_ratio"):
        if name.endswith(ending):
            return f"{readable(name.removesuffix(ending)).partition(' (')[0]} {_WORDS.get(ending[1:], ending[1:])}"
    for ending in ("_std", "_low", "_high"):
        if name.endswith(ending):
            head, bracket, end = readable(name.removesuffix(ending), unit).partition(" (")
            return f"{head} {ending[1:]}{bracket}{end}"
    for suffix, own_unit in _UNIT_SUFFIXES.items():
        if name.endswith(suffix):
            name, unit = name.removesuffix(suffix), own_unit
            break
    words = [_WORDS.get(word, word) for word in name.replace(".", " ").split("_")]
    text = " ".join(words)
    text = text[:1].upper() + text[1:]
    return text if unit in (None, "1", "fraction", text.lower()) else f"{text} ({unit})"


def in_a_sentence(name: str) -> str:
    """Write the name of a column within a sentence: "bucket size (MB)", "GPU memory"."""
    text = readable(name)
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]
