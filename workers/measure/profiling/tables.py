"""The tables of a profile: their columns, and their rows. All times are per step, unless their names say otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workers.measure.profiling.attention import Part, Roofline
from workers.measure.profiling.usage import ClassUsage, OperatorUsage, Usage
from workers.measure.table import Column, Scalar

Rows = list[list[Scalar]]
MAX_ROWS = 2000
"""Most kernels or operators in one table, those that take the most time."""
MAX_NAME = 1000
"""Most characters of a kernel's name; templates may write kilobytes."""

_SPREAD = (
    Column("mean_us", "number", "µs"),
    Column("median_us", "number", "µs"),
    Column("min_us", "number", "µs"),
    Column("max_us", "number", "µs"),
    Column("std_us", "number", "µs"),
)
KERNELS = (
    Column("name", "string"),
    Column("class", "string"),
    Column("total_ms", "number", "ms"),
    Column("share_percent", "number", "%"),
    Column("calls", "number", "calls"),
    *_SPREAD,
    Column("launch_to_start_us", "number", "µs"),
)
OPERATORS = (
    Column("name", "string"),
    Column("class", "string"),
    Column("device_ms", "number", "ms"),
    Column("host_ms", "number", "ms"),
    Column("share_percent", "number", "%"),
    Column("calls", "number", "calls"),
    *_SPREAD,
)
CLASS_SHARES = (
    Column("scope", "string"),
    Column("class", "string"),
    Column("total_ms", "number", "ms"),
    Column("share_percent", "number", "%"),
    Column("calls", "number", "calls"),
)
RANGES = (
    Column("range", "string"),
    Column("phase", "string"),
    Column("total_ms", "number", "ms"),
    Column("share_percent", "number", "%"),
)
ATTENTION = (
    Column("part", "string"),
    Column("phase", "string"),
    Column("total_ms", "number", "ms"),
    Column("product_ms", "number", "ms"),
    Column("share_percent", "number", "%"),
    Column("gflop", "number", "GFLOP"),
    Column("useful_gflop", "number", "GFLOP"),
    Column("traffic_mib", "number", "MiB"),
    Column("tflops", "number", "TFLOP/s"),
    Column("gb_per_s", "number", "GB/s"),
    Column("intensity", "number", "FLOP/byte"),
    Column("ridge", "number", "FLOP/byte"),
    Column("limit_percent", "number", "%"),
    Column("bound", "string"),
    Column("note", "string"),
)
SUMMARY = (
    Column("what", "string"),
    Column("value", "number"),
    Column("unit", "string"),
    Column("note", "string"),
)


def kernel_rows(found: Sequence[Usage]) -> Rows:
    """Return the rows of a table of kernels."""
    return [
        [
            *(short(one.name), one.class_name, one.total_ms, one.share_percent, one.calls),
            *(one.mean_us, one.median_us, one.min_us, one.max_us, one.std_us, one.launch_to_start_us),
        ]
        for one in found[:MAX_ROWS]
    ]


def operator_rows(found: Sequence[OperatorUsage]) -> Rows:
    """Return the rows of a table of operators."""
    return [
        [
            *(short(one.name), one.class_name, one.device_ms, one.host_ms, one.share_percent, one.calls),
            *(one.mean_us, one.median_us, one.min_us, one.max_us, one.std_us),
        ]
        for one in found[:MAX_ROWS]
    ]


def class_rows(scopes: Mapping[str, Sequence[ClassUsage]]) -> Rows:
    """Return the rows of the table of classes, by scope."""
    return [
        [scope, one.class_name, one.total_ms, one.share_percent, one.calls]
        for scope, found in scopes.items()
        for one in found
    ]


def range_rows(found: Sequence[tuple[str, Mapping[str, float]]], totals_ms: Mapping[str, float]) -> Rows:
    """Return the rows of the table of named ranges.

    Args:
        found: The time of each range in each phase, in ms.
        totals_ms: The time of each phase.
    """
    return [
        [name, phase, time, 100 * time / totals_ms[phase] if totals_ms[phase] else None]
        for name, times in found
        for phase, time in times.items()
        if time
    ]


def attention_row(
    part: Part, share_percent: float | None, useful_flops: int | None, roofline: Roofline | str, note: str
) -> list[Scalar]:
    """Return one row of the table of the parts of attention.

    Args:
        part: The part in one phase.
        share_percent: Its share of the phase.
        useful_flops: FLOPs that a causal implementation has to compute; None if unknown.
        roofline: The device's, or the reason why it is unknown.
        note: What else there is to say.
    """
    cost, intensity = part.cost, part.intensity
    known = None if isinstance(roofline, str) or intensity is None else roofline
    notes = [note, roofline if isinstance(roofline, str) else ""]
    limit = None if known is None or intensity is None else known.limit_tflops(intensity)
    return [
        *(part.name, part.phase, part.time_ms, part.product_ms, share_percent),
        None if cost is None else 1e-9 * cost.flops,
        None if useful_flops is None else 1e-9 * useful_flops,
        None if cost is None else cost.bytes / 2**20,
        *(part.tflops, part.gb_per_s, intensity),
        None if known is None else known.ridge,
        None if limit is None or part.tflops is None else 100 * part.tflops / limit,
        None if known is None or intensity is None else known.side(intensity),
        "; ".join(text for text in notes if text) or None,
    ]


def missing_row(part: str, phase: str, reason: str) -> list[Scalar]:
    """Return the row of a part that does not exist."""
    return [part, phase, *[None] * (len(ATTENTION) - 3), reason]


def short(name: str) -> str:
    """Return a name that is not too long for a table."""
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}…"
