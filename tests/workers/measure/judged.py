"""Judges every registered implementation, and kernels with planted faults."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels.attention.library import NO_KERNEL
from kernels.attention.problem import AttentionProblem
from kernels.registry import ATTENTION, KERNELS
from tests.workers.measure.faults import Fault
from workers.measure.judging import Draw, Reference, judge
from workers.measure.operations import Operation
from workers.measure.references import attention_reference, kernel_reference

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

NOT_TAKEN = (NO_KERNEL, "cannot be imported", "cannot take these inputs")
"""Parts of the errors of implementations that do not take a problem, or whose library is not installed."""


@dataclass(frozen=True)
class Size:
    """The size of the problems on which is judged."""

    heads: int
    length: int
    head_dims: Sequence[int]
    rows: int
    columns: Sequence[int]


SMALL = Size(heads=4, length=200, head_dims=(64,), rows=256, columns=(96,))
LARGE = Size(heads=8, length=1000, head_dims=(16, 64, 128, 256), rows=4096, columns=(1600, 8192))
PROBLEMS: Sequence[dict[str, Any]] = (
    {},
    {"is_causal": True},
    {"is_causal": True, "window": 100},
    {"is_causal": True, "num_kv_heads": 2},
    {"is_causal": True, "document_lengths": "thirds"},
    {"softcap": 20.0},
    {"scale": 0.04},
)


def problem_of(fields: dict[str, Any], size: Size) -> AttentionProblem:
    """Return the problem; documents of "thirds" are of about equal length."""
    fields = {"num_heads": size.heads, **fields}
    if fields.get("document_lengths") == "thirds":
        third = size.length // 3
        fields["document_lengths"] = (third, third, size.length - 2 * third)
    return AttentionProblem(**fields)


def attention_of(fields, size, head_dim, dtype, device, backward) -> tuple[AttentionProblem, Reference]:
    problem = problem_of(fields, size)
    reference = attention_reference(
        (1, size.heads, size.length, head_dim), (1, problem.num_kv_heads or size.heads, size.length, head_dim),
        DTYPES[dtype], problem, backward=backward, seed=1, device=device, tf32=dtype == "tf32",
    )  # fmt: skip
    return problem, reference


def draws(reference: Reference) -> Sequence[Draw]:
    """Return all values of the inputs, in the order in which jobs check them."""
    return reference.timed, *reference.checked


def noticed(fault: Fault, size: Size, device: torch.device) -> str | None:
    """Return by what the judge notices a fault; None if it does not."""
    torch.set_float32_matmul_precision("highest")
    if fault.kernel == "attention":
        size = dataclasses.replace(size, length=max(size.length, fault.length))
        if fault.length > 1000:
            size = dataclasses.replace(size, heads=1)
        problem, reference = attention_of(dict(fault.problem), size, 64, fault.dtype, device, fault.backward)
        options = problem.options(device)
        function: Any = functools.partial(_called, fault.function, problem.is_causal, options)
    else:
        kernel = KERNELS.load(fault.kernel)
        columns = size.columns[-1] if fault.kernel in ("rms_norm", "weighted_sum") else min(size.columns[0], 64)
        reference = kernel_reference(
            kernel, size.rows, columns, DTYPES[fault.dtype], backward=fault.backward, seed=1, device=device
        )
        function = fault.function
    operation = Operation(function, reference.inputs, reference.grad_out)
    for draw in draws(reference):
        if reason := judge(operation, reference, draw).wrong:
            return f"{draw.name}: {reason}"
    return None


def _called(function: Any, is_causal: bool, options: dict[str, Any], *inputs: torch.Tensor) -> torch.Tensor:
    return function(*inputs, is_causal, **options)


def honest_attention(size: Size, device: torch.device, names: Sequence[str]) -> dict[str, list[str]]:
    """Judge implementations of attention on every problem that they take; return what is wrong with each."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for dtype in ("fp32", "bf16", "fp16", *(["tf32"] if device.type == "cuda" else [])):
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        for head_dim in size.head_dims:
            for fields in PROBLEMS if head_dim == 64 else PROBLEMS[:2]:
                problem, reference = attention_of(fields, size, head_dim, dtype, device, backward=True)
                where = f"{dtype} d{head_dim} {' '.join(fields) or 'full'}"
                for name, wrong in found.items():
                    _judge_one(ATTENTION.load(name), dtype, problem, reference, wrong, where)
    torch.set_float32_matmul_precision("highest")
    return found


def _judge_one(implementation, dtype, problem, reference, wrong, where) -> None:
    device = reference.inputs[0].device
    name = str(DTYPES[dtype]).removeprefix("torch.")
    if implementation.why_not(device.type, name, backward=False, problem=problem):
        return
    function = functools.partial(_called, implementation.function, problem.is_causal, problem.options(device))
    operation = Operation(function, reference.inputs, reference.grad_out if implementation.has_backward else None)
    _judge_draws(operation, reference, wrong, where)


def _judge_draws(operation: Operation, reference: Reference, wrong: list[str], where: str) -> None:
    for draw in draws(reference):
        try:
            reason = judge(operation, reference, draw).wrong
        except (RuntimeError, ValueError) as error:  # a library that is not installed, or does not take this
            if not any(expected in str(error) for expected in NOT_TAKEN):
                wrong.append(f"{where}: {error}")
            return
        if reason:
            wrong.append(f"{where}, {draw.name}: {reason}")


def honest_kernels(size: Size, device: torch.device) -> Iterator[tuple[str, list[str]]]:
    """Judge every implementation of every other operation; yield what is wrong with each."""
    for name in KERNELS.names():
        kernel = KERNELS.load(name)
        found: dict[str, list[str]] = {one: [] for one in ("torch", *(each.name for each in kernel.kernels))}
        for dtype in ("fp32", "bf16", "fp16"):
            for columns in {min(columns, 64) for columns in size.columns} if name == "rope" else size.columns:
                rows = size.rows if columns * size.rows < 1 << 24 else size.rows // 4
                reference = kernel_reference(kernel, rows, columns, DTYPES[dtype], backward=True, seed=1, device=device)
                for one, wrong in found.items():
                    implementation = kernel.implementation(one)
                    plain = str(DTYPES[dtype]).removeprefix("torch.")
                    if implementation.why_not(device.type, plain, backward=False):
                        continue
                    grad_out = reference.grad_out if implementation.has_backward else None
                    operation = Operation(implementation.function, reference.inputs, grad_out)
                    _judge_draws(operation, reference, wrong, f"{dtype} {rows} × {columns}")
        yield from ((f"{name} {one}", wrong) for one, wrong in found.items())
