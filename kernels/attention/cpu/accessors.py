"""One number of a contiguous 4-D tensor by its four indices, in C++, by the formula that all implementations here use.

Tensors are row-major: the last axis lies together, so that a loop over head_dim reads whole cache lines. Element
(b, h, i, j) of (batch, heads, rows, columns) is number ((b · heads + h) · rows + i) · columns + j.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .build import library

FORMULA = "((b · heads + h) · rows + i) · columns + j"


def offset(shape: Sequence[int], at: Sequence[int]) -> int:
    """Return the number of the element at four indices, by `FORMULA`.

    Raises:
        ValueError: not four sizes and four indices.
        IndexError: an index is negative or too large.
    """
    if len(shape) != 4 or len(at) != 4:
        raise ValueError(f"there must be four sizes and four indices, not {len(shape)} and {len(at)}")
    for size, index in zip(shape, at, strict=True):
        if not 0 <= index < size:
            raise IndexError(f"{tuple(at)} is outside of {tuple(shape)}")
    (_, heads, rows, columns), (b, h, i, j) = shape, at
    return ((b * heads + h) * rows + i) * columns + j


def read(tensor: Tensor, at: Sequence[int]) -> float:
    """Return the number at four indices of a contiguous float32 tensor on the CPU.

    Raises:
        TypeError, ValueError: another tensor, or not four axes and indices.
        IndexError: an index is negative or too large.
        BuildError: the first call could not build the C++.
    """
    found: float = library().read_element(*_place(tensor, at))
    return found


def write(tensor: Tensor, at: Sequence[int], value: float) -> None:
    """Set the number at four indices; errors as `read`, and RuntimeError for a tensor that needs a gradient."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("the tensor needs a gradient, and autograd does not see this write: use torch.no_grad()")
    library().write_element(*_place(tensor, at), value)
    torch.autograd.graph.increment_version(tensor)


def _place(tensor: Tensor, at: Sequence[int]) -> tuple[int, ctypes.Array[ctypes.c_int64], ctypes.Array[ctypes.c_int64]]:
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        raise TypeError(f"the tensor must be float32 on the cpu, not {tensor.dtype} on {tensor.device.type}")
    if not tensor.is_contiguous():
        raise ValueError("the tensor must be contiguous: its strides say nothing about where another one's numbers lie")
    offset(tensor.shape, at)
    indices = ctypes.c_int64 * 4
    return tensor.data_ptr(), indices(*tensor.shape), indices(*at)
