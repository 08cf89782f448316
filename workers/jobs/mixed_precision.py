"""Runs `mixed_precision`: sums in several data types, and the data types of a training step under autocast.

The results do not depend on time, so the verdicts ignore the load of the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Literal, cast

from app.specs._training import TrainingSpec
from app.specs.mixed_precision import MixedPrecisionCell, MixedPrecisionSpec
from workers.jobs import _reference
from workers.jobs._grid import Context, GridRunner, Trial
from workers.jobs._training import building
from workers.jobs._values import Metric
from workers.measure.check import Check
from workers.measure.table import Column, Scalar, first_rows
from workers.reporter import Reporter

if TYPE_CHECKING:
    import torch

    from workers.measure.dtypes import TypedTensor
    from workers.measure.float8_ranges import Range
    from workers.model.steps import BackwardStep

PRECISIONS: dict[str | None, Literal["fp32", "fp16", "bf16"]] = {"none": "fp32", "fp16": "fp16", "bf16": "bf16"}
"""The training precision that corresponds to each autocast."""
ACCUMULATION_COLUMNS = Column.parse(
    "accumulation, device, addend_dtype, sum_dtype, additions: integer additions, sum: number 1, "
    "error: number 1, rounding_error: number 1, adding_error: number 1, right_sum, sum_digits, error_digits"
)
AUDITED = Column.parse("model, autocast, device")
DTYPE_COLUMNS = (
    *AUDITED,
    *Column.parse("tensor, name, module_class, dtype, cuda_dtype, kept_in_float32: boolean, reason"),
)
FLOAT8_COLUMNS = (
    *AUDITED,
    *Column.parse(
        "layer, tensor, format, largest: number, scale: number, underflow_percent: number %, "
        "underflow_unscaled_percent: number %, overflow_unscaled_percent: number %"
    ),
)
KEPT_COLUMNS = (*AUDITED, Column("name", "string"), Column("module_class", "string"))


@dataclass
class MixedPrecisionContext(Context):
    """The rows of the tables, which cover all cells."""

    accumulations: list[Sequence[Scalar]] = field(default_factory=list)
    dtypes: list[Sequence[Scalar]] = field(default_factory=list)
    kept: list[Sequence[Scalar]] = field(default_factory=list)
    float8: list[Sequence[Scalar]] = field(default_factory=list)


class MixedPrecisionRunner(GridRunner[MixedPrecisionContext]):
    kind = "mixed_precision"
    timed = False

    def open(
        self, spec: MixedPrecisionSpec, devices: Sequence[torch.device], report: Reporter
    ) -> MixedPrecisionContext:
        return MixedPrecisionContext(devices, report)

    def precision_of(self, cell: MixedPrecisionCell) -> str | None:
        """Return the precision of an audited step, or None for a sum."""
        return None if cell.autocast is None else PRECISIONS[cell.autocast]

    def metrics(self, spec: MixedPrecisionSpec, cell: MixedPrecisionCell) -> list[Metric]:
        if cell.audit is None:
            return [Metric(name, None, "1") for name in ("sum", "error", "rounding_error", "adding_error")]
        return [
            Metric("modules_in_float32", None, "modules"),
            Metric("modules", None, "modules"),
            Metric("parameters_in_float32", None, "tensors"),
            Metric("gradients_in_float32", None, "tensors"),
        ]

    def measure(
        self, spec: MixedPrecisionSpec, cell: MixedPrecisionCell, context: MixedPrecisionContext, trial: Trial
    ) -> None:
        if cell.accumulation is not None:
            add_up(spec, cell.accumulation, context, trial)
        else:
            audit(spec, cell, context, trial)

    def close(self, spec: MixedPrecisionSpec, context: MixedPrecisionContext) -> None:
        if context.accumulations:
            context.report.table("accumulations", ACCUMULATION_COLUMNS, context.accumulations)
        if context.dtypes:
            context.report.table("dtypes", DTYPE_COLUMNS, first_rows("dtypes", context.dtypes))
            context.report.table("kept-in-float32", KEPT_COLUMNS, context.kept)
        if context.float8:
            context.report.table("float8", FLOAT8_COLUMNS, first_rows("float8", context.float8))


RUNNER = MixedPrecisionRunner()


def add_up(spec: MixedPrecisionSpec, name: str, context: MixedPrecisionContext, trial: Trial) -> None:
    """Compute one sum twice, and set its values from the first."""
    from workers.measure.accumulation import ACCUMULATIONS, accumulate

    how = ACCUMULATIONS[name]
    added, again = (accumulate(how, spec.addend, spec.additions, context.device) for _ in range(2))
    trial.checks.append(
        Check("repeated", added == again, f"two sums computed alike: {added.value!r}, {again.value!r}", "invalid")
    )
    dtypes = dtype_name(how.addend_dtype), dtype_name(how.sum_dtype)
    errors = (added.error, added.rounding_error, added.adding_error)
    values = [None if added.error is None else added.value, *(None if one is None else float(one) for one in errors)]
    for metric, value in zip(trial.values.metrics, values, strict=True):
        samples = None if value is None else [value]
        trial.values.set(metric.name, metric.phase, samples, f"the sum overflowed {dtypes[1]}: {added.value}")
    # All decimal digits of the right sum, the computed one and its error: binary fractions have finitely many.
    right = plain(added.right)
    digits = (right, None, None) if added.error is None else (right, plain(Decimal(added.value)), plain(added.error))
    context.accumulations.append((name, context.device.type, *dtypes, spec.additions, *values, *digits))


def plain(number: Decimal) -> str:
    """Write a decimal number with all of its digits, without an exponent and without zeros at its end."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def audit(spec: MixedPrecisionSpec, cell: MixedPrecisionCell, context: MixedPrecisionContext, trial: Trial) -> None:
    """Run one step of the cell's model, and keep the data types of its tensors."""
    from workers.measure.dtypes import DtypeAudit
    from workers.measure.float8_ranges import watched as watched_ranges
    from workers.measure.memory import translate_oom

    model, step = build(spec, cell, context.device)
    watched = DtypeAudit(model)

    def forward() -> torch.Tensor:
        step.prepare()
        step.forward()
        loss: torch.Tensor = step.loss
        return loss

    # Under autocast to bf16, linear layers are those of precision fp8.
    ranges: AbstractContextManager[list[Range]] = nullcontext([])
    if cell.autocast == "bf16":
        ranges = watched_ranges(model)
    with translate_oom("the step"), ranges as found:
        watched.run(forward, step.backward, None if step.scaler is None else step.scaler.scale)
    context.float8 += [(cell.audit, cell.autocast, context.device.type, *astuple(one)) for one in found]
    tensors = watched.tensors()
    add_rows(model, tensors, cell, context)
    set_counts(tensors, trial)


def build(
    spec: MixedPrecisionSpec, cell: MixedPrecisionCell, device: torch.device
) -> tuple[torch.nn.Module, BackwardStep]:
    """Return the cell's model and its step, whose autocast and scaling are those of every training kind."""
    if cell.audit == "toy":
        return build_toy(spec, cell, device)
    training_spec = TrainingSpec(
        kind=spec.kind,
        model=spec.model,
        batch_size=spec.batch_size,
        context_length=spec.context_length,
        mode="forward_backward",
        precision=PRECISIONS[cell.autocast],
        attention=spec.attention,
        device=spec.device,
        seed=spec.seed,
    )
    build_model = building.choose_model(training_spec, device)
    _reference.check_parts(training_spec, device)
    training = building.build(training_spec, device, build_model)
    return training.model, cast("BackwardStep", training.step)


def build_toy(
    spec: MixedPrecisionSpec, cell: MixedPrecisionCell, device: torch.device
) -> tuple[torch.nn.Module, BackwardStep]:
    import torch

    from workers.model.precision import PRECISIONS as DEFINED
    from workers.model.steps import BackwardStep
    from workers.model.toy import ToyBatches, ToyModel

    torch.manual_seed(spec.seed)
    with device:
        model = ToyModel()
    batches = ToyBatches(spec.batch_size, device, spec.seed)
    return model, BackwardStep(model, batches, DEFINED[PRECISIONS[cell.autocast]], model)


def cuda_dtype(
    model: torch.nn.Module, tensor: TypedTensor, cell: MixedPrecisionCell, device: torch.device
) -> str | None:
    """Return the data type that a tensor has under CUDA's autocast; None for what has none by itself."""
    from workers.measure.dtypes import under_cudas_autocast
    from workers.model.precision import PRECISIONS as DEFINED

    found = tensor.dtype
    if device.type != "cuda" and cell.autocast != "none" and tensor.role in ("module_output", "logits"):
        module = model.get_submodule(tensor.name)
        found = under_cudas_autocast(module, DEFINED[PRECISIONS[cell.autocast]].compute_dtype)
    return None if found is None else dtype_name(found)


def add_rows(
    model: torch.nn.Module, tensors: Sequence[TypedTensor], cell: MixedPrecisionCell, context: MixedPrecisionContext
) -> None:
    """Add the cell's tensors to the table of data types, and those that autocast keeps in float32 to the other
    table."""
    from workers.measure.dtypes import kept_in_float32

    where = (cell.audit, cell.autocast, context.device.type)
    kept = kept_in_float32(tensors)
    among_kept = set(kept)
    for tensor in tensors:
        dtype = None if tensor.dtype is None else dtype_name(tensor.dtype)
        judged = tensor.leaf and tensor.dtype is not None and cell.autocast != "none"
        on_cuda = cuda_dtype(model, tensor, cell, context.device)
        is_kept = tensor in among_kept if judged else None
        context.dtypes.append(
            (*where, tensor.role, tensor.name, tensor.module_class, dtype, on_cuda, is_kept, tensor.reason)
        )
    if cell.autocast != "none":
        context.kept += [(*where, tensor.name, tensor.module_class) for tensor in kept]


def set_counts(tensors: Sequence[TypedTensor], trial: Trial) -> None:
    import torch

    from workers.measure.dtypes import kept_in_float32

    def in_float32(role: str) -> int:
        return sum(tensor.role == role and tensor.dtype == torch.float32 for tensor in tensors)

    trial.values.set("modules_in_float32", None, [len({tensor.name for tensor in kept_in_float32(tensors)})])
    trial.values.set("modules", None, [len({tensor.name for tensor in tensors if tensor.leaf})])
    trial.values.set("parameters_in_float32", None, [in_float32("parameter")])
    trial.values.set("gradients_in_float32", None, [in_float32("gradient")])


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a data type: "float32"."""
    return str(dtype).removeprefix("torch.")
