"""Attention of few queries to many keys, as in decoding with a cache: the keys are split among programs.

With one query per sequence, a program per tile of queries leaves most of the device idle. Here each program takes a
slice of the keys of one key head, for all queries of all query heads that share it (grouped keys are read once), and
writes its part of the output with the log-sum-exp of its slice; a second kernel weighs the parts. After Dao, Haziza,
Massa and Sizov, "Flash-Decoding for long-context inference" (2023).

Tensors are as in `launch`. Masked calls are none of this: aligned top-left, few queries see few keys only. One query,
aligned bottom-right, sees all keys, and is.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...launching import Address, Launch
from .inputs import capability, has_tensor_descriptors
from .kernels import LN_2, attend, program
from .launch import LAUNCHES, Kind, Scoring, kind, source
from .tilings import padded_width

MOST_QUERIES = 16
FEWEST_KEYS = 512
MOST_ROWS = 64
"""Queries times the heads that share a key head, in one tile."""
PARTS = 16
"""Slices that are weighed together."""
LEAST_ROWS = 16
"""Rows of the smallest product."""
INTERPRETED_MULTIPROCESSORS = 4
"""Of the device that the interpreter plays."""


@dataclass(frozen=True)
class Plan:
    """Sizes of one width's programs."""

    keys: int
    """Rows of a tile of keys and values."""
    warps: int
    stages: int
    programs: int
    """Programs per multiprocessor that a call has, where there are keys enough."""
    tma: bool = True
    """True fetches tiles by the copy engine, where there is one."""
    ahead: bool = True
    """True launches the second kernel while the first one runs (programmatic dependent launch, Hopper and later): its
    programs wait for the first kernel's results on the device.
    """


PLANS = {
    16: Plan(128, 4, 3, 4),
    32: Plan(128, 4, 3, 4),
    64: Plan(128, 4, 2, 3),
    128: Plan(128, 4, 2, 2),
    256: Plan(32, 4, 3, 3),
}


def suits(q: Tensor, k: Tensor, scoring: Scoring, bounds: Tensor | None = None) -> bool:
    """Return True if inputs (batch, heads, rows, head_dim) are few queries to many keys, in half precision."""
    return (
        scoring[:3] == (False, None, None)
        and bounds is None
        and q.shape[2] <= MOST_QUERIES
        and k.shape[2] >= FEWEST_KEYS
        and q.shape[2] * (q.shape[1] // k.shape[1]) <= MOST_ROWS
        and q.dtype != torch.float32
    )


def decode(q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, scoring: Scoring) -> None:
    """Fill `out` and `logsumexp`, for inputs that `suits`."""
    plan = PLANS[padded_width(q.shape[-1])]
    tma = plan.tma and all(has_tensor_descriptors(tensor) for tensor in (k, v))
    attend_to_slices, combine, room = _launches(
        kind(q), kind(k), kind(v), kind(out), scoring.factor, scoring.inner, tma, plan
    )
    parts = out.new_empty(room, dtype=torch.float32)
    attend_to_slices((q, k, v, parts))
    combine((parts, out, logsumexp))


@functools.lru_cache(maxsize=LAUNCHES)
def _launches(
    q: Kind, k: Kind, v: Kind, out: Kind, scale: float, inner: float | None, tma: bool, plan: Plan
) -> tuple[Launch, Launch, int]:
    """The launches of both kernels, and the elements of the room between them: parts, and behind them log-sum-exps."""
    batches, heads, queries, head_dim = out.shape
    key_heads, keys = k.shape[1:3]
    width, group = padded_width(head_dim), heads // key_heads
    ahead = plan.ahead and capability(q.device) >= (9, 0)
    splits, length = slices(keys, key_heads * batches, plan, _multiprocessors(q.device))
    numbers = batches * heads * queries
    first = Launch(
        slices_kernel,
        splits * key_heads * batches,
        (
            Address(0), source(1, k, plan.keys, width, tma), source(2, v, plan.keys, width, tma),
            Address(3), Address(3, splits * numbers * width), q.strides, k.strides, v.strides,
            heads, queries, keys, splits, length, scale, inner,
        ),
        {
            "GROUP": group, "HEAD_DIM": head_dim, "WIDTH": width, "TMA": tma, "AHEAD": ahead, "KEYS": plan.keys,
            "ROWS": max(LEAST_ROWS, triton.next_power_of_2(group * queries)),
            "num_warps": plan.warps, "num_stages": plan.stages,
        },
    )  # fmt: skip
    second = Launch(
        combine_kernel,
        numbers,
        (
            Address(0), Address(0, splits * numbers * width), Address(1), Address(2),
            out.strides, heads, queries, splits, numbers,
        ),
        {
            "HEAD_DIM": head_dim, "WIDTH": width, "SPLITS": triton.next_power_of_2(splits), "PARTS": PARTS,
            "AHEAD": ahead, "launch_pdl": ahead,
        },
    )  # fmt: skip
    return first, second, splits * numbers * (width + 1)


def slices(keys: int, planes: int, plan: Plan, multiprocessors: int) -> tuple[int, int]:
    """Return the number of slices of the keys, and their length, a multiple of a tile; none is empty."""
    tiles = triton.cdiv(keys, plan.keys)
    wanted = min(tiles, max(1, plan.programs * multiprocessors // planes))
    length = triton.cdiv(tiles, wanted) * plan.keys
    return triton.cdiv(keys, length), length


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def slices_kernel(
    q, k, v, parts, exponents,
    q_strides, k_strides, v_strides,
    heads, queries, keys, splits, length, scale, inner,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr,
    AHEAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Output (splits, batch, heads, queries, WIDTH) and log-sum-exp in powers of two of one slice of the keys.

    A tile has a row for each query of each head of the group.
    """
    if AHEAD:
        gdc_launch_dependents()
    split, head, batch = program(splits, heads // GROUP)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    inside = rows < GROUP * queries
    query_heads = head * GROUP + rows // queries
    places = batch.to(tl.int64) * q_strides[0] + query_heads.to(tl.int64) * q_strides[1]
    places += (rows % queries).to(tl.int64) * q_strides[2]
    mask = inside[:, None] & (columns < HEAD_DIM)[None, :]
    q_tile = tl.load(q + places[:, None] + columns[None, :], mask=mask, other=0.0)
    accumulator = tl.zeros([ROWS, WIDTH], tl.float32)
    maximum = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    start = split * length
    end = tl.minimum(start + length, keys)
    free = end // KEYS * KEYS
    accumulator, maximum, total = attend(
        accumulator, maximum, total, (q_tile,), k, v, k_strides, v_strides, batch, head, rows, keys, scale,
        inner, None, None, start, free, False, HEAD_DIM, WIDTH, "ieee", TMA, KEYS, False,
    )  # fmt: skip
    accumulator, maximum, total = attend(
        accumulator, maximum, total, (q_tile,), k, v, k_strides, v_strides, batch, head, rows, keys, scale,
        inner, None, None, free, end, False, HEAD_DIM, WIDTH, "ieee", TMA, KEYS, True,
    )  # fmt: skip
    # A slice whose scores are all −∞ has the weight 0, if there are others.
    part = accumulator / tl.where(total == 0, 1.0, total)[:, None]
    numbers = tl.num_programs(0).to(tl.int64) // splits * GROUP * queries
    number = split * numbers + (batch * heads + query_heads).to(tl.int64) * queries + rows % queries
    tl.store(parts + number[:, None] * WIDTH + columns[None, :], part, mask=inside[:, None])
    tl.store(exponents + number, maximum + tl.log2(total), mask=inside)


@triton.jit
def combine_kernel(
    parts, exponents, out, logsumexp,
    out_strides, heads, queries, splits, numbers,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """out and its log-sum-exp (natural, contiguous) for one query: its parts, weighed by their slices' sums."""
    if AHEAD:
        gdc_wait()
    query, head, batch = program(queries, heads)
    number = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    every = tl.arange(0, SPLITS)
    exponent = tl.load(exponents + every.to(tl.int64) * numbers + number, mask=every < splits, other=-float("inf"))
    maximum = tl.max(exponent, 0)
    base = tl.where(maximum == -float("inf"), 0.0, maximum)
    total = tl.sum(tl.exp2(exponent - base), 0)
    result = tl.zeros([WIDTH], tl.float32)
    for first in tl.range(0, splits, PARTS):
        some = first + tl.arange(0, PARTS)
        present = some < splits
        places = some.to(tl.int64) * numbers + number
        weights = tl.exp2(tl.load(exponents + places, mask=present, other=-float("inf")) - base) / total
        part = tl.load(parts + places[:, None] * WIDTH + columns[None, :], mask=present[:, None], other=0.0)
        result += tl.sum(part * weights[:, None], 0)
    target = out + batch.to(tl.int64) * out_strides[0] + head.to(tl.int64) * out_strides[1] + query * out_strides[2]
    tl.store(target + columns, result.to(out.dtype.element_ty), mask=columns < HEAD_DIM)
    tl.store(logsumexp + number, (maximum + tl.log2(total)) * LN_2)
