"""Launches the Gluon kernels: which inputs they support, the sizes of their tiles, and the order of the work.

Tensors are (batch, heads, rows, head_dim) with a contiguous last axis; all go through the copy engine, so other strides
and addresses are multiples of 16 bytes. Gluon is an experimental interface of Triton, so these kernels run only with
the version of Triton that they were tested with.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...launching import ALIGNMENT, Address, Launch, Window
from ...versions import KNOWN_VERSIONS, attention_kernels, why_not_hopper
from ..triton.inputs import (
    allocate_results,
    capability,
    has_tensor_descriptors,
    on_device,
    strides_allow_descriptors,
)
from ..triton.kernels import finish_kernel, rows_kernel
from ..triton.launch import LAUNCHES, ROW_TILE, Scoring, rows_per_program, some
from ..triton.tilings import padded_width
from . import native

Sizes = tuple[int, ...]

DTYPES = (torch.bfloat16, torch.float16)
COLUMNS = 8
"""Head dimensions are multiples of this, so that the rows of results begin at multiples of 16 bytes."""
L2_BYTES = 25_000_000
"""Size of the keys and values that are processed at the same time: half of the L2 cache."""
Q, K, V, GRADIENT, BUFFER, DK, DV, DQ, OUT, LOGSUMEXP = range(10)
"""Indices of a backward call's tensors in `source/calls.cpp`, for the launches of `_launch_backward`."""
MIN_DEPTH = 16
"""Columns that tensor cores multiply at once."""
ENOUGH_TURNS = 4
"""Tiles per program from which on a group of heads is balanced without a simulation."""
SIMULATED_TURNS = 64
"""Tiles per program up to which the host simulates the programs' work. That takes 0.6 ms for 1000 tiles, and 7 ms at
most."""
UNIT_COST = 4
"""The time that a tile of queries takes beside its tiles of keys, in tiles of keys."""
CLOSE_BYTES = 6_000_000
"""Size of a group's keys and values up to which a larger group is not slower."""
FARTHER = 0.03
"""The share of time that each doubling of a group's keys and values beyond `CLOSE_BYTES` adds."""
OWN_PROGRAM = 0.08
"""The share of time that one program per tile adds: it starts when another has ended, and fetches nothing in advance.

`UNIT_COST`, `CLOSE_BYTES`, `FARTHER` and `OWN_PROGRAM` were fitted to 180 forward times of 19 shapes on an H200, with
head dimensions 64 to 256: the chosen order takes 1 % longer than the fastest one on average, and 4 % at most. That was
with the kernels of commit c165c5a7, with which `LONG` was chosen, too.
"""
LONG = 8192
"""Queries from which on three consumers are faster than two at width 64, with a plain mask."""


@dataclass(frozen=True)
class Forward:
    """The build parameters of the forward kernel for one width."""

    consumers: int
    queries: int
    """Rows of a tile of queries; each consumer has one."""
    keys: int
    stages: int = 2
    """Slots in shared memory; each has a tile of keys, and one of values: those of the keys before."""
    query_stages: int = 1
    """Tiles of queries of each consumer in shared memory: with two, the next unit's tile is fetched in advance."""
    own_room: bool = True
    """True if the output has its own shared memory; False: it uses that of the queries."""
    registers: int = 240
    """Registers of each thread of a consumer."""
    halves: bool = False
    """True: with a causal mask, the first consumer skips the half of the last tile of keys that it does not see. This
    needs two consumers, each with half as many rows as a tile has keys."""


@dataclass(frozen=True)
class Backward:
    """The build parameters of the backward kernel for one width; it accumulates dQ in memory."""

    queries: int
    """Rows of a tile."""
    keys: int
    registers: int = 240
    halves: bool = False
    """True: consumers take each tile of 128 queries in two halves, and multiply the scores of a half in advance. It
    holds where all columns of a tile are multiplied (`rest` is 0); elsewhere it was not timed."""


@dataclass(frozen=True)
class TwoPasses:
    """The build parameters of the two backward kernels of the greatest width."""

    queries: int
    """Rows of a tile, in both kernels."""
    keys: int
    key_stages: int = 2
    """Tiles of keys in shared memory of the kernel for dQ."""
    value_stages: int = 1
    """The same, of values."""
    registers: int = 240


@dataclass(frozen=True)
class KernelChoice:
    """The kernels of one width."""

    forward: Forward
    forward_long: Forward
    """From `LONG` queries on, with a plain mask."""
    backward: Backward | TwoPasses


_128, _256 = Forward(2, 64, 128), Forward(2, 64, 64, own_room=False)
CHOICES = {
    64: KernelChoice(
        Forward(2, 64, 128, query_stages=2, halves=True),
        Forward(3, 64, 128, registers=160),
        Backward(128, 128, halves=True),
    ),
    128: KernelChoice(_128, _128, Backward(64, 128)),
    256: KernelChoice(_256, _256, TwoPasses(64, 64)),
}
"""The build parameters by width, each compared with the oracle and timed on an H200 (docs/decisions/0013)."""


class Bounded(NamedTuple):
    """A mask other than none and the causal one aligned top-left."""

    lower: int
    """Row i sees columns from i + lower to i + upper; a bound that hides nothing stands for none."""
    upper: int
    has_documents: bool

    @classmethod
    def of(cls, scoring: Scoring, queries: int, keys: int, has_documents: bool) -> Bounded | None:
        """Return the mask of rows of queries; None if it is plain."""
        if not has_documents and (scoring.is_causal or (scoring.lower, scoring.upper) == (None, None)):
            return None
        lower = -queries if scoring.lower is None else scoring.lower
        return cls(lower, keys if scoring.upper is None else scoring.upper, has_documents)

    def turned(self) -> Bounded:
        """Return the same mask of rows of keys, whose columns are the queries that see them."""
        return Bounded(-self.upper, -self.lower, self.has_documents)


def _bounds_arguments(bounded: Bounded | None, place: int) -> tuple[Any, ...]:
    """Return a kernel's arguments `lower`, `upper` and `bounds`, of which the last is tensor `place` of the launch."""
    if bounded is None:
        return None, None, None
    return bounded.lower, bounded.upper, Address(place) if bounded.has_documents else None


@functools.cache
def runs_on(device: torch.device) -> bool:
    """Return True if the kernels run on this device. Warns once if it is a Hopper GPU with another Triton."""
    if (reason := why_not_hopper(device)) is not None:
        warnings.warn(reason, stacklevel=2)
    return attention_kernels(device) == "hopper"


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why the kernels do not support these inputs, which have been checked; None if they do."""
    if not runs_on(q.device):
        version = ".".join(map(str, capability(q.device)))
        return (
            f"it needs compute capability 9.0 and Triton {' or '.join(f'{known}x' for known in KNOWN_VERSIONS)}; "
            f"{q.device} has {version}, and Triton is {triton.__version__}"
        )
    if q.dtype not in DTYPES:
        return f"it takes bfloat16 and float16, not {q.dtype}"
    if padded_width(q.shape[-1]) not in CHOICES or q.shape[-1] % COLUMNS:
        return f"the head dimension is {q.shape[-1]}, and it takes multiples of {COLUMNS} from 40 to 256"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not has_tensor_descriptors(tensor):
            return f"{name}'s address or its strides {tensor.stride()} are no multiples of 16 bytes: make it contiguous"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor] | None:
    """Return the output and its log-sum-exp, or None for inputs that must be checked and passed to `forward`.

    Repeated calls of one kind take the host less time, since they are registered with `native`.
    """
    known = native.forward(q, k, v, is_causal)
    if known is not None:
        return known
    launch = _forward_plan(
        q.device, k.device, v.device, q.dtype, k.dtype, v.dtype, q.shape, k.shape, v.shape,
        q.stride(), k.stride(), v.stride(), is_causal,
    )  # fmt: skip
    if launch is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
        return None
    out, logsumexp = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    with on_device(q.device):
        launch((q, k, v, out, logsumexp))
    native.learn_forward(q, k, v, is_causal, launch)
    return out, logsumexp


@functools.lru_cache(maxsize=LAUNCHES)
def _forward_plan(
    device: torch.device, key_device: torch.device, value_device: torch.device,
    dtype: torch.dtype, key_dtype: torch.dtype, value_dtype: torch.dtype,
    shape: Sizes, key_shape: Sizes, value_shape: Sizes, q_strides: Sizes, k_strides: Sizes, v_strides: Sizes,
    is_causal: bool,
) -> Launch | None:  # fmt: skip
    q, k, v = (
        torch.empty_strided(sizes, steps, dtype=kind, device="meta")
        for sizes, steps, kind in (
            (shape, q_strides, dtype), (key_shape, k_strides, key_dtype), (value_shape, v_strides, value_dtype)
        )
    )  # fmt: skip
    if (
        not (device == key_device == value_device and runs_on(device))
        or len(shape) != 4
        or shape[2] < ROW_TILE  # for few queries, decoding may be faster
        or any(tensor.stride(-1) != 1 or 0 in tensor.stride() for tensor in (q, k, v))
    ):
        return None
    out, _ = allocate_results(q, k, v)  # also checks the inputs
    if out.numel() == 0 or out.stride() != torch.empty_like(q).stride():
        return None
    return _forward_launch(
        device, dtype, shape, key_shape, q_strides, k_strides, v_strides, out.stride(), is_causal,
        1 / math.sqrt(shape[-1]),
    )  # fmt: skip


def takes(scoring: Scoring) -> bool:
    """Return True if the kernels compute such scores: with a positive scale, and without a soft cap."""
    return scoring.softcap is None and scoring.scale > 0


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, scoring: Scoring, bounds: Tensor | None = None
) -> bool:
    """Fill `out` and `logsumexp`; return False if the kernels do not support these inputs, which have been checked.

    `bounds` are the `document_bounds`, if there are documents.
    """
    if not takes(scoring):
        return False
    launch = _forward_launch(
        q.device, q.dtype, q.shape, k.shape, q.stride(), k.stride(), v.stride(), out.stride(), scoring.is_causal,
        scoring.scale, Bounded.of(scoring, q.shape[2], k.shape[2], bounds is not None),
    )  # fmt: skip
    if launch is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
        return False
    launch((q, k, v, out, logsumexp, *some(bounds)))
    return True


def gradients(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return dq, dk and dv, or None if the kernels do not support these inputs.

    The other tensors come from `attend`, so only the output's gradient is checked.
    """
    known = native.gradients(out_gradient, q, k, v, out, logsumexp, is_causal)
    if known is not None:
        return known
    if 0 in out_gradient.stride():  # that of a sum is one number, expanded
        out_gradient = out_gradient.contiguous()
    launches = _backward_plan(
        q.device, k.device, v.device, q.dtype, k.dtype, v.dtype, q.shape, k.shape, v.shape,
        q.stride(), k.stride(), v.stride(), out.stride(), out_gradient.stride(), out_gradient.dtype, is_causal,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    if (
        launches is None
        or not logsumexp.is_contiguous()
        or (q.data_ptr() | k.data_ptr() | v.data_ptr() | out_gradient.data_ptr()) % ALIGNMENT
    ):
        return None
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    with on_device(q.device):
        _launch_backward(launches, out_gradient, q, k, v, out, dq, dk, dv, logsumexp, logsumexp)
    native.learn_backward(
        out_gradient, q, k, v, out, logsumexp, is_causal, launches.size, launches.is_deterministic,
        (
            (launches.rows, (OUT, GRADIENT, LOGSUMEXP, LOGSUMEXP, BUFFER)),
            (launches.keys, (Q, K, V, GRADIENT, BUFFER, DK, DV)),
            (launches.queries, (Q, K, V, GRADIENT, BUFFER, DQ)),
        ),
    )  # fmt: skip
    return dq, dk, dv


@functools.lru_cache(maxsize=LAUNCHES)
def _backward_plan(
    device: torch.device, key_device: torch.device, value_device: torch.device,
    dtype: torch.dtype, key_dtype: torch.dtype, value_dtype: torch.dtype,
    shape: Sizes, key_shape: Sizes, value_shape: Sizes, q_strides: Sizes, k_strides: Sizes, v_strides: Sizes,
    out_strides: Sizes, gradient_strides: Sizes, gradient_dtype: torch.dtype, is_causal: bool, deterministic: bool,
) -> BackwardLaunches | None:  # fmt: skip
    forward = _forward_plan(
        device, key_device, value_device, dtype, key_dtype, value_dtype, shape, key_shape, value_shape,
        q_strides, k_strides, v_strides, is_causal,
    )  # fmt: skip
    if forward is None or gradient_dtype != dtype or gradient_strides[-1] != 1 or 0 in gradient_strides:
        return None
    results = [
        torch.empty_like(torch.empty_strided(sizes, steps, device="meta")).stride()
        for sizes, steps in ((shape, q_strides), (key_shape, k_strides), (key_shape, v_strides))
    ]
    launches = _backward_launches(
        device, dtype, shape, key_shape, q_strides, k_strides, v_strides, out_strides, gradient_strides, *results,
        False, is_causal, 1 / math.sqrt(shape[-1]),
    )  # fmt: skip
    if launches is None or (deterministic and not launches.is_deterministic):
        return None
    return launches


def backward(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    logsumexp: Tensor, logsumexp_gradient: Tensor | None, scoring: Scoring, bounds: Tensor | None = None,
) -> bool:  # fmt: skip
    """Fill dq, dk and dv; return False if the kernels do not support these inputs.

    For head dimensions up to 128, the order of dq's float32 sum, and so its last bits, differ from run to run; if
    torch's deterministic algorithms are on, the function returns False for them.
    """
    if not takes(scoring):
        return False
    if 0 in out_gradient.stride():  # that of a sum is one number, expanded
        out_gradient = out_gradient.contiguous()
    launches = _backward_launches(
        q.device, q.dtype, q.shape, k.shape, q.stride(), k.stride(), v.stride(), out.stride(), out_gradient.stride(),
        dq.stride(), dk.stride(), dv.stride(), logsumexp_gradient is not None, scoring.is_causal, scoring.scale,
        Bounded.of(scoring, q.shape[2], k.shape[2], bounds is not None),
    )  # fmt: skip
    if (
        launches is None
        or out_gradient.dtype != q.dtype
        or (q.data_ptr() | k.data_ptr() | v.data_ptr() | out_gradient.data_ptr()) % ALIGNMENT
        or (not launches.is_deterministic and torch.are_deterministic_algorithms_enabled())
    ):
        return False
    numbers = logsumexp if logsumexp_gradient is None else logsumexp_gradient
    _launch_backward(launches, out_gradient, q, k, v, out, dq, dk, dv, logsumexp, numbers, bounds)
    return True


def _launch_backward(
    launches: BackwardLaunches, out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, logsumexp: Tensor, logsumexp_gradient: Tensor, bounds: Tensor | None = None,
) -> None:  # fmt: skip
    buffer = torch.empty(launches.size, dtype=torch.float32, device=q.device)
    launches.rows((out, out_gradient, logsumexp, logsumexp_gradient, buffer))
    launches.keys((q, k, v, out_gradient, buffer, dk, dv, *some(bounds)))
    launches.queries((q, k, v, out_gradient, buffer, dq, *some(bounds)))


class BackwardLaunches(NamedTuple):
    """The launches of a backward pass, in the order of their execution."""

    size: int
    """Elements of the float32 buffer: exponents, deltas, and dQ's sum if there is one."""
    is_deterministic: bool
    rows: Launch
    """Writes exponents and deltas, and clears dQ's sum."""
    keys: Launch
    """Gives dK and dV, and adds to dQ's sum."""
    queries: Launch
    """Gives dQ, from its sum if there is one."""


@functools.lru_cache(maxsize=LAUNCHES)
def _forward_launch(
    device: torch.device, dtype: torch.dtype, shape: Sizes, key_shape: Sizes,
    q_strides: Sizes, k_strides: Sizes, v_strides: Sizes, out_strides: Sizes, is_causal: bool, scale: float,
    bounded: Bounded | None = None,
) -> Launch | None:  # fmt: skip
    batches, heads, queries, head_dim = shape
    key_heads, keys = key_shape[1:3]
    width = padded_width(head_dim)
    windows = (shape, q_strides), (key_shape, k_strides), (key_shape, v_strides), (shape, out_strides)
    if not _is_supported(device, dtype, head_dim, windows):
        return None
    from .forward import forward_kernel

    how = CHOICES[width].forward_long if queries >= LONG and bounded is None else CHOICES[width].forward
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    head_bytes = 2 * keys * head_dim * dtype.itemsize * key_heads / heads
    planes, lengths = batches * heads, key_tiles(how, queries, keys, is_causal)
    programs, span = order_of_work(lengths, planes, head_bytes, multiprocessors, is_causal)
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
            heads, planes, span, queries, keys, heads // key_heads, math.log2(math.e) * scale,
            *_bounds_arguments(bounded, 5),
        ),
        {
            "CONSUMERS": how.consumers, "M": how.queries, "N": how.keys, "D": width, "STAGES": how.stages,
            "Q_STAGES": how.query_stages, "CAUSAL": None if bounded else is_causal, "OWN_ROOM": how.own_room,
            "HALVES": how.halves and is_causal, "REGISTERS": how.registers, "REST": rest(head_dim),
            "num_warps": 4,
        },
    )  # fmt: skip


def key_tiles(how: Forward, queries: int, keys: int, is_causal: bool) -> list[int]:
    """Return the number of tiles of keys that each tile of queries sees, as the kernel counts them."""
    rows = how.consumers * how.queries
    ends = (min(start + rows, keys) if is_causal else keys for start in range(0, queries, rows))
    return [triton.cdiv(end, how.keys) for end in ends]


def order_of_work(
    lengths: Sequence[int], planes: int, head_bytes: float, multiprocessors: int, is_causal: bool
) -> tuple[int, int]:
    """Choose the number of programs, and the number of heads in a group.

    One program per multiprocessor processes several tiles, each fetched in advance, in a fixed order: heads group by
    group, and the longest rows of a group first. With a causal mask, the size of the groups determines how evenly the
    programs share the work. So the host simulates some sizes, and chooses the one with the least modelled time. If
    heads are so long that no small group is balanced, each tile gets its own program, and the hardware balances them.

    Without a mask, and for more tiles than the host simulates, the group is as large as the L2 cache allows.

    Args:
        lengths: Tiles of keys that each tile of queries of a head sees.
        planes: Batches times heads.
        head_bytes: Bytes of keys and values of one head of queries.
        multiprocessors: Number of the device's multiprocessors.
        is_causal: Whether a causal mask makes rows differ in length.
    """
    total = len(lengths) * planes
    programs = min(total, multiprocessors)
    fitting = min(planes, max(1, int(L2_BYTES // head_bytes)))
    span = math.ceil(planes / math.ceil(planes / fitting))
    if is_causal and total <= SIMULATED_TURNS * multiprocessors:
        return _fastest_order(lengths, planes, head_bytes, programs, span)
    if not is_causal or len(lengths) * fitting >= ENOUGH_TURNS * multiprocessors:
        return programs, span
    return total, span


def _fastest_order(
    lengths: Sequence[int], planes: int, head_bytes: float, programs: int, fitting: int
) -> tuple[int, int]:
    """Return the number of programs and the size of groups with the least modelled time; of equal ones, the smallest.

    It tries divisors of twice the number of programs: a whole number of tiles of each head then fills one or two
    rounds of turns. It also tries the size that fits the L2 cache, and all heads in one group. It leaves out groups
    with fewer tiles than a third of the programs, since none was timed.
    """
    total = len(lengths) * planes
    sizes = {each for each in range(1, 2 * programs + 1) if 2 * programs % each == 0} | {fitting}
    enough = sorted({each for each in sizes if each < planes and 3 * each * len(lengths) >= programs} | {planes})

    def time(load: float, span: int) -> float:
        return load * (1 + FARTHER * max(0.0, math.log2(span * head_bytes / CLOSE_BYTES)))

    times = {(programs, span): time(heaviest_load(lengths, planes, span, programs), span) for span in enough}
    if total > programs:
        even = planes * sum(UNIT_COST + length for length in lengths) / programs
        times[total, fitting] = time((1 + OWN_PROGRAM) * even, fitting)
    return min(times, key=times.__getitem__)


def heaviest_load(lengths: Sequence[int], planes: int, span: int, programs: int) -> int:
    """Return the work of the busiest program, in tiles of keys, if heads are processed in groups of `span`.

    It assigns units to programs as the kernel's `place` and `next_unit` do. It uses lists, since tensors would depend
    on the caller's default device and torch modes.
    """
    costs: list[int] = []
    for first in range(0, planes, span):
        members = min(span, planes - first)
        for length in reversed(lengths):
            costs += [UNIT_COST + length] * members
    costs += [0] * (-len(costs) % programs)
    loads = [0] * programs
    for turn, first in enumerate(range(0, len(costs), programs)):
        units = costs[first : first + programs]
        loads = list(map(operator.add, loads, units[::-1] if turn % 2 else units))
    return max(loads)


@functools.lru_cache(maxsize=LAUNCHES)
def _backward_launches(
    device: torch.device, dtype: torch.dtype, shape: Sizes, key_shape: Sizes,
    q_strides: Sizes, k_strides: Sizes, v_strides: Sizes, out_strides: Sizes, gradient_strides: Sizes,
    dq_strides: Sizes, dk_strides: Sizes, dv_strides: Sizes, has_logsumexp_gradient: bool, is_causal: bool,
    scale: float, bounded: Bounded | None = None,
) -> BackwardLaunches | None:  # fmt: skip
    batches, heads, queries, head_dim = shape
    width = padded_width(head_dim)
    windows = (
        *((shape, q_strides), (key_shape, k_strides), (key_shape, v_strides), (shape, gradient_strides)),
        *((key_shape, dk_strides), (key_shape, dv_strides), (shape, dq_strides)),
    )
    if not _is_supported(device, dtype, head_dim, windows):
        return None
    how = CHOICES[width].backward
    padded = triton.cdiv(queries, ROW_TILE) * ROW_TILE
    problem = BackwardProblem(dtype, shape, key_shape, windows, padded, is_causal, scale, bounded)
    numbers, rows, columns = problem.numbers, rows_per_program(width), sum_columns(head_dim)
    prepare = Launch(
        rows_kernel,
        padded // rows * heads * batches,
        (
            *map(Address, range(4)), Address(4), Address(4, numbers), Address(4, 2 * numbers),
            out_strides, gradient_strides, heads, queries, padded,
        ),
        {
            "HEAD_DIM": head_dim, "WIDTH": width, "HAS_LOGSUMEXP_GRADIENT": has_logsumexp_gradient,
            "CLEAR": isinstance(how, Backward), "ROWS": rows, "SUM": columns, **OVERLAPPED_LAUNCH,
        },
    )  # fmt: skip
    if isinstance(how, TwoPasses):
        return BackwardLaunches(2 * numbers, True, prepare, _wide_keys(problem, how), _wide_queries(problem, how))
    finish = Launch(
        finish_kernel,
        triton.cdiv(queries, 64) * heads * batches,
        (Address(4, 2 * numbers), Address(5), dq_strides, heads, queries, padded, problem.scale),
        {"HEAD_DIM": head_dim, "WIDTH": width, "ROWS": 64, "SUM": columns, "BY_THREAD": True, **OVERLAPPED_LAUNCH},
    )
    return BackwardLaunches((2 + columns) * numbers, False, prepare, _keys_and_sum(problem, how), finish)


OVERLAPPED_LAUNCH = {"OVERLAP": True, "launch_pdl": True}
"""Launch options of kernels that start their preparation while the preceding kernel ends."""


class BackwardProblem(NamedTuple):
    """The key of a backward pass's launches."""

    dtype: torch.dtype
    shape: Sizes
    """Sizes of the queries."""
    key_shape: Sizes
    windows: tuple[tuple[Sizes, Sizes], ...]
    """Shape and strides of q, k, v, the output's gradient, dk, dv and dq."""
    padded: int
    """Queries, rounded up to whole tiles."""
    is_causal: bool
    scale: float
    bounded: Bounded | None = None

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return padded_width(self.shape[-1])

    @property
    def numbers(self) -> int:
        """Elements of a buffer with one number per query."""
        return self.shape[0] * self.shape[1] * self.padded

    @property
    def group(self) -> int:
        """Heads of queries that share a head of keys."""
        return self.shape[1] // self.key_shape[1]

    def window(self, place: int, which: int, rows: int) -> Window:
        """Return a tensor's descriptor, by its index in a launch's tensors and its index in `windows`."""
        block = rows, self.width
        return Window.of(place, *self.windows[which], (1, 1, *block), _layout(self.dtype, *block))

    def bounds_of_keys(self, place: int) -> tuple[Any, ...]:
        """Return a kernel's arguments that tell, of keys, the queries that see them."""
        return _bounds_arguments(self.bounded and self.bounded.turned(), place)

    def tiles(self, queries: int, keys: int) -> tuple[Window, ...]:
        """Return q, k, v and the output's gradient in tiles of so many rows."""
        rows = queries, keys, keys, queries
        return tuple(self.window(place, place, rows[place]) for place in range(4))

    def options(self, how: Backward | TwoPasses) -> dict[str, Any]:
        """Return the constants of all kernels."""
        sizes = {"M": how.queries, "N": how.keys, "D": self.width, "CAUSAL": None if self.bounded else self.is_causal}
        sizes["REST"] = rest(self.shape[-1])
        return {**sizes, "REGISTERS": how.registers, "num_warps": 4, "launch_pdl": True}


def _keys_and_sum(problem: BackwardProblem, how: Backward) -> Launch:
    """Return the launch of the kernel that gives dK and dV, and adds dQ up."""
    from .backward import backward_kernel

    (batches, heads, queries, _), (_, key_heads, keys, _) = problem.shape, problem.key_shape
    padded, width = problem.padded, problem.width
    depth, narrow, columns = rest(problem.shape[-1]), is_narrow(problem.shape[-1]), sum_columns(problem.shape[-1])
    # Consumers add up half of the rows each, or half of the columns; narrow ones the first half of them, and the rest.
    block = (how.queries // 2, width) if how.queries == 128 else (how.queries, width // 2)
    lines, plane = padded * columns // 256, padded * columns
    sizes, steps = (batches, heads, lines, 256), (heads * plane, plane, 256, 1)
    dq_sum, dq_rest = (
        Window.of(4, sizes, steps, (1, 1, math.prod(each) // 256, 256), _plain_layout(4), 2 * problem.numbers)
        for each in (block, (how.queries, depth) if narrow else block)
    )
    numbers = Window.of(4, (2, problem.numbers), (problem.numbers, 1), (1, how.queries), _plain_layout(2))
    return Launch(
        backward_kernel,
        triton.cdiv(keys, how.keys) * key_heads * batches,
        (
            *problem.tiles(how.queries, how.keys), numbers, dq_sum, dq_rest,
            problem.window(5, 4, how.keys // 2), problem.window(6, 5, how.keys // 2),
            heads, key_heads, problem.group, queries, keys, padded, math.log2(math.e) * problem.scale, problem.scale,
            *problem.bounds_of_keys(7),
        ),
        {
            **problem.options(how), "HALVES": how.halves and depth == 0, "NARROW": narrow,
        },
    )  # fmt: skip


def _wide_keys(problem: BackwardProblem, how: TwoPasses) -> Launch:
    """Return the launch of the kernel that gives dK and dV."""
    from .backward_wide import wide_keys_kernel

    (batches, heads, queries, _), (_, key_heads, keys, _) = problem.shape, problem.key_shape
    return Launch(
        wide_keys_kernel,
        triton.cdiv(keys, how.keys) * key_heads * batches,
        (
            *problem.tiles(how.queries, how.keys), Address(4), Address(4, problem.numbers),
            problem.window(5, 4, how.keys), problem.window(6, 5, how.keys),
            heads, key_heads, problem.group, queries, keys, problem.padded, math.log2(math.e) * problem.scale,
            problem.scale, *problem.bounds_of_keys(7),
        ),
        problem.options(how),
    )  # fmt: skip


def _wide_queries(problem: BackwardProblem, how: TwoPasses) -> Launch:
    """Return the launch of the kernel that gives dQ."""
    from .backward_wide import wide_queries_kernel

    (batches, heads, queries, _), keys = problem.shape, problem.key_shape[2]
    return Launch(
        wide_queries_kernel,
        triton.cdiv(queries, 2 * how.queries) * heads * batches,
        (
            *problem.tiles(how.queries, how.keys), Address(4), Address(4, problem.numbers),
            problem.window(5, 6, how.queries),
            heads, problem.group, queries, keys, problem.padded, math.log2(math.e) * problem.scale, problem.scale,
            *_bounds_arguments(problem.bounded, 6),
        ),
        {**problem.options(how), "K_STAGES": how.key_stages, "V_STAGES": how.value_stages},
    )  # fmt: skip


def is_narrow(head_dim: int) -> bool:
    """Return True if the backward kernel leaves the columns of zeros out of dK, dV and dQ's sum: for 72 and 80.

    88 and 96 were not timed; the forward kernel leaves their zeros out, too. Width 64 needs all columns where consumers
    halve dQ by rows.
    """
    return padded_width(head_dim) == 128 and rest(head_dim) == MIN_DEPTH


def sum_columns(head_dim: int) -> int:
    """Return the columns of dQ's float32 sum in memory."""
    width = padded_width(head_dim)
    return width // 2 + rest(head_dim) if is_narrow(head_dim) else width


def rest(head_dim: int) -> int:
    """Return how many columns of the second half of a tile the scores need: a power of two, or 0 for all.

    The other columns are zero.
    """
    half = padded_width(head_dim) // 2
    needed = max(MIN_DEPTH, 1 << (head_dim - half - 1).bit_length())
    return needed if needed < half else 0


def _is_supported(
    device: torch.device, dtype: torch.dtype, head_dim: int, windows: tuple[tuple[Sizes, Sizes], ...]
) -> bool:
    return (
        runs_on(device)
        and dtype in DTYPES
        and padded_width(head_dim) in CHOICES
        and head_dim % COLUMNS == 0
        and all(strides_allow_descriptors(shape, strides, dtype.itemsize) for shape, strides in windows)
    )


@functools.cache
def _layout(dtype: torch.dtype, length: int, width: int) -> Any:
    from triton.experimental.gluon import language as gl

    names = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
    return gl.NVMMASharedLayout.get_default_for([1, 1, length, width], names[dtype])


@functools.cache
def _plain_layout(rank: int) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(0, 32, rank)
