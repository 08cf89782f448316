"""RMSNorm (Zhang & Sennrich, 2019) in Triton: x / sqrt(mean(x²) + eps) * weight over the last axis.

Forward reads x and writes the result; backward reads x and the result's gradient, and writes x's gradient. A program
has whole rows in registers. The weight's gradient is a sum over all rows: each program of the backward pass adds up its
own rows, and a second kernel adds up these partial sums, in one fixed order. Sums are in float32, or in float64 for
float64.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .derivatives import register
from .interpreted import patch_interpreter
from .rows import as_rows, check_device, check_floating, is_floating, wide, wide_dtype

patch_interpreter()

TILE = 4096
"""Elements of a tile, unless a row is longer."""
ELEMENTS = {"forward": 32, "backward": 16}
"""Elements of a tile that a thread has. Backward, it has those of x, the gradient, the weight and the partial sum."""
MAX_COLUMNS = 65_536
"""Longest row, which a program has in registers."""
WARPS_PER_SM = 16
"""Warps of the backward pass on each multiprocessor: so many run at once even if a thread takes 128 registers, and a
second wave of programs would run alone."""
STAGES = 3
"""Tiles of the backward pass that are loaded or computed at once: two are loaded ahead, into shared memory. Loading one
ahead is slower than loading none."""
MAX_STAGED_BYTES = 32 << 10
"""Largest tile, of x and the gradient, of which shared memory holds two on all devices."""
MIN_TILES = 4
"""Fewest tiles of a program of the backward pass: each program's partial sums are written and read once more."""
SUM_ROWS, SUM_COLUMNS = 64, 32
"""Tile of the kernel that adds up the partial sums: 32 numbers side by side are a whole line of the cache."""
INTERPRETED_PROGRAMS = 3


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """RMSNorm of x over its last axis.

    Args:
        x: (…, columns), floating point, on a CUDA device; at most 65 536 columns.
        weight: (columns,), floating point.
        eps: Added to the mean square.
        out_dtype: The result's data type; None: x's. Under autocast, products would cast the result of their own.

    Returns:
        (…, columns).

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        NoDerivative: in forward mode and in torch.func.grad. Second derivatives are right.
    """
    out: Tensor = _rms_norm(x, weight, eps, out_dtype or x.dtype)[0]
    return out


@torch.library.custom_op("flopwatch::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out, scale = _results(x, weight, eps, out_dtype)
    check_device(x.device, _NAMES[1])
    if x.numel():
        rows = as_rows(x)
        tile_rows, columns, warps = _tile(rows, "forward")
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            _rms_norm_kernel[(triton.cdiv(len(rows), tile_rows),)](
                rows, weight.contiguous(), out, scale, rows.stride(0), *rows.shape,
                EPS=eps, WIDE=wide(x, weight), ROWS=tile_rows, COLUMNS=columns, num_warps=warps,
            )  # fmt: skip
    return out, scale


@_rms_norm.register_fake
def _results(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if x.dim() == 0 or weight.dim() != 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"expected x (…, columns) and weight (columns), not {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if x.shape[-1] > MAX_COLUMNS:
        raise ValueError(f"expected at most {MAX_COLUMNS} columns, not {x.shape[-1]}")
    check_floating(x, weight)
    if not is_floating(out_dtype):
        raise ValueError(f"expected a floating-point out_dtype of 16 bits or more, not {out_dtype}")
    return x.new_empty(x.shape, dtype=out_dtype), x.new_empty(x.shape[:-1], dtype=wide_dtype(x, weight))


@torch.library.custom_op("flopwatch::rms_norm_backward", mutates_args=())
def _rms_norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    dx = x.new_empty(x.shape)
    if not x.numel():
        return dx, torch.zeros_like(weight)
    rows, gradients = as_rows(x), as_rows(gradient)
    tile_rows, columns, warps = _tile(rows, "backward")
    tile_bytes = tile_rows * columns * (x.itemsize + gradient.itemsize)
    stages = STAGES if tile_bytes <= MAX_STAGED_BYTES else 1
    programs = _programs(triton.cdiv(len(rows), tile_rows), warps, (stages - 1) * tile_bytes, x.device)
    partial = x.new_empty((programs, len(weight)), dtype=wide_dtype(x, weight))
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _rms_norm_backward_kernel[(programs,)](
            gradients, rows, weight.contiguous(), scale, dx, partial, gradients.stride(0), rows.stride(0), *rows.shape,
            WIDE=wide(x, weight), ROWS=tile_rows, COLUMNS=columns, STAGES=stages, num_warps=warps,
        )  # fmt: skip
        # In 4 µs less than torch's sum and cast take.
        _add_up_kernel[(triton.cdiv(len(weight), SUM_COLUMNS),)](
            partial, dweight, *partial.shape, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=4
        )
    return dx, dweight


@_rms_norm_backward.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float, torch.dtype], output: tuple[Tensor, Tensor]) -> None:
    x, weight, ctx.eps, _ = inputs
    _, scale = output
    ctx.mark_non_differentiable(scale)
    ctx.save_for_backward(x, weight, scale)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
    x, weight, scale = ctx.saved_tensors
    if torch.is_grad_enabled():  # these gradients may be differentiated in turn
        dx, dweight = _plain_backward(gradient, x, weight, ctx.eps)
    else:
        dx, dweight = _rms_norm_backward(gradient, x, weight, scale)
    return dx, dweight, None, None


def _plain_backward(gradient: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The backward pass in operations that torch differentiates."""
    wide_x, wide_gradient = (tensor.to(wide_dtype(x, weight)) for tensor in (x, gradient))
    inverse = (wide_x.square().mean(-1, keepdim=True) + eps).rsqrt()
    normal, scaled = wide_x * inverse, wide_gradient * weight
    dx = (scaled - normal * (scaled * normal).mean(-1, keepdim=True)) * inverse
    return dx.to(x.dtype), (wide_gradient * normal).flatten(0, -2).sum(0).to(weight.dtype)


_NAMES = "rms_norm", "torch.nn.functional.rms_norm"
register(_rms_norm, *_NAMES, _differentiate, _save)
register(_rms_norm_backward, *_NAMES)


@triton.jit
def _rms_norm_kernel(
    x, weight, out, scale, stride, rows, columns,
    EPS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row.to(tl.int64)[:, None]
    x_tile = tl.load(x + place * stride + column[None, :], mask=inside, other=0.0).to(WIDE)
    w = tl.load(weight + column, mask=column < columns, other=0.0).to(WIDE)
    inverse = 1.0 / tl.sqrt(tl.sum(x_tile * x_tile, 1) / columns + EPS)
    tl.store(scale + row, inverse, mask=row < rows)
    normal = x_tile * inverse[:, None] * w[None, :]
    tl.store(out + place * columns + column[None, :], normal.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward_kernel(
    gradient, x, weight, scale, dx, partial, gradient_stride, stride, rows, columns,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles of dx, every so many as there are programs, and these rows' sum of the weight's gradient."""
    column = tl.arange(0, COLUMNS)
    w = tl.load(weight + column, mask=column < columns, other=0.0).to(WIDE)
    total = tl.zeros([ROWS, COLUMNS], WIDE)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        place = row.to(tl.int64)[:, None]
        g = tl.load(gradient + place * gradient_stride + column[None, :], mask=inside, other=0.0).to(WIDE)
        x_tile = tl.load(x + place * stride + column[None, :], mask=inside, other=0.0).to(WIDE)
        inverse = tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
        normal = x_tile * inverse
        total += g * normal
        scaled = g * w[None, :]
        shared = tl.sum(scaled * normal, 1)[:, None] / columns
        tl.store(
            dx + place * columns + column[None, :],
            ((scaled - normal * shared) * inverse).to(dx.dtype.element_ty),
            mask=inside,
        )
    place = tl.program_id(0).to(tl.int64) * columns
    tl.store(partial + place + column, tl.sum(total, 0), mask=column < columns)


@triton.jit
def _add_up_kernel(partial, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], partial.dtype.element_ty)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(partial + place, mask=inside, other=0.0)
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < columns)


def _tile(rows: Tensor, direction: str) -> tuple[int, int, int]:
    """Return a tile's rows and columns, powers of two, and the warps of a program."""
    columns = triton.next_power_of_2(rows.shape[1])
    tile_rows = max(1, TILE // columns)
    warps = tile_rows * columns // (32 * ELEMENTS[direction])
    return tile_rows, columns, min(32, max(4, warps))


def _programs(tiles: int, warps: int, shared_bytes: int, device: torch.device) -> int:
    """Return the number of programs of the backward pass: as many as run at once, and have enough tiles each."""
    if device.type != "cuda":
        return min(tiles, INTERPRETED_PROGRAMS)
    sm = torch.cuda.get_device_properties(device)
    together = min(WARPS_PER_SM // warps, sm.shared_memory_per_multiprocessor // max(1, shared_bytes))
    return min(sm.multi_processor_count * max(1, together), -(-tiles // MIN_TILES))
