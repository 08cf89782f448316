"""The tables of a profile: their columns, and their rows. All times are per step, unless their names say otherwise."""

from collections.abc import Iterable, Mapping, Sequence

from workers.measure.ceilings import NO_CEILING, Ceiling
from workers.measure.profiling.attention import Part, Roofline
from workers.measure.profiling.idle import Stretch
from workers.measure.profiling.lines import OUTSIDE, Use
from workers.measure.profiling.recording import HostEvent
from workers.measure.profiling.usage import ClassUsage, OperatorUsage, ProductUsage, Usage
from workers.measure.table import Column, Scalar

Rows = list[list[Scalar]]
MAX_ROWS = 2000
"""Most kernels or operators in one table, and most products of one phase: those that take the most time."""
MAX_NAME = 1000
"""Most characters of a kernel's name; templates may write kilobytes."""

_SPREAD = Column.parse(
    "mean_us: number µs, median_us: number µs, min_us: number µs, max_us: number µs, std_us: number µs"
)
KERNELS = (
    *Column.parse("name, class, total_ms: number ms, share_percent: number %, calls: number calls"),
    *_SPREAD,
    Column("launch_to_start_us", "number", "µs"),
)
KERNELS_BY_RANGE = (Column("phase", "string"), Column("range", "string"), *KERNELS)
WORK = Column.parse("phase, range, operator, shapes, name, class, total_ms: number ms, calls: number calls")
OPERATORS = (
    *Column.parse(
        "name, class, device_ms: number ms, host_ms: number ms, device_total_ms: number ms, "
        "host_total_ms: number ms, cpu_mib: number MiB, device_mib: number MiB, share_percent: number %, "
        "calls: number calls"
    ),
    *_SPREAD,
)
CLASS_SHARES = Column.parse("scope, class, total_ms: number ms, share_percent: number %, calls: number calls")
WAITS = Column.parse("class, total_ms: number ms, share_percent: number %, largest_ms: number ms, operator, kernel")
RANGES = Column.parse("range, phase, total_ms: number ms, share_percent: number %")
LINES = Column.parse(
    "file, line: integer, function, self_ms: number ms, self_percent: number %, self_margin_percent: number %, "
    "total_ms: number ms, python_ms: number ms, device_self_ms: number ms, device_total_ms: number ms, "
    "calls: integer calls, operators: integer calls, code"
)
ATTENTION = Column.parse(
    "part, phase, total_ms: number ms, product_ms: number ms, share_percent: number %, gflop: number GFLOP, "
    "useful_gflop: number GFLOP, traffic_mib: number MiB, tflops: number TFLOP/s, gb_per_s: number GB/s, "
    "intensity: number FLOP/byte, ridge: number FLOP/byte, limit_percent: number %, bound, note"
)
PRODUCTS = Column.parse(
    "phase, operator, product, dtype, calls: number calls, total_ms: number ms, share_percent: number %, "
    "gflop: number GFLOP, traffic_mib: number MiB, tflops: number TFLOP/s, gb_per_s: number GB/s, "
    "intensity: number FLOP/byte, ridge: number FLOP/byte, limit_percent: number %, bound"
)
CEILINGS = Column.parse("limit, precision, value: number, unit, source")
SUMMARY = Column.parse("what, value: number, unit, note")
LIMITS = {"compute-bound": "products", "memory-bound": "copies"}
"""The rows of the table `ceilings`, by what they bound."""
TOO_LOW = (
    "too low, since work reached {:.0f} % of it: measured beside other load, or that work's data was in a cache; "
    "`flopwatch submit ceiling` on an idle host measures it again"
)


def left_out(times_ms: Sequence[float]) -> str | None:
    """Describe the rows that a table leaves out, from all rows' times in descending order; None if it has all rows."""
    others = times_ms[MAX_ROWS:]
    if not others:
        return None
    return f"the {MAX_ROWS} of {len(times_ms)} that take the most time; the others take {sum(others):.4g} ms together"


def kernel_rows(usages: Sequence[Usage]) -> Rows:
    return [
        [
            *(short(one.name), one.class_name, one.total_ms, one.share_percent, one.calls),
            *(one.mean_us, one.median_us, one.min_us, one.max_us, one.std_us, one.launch_to_start_us),
        ]
        for one in usages[:MAX_ROWS]
    ]


def kernel_rows_by_range(usages: Sequence[tuple[str, str, Usage]]) -> Rows:
    return [[phase, short(path), *row] for phase, path, one in usages[:MAX_ROWS] for row in kernel_rows([one])]


def work_rows(usages: Sequence[tuple[str, str, str, str, Usage]]) -> Rows:
    """Return the rows of the table of work by what launched it, which comparisons match."""
    return [
        [
            *(phase, short(path), short(operator) or None, shapes or None),
            *(short(one.name), one.class_name, one.total_ms, one.calls),
        ]
        for phase, path, operator, shapes, one in usages[:MAX_ROWS]
    ]


def operator_rows(usages: Sequence[OperatorUsage]) -> Rows:
    return [
        [
            *(short(one.name), one.class_name, one.device_ms, one.host_ms),
            *(one.device_total_ms, one.host_total_ms, one.cpu_mib, one.device_mib, one.share_percent, one.calls),
            *(one.mean_us, one.median_us, one.min_us, one.max_us, one.std_us),
        ]
        for one in usages[:MAX_ROWS]
    ]


def class_rows(scopes: Mapping[str, Sequence[ClassUsage]]) -> Rows:
    return [
        [scope, one.class_name, one.total_ms, one.share_percent, one.calls]
        for scope, usages in scopes.items()
        for one in usages
    ]


def wait_rows(found: Sequence[Stretch], times_ms: Mapping[str, float], host: Sequence[HostEvent]) -> Rows:
    """Return the rows of the table of what a GPU does at each moment of a step, or why it does nothing. `times_ms`: the
    ms of each class in an unprofiled step."""
    rows: Rows = []
    total = sum(times_ms.values()) or 1.0
    for cause, time_ms in sorted(times_ms.items(), key=lambda one: -one[1]):
        longest = max((one for one in found if one.cause == cause), key=lambda one: one.ns)
        at = longest.at_ns
        inside = [one for one in host if one.kind == "operator" and one.begin_ns <= at < one.end_ns]
        operator = max(inside, key=lambda one: one.begin_ns).name if inside else None
        rows.append(
            [cause, time_ms, 100 * time_ms / total, 1e-6 * longest.ns, operator, longest.next and short(longest.next)]
        )
    return rows


def range_rows(ranges: Sequence[tuple[str, Mapping[str, float]]], totals_ms: Mapping[str, float]) -> Rows:
    """Return the rows of the table of named ranges. `ranges`: the time of each range in each phase, in ms."""
    return [
        [name, phase, time, 100 * time / totals_ms[phase] if totals_ms[phase] else None]
        for name, times in ranges
        for phase, time in times.items()
        if time
    ]


def line_rows(uses: Sequence[Use], step_ms: float) -> Rows:
    """Return the rows of the table of lines of the user's own code. `uses`: in order; the last one may be that of all
    other code. `step_ms`: the step's time, to which their own times add up."""
    others = uses[-1:] if uses and uses[-1].place is None else []
    return [
        [
            *((use.place.file, use.place.line, short(use.place.function)) if use.place else (None, None, OUTSIDE)),
            *(use.self_ms, 100 * use.self_ms / step_ms),
            None if use.margin_ms is None else 100 * use.margin_ms / step_ms,
            *(use.total_ms, use.python_ms),
            *(use.device_self_ms, use.device_total_ms, use.calls, use.operators, use.code or None),
        ]
        for use in [*uses[: min(MAX_ROWS, len(uses) - len(others))], *others]
    ]


def product_rows(
    products: Sequence[ProductUsage], phase_ms: float, rooflines: Mapping[str, Roofline | str], precision: str
) -> Rows:
    """Return the rows of the table of matrix products of one phase, of which all work takes `phase_ms`. `rooflines`:
    the device's roofline in each data type that the job's `precision` has, or why it is unknown. Products in other data
    types, such as float32 in a job in bf16, get no limit."""
    rows: Rows = []
    for one in products[:MAX_ROWS]:
        dtype = "tf32" if (one.product.dtype, precision) == ("fp32", "tf32") else one.product.dtype
        line = rooflines.get(dtype, f"not in {precision}")
        share_percent = 100 * one.part.time_ms / phase_ms if phase_ms else None
        rows.append(
            [
                *(one.part.phase, one.operator, one.part.name, dtype, one.calls, one.part.time_ms, share_percent),
                *roofline_columns(one.part, line),
            ]
        )
    return rows


def highest_percent(tables: Iterable[tuple[Sequence[Column], Rows]]) -> dict[str, float]:
    """Return the highest share of its limit that a row has reached, by the limit: "products" and "copies"."""
    highest = dict.fromkeys(LIMITS.values(), 0.0)
    for columns, rows in tables:
        at = {column.name: index for index, column in enumerate(columns)}
        for row in rows:
            percent, bound = row[at["limit_percent"]], row[at["bound"]]
            if isinstance(percent, int | float):
                limit = LIMITS[str(bound)]
                highest[limit] = max(highest[limit], percent)
    return highest


def ceiling_rows(
    ceiling: Ceiling | None,
    precision: str,
    peak: tuple[float | None, str],
    refused: Mapping[str | None, str],
    reached: Mapping[str, float],
) -> Rows:
    """Return the limits of the device: its measured ceilings, and the vendor's peak with its source.

    A limit of which more than 100 % was `reached` is too low, and `source` says so. An unknown limit has no value, and
    `source` says why: `refused` has the reasons for those that the job has measured and not recorded, by the product's
    data type; None is the copy.
    """
    rate = None if ceiling is None else ceiling.tflops.get(precision)
    copy = None if ceiling is None else ceiling.copy_gb_per_s
    rows: Rows = []
    for limit, of, known, unit in (("products", precision, rate, "TFLOP/s"), ("copies", None, copy, "GB/s")):
        missing = NO_CEILING if ceiling is None else f"no measured ceiling of this device's {limit} is on record"
        if of in refused:
            missing = f"measured now, and not recorded: {refused[of]}"
        source = missing if known is None else f"measured at {known.measured_at}"
        if known is not None and reached[limit] > 100:
            source += f"; {TOO_LOW.format(reached[limit])}"
        rows.append([limit, of, None if known is None else known.value, unit, source])
    return [*rows, ["vendor's peak", precision, peak[0], "TFLOP/s", peak[1]]]


def attention_row(
    part: Part, share_percent: float | None, useful_flops: int | None, roofline: Roofline | str, note: str
) -> list[Scalar]:
    """Return one row of the table of the parts of attention. `useful_flops`: FLOPs that a causal implementation has to
    compute; None if unknown."""
    gflop, *rest = roofline_columns(part, roofline)
    notes = [note, roofline if isinstance(roofline, str) else ""]
    return [
        *(part.name, part.phase, part.time_ms, part.product_ms, share_percent),
        gflop,
        None if useful_flops is None else 1e-9 * useful_flops,
        *rest,
        "; ".join(text for text in notes if text) or None,
    ]


def roofline_columns(part: Part, roofline: Roofline | str) -> list[Scalar]:
    """Return a part's columns from `gflop` to `bound`; all null if its cost is unknown."""
    cost, intensity = part.cost, part.intensity
    known = None if isinstance(roofline, str) or intensity is None else roofline
    limit = None if known is None or intensity is None else known.limit_tflops(intensity)
    return [
        None if cost is None else 1e-9 * cost.flops,
        None if cost is None else cost.bytes / 2**20,
        *(part.tflops, part.gb_per_s, intensity),
        None if known is None else known.ridge,
        None if limit is None or part.tflops is None else 100 * part.tflops / limit,
        None if known is None or intensity is None else known.side(intensity),
    ]


def short(name: str) -> str:
    """Return a name that is not too long for a table."""
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}…"
