"""The launches of the Gluon kernels for tensors of given kinds, made once for each set of kinds.

Tensors are (batch, heads, rows, head_dim) with a contiguous last axis; all go through the copy engine, so other strides
and addresses are multiples of 16 bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...launching import Address, Launch, Window
from ..triton.kernels import finish_kernel, rows_kernel
from ..triton.launch import LAUNCHES, ROW_TILE, Kind, rows_per_program, some
from ..triton.tilings import padded_width
from . import rules
from .rules import CHOICES, LONG, Backward, Bounded, TwoPasses, is_narrow, rest, sum_columns

OVERLAPPED_LAUNCH = {"OVERLAP": True, "launch_pdl": True}
"""Launch options of kernels that start their preparation while the preceding kernel ends."""


@functools.lru_cache(maxsize=LAUNCHES)
def forward_launch(
    q: Kind, k: Kind, v: Kind, out: Kind, is_causal: bool, scale: float, bounded: Bounded | None = None
) -> Launch | None:
    """Return the launch on the tensors q, k, v, the output, its log-sum-exp and the documents' bounds, if there are
    any; None if the kernel does not take them."""
    if rules.why_not(q, k, v, out) is not None:
        return None
    from .forward import forward_kernel

    (batches, heads, queries, head_dim), (_, key_heads, keys, _) = q.shape, k.shape
    width = padded_width(head_dim)
    how = CHOICES[width].forward_long if queries >= LONG[is_causal] and bounded is None else CHOICES[width].forward
    multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count
    head_bytes = 2 * keys * head_dim * q.dtype.itemsize * key_heads / heads
    planes, lengths = batches * heads, rules.key_tiles(how, queries, keys, is_causal)
    programs, span = rules.order_of_work(lengths, planes, head_bytes, multiprocessors, is_causal)
    if bounded and bounded.has_documents:  # the same tile of all heads takes equally long, which balances the programs
        span = planes
    rows = how.queries, how.keys, how.keys, how.queries
    return Launch(
        forward_kernel,
        programs,
        (
            *(_window(place, one, rows[place]) for place, one in enumerate((q, k, v, out))), Address(4),
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


class BackwardLaunches(NamedTuple):
    """The launches of a backward pass, in the order of their execution."""

    size: int
    """Elements of the float32 buffer: exponents, deltas, and dQ's sum and a counter if there are any."""
    is_deterministic: bool
    rows: Launch
    """Writes exponents and deltas, and clears dQ's sum and the counter."""
    keys: Launch
    """Gives dK and dV, and adds to dQ's sum."""
    queries: Launch
    """Gives dQ, from its sum if there is one."""

    def run(
        self, out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, results: Sequence[Tensor],
        logsumexp: Tensor, logsumexp_gradient: Tensor, bounds: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Fill the results dq, dk and dv."""
        buffer = torch.empty(self.size, dtype=torch.float32, device=q.device)
        dq, dk, dv = results
        self.rows((out, out_gradient, logsumexp, logsumexp_gradient, buffer))
        self.keys((q, k, v, out_gradient, buffer, dk, dv, *some(bounds)))
        self.queries((q, k, v, out_gradient, buffer, dq, *some(bounds)))


class BackwardProblem(NamedTuple):
    """The key of a backward pass's launches."""

    tensors: tuple[Kind, ...]
    """q, k, v, the output's gradient, dk, dv and dq."""
    out_strides: tuple[int, ...]
    has_logsumexp_gradient: bool
    is_causal: bool
    scale: float
    bounded: Bounded | None = None

    @property
    def padded(self) -> int:
        """Queries, rounded up to whole tiles."""
        return -(-self.tensors[0].shape[2] // ROW_TILE) * ROW_TILE

    @property
    def numbers(self) -> int:
        """Elements of a buffer with one number per query."""
        return math.prod(self.tensors[0].shape[:2]) * self.padded

    @property
    def sizes(self) -> tuple[int, ...]:
        """What the kernels call heads, key_heads, group, queries and keys."""
        (_, heads, queries, _), (_, key_heads, keys, _) = (one.shape for one in self.tensors[:2])
        return heads, key_heads, heads // key_heads, queries, keys

    @property
    def scales(self) -> tuple[float, float]:
        """The factor of the scores in powers of two, and that of the gradients."""
        return math.log2(math.e) * self.scale, self.scale

    def bounds_of_keys(self, place: int) -> tuple[Any, ...]:
        """Return a kernel's arguments that tell, of keys, the queries that see them."""
        return _bounds_arguments(self.bounded and self.bounded.turned(), place)

    def tiles(self, queries: int, keys: int) -> tuple[Window, ...]:
        """Return q, k, v and the output's gradient in tiles of so many rows."""
        rows = queries, keys, keys, queries
        return tuple(_window(place, one, rows[place]) for place, one in enumerate(self.tensors[:4]))

    def options(self, how: Backward | TwoPasses) -> dict[str, Any]:
        """Return the constants of all kernels."""
        head_dim = self.tensors[0].shape[-1]
        return {
            "M": how.queries, "N": how.keys, "D": padded_width(head_dim), "REST": rest(head_dim),
            "CAUSAL": None if self.bounded else self.is_causal,
            "REGISTERS": how.registers, "num_warps": 4, "launch_pdl": True,
        }  # fmt: skip


@functools.lru_cache(maxsize=LAUNCHES)
def backward_launches(problem: BackwardProblem) -> BackwardLaunches | None:
    """Return the launches of a backward pass; None if the kernels do not take its tensors."""
    if rules.why_not(*problem.tensors) is not None:
        return None
    q, _, _, gradient, _, _, dq = problem.tensors
    batches, heads, queries, head_dim = q.shape
    width, padded, numbers, columns = padded_width(head_dim), problem.padded, problem.numbers, sum_columns(head_dim)
    how, rows, counter = CHOICES[width].backward, rows_per_program(width), (2 + columns) * numbers
    prepare = Launch(
        rows_kernel,
        padded // rows * heads * batches,
        (
            *map(Address, range(4)), Address(4), Address(4, numbers), Address(4, 2 * numbers),
            Address(4, counter) if isinstance(how, Backward) else None,
            problem.out_strides, gradient.strides, heads, queries, padded,
        ),
        {
            "HEAD_DIM": head_dim, "WIDTH": width, "HAS_LOGSUMEXP_GRADIENT": problem.has_logsumexp_gradient,
            "CLEAR": isinstance(how, Backward), "ROWS": rows, "SUM": columns, **OVERLAPPED_LAUNCH,
        },
    )  # fmt: skip
    if isinstance(how, TwoPasses):
        return BackwardLaunches(2 * numbers, True, prepare, _wide_keys(problem, how), _wide_queries(problem, how))
    finish = Launch(
        finish_kernel,
        triton.cdiv(queries, 64) * heads * batches,
        (Address(4, 2 * numbers), Address(5), dq.strides, heads, queries, padded, problem.scale),
        {"HEAD_DIM": head_dim, "WIDTH": width, "ROWS": 64, "SUM": columns, "BY_THREAD": True, **OVERLAPPED_LAUNCH},
    )
    return BackwardLaunches(counter + 1, False, prepare, _keys_and_sum(problem, how, Address(4, counter)), finish)


def _keys_and_sum(problem: BackwardProblem, how: Backward, counter: Address) -> Launch:
    """Return the launch of the kernel that gives dK and dV, and adds dQ up: programs as many as multiprocessors."""
    from .backward import backward_kernel

    (batches, heads, queries, head_dim), (_, key_heads, keys, _) = (one.shape for one in problem.tensors[:2])
    width, depth, narrow, plane = padded_width(head_dim), rest(head_dim), is_narrow(head_dim), problem.padded
    # Consumers add up half of the rows each, or half of the columns; narrow ones the first half of them, and the rest.
    block = (how.queries // 2, width) if how.queries == 128 else (how.queries, width // 2)
    plane *= sum_columns(head_dim)
    sizes, steps = (batches, heads, plane // 256, 256), (heads * plane, plane, 256, 1)
    dq_sum: Window | Address
    dq_sum, dq_rest = (
        Window.of(4, sizes, steps, (1, 1, math.prod(each) // 256, 256), _plain_layout(4), 2 * problem.numbers)
        for each in (block, (how.queries, depth) if narrow else block)
    )
    # With a mask, programs are at different queries at a time: then adding from registers is faster.
    direct = not (how.stream or narrow) and (problem.is_causal or problem.bounded is not None)
    if direct:
        dq_sum = Address(4, 2 * problem.numbers)
    planes, span = batches * key_heads, 1
    multiprocessors = torch.cuda.get_device_properties(problem.tensors[0].device).multi_processor_count
    if problem.is_causal and not problem.bounded:
        group = heads // key_heads
        lengths = tuple(group * max(queries - start, 0) for start in range(0, keys, how.keys))
        span = rules.heads_of_keys(lengths, planes, 8 * group * plane, multiprocessors)
    numbers = Window.of(4, (2, problem.numbers), (problem.numbers, 1), (1, how.queries), _plain_layout(2))
    return Launch(
        backward_kernel,
        min(triton.cdiv(keys, how.keys) * planes, multiprocessors),
        (
            *problem.tiles(how.queries, how.keys), numbers, dq_sum, dq_rest, counter,
            _window(5, problem.tensors[4], how.keys // 2), _window(6, problem.tensors[5], how.keys // 2),
            *problem.sizes, planes, problem.padded, span, *problem.scales, *problem.bounds_of_keys(7),
        ),
        {**problem.options(how), "STREAM": how.stream, "NARROW": narrow, "DIRECT": direct},
    )  # fmt: skip


def _wide_keys(problem: BackwardProblem, how: TwoPasses) -> Launch:
    """Return the launch of the kernel that gives dK and dV."""
    from .backward_wide import wide_keys_kernel

    batches, key_heads, keys, _ = problem.tensors[1].shape
    return Launch(
        wide_keys_kernel,
        triton.cdiv(keys, how.keys) * key_heads * batches,
        (
            *problem.tiles(how.queries, how.keys), Address(4), Address(4, problem.numbers),
            _window(5, problem.tensors[4], how.keys), _window(6, problem.tensors[5], how.keys),
            *problem.sizes, problem.padded, *problem.scales, *problem.bounds_of_keys(7),
        ),
        problem.options(how),
    )  # fmt: skip


def _wide_queries(problem: BackwardProblem, how: TwoPasses) -> Launch:
    """Return the launch of the kernel that gives dQ."""
    from .backward_wide import wide_queries_kernel

    heads, _, group, queries, keys = problem.sizes
    return Launch(
        wide_queries_kernel,
        triton.cdiv(queries, 2 * how.queries) * heads * problem.tensors[0].shape[0],
        (
            *problem.tiles(how.queries, how.keys), Address(4), Address(4, problem.numbers),
            _window(5, problem.tensors[6], how.queries), heads, group, queries, keys, problem.padded, *problem.scales,
            *_bounds_arguments(problem.bounded, 6),
        ),
        {**problem.options(how), "K_STAGES": how.key_stages, "V_STAGES": how.value_stages},
    )  # fmt: skip


def _bounds_arguments(bounded: Bounded | None, place: int) -> tuple[Any, ...]:
    """Return a kernel's arguments `lower`, `upper` and `bounds`, of which the last is tensor `place` of the launch."""
    if bounded is None:
        return None, None, None
    return bounded.lower, bounded.upper, Address(place) if bounded.has_documents else None


def _window(place: int, of: Kind, rows: int) -> Window:
    """Return the descriptor of tensor `place` of a launch, in tiles of so many rows."""
    block = 1, 1, rows, padded_width(of.shape[-1])
    return Window.of(place, of.shape, of.strides, block, _layout(of.dtype, *block))


@functools.cache
def _layout(dtype: torch.dtype, *block: int) -> Any:
    from triton.experimental.gluon import language as gl

    names = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
    return gl.NVMMASharedLayout.get_default_for(list(block), names[dtype])


@functools.cache
def _plain_layout(rank: int) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(0, 32, rank)
