"""Runs `kernel`: times kernels other than attention, and the plain PyTorch operations that they replace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from app.specs.kernel import KernelCell, KernelSpec
from workers.jobs._grid.judging import Reference
from workers.jobs._grid.operations import OperationContext, OperationRunner
from workers.jobs._values import Values
from workers.outcome import Unsupported

if TYPE_CHECKING:
    import torch

    from workers.measure.operations import Operation


class KernelRunner(OperationRunner):
    """The runner of kind `kernel`."""

    kind = "kernel"
    rates = (("gb_per_s", "GB/s"),)

    def reference_of(self, spec: KernelSpec, cell: KernelCell) -> Any:
        return cell.dtype, cell.rows, cell.columns

    def make_reference(self, spec: KernelSpec, cell: KernelCell, device: torch.device) -> Reference:
        """Make normally distributed x (rows, columns), weight (columns), and gradient of the output (rows)."""
        import torch

        from kernels.tolerance import error, limits_beside_plain
        from workers.model.precision import PRECISIONS

        dtype = PRECISIONS[cell.dtype].compute_dtype
        generator = torch.Generator(device).manual_seed(spec.seed)
        x, weight, grad_out = (
            torch.randn(shape, generator=generator, device=device).to(dtype)
            for shape in ((cell.rows, cell.columns), (cell.columns,), (cell.rows,))
        )
        backward = spec.mode == "forward_backward"
        # Outer and inner product: the gradients of x and weight.
        expected, plain = (
            [x @ weight, *([torch.outer(grad_out, weight), grad_out @ x] if backward else [])]
            for x, weight, grad_out in ([tensor.double() for tensor in (x, weight, grad_out)], (x, weight, grad_out))
        )
        return Reference(
            inputs=(x.requires_grad_(backward), weight.requires_grad_(backward)),
            grad_out=grad_out if backward else None,
            expected=tuple(expected),
            limits=tuple(
                limits_beside_plain(error(rounded, right), dtype)
                for rounded, right in zip(plain, expected, strict=True)
            ),
            linear_in=1,
        )

    def admit(self, spec: KernelSpec, cell: KernelCell, device: torch.device) -> None:
        """Refuse Triton's kernel without a GPU."""
        if cell.implementation == "triton" and device.type != "cuda":
            raise Unsupported("the Triton kernel needs a GPU")

    def operation(self, spec: KernelSpec, cell: KernelCell, reference: Reference, device: torch.device) -> Operation:
        from workers.measure.operations import Operation

        if cell.implementation == "torch":
            return Operation(weighted_sum, reference.inputs, reference.grad_out)
        import kernels

        return Operation(kernels.weighted_sum, reference.inputs, reference.grad_out)

    def add_rates(
        self,
        spec: KernelSpec,
        cell: KernelCell,
        milliseconds: Mapping[str | None, float],
        context: OperationContext,
        values: Values,
    ) -> None:
        """Set the GB/s of the tensors that each pass has to read and write."""
        x = cell.rows * cell.columns
        forward = x + cell.columns + cell.rows
        # The pass reads the same inputs and the output's gradient; it writes the gradients of x and weight.
        backward = 2 * x + 2 * cell.columns + cell.rows
        whole = forward if spec.mode == "forward" else forward + backward
        numbers = {"forward": forward, "backward": backward, None: whole}
        size = 4 if cell.dtype == "fp32" else 2
        for phase, median in milliseconds.items():
            values.set("gb_per_s", phase, [1e-6 * size * numbers[phase] / median])


def weighted_sum(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The plain PyTorch: x (rows, columns) times weight (columns), summed over columns."""
    return (x * weight).sum(-1)


RUNNER = KernelRunner()
