"""Runs `estimate`: evaluates the formulas of `workers.model.accounting` and `parallel.scaling`. It measures nothing.

The table `formulas` has each result with its formula and the formula's source.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from app.specs.estimate import EstimateSpec
from parallel import scaling
from parallel.scaling import (
    FEWEST_SHARDS,
    REPLICA_DEVICES,
    SAVED_BY_SHARDING,
    STRATEGIES,
    Formula,
    evaluate,
    pretty,
    why_no_shards,
)
from workers.devices.discovery import has_gpu
from workers.jobs._attention_memory import estimate_attention
from workers.jobs._base import Unit
from workers.jobs._fits import (
    MOST_DEVICES,
    OTHERWISE,
    SPLIT_BY_TENSOR,
    Fit,
    Mesh,
    Question,
    answer,
    asked,
    close,
    columns,
    fewest_devices,
    gib,
    question_of,
    report_moments,
    split_sizes,
    splits_of,
)
from workers.jobs._training.building import shape_of
from workers.jobs._values import Metric, Values
from workers.measure.table import Column, Scalar
from workers.model import accounting
from workers.model.accounting import ITEM_BYTES, FeedForwardStack, Shape, StepMemory, counts_half, saved_for_backward
from workers.outcome import Unsupported
from workers.reporter import Reporter

OUR_MODEL = "transformer_lm"
OUR_STEP = "workers/model/steps.py"
DEVICE_KEY = "on paper"
"""The device key of estimates: computed results are the same everywhere."""
CPU_KEY = "on paper, as on a CPU"
"""The device key of estimates of a step on a CPU."""
GIB, MIB = 2**30, 2**20
EXACT = 2**53
"""The largest number up to which readers of JSON keep integers exact."""
PARTS = {
    "parameters_gib": ("P", "parameters"),
    "gradients_gib": ("G", "gradients"),
    "optimizer_state_gib": ("O", "optimizer state"),
    "weight_copies_gib": ("K", "16-bit copies of weights"),
    "activations_gib": ("A", "activations"),
}
"""The parts of a replica's memory: symbol and name, by metric."""
PLAYED = "workers/model/step_memory.py"
NOT_COUNTED = (
    "Counted for the step as it is written: torch.compile, CUDA graphs, Triton's fused parts and selective checkpoints "
    "change what is kept, and data parallelism's buckets and communication come on top."
)


def metrics() -> list[Metric]:
    """Return the metrics in the order of the report."""
    return [
        Metric("total_gib", None, "GiB"),
        Metric("without_activations_gib", None, "GiB"),
        Metric("residual_stream_mib", None, "MiB"),
        Metric("parameters", None, "parameters"),
        *(Metric(name, None, "GiB") for name in PARTS),
        Metric("step_peak_gib", None, "GiB"),
        Metric("free_gib", None, "GiB"),
        Metric("saved_by_16_bits_gib", None, "GiB"),
        Metric("saved_by_sharding_gib", None, "GiB"),
        Metric("replica_devices", None, "devices"),
        Metric("fewest_shards", None, "devices"),
        *(Metric("device_gib", strategy, "GiB") for strategy in STRATEGIES),
        *(Metric("device_tokens", how, "tokens") for how in ("summed", "overlapped")),
        *(Metric("global_tokens", how, "tokens") for how in ("summed", "overlapped")),
    ]


@dataclass
class Sheet:
    """The formulas of a job with their values, each computed from the symbols before it."""

    symbols: dict[str, float]
    rows: list[list[Scalar]] = field(default_factory=list)
    """Rows of the table `formulas`."""

    def add(self, formula: Formula, symbol: str = "", *, unless: str | None = None) -> Fraction | None:
        """Evaluate a formula, list it, and let later ones use its value as `symbol`. `unless`: the reason why it has no
        value; None if it has one."""
        value = None if unless is not None else formula.value(self.symbols)
        if value is not None and symbol:
            self.symbols[symbol] = int(value) if value.denominator == 1 else float(value)
        text = f"{symbol} = {pretty(formula.text)}" if symbol else pretty(formula.text)
        self.rows.append([formula.quantity, text, number(value), formula.unit, formula.source, unless])
        return value


class EstimateRunner:
    kind = "estimate"
    needs_torch = False

    def plan(self, spec: EstimateSpec) -> list[Unit]:
        return [Unit(title=f"{spec.label()}, on paper")]

    def run(self, spec: EstimateSpec, unit: Unit, report: Reporter) -> None:
        """Compute all results and report them. Raises Unsupported: the model is not ours, so that its formulas are
        unknown."""
        from workers.measure import environment

        if spec.architecture == "transformer" and spec.model.name != OUR_MODEL:
            raise Unsupported(
                f"model.name: there are formulas for {OUR_MODEL!r} only, not for {spec.model.name!r}: leave the name "
                "out, or measure the model by a job of kind benchmark"
            )
        report.environment({"host": environment.host(), "software": environment.software()})
        on_gpu = has_gpu() if spec.device == "auto" else spec.device == "cuda"
        key = DEVICE_KEY if on_gpu or spec.architecture == "feed_forward_stack" else CPU_KEY
        case = spec.case()
        if spec.architecture == "attention":
            estimate_attention(spec, case, key, report, on_gpu=on_gpu)
            report.progress(1, 1, "done")
            return
        shape, step = sizes(spec, on_gpu=on_gpu)
        symbols = mesh_symbols(spec) | shape.symbols | step.symbols
        if isinstance(shape, Shape) and not counts_half(shape.problem):
            symbols["N"] = shape.problem.visible_pairs(step.context_length, step.context_length)
        values, sheet = Values(metrics()), Sheet(symbols)
        add_memory(values, sheet, spec, shape, step)
        add_batch(values, sheet, spec, shape, report)
        if isinstance(shape, FeedForwardStack):
            fits, fewer = add_devices(values, sheet, spec, report), None
        else:
            question = question_of(spec, shape, step)
            fits = add_peaks(values, sheet, spec, question, report)
            fewer = question.fewer(fits, splits_of(spec))
        set_free(values, asked(spec, fits), int(sheet.symbols["R"]))
        report_answer(spec, fits, fewer, report, on_gpu=on_gpu)
        report_memory(sheet, shape, step, report)
        report_formulas(sheet, report)
        values.report(case, key, report)
        report.progress(1, 1, "done")


RUNNER = EstimateRunner()


def sizes(spec: EstimateSpec, *, on_gpu: bool = True) -> tuple[Shape | FeedForwardStack, StepMemory]:
    """Return the model's sizes, and the choices of the step that change its memory."""
    step = StepMemory(
        spec.batch_size,
        spec.context_length,
        spec.precision,
        spec.parameter_dtype,
        spec.attention,
        spec.activation_checkpointing,
        on_gpu,
    )
    if spec.architecture == "feed_forward_stack":
        return FeedForwardStack(spec.stack.d_model, spec.stack.d_ff, spec.stack.num_blocks), step
    return shape_of(spec.model, spec.context_length), step


def mesh_symbols(spec: EstimateSpec) -> dict[str, float]:
    """Return the values of the symbols of `parallel.scaling` that the spec sets."""
    mesh = spec.mesh
    return {
        "X": mesh.fsdp,
        "Y": mesh.tensor,
        "Mx": mesh.fsdp_axes,
        "My": mesh.tensor_axes,
        "W": mesh.link_bytes_per_s,
        "C": mesh.flops_per_s,
        "f": spec.sharded_activation_fraction,
        "s": int(spec.communication_dtype == "fp32"),
        "R": int(Fraction(repr(spec.device_gb)) * 10**9),
        "M": int(Fraction(repr(spec.limit_gb)) * 10**9),
    }


def add_memory(
    values: Values, sheet: Sheet, spec: EstimateSpec, shape: Shape | FeedForwardStack, step: StepMemory
) -> None:
    """Set the bytes of one replica on one device, by their content."""
    of_model = "workers/model/accounting.py"
    each = step.parameter_bytes
    copies, saved = accounting.weight_copies_formula(shape, step), accounting.activations_formula(shape, step)
    in_fp32 = replace(step, precision="fp32", parameter_dtype="fp32")
    wide = accounting.activations_formula(shape, in_fp32)
    adamw = "Loshchilov & Hutter, 2019, algorithm 2"
    with_gradients, trained = spec.mode != "forward", spec.mode == "train_step"
    moments = f"{accounting.MOMENTS} * {each} * n"
    has_masters = trained and spec.master_weights
    if has_masters:
        moments = f"{accounting.MOMENTS} * 4 * n + 4 * n"
    count = sheet.add(Formula("parameters", shape.parameters_formula, "parameters", of_model), "n")
    sheet.add(Formula("parameters", f"{each} * n", "bytes", of_model), "P")
    sheet.add(Formula("accumulated gradients", f"{each} * n" if with_gradients else "0", "bytes", of_model), "G")
    named = "AdamW's two moments and master weights" if has_masters else "AdamW's two moments"
    sheet.add(Formula(named, moments if trained else "0", "bytes", adamw), "O")
    sheet.add(Formula("16-bit copies of weights", copies, "bytes", of_model), "K")
    sheet.add(Formula("saved for the backward pass", saved if with_gradients else "0", "bytes", of_model), "A")
    in_fp32_text = wide if with_gradients else "0"
    sheet.add(Formula("saved for the backward pass, all in fp32", in_fp32_text, "bytes", of_model), "A32")
    tensors = 1 + with_gradients + accounting.MOMENTS * trained
    saving = f"{tensors} * 4 * n + A32 - (P + G + O + K + A)"
    narrow = sheet.add(Formula("bytes saved by 16 bits", saving, "bytes", of_model))
    sharded = sheet.add(SAVED_BY_SHARDING)
    values.set("parameters", None, samples(count))
    for name, (symbol, _) in PARTS.items():
        values.set(name, None, [sheet.symbols[symbol] / GIB])
    total = sum(sheet.symbols[symbol] for symbol, _ in PARTS.values())
    values.set("total_gib", None, [total / GIB])
    values.set("without_activations_gib", None, [(total - sheet.symbols["A"]) / GIB])
    # A stack has its activations in the type of its products, a transformer its residual stream in its parameters'.
    number_bytes = each if isinstance(shape, accounting.Shape) else step.compute_bytes
    stream = sheet.add(Formula("a tensor of the residual stream", f"{number_bytes} * B * T * D", "bytes", of_model))
    values.set("residual_stream_mib", None, samples(stream, MIB))
    values.set("saved_by_16_bits_gib", None, samples(narrow, GIB))
    values.set("saved_by_sharding_gib", None, samples(sharded, GIB))


def add_devices(values: Values, sheet: Sheet, spec: EstimateSpec, report: Reporter) -> list[Fit]:
    """Set the bytes on each device of a stack, by formulas; report them as the table `per-device`."""
    # In the backward pass gradients replace saved activations; a step drops them at its end.
    peak = sheet.add(Formula("peak of a step that keeps no gradients", "P + O + max(G, K + A)", "bytes", OUR_STEP))
    values.set("step_peak_gib", None, samples(peak, GIB))
    values.set("replica_devices", None, samples(sheet.add(REPLICA_DEVICES)))
    reason = why_no_shards(sheet.symbols)
    shards, why_none = samples(sheet.add(FEWEST_SHARDS, unless=reason)), reason or ""
    fsdp, tensor = spec.mesh.fsdp, spec.mesh.tensor
    devices = {"tensor": tensor, "mesh": fsdp * tensor}
    rows: list[list[Scalar]] = []
    found: list[Fit] = []
    for strategy, formula in STRATEGIES.items():
        reason = why_not_split(spec) if strategy in SPLIT_BY_TENSOR else None
        device_bytes = sheet.add(formula, unless=reason)
        values.set("device_gib", strategy, samples(device_bytes, GIB), reason or "")
        parts = [None] * len(PARTS) if device_bytes is None else parts_of(formula, sheet.symbols)
        share = None if device_bytes is None else float(100 * device_bytes / Fraction(sheet.symbols["R"]))
        fits = None if device_bytes is None else device_bytes <= sheet.symbols["R"]
        total = number(device_bytes, GIB)
        number_of = devices.get(strategy, fsdp)
        rows.append([strategy, number_of, *parts, None, total, share, fits, pretty(formula.text), None, reason])
        size = None if device_bytes is None else float(device_bytes)
        fewest = fewest_of(strategy, formula, sheet.symbols, splits_of(spec))
        helps = None
        if fits is False:
            axes = [] if fewest is None else [f"mesh.{axis}={n}" for axis, n in fewest._asdict().items() if n > 1]
            helps = " with ".join(axes) or OTHERWISE
        found.append(Fit(strategy, number_of, size, fits, helps, fewest, reason))
    set_fewest_shards(values, shards, why_none, asked(spec, found))
    report_devices(rows, report)
    return found


def set_free(values: Values, fit: Fit, limit: int) -> None:
    """Set what a device of so many bytes has left at the peak; where it does not fit it is `oom`, for a search, too."""
    of_free = [metric for metric in values.metrics if metric.name == "free_gib"]
    if fit.peak is None:
        values.set_missing("unsupported", fit.note or "", of_free)
    elif fit.fits:
        values.set("free_gib", None, [(limit - fit.peak) / GIB])
    else:
        why = f"the step takes {gib(fit.peak)} on each device (strategy {fit.strategy}), of {gib(limit)}"
        values.set_missing("oom", why, of_free)


def set_fewest_shards(values: Values, shards: Sequence[float] | None, why_none: str, fit: Fit) -> None:
    """Set the fewest shards. None: no number suffices, which is `oom` unless the step fits as it is asked about."""
    if fit.fits or shards is not None:
        values.set("fewest_shards", None, shards, why_none)
    else:
        values.set_missing("oom", why_none, [metric for metric in values.metrics if metric.name == "fewest_shards"])


def fewest_of(strategy: str, formula: Formula, symbols: Mapping[str, float], splits: Sequence[int]) -> Mesh | None:
    """Return the mesh of the fewest devices each of which holds a formula's bytes; None if none do."""
    return fewest_devices(
        strategy, splits, lambda fsdp, tensor: formula.value({**symbols, "X": fsdp, "Y": tensor}) <= symbols["R"]
    )


def report_devices(rows: list[list[Scalar]], report: Reporter) -> None:
    """Report the table `per-device`: what memory is used for on each device."""
    report.table(
        "per-device",
        [
            *Column.parse("strategy, devices: integer"),
            *(Column(name, "number", "GiB") for name in PARTS),
            *Column.parse(
                "workspaces_gib: number GiB, total_gib: number GiB, share_percent: number %, fits: boolean, "
                "formula, moment, note"
            ),
        ],
        rows,
    )


def add_peaks(values: Values, sheet: Sheet, spec: EstimateSpec, question: Question, report: Reporter) -> list[Fit]:
    """Set a transformer's peaks on each device, by strategy, and the numbers of devices; report the tables `per-device`
    and `moments`."""
    highest, _ = question.parts("none")
    peak = sheet.add(Formula(f"peak of the step, {highest.name}", highest.formula, "bytes", PLAYED))
    values.set("step_peak_gib", None, samples(peak, GIB))
    values.set("replica_devices", None, samples(sheet.add(REPLICA_DEVICES)))
    limit = replace(question, limit=int(sheet.symbols["M"]))
    shards, splits = limit.fewest_shards("fully_sharded"), splits_of(spec)
    why = f"each device keeps {gib(replace(limit, fsdp=MOST_DEVICES).peak('fully_sharded'))}, however many there are"
    rows: list[list[Scalar]] = []
    fits: list[Fit] = []
    for strategy in ("none", *STRATEGIES):
        reason = why_not_split(spec) if strategy in SPLIT_BY_TENSOR else None
        devices = question.devices(strategy)
        if reason is not None:
            values.set("device_gib", strategy, None, reason)
            fits.append(Fit(strategy, devices, None, None, None, question.fewest(strategy, splits), reason))
            rows.append([strategy, devices, *[None] * (len(PARTS) + 6), reason])
            continue
        moment, parts = question.parts(strategy)
        total = sum(parts.values())
        fewest = question.fewest(strategy, splits)
        suffices, helps, note = question.fits(strategy), question.helps(strategy), close(total, question.limit)
        fits.append(Fit(strategy, devices, total, suffices, helps, fewest, note))
        if strategy == "none":  # as with data parallelism
            continue
        values.set("device_gib", strategy, [total / GIB])
        share = 100 * total / question.limit
        sizes = [size / GIB for size in parts.values()]
        rows.append([strategy, devices, *sizes, total / GIB, share, question.fits(strategy), None, moment.name, None])
    set_fewest_shards(values, None if shards is None else [shards], why, asked(spec, fits))
    report_devices(rows, report)
    report_moments(question.moments("none"), report)
    return fits


def report_answer(
    spec: EstimateSpec, fits: Sequence[Fit], fewer: str | None, report: Reporter, *, on_gpu: bool
) -> None:
    """Report the tables `answer`, sentences, and `fits`."""
    lines = answer(spec, fits, fewer, on_gpu=on_gpu)
    if spec.architecture == "transformer":
        lines.append(NOT_COUNTED)
    report.table("answer", [Column("answer", "string")], [[line] for line in lines])
    report.table("fits", columns(), [fit.row() for fit in fits])


def parts_of(formula: Formula, symbols: Mapping[str, float]) -> list[Scalar]:
    """Return the GiB on each device that each part of a replica takes: the formula is linear in them."""
    others: dict[str, float] = {symbol: 0 for symbol, _ in PARTS.values()}
    return [number(formula.value({**symbols, **others, symbol: symbols[symbol]}), GIB) for symbol, _ in PARTS.values()]


def why_not_split(spec: EstimateSpec) -> str | None:
    """Say why mesh.tensor devices cannot share the model's heads and d_ff evenly; None if they can."""
    tensor = spec.mesh.tensor
    for name, size in split_sizes(spec).items():
        if size % tensor:
            return f"{name} ({size}) cannot be split evenly over {tensor} devices: take a mesh.tensor that divides it"
    return None


def add_batch(
    values: Values, sheet: Sheet, spec: EstimateSpec, shape: Shape | FeedForwardStack, report: Reporter
) -> None:
    """Set the batch at which computation hides communication, and report the table `batch`."""
    book, of_model = "Scaling book, part 5", "workers/model/accounting.py"
    each, heading = ITEM_BYTES[spec.communication_dtype], "a block's forward pass"
    gathered = scaling.Formula("a block's weights, gathered", f"{each} * ({shape.block_formula})", "bytes", book)
    moved = scaling.Formula(f"exchanged in {heading}", f"{each} * {shape.exchanged} * D", "bytes/token", book)
    sheet.add(scaling.Formula(f"FLOPs of {heading}", shape.block_flops_formula, "FLOP/token", of_model), "k")
    sheet.add(gathered, "g")
    sheet.add(moved, "m")
    fsdp, tensor = spec.mesh.fsdp, spec.mesh.tensor
    alone = scaling.why_not_hidden({**sheet.symbols, "Y": 1})
    both = why_not_split(spec) or scaling.why_not_hidden(sheet.symbols)
    summed, overlapped = scaling.SUMMED_TOKENS, scaling.OVERLAPPED_TOKENS
    if tensor == 1:
        summed = overlapped = scaling.FSDP_TOKENS
    rows: list[list[Scalar]] = []
    for way, formula, sharing, why_not in (
        ("fully sharded alone", scaling.FSDP_TOKENS, 1, alone),
        ("mesh, summed", summed, tensor, both),
        ("mesh, overlapped", overlapped, tensor, both),
    ):
        device_tokens = sheet.add(formula, unless=why_not)
        global_tokens = None if device_tokens is None else device_tokens * fsdp * sharing
        sequences = None if global_tokens is None else global_tokens / spec.context_length
        tokens = Fraction(spec.batch_size * spec.context_length, sharing)
        hidden = None if device_tokens is None else tokens >= device_tokens
        numbers = map(number, (device_tokens, global_tokens, sequences))
        rows.append([way, fsdp * sharing, *numbers, hidden, scaling.pretty(formula.text), why_not])
        how = way.removeprefix("mesh, ")
        if how != way:
            values.set("device_tokens", how, samples(device_tokens), why_not or "")
            values.set("global_tokens", how, samples(global_tokens), why_not or "")
    none = scaling.MOST_TENSOR.value(sheet.symbols) < 1
    why_none = "no tensor parallelism is hidden: fully sharded alone needs the fewest tokens" if none else None
    best, text = number(sheet.add(scaling.BEST_TOKENS, unless=why_none)), scaling.pretty(scaling.BEST_TOKENS.text)
    rows.append(["best mesh, overlapped", None, best, None, None, None, text, why_none])
    sheet.add(scaling.MOST_TENSOR)
    columns = Column.parse(
        "way, devices: integer, device_tokens: number tokens, global_tokens: number tokens, "
        "global_sequences: number sequences, this_batch_hides: boolean, formula, note"
    )
    report.table("batch", columns, rows)


def report_memory(sheet: Sheet, shape: Shape | FeedForwardStack, step: StepMemory, report: Reporter) -> None:
    """Report the table `memory`: the parts of one replica, and below them the parts of the activations."""
    written = {str(row[1]).partition(" = ")[0]: str(row[1]).partition(" = ")[2] for row in sheet.rows}
    rows: list[list[Scalar]] = []
    for symbol, name in PARTS.values():
        size = Fraction(sheet.symbols[symbol])
        rows.append([name, None, written[symbol], number(size), number(size, GIB)])
    for name, formula in (("total", "P + G + O + K + A"), ("total without activations", "P + G + O + K")):
        total = evaluate(formula, sheet.symbols)
        rows.append([name, None, formula, number(total), number(total, GIB)])
    for what, formula, saved in saved_for_backward(shape, step) if sheet.symbols["A"] else []:
        size = Fraction(saved)
        rows.append(["of the activations", what, pretty(formula), number(size), number(size, GIB)])
    columns = Column.parse("category, what, formula, bytes: number bytes, gib: number GiB")
    report.table("memory", columns, rows)


MEANINGS: Mapping[str, tuple[str, str | None]] = {
    "B": ("sequences of one data-parallel rank", "sequences"),
    "T": ("tokens per sequence", "tokens"),
    "V": ("vocabulary", "tokens"),
    "D": ("d_model", None),
    "F": ("d_ff", None),
    "H": ("heads", None),
    "E": ("width of all key heads", None),
    "N": ("visible scores of one head and sequence", None),
    "L": ("blocks", None),
    "X": ("devices along the fsdp axis", "devices"),
    "Y": ("devices along the tensor axis", "devices"),
    "Mx": ("links that serve the fsdp axis", None),
    "My": ("links that serve the tensor axis", None),
    "W": ("bandwidth of a link", "bytes/s"),
    "C": ("rate of a device", "FLOP/s"),
    "f": ("share of the activations that is sharded", None),
    "s": ("1 if sharded weights travel in fp32, so that autocast keeps 16-bit copies of them", None),
    "R": ("memory of a device that replicas are counted in", "bytes"),
    "M": ("limit for the fewest shards", "bytes"),
}
"""The meanings and units of the symbols that the spec sets."""


def report_formulas(sheet: Sheet, report: Reporter) -> None:
    """Report the tables `formulas` and, with the values that the spec sets, `symbols`."""
    columns = Column.parse("quantity, formula, value: number, unit, source, note")
    report.table("formulas", columns, sheet.rows)
    report.table(
        "symbols",
        Column.parse("symbol, meaning, value: number, unit"),
        [
            [symbol, meaning, number(Fraction(repr(sheet.symbols[symbol]))), unit]
            for symbol, (meaning, unit) in MEANINGS.items()
            if symbol in sheet.symbols
        ],
    )


def number(value: Fraction | None, unit: int = 1) -> int | float | None:
    """Return a value in units of `unit` for a table: an integer if JSON keeps it exact, otherwise a float."""
    if value is None:
        return None
    converted = value / unit
    return int(converted) if converted.denominator == 1 and abs(converted) <= EXACT and unit == 1 else float(converted)


def samples(value: Fraction | None, unit: int = 1) -> list[float] | None:
    """Return a value in units of `unit` as the samples of a metric."""
    return None if value is None else [float(value / unit)]
