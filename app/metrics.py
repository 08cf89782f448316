"""Metrics: the names of their columns, which direction is better, which one is the main one, and heads with units.

Standard library only: the command line reads it too.
"""

import functools
from collections.abc import Mapping, Sequence
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


_DIRECTIONS: Mapping[Direction | None, Sequence[str]] = {
    "more": ("mfu", "ceiling_percent", "gpu_busy_percent", "free_gib", "saved_by_16_bits_gib", "saved_by_sharding_gib"),
    "less": (
        "output_error", "gradient_error", "parameter_error", "profiler_overhead_percent", "communication_percent",
        "exposed_communication_percent", "unknown_percent",
        "exposed_communication_error_ms",  # of ddp jobs up to version 0.1.0
    ),
    None: (
        # Errors with a sign, of which the smallest is no better than one near 0.
        "error", "rounding_error", "adding_error",
        # Sizes that were asked for or observed.
        "copy_mib", "tensor_mib", "snapshot_mib", "rounding_mib", "largest_free_mib", "residual_stream_seen_mib",
    ),
}  # fmt: skip
"""Whether more or less of a metric is better, or neither, where its unit does not give that. Of all others, less time,
less memory or a higher rate is better; numbers in other units have no direction."""
_BETTER = {name: direction for direction, names in _DIRECTIONS.items() for name in names}
_ERRORS = ("error", "rounding_error", "adding_error", "output_error", "gradient_error", "parameter_error")
"""Metrics that say how wrong a result is, which are no measures of speed or memory."""

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
def _listed(column: str) -> str | None:
    """Return the metric of a column if its direction is listed; None if it has the properties of its unit."""
    return next((name for name in metric_names(column) if name in _BETTER), None)


def better(metric: str, unit: str | None) -> Direction | None:
    """Return whether less or more of a metric is better; None where neither is. It may be a column (`step_ms`); `unit`
    is by default that at the end of its name.

    Tables, comparisons and gates all use this function.
    """
    if (listed := _listed(metric)) is not None:
        return _BETTER[listed]
    unit = unit or _unit_in(metric)
    return "less" if unit in TIMES | _SIZES else "more" if unit in _RATES else None


def is_speed(metric: str, unit: str | None) -> bool:
    """Return True if a metric is a time or a rate, of which people say that it is faster or slower."""
    return _listed(metric) is None and (unit or _unit_in(metric)) in TIMES | _RATES


def is_rate(metric: str, unit: str | None) -> bool:
    """Return True if a metric is work divided by a time, or a share of such a rate: it falls as the time rises."""
    if unit is None and metric.endswith("_per_s"):
        return True
    return (unit or _unit_in(metric)) in _RATES or _listed(metric) in _SHARES_OF_RATES


def is_count(unit: str | None) -> bool:
    """Return True if a metric is counted, not measured: two counts are equal or they differ, without any chance."""
    return unit in _COUNTS


def is_error(metric: str) -> bool:
    """Return True if a metric says how wrong a result is."""
    return _listed(metric) in _ERRORS


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
    length", and of an argument of one's own step its name alone. `unit` is for names that do not contain it."""
    name = name.removeprefix("arguments.")
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
