"""What a cell of kind `attention` does beside its times: its operators, the processor's counts, and 4-D accesses."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from app.specs.attention import AttentionCell, AttentionSpec
from workers.jobs._grid import Trial
from workers.jobs._grid.operations import OperationContext
from workers.jobs._values import Metric
from workers.measure.hardware_counters import counting
from workers.measure.table import Column, Scalar, first_rows

if TYPE_CHECKING:
    from workers.measure.operations import Operation

COUNTERS = (
    Metric("instructions", None, "instructions"),
    Metric("l1_load_misses", None, "misses"),
    Metric("cache_misses", None, "misses"),
    Metric("dram_lines", None, "lines"),
)
"""The processor's counts of one call, as `workers.measure.hardware_counters` names them."""
ON_GPU = "a processor's counter: kind profile with ncu=true counts a GPU's"
PLACE = Column.parse(
    "implementation, dtype, causal: boolean, head_dim: integer, sequence_length: integer, br: integer, bc: integer, "
    "query_length: integer, threads: integer, pass"
)
"""The columns of the table `profile` that name a cell, and the pass."""
SHAPE = (1, 4, 1024, 32)
"""The tensor that is accessed: that of the preset `cpu`."""
ACCESSES = 4
"""Numbers that are read, and as many that are written."""
ACCESSOR = Column.parse(
    "access, b: integer, h: integer, i: integer, j: integer, formula, offset: integer, expected: number, "
    "result: number, equal: boolean"
)
"""Columns of the table `accessor`."""


def take_profile(
    spec: AttentionSpec, cell: AttentionCell, operation: Operation, context: OperationContext, trial: Trial
) -> None:
    """Profile one call of each pass, and count what the processor does in one call of all of them.

    After the first C++ implementation, the accesses to a 4-D tensor that all of them are made of are checked, too.
    """
    import torch

    from workers.measure.call_profile import profile_call

    trial.tell("profiling")
    if cell.implementation.startswith("cpu_") and not context.accesses:
        context.accesses += accesses(spec.seed)
    place: list[Scalar] = [cell.coordinates()[column.name] for column in PLACE[:-1]]
    with torch.set_grad_enabled(operation.grad_out is not None):
        rows = [["forward", *row] for row in profile_call(operation.forward, context.device)]
        if operation.grad_out is not None:
            out = operation.forward()
            rows += [["backward", *row] for row in profile_call(lambda: operation.backward(out), context.device)]
        context.profiles += [[*place, *row] for row in rows]
        if context.device.type == "cuda":
            trial.values.set_missing("unknown", ON_GPU, COUNTERS)
            return
        with counting() as counts:
            out = operation.forward()
            if operation.grad_out is not None:
                operation.backward(out)
    for metric in COUNTERS:
        value = counts.values.get(metric.name)
        trial.values.set(metric.name, None, None if value is None else [value], counts.reasons.get(metric.name, ""))


def report_profiles(context: OperationContext) -> None:
    """Report the tables `profile`, of all cells that were profiled, and `accessor`."""
    from workers.measure.call_profile import COLUMNS

    if context.profiles:
        context.report.table("profile", (*PLACE, *COLUMNS), first_rows("profile", context.profiles))
    if context.accesses:
        context.report.table("accessor", ACCESSOR, context.accesses)


def accesses(seed: int) -> list[list[Scalar]]:
    """Read and write numbers of a 4-D tensor by four indices in C++; return each with what torch has there."""
    import torch

    from kernels.attention import cpu
    from kernels.attention.cpu.accessors import FORMULA, offset

    draw = random.Random(seed)
    tensor = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    rows: list[list[Scalar]] = []
    for access in ("read", "write") * ACCESSES:
        at = tuple(draw.randrange(size) for size in SHAPE)
        if access == "read":
            expected, result = float(tensor[at]), cpu.read(tensor, at)
        else:
            expected = float(torch.tensor(draw.gauss(0, 1)))  # rounded as the tensor's numbers
            cpu.write(tensor, at, expected)
            result = float(tensor[at])
        rows.append([access, *at, FORMULA, offset(SHAPE, at), expected, result, expected == result])
    return rows
