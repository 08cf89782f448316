"""Tensors as matrices of rows, as the Triton kernels outside attention take them."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 2**31 - 2**16
"""Kernels count rows in 32 bits, and the last tile goes beyond the last row."""


def check_rows(rows: int) -> None:
    """Check that kernels can count them. Raises ValueError: they cannot."""
    if rows > MOST_ROWS:
        raise ValueError(f"expected at most {MOST_ROWS} rows, not {rows}: call it on parts")


def as_rows(x: Tensor) -> Tensor:
    """x as (rows, columns) with contiguous rows; a view if its strides allow one. Raises as `check_rows`."""
    rows = x.reshape(-1, x.shape[-1])
    check_rows(len(rows))
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """The type in which kernels compute: float64 if a tensor has it, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def wide(*tensors: Tensor) -> Any:
    """`wide_dtype` as Triton names it."""
    return tl.float64 if wide_dtype(*tensors) == torch.float64 else tl.float32


def check_floating(*tensors: Tensor) -> None:
    """Check that they are floating point, of 16 bits or more, and on one device. Raises ValueError: they are not."""
    if not all(is_floating(tensor.dtype) and tensor.device == tensors[0].device for tensor in tensors):
        given = " and ".join(f"{tensor.dtype} on {tensor.device}" for tensor in tensors)
        raise ValueError(f"expected floating-point tensors of 16 bits or more on one device, not {given}")


def is_floating(dtype: torch.dtype) -> bool:
    """Return True for floating-point numbers of 16 bits or more: torch computes with no others, either."""
    return dtype.is_floating_point and dtype.itemsize > 1


def check_device(device: torch.device, instead: str) -> None:
    """Check that Triton has kernels for a device. `instead`: what computes the same on every device, for the message.
    Raises ValueError: it has none, and this is not its interpreter."""
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(
            f"expected tensors on a CUDA device, not on {device}: without a GPU call {instead}, or set "
            "TRITON_INTERPRET=1 before Python starts"
        )
