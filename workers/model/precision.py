"""The only definition of `fp32`, `tf32`, `bf16`, `fp16` and `fp8`.

Parameters, gradients and optimizer state are float32 in all of them, unless a parameter dtype is chosen. tf32 rounds
the inputs of float32 matrix products to 10 bits of mantissa; bf16 and fp16 run matrix products in that type by
autocast, fp16 with gradient scaling. fp8 is bf16, and `workers.model.float8` replaces linear layers.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Precision:
    """One of the spec's precisions."""

    name: str
    compute_dtype: torch.dtype
    """Dtype of the inputs of attention."""
    matmul_precision: str = "highest"
    """Setting for products of float32 inputs; "highest" is IEEE float32, "high" allows TF32."""

    def apply(self) -> None:
        """Set this process's matrix-product precision. Raises RuntimeError: torch refuses the setting."""
        torch.set_float32_matmul_precision(self.matmul_precision)
        if torch.get_float32_matmul_precision() != self.matmul_precision:
            raise RuntimeError(f"torch refuses float32 matrix products in precision {self.matmul_precision!r}")

    def autocast(self, device_type: str) -> AbstractContextManager[object]:
        """Return the autocast context of the forward pass."""
        if self.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type, dtype=self.compute_dtype)


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp32", torch.float32),
        Precision("tf32", torch.float32, matmul_precision="high"),
        Precision("bf16", torch.bfloat16),
        Precision("fp16", torch.float16),
        Precision("fp8", torch.bfloat16),
    )
}

PARAMETER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def set_parameter_dtype(model: nn.Module, name: str) -> None:
    """Give a model's floating-point parameters the dtype "fp32" or "bf16", in place; gradients and state follow it.

    Buffers stay as they are: rotary angles lose their meaning in bfloat16.
    """
    dtype = PARAMETER_DTYPES[name]
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
