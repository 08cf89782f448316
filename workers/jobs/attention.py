"""Runs `attention`: times implementations forward and backward, each checked against one oracle."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from app.specs.attention import AttentionCell, AttentionSpec
from workers import uploaded
from workers.jobs._grid import Trial
from workers.jobs._grid.operations import OperationContext, OperationRunner
from workers.jobs._values import Metric, Values
from workers.outcome import Unsupported
from workers.torch_host import load

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kernels.attention.problem import AttentionProblem
    from kernels.registry import Implementation
    from workers.measure.judging import Reference
    from workers.measure.operations import Operation


class AttentionRunner(OperationRunner):
    """The runner of kind `attention`."""

    kind = "attention"
    rates = (("tflops", "TFLOP/s"), ("ceiling_percent", "%"))
    extras = (Metric("intermediates_mib", None, "MiB"), Metric("working_memory_mib", None, "MiB"))

    def check(self, spec: AttentionSpec) -> None:
        """Refuse a job for which this worker has no implementation at all, or whose own code cannot be imported."""
        from kernels.registry import ATTENTION

        if spec.code is not None:
            uploaded.implementation(spec.code)
        elif not set(spec.implementations) & set(ATTENTION.names()):
            load(ATTENTION, spec.implementations[0])

    def reference_of(self, spec: AttentionSpec, cell: AttentionCell) -> Any:
        return cell.dtype, cell.causal, cell.head_dim, cell.sequence_length

    def make_reference(self, spec: AttentionSpec, cell: AttentionCell, device: torch.device) -> Reference:
        """Make inputs: keys and values (batch_size, num_kv_heads, sequence_length, head_dim); queries and the output's
        gradient with `num_heads`, and `query_length` rows if the job has one.
        """
        from workers.measure.references import attention_reference
        from workers.model.precision import PRECISIONS

        batch, heads, length, head_dim = shape_of(spec, cell)
        return attention_reference(
            (batch, heads, spec.query_length or length, head_dim),
            (batch, spec.num_kv_heads or heads, length, head_dim),
            PRECISIONS[cell.dtype].compute_dtype,
            problem_of(spec, cell),
            backward=spec.mode == "forward_backward",
            seed=spec.seed,
            device=device,
            tf32=cell.dtype == "tf32",
        )

    def admit(self, spec: AttentionSpec, cell: AttentionCell, device: torch.device) -> None:
        """Refuse a cell that the implementation cannot compute on this device."""
        from workers.model.precision import PRECISIONS

        dtype = str(PRECISIONS[cell.dtype].compute_dtype).removeprefix("torch.")
        implementation, problem = implementation_of(spec, cell), problem_of(spec, cell)
        if reason := implementation.why_not(device.type, dtype, backward=False, problem=problem):
            raise Unsupported(reason)

    def operation(
        self, spec: AttentionSpec, cell: AttentionCell, reference: Reference, device: torch.device
    ) -> Operation:
        from workers.measure.operations import Operation

        implementation = implementation_of(spec, cell)
        return Operation(
            function=functools.partial(
                call, implementation, cell.causal, problem_of(spec, cell).options(device) | blocks(cell)
            ),
            inputs=reference.inputs,
            grad_out=reference.grad_out if implementation.has_backward else None,
        )

    def prepare(self, spec: AttentionSpec, cell: AttentionCell, reference: Reference, trial: Trial) -> None:
        """Let the implementation tune itself for these inputs, if the job asks for it and the implementation can.

        The log says what it chose.
        """
        from workers.measure.memory import translate_oom
        from workers.measure.validity import check_kernels

        implementation = implementation_of(spec, cell)
        if cell.implementation == "triton":
            trial.checks += check_kernels(reference.inputs[0].device)
        if not spec.autotune or implementation.tune is None:
            return
        backward = reference.grad_out is not None and implementation.has_backward
        with translate_oom("tuning"):
            chosen = implementation.tune(
                *reference.inputs, cell.causal, backward=backward, tell=lambda line: trial.tell(f"tuning, {line}"),
                **problem_of(spec, cell).options(reference.inputs[0].device),
            )  # fmt: skip
        sys.stderr.write(f"{cell.title}: tuned: {chosen}\n")
        trial.tell("tuned")

    def add_rates(
        self,
        spec: AttentionSpec,
        cell: AttentionCell,
        milliseconds: Mapping[str | None, float],
        context: OperationContext,
        values: Values,
    ) -> None:
        """Set the TFLOP/s of useful work, and their share of the measured rate of this device's matrix products."""
        from workers.measure.ceilings import Ceilings
        from workers.model.accounting import attention_backward_flops, attention_flops

        forward = attention_flops(shape_of(spec, cell), problem_of(spec, cell), spec.query_length)
        backward = attention_backward_flops(forward)
        whole = forward if spec.mode == "forward" else forward + backward
        flops = {"forward": forward, "backward": backward, None: whole}
        ceiling, source = Ceilings(context.report.ceilings).tflops(context.device, cell.dtype)
        for phase, median in milliseconds.items():
            rate = 1e-9 * flops[phase] / median
            values.set("tflops", phase, [rate])
            values.set("ceiling_percent", phase, None if ceiling is None else [100 * rate / ceiling], source)
        tell = implementation_of(spec, cell).forward_bytes
        if tell is not None and spec.query_length is None:
            working, output = tell(*shape_of(spec, cell), **blocks(cell))
            values.set("intermediates_mib", None, [(working + output) / 2**20])
            values.set("working_memory_mib", None, [working / 2**20])
        values.set_missing("unknown", "the implementation does not tell", self.extras)


def implementation_of(spec: AttentionSpec, cell: AttentionCell) -> Implementation:
    """Return the cell's implementation: an installed one, or the job's own code.

    Raises:
        Unsupported, InvalidEnvironment, BrokenCode: it does not exist here, or is broken.
    """
    from kernels.registry import ATTENTION

    if spec.code is not None and spec.is_code(cell.implementation):
        return uploaded.implementation(spec.code)
    implementation: Implementation = load(ATTENTION, cell.implementation)
    return implementation


def shape_of(spec: AttentionSpec, cell: AttentionCell) -> tuple[int, int, int, int]:
    """Return (batch, query heads, keys, head_dim)."""
    return spec.batch_size, spec.num_heads, cell.sequence_length, cell.head_dim


def problem_of(spec: AttentionSpec, cell: AttentionCell) -> AttentionProblem:
    """Return what the cell computes, without the fields that have no effect on it."""
    from kernels.attention.problem import AttentionProblem

    used = spec.case(cell).identity
    window, documents = spec.masks(cell.sequence_length)
    return AttentionProblem(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        is_causal=cell.causal,
        bottom_right=bool(used["bottom_right"]),
        window=window,
        document_lengths=None if documents is None else tuple(documents),
        scale=spec.scale,
        softcap=spec.softcap,
    )


def call(implementation: Any, causal: bool, options: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the implementation as a function, with the cell's mask and options."""
    out: Tensor = implementation.function(q, k, v, causal, **options)
    return out


def blocks(cell: AttentionCell) -> dict[str, int]:
    """Return the block sizes that the implementation takes, by name."""
    return {name: value for name, value in (("br", cell.br), ("bc", cell.bc)) if value is not None}


RUNNER = AttentionRunner()
