"""Estimates one call of attention alone: the bytes of each pass, and the first length that a device has no memory for.

The bytes are those of `workers.model.attention_memory`. The metrics are named as those that kind `attention` measures.
"""

from collections.abc import Mapping
from fractions import Fraction

from app.specs import Case
from app.specs.estimate import EstimateSpec
from parallel.scaling import pretty
from workers.jobs._fits import close, gib, report_moments, size_text
from workers.jobs._values import Metric, Values
from workers.measure.table import Column, Scalar
from workers.model.accounting import StepMemory
from workers.model.attention_memory import BACKWARD, BETWEEN, FORWARD, AttentionMemory
from workers.model.step_memory import BHTT, Moment
from workers.reporter import Reporter

MIB = 2**20


def estimate_attention(spec: EstimateSpec, case: Case, device_key: str, report: Reporter, *, on_gpu: bool) -> None:
    """Compute a job's results and report them as those of a case."""
    layer, backward = spec.attention_layer, spec.mode != "forward"
    step = StepMemory(spec.batch_size, spec.context_length, spec.precision, attention=spec.attention, on_gpu=on_gpu)
    call = AttentionMemory(layer.num_heads, layer.head_dim, step, layer.causal, backward)
    moments, limit = call.moments(), int(Fraction(repr(spec.device_gb)) * 10**9)
    passes = (FORWARD, BACKWARD) if backward else (FORWARD,)
    first = {name: call.first_beyond(limit, name) for name in passes}
    peak = max(moments.values(), key=lambda moment: moment.total)
    values = Values(
        [
            Metric("peak_memory_mib", None, "MiB"),
            *(Metric("peak_memory_mib", name, "MiB") for name in passes),
            *([Metric("memory_before_backward_mib", None, "MiB")] if backward else []),
            *(Metric("oom_length", name, "tokens") for name in passes),
        ]
    )
    values.set("peak_memory_mib", None, [peak.total / MIB])
    if backward:
        values.set("memory_before_backward_mib", None, [moments[BETWEEN].total / MIB])
    for name in passes:
        values.set("peak_memory_mib", name, [moments[name].total / MIB])
        length = first[name]
        values.set("oom_length", name, None if length is None else [length], "no length that is looked at exceeds it")
    report_tables(spec, moments, report)
    report_answer(spec, moments, first, limit, report, on_gpu=on_gpu)
    values.report(case, device_key, report)


def report_tables(spec: EstimateSpec, moments: Mapping[str, Moment], report: Reporter) -> None:
    """Report the tables `moments`, which tensors are there, `formulas` and `symbols`."""
    report_moments(moments.values(), report)
    formulas: list[list[Scalar]] = [
        [moment.name, pretty(moment.formula), moment.total, "bytes"] for moment in moments.values()
    ]
    report.table("formulas", Column.parse("quantity, formula, value: integer, unit"), formulas)
    layer = spec.attention_layer
    meanings: dict[str, tuple[str, int]] = {
        "B": ("sequences", spec.batch_size),
        "H": ("heads", layer.num_heads),
        "T": ("tokens per sequence", spec.context_length),
        "D": ("heads · head_dim", layer.num_heads * layer.head_dim),
    }
    report.table(
        "symbols",
        Column.parse("symbol, meaning, value: integer"),
        [[symbol, meaning, value] for symbol, (meaning, value) in meanings.items()],
    )


def report_answer(
    spec: EstimateSpec,
    moments: Mapping[str, Moment],
    first: Mapping[str, int | None],
    limit: int,
    report: Reporter,
    *,
    on_gpu: bool,
) -> None:
    """Report the table `answer`: sentences."""
    peak = max(moment.total for moment in moments.values())
    what = f"{spec.label()}, {spec.batch_size} × {spec.context_length} tokens, {spec.precision}, {spec.attention}"
    where = "a GPU" if on_gpu else "a device, as on a CPU (for a GPU, say device=cuda),"
    if spec.device == "cpu":
        where = "a CPU"
    lines = [
        f"{what}, {'fits' if peak <= limit else 'does not fit'} on {where} of {size_text(spec, on_gpu=on_gpu)}: "
        + "; ".join(f"{moment.name} {gib(moment.total)}" for moment in moments.values())
        + ".",
    ]
    for name, length in first.items():
        lines.append(
            f"The {name} pass fits at every length that is looked at."
            if length is None
            else f"The {name} pass exceeds it from {length} tokens on."
        )
    if BETWEEN in moments:
        held = moments[BETWEEN]
        weights = sum(held.bytes_of(key) for key in held.held if key[2].axes == BHTT)
        lines.append(
            f"Between the passes {100 * weights / held.total:.3g} % of it are attention weights, whose bytes grow with "
            "the square of the length; all others grow with the length."
        )
    if note := close(peak, limit):
        lines.append(f"The peak is {note}.")
    report.table("answer", [Column("answer", "string")], [[line] for line in lines])
