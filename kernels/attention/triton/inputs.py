"""Checks attention's inputs and the capabilities of their device, and reshapes inputs for launches."""

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
import triton
from torch import Tensor

from ...rows import check_device as on_triton
from ..problem import DIFFERENTIABLE, check_shapes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)
"""Lowest compute capability with tensor cores for bfloat16."""


def allocate_results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Check the inputs, and return empty tensors for the output (q's shape and dtype) and the log-sum-exp (float32).
    Raises ValueError: the kernels do not take these shapes, dtypes or devices."""
    if q.dim() not in (3, 4):
        raise ValueError(f"expected q, k and v with three or four axes, not {tuple(q.shape)}")
    check_shapes(q, k, v)
    if not 1 <= q.shape[-1] <= LARGEST_HEAD_DIM:
        raise ValueError(f"the head dimension is {q.shape[-1]}, not between 1 and {LARGEST_HEAD_DIM}")
    if k.shape[-2] == 0:
        raise ValueError("there are no keys")
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"expected one of {DTYPES} for q, k and v, not {q.dtype}, {k.dtype} and {v.dtype}")
    if k.device != q.device or v.device != q.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}")
    return empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


def check_device(device: torch.device) -> None:
    """Check that the kernels run on this device. Raises ValueError: it is no CUDA device, or its compute capability is
    below `MIN_CAPABILITY`."""
    on_triton(device, DIFFERENTIABLE)
    if not triton.knobs.runtime.interpret and capability(device) < MIN_CAPABILITY:
        version = ".".join(map(str, capability(device)))
        raise ValueError(f"{device} has compute capability {version}, and at least 8.0 (Ampere) is needed")


def empty_like(tensor: Tensor) -> Tensor:
    """Allocate a result with the memory format of an input, so that callers can undo a transposition without a copy.

    It is contiguous if the input's last axis is not contiguous, or if the input repeats elements (is expanded).
    """
    result = torch.empty_like(tensor)
    return result if result.stride(-1) == 1 and 0 not in tensor.stride() else tensor.new_empty(tensor.shape)


def with_heads(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors as (batch, heads, rows, head_dim) with a contiguous last axis. Results are returned as views,
    so kernels write into the original tensors.
    """
    if all(tensor.dim() == 4 and tensor.stride(3) == 1 for tensor in tensors):
        return list(tensors)
    contiguous = [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]
    return [tensor if tensor.dim() == 4 else tensor.unsqueeze(1) for tensor in contiguous]


def cast_for_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast the inputs to autocast's dtype if autocast is on for their device, as torch does for
    scaled_dot_product_attention. float64 inputs are not cast; the kernels refuse them.
    """
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (
        tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
        for tensor in (q, k, v)
    )
    return q, k, v


_NO_CHANGE = contextlib.nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which `device` is the current one. It usually is; then nothing is set, which is faster."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NO_CHANGE
    return torch.cuda.device(device)


# A compiled graph keeps the setting of its compilation.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def tf32_is_allowed() -> bool:
    """Return True if torch's older or newer settings let float32 products round their operands to tf32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device; (0, 0) for the CPU, where the interpreter runs."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def has_tensor_descriptors(tensor: Tensor) -> bool:
    """Return True if the copy engine of Hopper and later can fetch tiles of this (batch, heads, rows, head_dim) tensor.

    It needs addresses and strides that are multiples of 16 bytes. Kernels read other tensors through pointers.
    """
    return (
        capability(tensor.device) >= (9, 0)
        and tensor.data_ptr() % 16 == 0
        and strides_allow_descriptors(tensor.shape, tensor.stride(), tensor.element_size())
    )


@functools.lru_cache(maxsize=1024)
def strides_allow_descriptors(shape: tuple[int, ...], strides: tuple[int, ...], element_size: int) -> bool:
    """Return True if the strides of all axes but the last are multiples of 16 bytes; axes of length 1 do not count."""
    used = [stride for size, stride in zip(shape[:-1], strides[:-1], strict=True) if size > 1]
    return all(stride > 0 and stride * element_size % 16 == 0 for stride in used)
