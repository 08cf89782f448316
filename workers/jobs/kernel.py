"""Runs `kernel`: times kernels other than attention, and the plain PyTorch operations that they replace."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from app.specs.kernel import KernelCell, KernelSpec, PlanCell
from kernels.registry import KERNELS, Implementation, Kernel, UnknownName
from workers import uploaded
from workers.jobs._grid import Trial
from workers.jobs._grid.operations import OperationContext, OperationRunner
from workers.jobs._values import Metric, Values
from workers.outcome import InvalidEnvironment, Unsupported
from workers.torch_host import load

if TYPE_CHECKING:
    import torch

    from workers.measure.judging import Reference
    from workers.measure.operations import Operation


class KernelRunner(OperationRunner):
    kind = "kernel"
    rates = (("gb_per_s", "GB/s"), ("ceiling_percent", "%"))

    def precision_of(self, cell: KernelCell | PlanCell) -> str | None:
        """Return the cell's data type; a plan computes in several."""
        return None if isinstance(cell, PlanCell) else cell.dtype

    def metrics(self, spec: Any, cell: KernelCell | PlanCell) -> list[Metric]:
        from workers.jobs import _linear_plan

        return _linear_plan.metrics(spec) if isinstance(cell, PlanCell) else super().metrics(spec, cell)

    def measure(self, spec: Any, cell: KernelCell | PlanCell, context: OperationContext, trial: Trial) -> None:
        from workers.jobs import _linear_plan

        if isinstance(cell, PlanCell):
            _linear_plan.measure(spec, context, trial)
        else:
            super().measure(spec, cell, context, trial)

    def reference_of(self, spec: KernelSpec, cell: KernelCell) -> Any:
        return cell.dtype, cell.rows, cell.columns

    def check(self, spec: KernelSpec) -> None:
        """Refuse a job whose operation is not here, that names an implementation which no operation has, or whose own
        code cannot be imported."""
        if not spec.plans:
            kernel_of(spec)
            for name in spec.implementations:
                try:
                    installed(spec, name)
                except Unsupported:  # only then are the modules of other operations imported
                    if name not in implementations_of_all():
                        raise
        if spec.code is not None:
            uploaded.implementation(spec.code, of=spec.kernel)

    def make_reference(self, spec: KernelSpec, cell: KernelCell, device: torch.device) -> Reference:
        from workers.measure.references import kernel_reference
        from workers.model.precision import PRECISIONS

        return kernel_reference(
            kernel_of(spec),
            cell.rows,
            cell.columns,
            PRECISIONS[cell.dtype].compute_dtype,
            backward=spec.mode == "forward_backward",
            seed=spec.seed,
            device=device,
        )

    def admit(self, spec: KernelSpec, cell: KernelCell, device: torch.device) -> None:
        """Refuse an implementation that does not exist, or not for these inputs."""
        from workers.model.precision import PRECISIONS

        dtype = str(PRECISIONS[cell.dtype].compute_dtype).removeprefix("torch.")
        implementation = implementation_of(spec, cell)
        if reason := implementation.why_not(device.type, dtype, backward=spec.mode == "forward_backward"):
            raise Unsupported(reason)

    def operation(self, spec: KernelSpec, cell: KernelCell, reference: Reference, device: torch.device) -> Operation:
        from workers.measure.operations import Operation

        return Operation(implementation_of(spec, cell).function, reference.inputs, reference.grad_out)

    def add_rates(
        self,
        spec: KernelSpec,
        cell: KernelCell,
        milliseconds: Mapping[str | None, float],
        context: OperationContext,
        values: Values,
    ) -> None:
        """Set the GB/s of the tensors that each pass has to read and write, and their share of a copy's."""
        import torch

        from workers.measure.ceilings import Ceilings

        kernel = kernel_of(spec)
        shapes = kernel.shapes(cell.rows, cell.columns)
        read = sum(map(math.prod, shapes))
        written = kernel.plain(*(torch.empty(shape, device="meta") for shape in shapes)).numel()
        forward, backward = kernel.moved(read, written)
        whole = forward if spec.mode == "forward" else forward + backward
        numbers = {"forward": forward, "backward": backward, None: whole}
        size = 4 if cell.dtype == "fp32" else 2
        ceiling, source = Ceilings(context.report.ceilings).copy_gb_per_s(context.device)
        for phase, median in milliseconds.items():
            rate = 1e-6 * size * numbers[phase] / median
            values.set("gb_per_s", phase, [rate])
            values.set("ceiling_percent", phase, None if ceiling is None else [100 * rate / ceiling], source)


def kernel_of(spec: KernelSpec) -> Kernel:
    """Return the job's operation. Raises Unsupported or InvalidEnvironment: it does not exist here, or is broken."""
    kernel: Kernel = load(KERNELS, spec.kernel)
    return kernel


def implementation_of(spec: KernelSpec, cell: KernelCell) -> Implementation:
    """Return the cell's implementation: one of the operation's, or the job's own code. Raises Unsupported,
    InvalidEnvironment, BrokenCode: it does not exist here, or is broken."""
    if spec.code is not None and spec.is_code(cell.implementation):
        return uploaded.implementation(spec.code, of=spec.kernel)
    return installed(spec, cell.implementation)


def installed(spec: KernelSpec, name: str) -> Implementation:
    """Return the operation's implementation of this name. Raises Unsupported, InvalidEnvironment."""
    try:
        return kernel_of(spec).implementation(name)
    except UnknownName as error:
        raise Unsupported(str(error)) from error


def implementations_of_all() -> set[str]:
    """Return the names of the implementations of all operations here, of which none has them all."""
    found = set[str]()
    for name in KERNELS.names():
        with contextlib.suppress(InvalidEnvironment):  # a broken one harms no other
            found |= {one.name for one in load(KERNELS, name).kernels}
    return found


RUNNER = KernelRunner()
