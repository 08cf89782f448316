"""Checks what a model takes in place of plain PyTorch, its attention and fused kernels, against their references.

They are called alone, once, with inputs of the model's shapes, before any time is taken, as kinds `attention` and
`kernel` check them: a model that computes something else has no times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from app.specs._training import WITH_BACKWARD, TrainingSpec
from kernels.attention.problem import AttentionProblem
from kernels.registry import KERNELS
from workers.jobs._grid import check_measured
from workers.jobs._training.building import attention_of, shape_of
from workers.jobs._training.fp8 import fp8_notes
from workers.jobs._values import Metric, Values
from workers.measure.check import Check
from workers.measure.errors import NotMeasured
from workers.measure.host_memory import trim_free_memory
from workers.torch_host import load, reset_process

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from workers.measure.judging import Reference

MAX_LOGITS = 1 << 27
"""Most logits that the reference of the fused loss computes, by fewer rows: they take 1 GiB in float64."""


def check_parts(spec: TrainingSpec, device: torch.device) -> list[Check]:
    """Check the parts of a spec's model. Returns a check for each, which fails if there is no memory for its reference.

    Attention `eager` is the reference, and a step of the user's own brings no parts. Raises WrongResult: a part
    computes something else.
    """
    from workers.measure.judging import WrongResult
    from workers.measure.memory import is_out_of_memory, short_message

    checks = []
    for name, find_fault in parts(spec, device).items():
        try:
            fault = find_fault()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            detail = f"{name} is not checked: no memory for its float64 reference: {short_message(error)}"
            checks.append(Check("reference", False, detail))
            continue
        if fault is not None:
            raise WrongResult(f"{name} is wrong: {fault}")
        checks.append(Check("reference", True, f"{name} computes what plain PyTorch does, at the model's shapes"))
    if checks:  # leave no trace in times and peaks
        reset_process()
        trim_free_memory()
    return checks + fp8_notes(spec, device)


def parts(spec: TrainingSpec, device: torch.device) -> dict[str, Callable[[], str | None]]:
    """Return the names of a model's parts, each with a function that returns the fault in its results, or None."""
    found: dict[str, Callable[[], str | None]] = {}
    if spec.step_code is not None:
        return found
    if spec.attention_code is not None or spec.attention != "eager":
        name = f"attention {attention_of(spec).name!r}"
        found[name] = lambda: attention_fault(spec, device)
        if spec.mode == "generate":
            # The first and the last token: tiles may fit the one, and not the other.
            for keys in sorted({spec.context_length + 1, spec.longest}):
                of_one = f"{name} of a single query and {keys} keys"
                found[of_one] = lambda keys=keys: attention_fault(spec, device, decoded=keys)  # type: ignore[misc]
    for kernel in spec.fused:
        found[f"fused {kernel}"] = lambda kernel=kernel: kernel_fault(spec, kernel, device)  # type: ignore[misc]
    return found


def attention_fault(spec: TrainingSpec, device: torch.device, *, decoded: int | None = None) -> str | None:
    """Return the fault of the model's attention, or None. `decoded`: check the call that generates one more token,
    whose single query sees so many keys."""
    from workers.measure.references import attention_reference
    from workers.model.precision import PRECISIONS

    shape, function, precision = shape_of(spec.model, spec.longest), attention_of(spec).function, spec.precision
    decode = decoded is not None
    keys = decoded or (spec.longest if spec.mode != "generate" else spec.context_length)
    problem = shape_of(spec.model, keys).problem
    if decode:
        keys = min(keys, shape.window or keys)
        problem = AttentionProblem(num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads)
    reference = attention_reference(
        (spec.batch_size, shape.num_heads, 1 if decode else keys, shape.head_dim),
        (spec.batch_size, shape.num_kv_heads or shape.num_heads, keys, shape.head_dim),
        PRECISIONS[precision].compute_dtype,
        problem,
        backward=spec.mode in WITH_BACKWARD,
        seed=spec.seed,
        device=device,
        tf32=precision == "tf32",
    )
    options = problem.options(device)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with PRECISIONS[precision].autocast(device.type):
            out: Tensor = function(q, k, v, not decode, **options)
        return out

    if fault := fault_of(call, reference):
        return fault
    if spec.code is not None:  # a model of the user's own may lay tensors out in another way
        return None
    # In the model heads lie between positions, and keys and values of earlier tokens in a longer cache.
    strided = replace(
        reference,
        inputs=tuple(_with_gaps(tensor) if decode else _between(tensor) for tensor in reference.inputs),
        grad_out=None if reference.grad_out is None else _between(reference.grad_out),
    )
    fault = fault_of(call, strided)
    return None if fault is None else f"with tensors that are not contiguous, as in the model: {fault}"


def _between(tensor: Tensor) -> Tensor:
    """Return (batch, heads, positions, head_dim) as a view of (batch, positions, heads, head_dim)."""
    laid_out = tensor.detach().transpose(1, 2).contiguous().transpose(1, 2)
    return laid_out.requires_grad_(tensor.requires_grad)


def _with_gaps(tensor: Tensor) -> Tensor:
    """Return (batch, heads, positions, head_dim) as a view of more positions."""
    import torch

    batch, heads, positions, head_dim = tensor.shape
    cache = torch.zeros(batch, heads, positions + 1, head_dim, dtype=tensor.dtype, device=tensor.device)
    cache[:, :, :positions] = tensor.detach()
    return cache[:, :, :positions]


def kernel_fault(spec: TrainingSpec, name: str, device: torch.device) -> str | None:
    """Return the fault of one of the model's fused kernels, or None."""
    from workers.measure.references import kernel_reference
    from workers.model.precision import PRECISIONS

    kernel, shape = load(KERNELS, name), shape_of(spec.model, spec.longest)
    rows, columns = spec.batch_size * spec.context_length, shape.d_model
    if name == "rope":
        rows, columns = spec.context_length, shape.num_heads
        kernel = replace(kernel, shapes=lambda rows, columns: ((rows, columns, shape.head_dim),))
    elif name == "linear_cross_entropy":
        rows = min(rows, max(1, MAX_LOGITS // shape.vocab_size))
        kernel = replace(kernel, shapes=lambda rows, columns: ((rows, columns), (shape.vocab_size, columns), (1,)))
    dtype, backward = PRECISIONS[spec.precision].compute_dtype, spec.mode in WITH_BACKWARD
    reference = kernel_reference(kernel, rows, columns, dtype, backward=backward, seed=spec.seed, device=device)
    return fault_of(kernel.implementation("triton").function, reference)


def fault_of(function: Callable[..., Any], reference: Reference) -> str | None:
    """Return the fault in a function's results for any values of the reference, or None."""
    from workers.measure.judging import BACKWARD, OTHERS, judge
    from workers.measure.operations import Operation

    operation = Operation(function, reference.inputs, reference.grad_out)
    for draw in (reference.timed, *reference.checked):
        wrong = judge(operation, reference, draw).wrong
        if draw is reference.timed and (changed := reference.changed()):
            return f"it changes {' and '.join(changed)} in place"
        if wrong is not None:
            return wrong if draw is reference.timed else f"with {draw.name}: {wrong}"
    for how, options in (OTHERS if operation.grad_out is None else BACKWARD).items():
        if wrong := judge(operation, reference, **options).wrong:
            return f"with {how}: {wrong}"
    return None


def not_measured(metrics: Sequence[Metric], error: NotMeasured) -> tuple[Values, list[Check]]:
    """Return the values of a case that has an outcome instead, and the check of its verdict."""
    values = Values(metrics)
    values.set_missing(error.outcome, str(error))
    return values, [check_measured(values, alone=True)]
