"""Launches the Gluon kernels: which inputs they take, the sizes of their tiles, and the order of the work.

Tensors are (batch, heads, rows, head_dim) with a contiguous last axis; all go through the copy engine, so other steps
and addresses are multiples of 16 bytes. Gluon is an experimental interface of Triton, and these kernels are compiled by
the version that they were tested with only.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.attention.triton.inputs import capability, has_tensor_descriptors, steps_allow_descriptors
from kernels.attention.triton.kernels import finish_kernel, rows_kernel
from kernels.attention.triton.launch import LAUNCHES, ROW_TILE, rows_at_once
from kernels.attention.triton.tilings import padded_width
from kernels.launching import ALIGNMENT, KNOWN_VERSIONS, Address, Launch, Window

CAPABILITY = (9, 0)
DTYPES = (torch.bfloat16, torch.float16)
COLUMNS = 8
"""Head dimensions are multiples of this, so that the rows of results begin at multiples of 16 bytes."""
WIDEST = 256
"""Head dimension whose backward pass has a kernel of its own."""
L2_BYTES = 25_000_000
"""Keys and values that are worked on at the same time: half of the L2 cache."""
ENOUGH_TURNS = 4
"""Tiles per program of a group of heads from which on a group balances by itself."""
MANY_TURNS = 12
"""Tiles per program from which on the hardware's order balances better than one made beforehand."""
LONG = 8192
"""Queries from which on three consumers are faster than two at width 64."""


@dataclass(frozen=True)
class Forward:
    """How the forward kernel is built, for one width."""

    consumers: int
    queries: int
    """Rows of a tile of queries; each consumer has one."""
    keys: int
    stages: int = 2
    """Tiles of keys, and of values, in shared memory."""
    query_stages: int = 1
    """Tiles of queries of each consumer in shared memory: with two, those of the next unit are fetched ahead."""
    own_room: bool = True
    """True if the output leaves through shared memory of its own; False: through that of the queries."""
    registers: int = 240
    """Of each thread of a consumer."""
    mask_first: bool = True
    """True compares the first tile of keys with the mask in any case; False: by a branch, if it needs the mask."""


@dataclass(frozen=True)
class Backward:
    """How the backward kernel is built, for one width."""

    queries: int
    """Rows of a tile."""
    keys: int
    registers: int = 240
    together: int = 2
    """Numbers of dQ that a thread adds to memory at once, at width 256: 2 or 4."""


@dataclass(frozen=True)
class Choice:
    """The kernels of one width."""

    forward: Forward
    forward_long: Forward
    """From `LONG` queries on."""
    backward: Backward


_128, _256 = Forward(2, 64, 128), Forward(2, 64, 64, own_room=False)
CHOICES = {
    64: Choice(Forward(2, 64, 128), Forward(3, 64, 128, registers=160), Backward(128, 128)),
    128: Choice(_128, _128, Backward(64, 128)),
    256: Choice(_256, _256, Backward(64, 64)),
}
"""What calls take. Each was compared with the oracle on a device in hundreds of shapes, and timed there."""


@functools.cache
def is_here(device: torch.device) -> bool:
    """Return True if the kernels run on this device, with this Triton."""
    return (
        device.type == "cuda"
        and not triton.knobs.runtime.interpret
        and torch.version.hip is None
        and capability(device) == CAPABILITY
        and triton.__version__.startswith(KNOWN_VERSIONS)
    )


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Say why the kernels do not take these inputs, which have been checked; None if they do."""
    if not is_here(q.device):
        found = ".".join(map(str, capability(q.device)))
        return (
            f"it needs compute capability 9.0 and Triton {KNOWN_VERSIONS[0]}x; {q.device} has {found}, and Triton is "
            f"{triton.__version__}"
        )
    if q.dtype not in DTYPES:
        return f"it takes bfloat16 and float16, not {q.dtype}"
    if padded_width(q.shape[-1]) not in CHOICES or q.shape[-1] % COLUMNS:
        return f"the head dimension is {q.shape[-1]}, and it takes multiples of {COLUMNS} from 40 to 256"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not has_tensor_descriptors(tensor):
            return f"{name}'s address or its strides {tensor.stride()} are no multiples of 16 bytes: make it contiguous"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool) -> bool:
    """Fill `out` and `logsumexp`, or return False if the kernels do not take these inputs, which have been checked."""
    launch = _forward_launch(
        q.device, q.dtype, q.shape, k.shape, q.stride(), k.stride(), v.stride(), out.stride(), is_causal
    )
    if launch is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
        return False
    launch((q, k, v, out, logsumexp))
    return True


def backward(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    logsumexp: Tensor, logsumexp_gradient: Tensor | None, is_causal: bool,
) -> bool:  # fmt: skip
    """Fill dq, dk and dv, or return False, as `forward`. dq is a sum of float32 whose order, and so its last bits,
    differ from run to run.
    """
    if 0 in out_gradient.stride():  # that of a sum is one number, expanded
        out_gradient = out_gradient.contiguous()
    launches = _backward_launches(
        q.device, q.dtype, q.shape, k.shape, q.stride(), k.stride(), v.stride(), out.stride(), out_gradient.stride(),
        dq.stride(), dk.stride(), dv.stride(), logsumexp_gradient is not None, is_causal,
    )  # fmt: skip
    same = out_gradient.dtype == q.dtype
    if (
        launches is None
        or not same
        or (q.data_ptr() | k.data_ptr() | v.data_ptr() | out_gradient.data_ptr()) % ALIGNMENT
    ):
        return False
    size, prepare, multiply, finish = launches
    buffer = torch.empty(size, dtype=torch.float32, device=q.device)
    numbers = logsumexp if logsumexp_gradient is None else logsumexp_gradient
    prepare((out, out_gradient, logsumexp, numbers, buffer))
    multiply((q, k, v, out_gradient, buffer, dk, dv))
    finish((buffer, dq))
    return True


Sizes = tuple[int, ...]


@functools.lru_cache(maxsize=LAUNCHES)
def _forward_launch(
    device: torch.device, dtype: torch.dtype, shape: Sizes, key_shape: Sizes,
    q_strides: Sizes, k_strides: Sizes, v_strides: Sizes, out_strides: Sizes, is_causal: bool,
) -> Launch | None:  # fmt: skip
    batches, heads, queries, head_dim = shape
    key_heads, keys = key_shape[1:3]
    width = padded_width(head_dim)
    windows = (shape, q_strides), (key_shape, k_strides), (key_shape, v_strides), (shape, out_strides)
    if not _is_taken(device, dtype, head_dim, windows):
        return None
    from kernels.attention.hopper.forward import forward_kernel

    how = CHOICES[width].forward_long if queries >= LONG else CHOICES[width].forward
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    head_bytes = 2 * keys * head_dim * dtype.itemsize * key_heads / heads
    tiles, planes = triton.cdiv(queries, how.consumers * how.queries), batches * heads
    programs, span = order_of_work(tiles, planes, head_bytes, multiprocessors, is_causal)
    q, k, v, out = (
        Window.of(place, *window, (1, 1, rows, width), _layout(dtype, rows, width))
        for place, (window, rows) in enumerate(
            zip(windows, (how.queries, how.keys, how.keys, how.queries), strict=True)
        )
    )
    return Launch(
        forward_kernel,
        programs,
        (
            q, k, v, out, Address(4),
            heads, planes, span, queries, keys, heads // key_heads, math.log2(math.e) / math.sqrt(head_dim),
        ),
        {
            "CONSUMERS": how.consumers, "M": how.queries, "N": how.keys, "D": width, "STAGES": how.stages,
            "Q_STAGES": how.query_stages, "CAUSAL": is_causal, "OWN_ROOM": how.own_room,
            "MASK_FIRST": how.mask_first, "REGISTERS": how.registers, "num_warps": 4,
        },
    )  # fmt: skip


def order_of_work(tiles: int, planes: int, head_bytes: float, multiprocessors: int, is_causal: bool) -> tuple[int, int]:
    """Choose the number of programs, and of heads that are worked on together.

    One program per multiprocessor walks over several tiles, fetched ahead, in an order made beforehand: the longest
    rows first. Heads are taken in groups whose keys and values fit the L2 cache, if a group has enough tiles to
    balance. Else, if there are many tiles, each gets a program of its own, and the hardware balances.

    Args:
        tiles: Tiles of queries of a head.
        planes: Batches times heads.
        head_bytes: Bytes of keys and values of one head of queries.
        multiprocessors: Of the device.
        is_causal: Rows differ in length.
    """
    total = tiles * planes
    fitting = min(planes, max(1, int(L2_BYTES // head_bytes)))
    span = math.ceil(planes / math.ceil(planes / fitting))
    if not is_causal or tiles * fitting >= ENOUGH_TURNS * multiprocessors:
        return min(total, multiprocessors), span
    if total >= MANY_TURNS * multiprocessors:
        return total, span
    return min(total, multiprocessors), planes


@functools.lru_cache(maxsize=LAUNCHES)
def _backward_launches(
    device: torch.device, dtype: torch.dtype, shape: Sizes, key_shape: Sizes,
    q_strides: Sizes, k_strides: Sizes, v_strides: Sizes, out_strides: Sizes, gradient_strides: Sizes,
    dq_strides: Sizes, dk_strides: Sizes, dv_strides: Sizes, has_logsumexp_gradient: bool, is_causal: bool,
) -> tuple[int, Launch, Launch, Launch] | None:  # fmt: skip
    """(elements of the float32 buffer, preparation, products, end); the buffer has exponents, deltas, and dQ's sum."""
    batches, heads, queries, head_dim = shape
    width = padded_width(head_dim)
    windows = (
        *((shape, q_strides), (key_shape, k_strides), (key_shape, v_strides), (shape, gradient_strides)),
        *((key_shape, dk_strides), (key_shape, dv_strides)),
    )
    if not _is_taken(device, dtype, head_dim, windows):
        return None
    padded = triton.cdiv(queries, ROW_TILE) * ROW_TILE
    numbers, rows = batches * heads * padded, rows_at_once(width)
    prepare = Launch(
        rows_kernel,
        padded // rows * heads * batches,
        (
            *map(Address, range(4)), Address(4), Address(4, numbers), Address(4, 2 * numbers),
            out_strides, gradient_strides, heads, queries, padded,
        ),
        {
            "HEAD_DIM": head_dim, "WIDTH": width, "HAS_LOGSUMEXP_GRADIENT": has_logsumexp_gradient, "CLEAR": True,
            "ROWS": rows,
        },
    )  # fmt: skip
    finish = Launch(
        finish_kernel,
        triton.cdiv(queries, rows) * heads * batches,
        (Address(0, 2 * numbers), Address(1), dq_strides, heads, queries, padded, 1 / math.sqrt(head_dim)),
        {"HEAD_DIM": head_dim, "WIDTH": width, "ROWS": rows},
    )
    multiply = _products(dtype, shape, key_shape, windows, padded, CHOICES[width].backward, is_causal)
    return numbers * (2 + width), prepare, multiply, finish


def _products(
    dtype: torch.dtype, shape: Sizes, key_shape: Sizes, windows: tuple[tuple[Sizes, Sizes], ...], padded: int,
    how: Backward, is_causal: bool,
) -> Launch:  # fmt: skip
    from kernels.attention.hopper.backward import backward_kernel
    from kernels.attention.hopper.backward_wide import wide_backward_kernel

    batches, heads, queries, head_dim = shape
    key_heads, keys = key_shape[1:3]
    width, root, numbers = padded_width(head_dim), 1 / math.sqrt(head_dim), batches * heads * padded
    options: dict[str, Any] = {"M": how.queries, "N": how.keys, "D": width, "CAUSAL": is_causal}
    options |= {"REGISTERS": how.registers, "num_warps": 4}
    dq_sum: Address | Window
    if width == WIDEST:  # consumers have half of the columns each
        kernel, result = wide_backward_kernel, (how.keys, width // 2)
        dq_sum = Address(4, 2 * numbers)
        options["TOGETHER"] = how.together
    else:
        kernel, result = backward_kernel, (how.keys // 2, width)
        sums = (batches, heads, padded, width)
        block = (how.queries // 2, width) if how.queries == 128 else (how.queries, width // 2)
        steps = (heads * padded * width, padded * width, width, 1)
        dq_sum = Window.of(4, sums, steps, (1, 1, *block), _layout(torch.float32, *block), 2 * numbers)
    blocks = ((how.queries, width), (how.keys, width), (how.keys, width), (how.queries, width), result, result)
    q, k, v, out_gradient, dk, dv = (
        Window.of(place, *window, (1, 1, *block), _layout(dtype, *block))
        for place, window, block in zip((0, 1, 2, 3, 5, 6), windows, blocks, strict=True)
    )
    return Launch(
        kernel,
        triton.cdiv(keys, how.keys) * key_heads * batches,
        (
            q, k, v, out_gradient, Address(4), Address(4, numbers), dq_sum, dk, dv,
            heads, key_heads, heads // key_heads, queries, keys, padded, math.log2(math.e) * root, root,
        ),
        options,
    )  # fmt: skip


def _is_taken(
    device: torch.device, dtype: torch.dtype, head_dim: int, windows: tuple[tuple[Sizes, Sizes], ...]
) -> bool:
    return (
        is_here(device)
        and dtype in DTYPES
        and padded_width(head_dim) in CHOICES
        and head_dim % COLUMNS == 0
        and all(steps_allow_descriptors(shape, strides, dtype.itemsize) for shape, strides in windows)
    )


@functools.cache
def _layout(dtype: torch.dtype, length: int, width: int) -> Any:
    from triton.experimental.gluon import language as gl

    names = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    return gl.NVMMASharedLayout.get_default_for([1, 1, length, width], names[dtype])
