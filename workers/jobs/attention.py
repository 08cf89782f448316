"""Runs `attention`: times implementations forward and backward, each checked against one oracle."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from app.specs.attention import AttentionCell, AttentionSpec
from kernels.attention.problem import AttentionProblem
from kernels.registry import ATTENTION, Implementation
from workers import uploaded
from workers.jobs._attention_profile import COUNTERS, report_profiles, take_profile
from workers.jobs._grid import Trial
from workers.jobs._grid.operations import OperationContext, OperationRunner
from workers.jobs._values import Metric, Values
from workers.measure.check import check_cores
from workers.model.accounting import attention_backward_flops, attention_flops
from workers.outcome import Unsupported
from workers.torch_host import load

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from workers.measure.judging import Reference
    from workers.measure.operations import Operation


class AttentionRunner(OperationRunner):
    kind = "attention"
    rates = (("tflops", "TFLOP/s"), ("ceiling_percent", "%"))
    extras = (Metric("intermediates_mib", None, "MiB"), Metric("working_memory_mib", None, "MiB"))

    def check(self, spec: AttentionSpec) -> None:
        """Refuse a job with an implementation that this worker does not know, or whose own code cannot be imported."""
        if spec.code is not None:
            check_arguments(uploaded.implementation(spec.code), spec)
        for name in set(spec.implementations) - set(ATTENTION.names()):
            load(ATTENTION, name)

    def metrics(self, spec: Any, cell: Any) -> list[Metric]:
        stopwatch = [Metric("do_bench_ms", None, "ms")] if spec.do_bench else []
        return [*super().metrics(spec, cell), *stopwatch, *(COUNTERS if spec.profile else [])]

    def measure(self, spec: Any, cell: AttentionCell, context: OperationContext, trial: Trial) -> None:
        """Measure a cell with its number of threads, and profile it if the job asks for that."""
        from workers.measure.validity import check_kernels

        if cell.implementation == "triton":
            trial.checks += check_kernels(context.device)
        with computing_threads(cell.threads, trial):
            super().measure(spec, cell, context, trial)
            # Of a wrong implementation there are no times, either.
            if context.reference is None or not trial.values.samples("forward_ms", "forward"):
                return
            operation = self.operation(spec, cell, context.reference[1], context.device)
            if spec.do_bench:
                time_by_do_bench(spec, operation, context.device, trial.values)
            if spec.profile:
                take_profile(spec, cell, operation, context, trial)

    def close(self, spec: Any, context: OperationContext) -> None:
        report_profiles(context)

    def reference_of(self, spec: AttentionSpec, cell: AttentionCell) -> Any:
        return cell.dtype, cell.causal, cell.head_dim, cell.sequence_length

    def make_reference(self, spec: AttentionSpec, cell: AttentionCell, device: torch.device) -> Reference:
        """Make inputs: keys and values (batch_size, num_kv_heads, sequence_length, head_dim); queries and the output's
        gradient with `num_heads`, and `query_length` rows if the job has one."""
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
                call, implementation, cell.causal, problem_of(spec, cell).options(device) | arguments_of(spec, cell)
            ),
            inputs=reference.inputs,
            grad_out=reference.grad_out if implementation.has_backward else None,
        )

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
        values.set_missing("unknown", "not reported by the implementation", self.extras)


def implementation_of(spec: AttentionSpec, cell: AttentionCell) -> Implementation:
    """Return the cell's implementation: an installed one, or the job's own code. Raises Unsupported,
    InvalidEnvironment, BrokenCode: it does not exist here, or is broken."""
    if spec.code is not None and spec.is_code(cell.implementation):
        return uploaded.implementation(spec.code)
    implementation: Implementation = load(ATTENTION, cell.implementation)
    return implementation


def shape_of(spec: AttentionSpec, cell: AttentionCell) -> tuple[int, int, int, int]:
    """Return (batch, query heads, keys, head_dim)."""
    return spec.batch_size, spec.num_heads, cell.sequence_length, cell.head_dim


def problem_of(spec: AttentionSpec, cell: AttentionCell) -> AttentionProblem:
    """Return what the cell computes, without the fields that have no effect on it."""
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


def arguments_of(spec: AttentionSpec, cell: AttentionCell) -> dict[str, Any]:
    """Return the arguments that the implementation gets beside the problem's options."""
    return {**blocks(cell), **(spec.arguments if spec.is_code(cell.implementation) else {})}


def check_arguments(implementation: Implementation, spec: AttentionSpec) -> None:
    """Check that the job's own function takes the job's arguments. Raises BrokenCode: it does not."""
    function = implementation.function
    if not spec.arguments:
        return
    try:
        inspect.signature(function).bind(None, None, None, False, **spec.arguments)
    except ValueError:  # a function in another language has no signature
        return
    except TypeError as error:
        called = ", ".join(["q, k, v, is_causal", *(f"{name}=" for name in spec.arguments)])
        raise uploaded.BrokenCode(f"{implementation.name} is called as ({called}): {error}") from error


def time_by_do_bench(spec: AttentionSpec, operation: Operation, device: torch.device, values: Values) -> None:
    """Set the mean time of the mode's whole work as `triton.testing.do_bench` finds it: on a GPU whose L2 cache it
    overwrites before each call, warm-up 1000 ms, calls for 10 000 ms."""
    backward = spec.mode == "forward_backward"
    if device.type != "cuda":
        values.set("do_bench_ms", None, None, "triton.testing.do_bench times GPUs only")
    elif not backward or operation.grad_out is not None:
        from triton.testing import do_bench

        work = (lambda: operation.backward(operation.forward())) if backward else operation.forward
        values.set("do_bench_ms", None, [do_bench(work, warmup=1000, rep=10_000)])


@contextlib.contextmanager
def computing_threads(number: int | None, trial: Trial) -> Iterator[None]:
    """Let torch, and the C++ implementations, compute with so many threads inside the context; None: as many as now."""
    import torch

    if number is None:
        yield
        return
    trial.checks.append(check_cores(number))
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def blocks(cell: AttentionCell) -> dict[str, int]:
    """Return the block sizes that the implementation takes, by name."""
    return {name: value for name, value in (("br", cell.br), ("bc", cell.bc)) if value is not None}


RUNNER = AttentionRunner()
