"""Which inputs the Gluon kernels take, the sizes of their tiles, and the order of the work: tables and rules, with the
reasons for them.

Gluon is an experimental interface of Triton, so these kernels run only with the version of Triton that they were tested
with.
"""

from __future__ import annotations

import functools
import heapq
import math
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from ...versions import KNOWN_VERSIONS, attention_kernels, why_not_hopper
from ..triton.inputs import capability, strides_allow_descriptors
from ..triton.launch import Kind, Scoring
from ..triton.tilings import padded_width

DTYPES = (torch.bfloat16, torch.float16)
COLUMNS = 8
"""Head dimensions are multiples of this, so that the rows of results begin at multiples of 16 bytes."""
MIN_DEPTH = 16
"""Columns that tensor cores multiply at once."""


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
    stream: bool = False
    """True: consumers take each tile of 128 queries in two halves, and multiply the scores of a half in advance, and a
    unit's last dQ with the next unit's first tile."""


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


_128 = Forward(2, 64, 128, query_stages=2)
_256 = Forward(2, 64, 64, own_room=False)
CHOICES = {
    64: KernelChoice(
        Forward(2, 64, 128, query_stages=2, halves=True),
        Forward(3, 64, 128, query_stages=2, registers=160),
        Backward(128, 128, stream=True),
    ),
    128: KernelChoice(_128, _128, Backward(64, 128)),
    256: KernelChoice(_256, _256, TwoPasses(64, 64)),
}
"""The build parameters by width, each compared with the oracle and timed on an H200 (docs/decisions/0013)."""
LONG = {True: 8192, False: 1500}
"""Queries from which on three consumers are faster than two at width 64, with the causal mask and without a mask."""


@functools.cache
def runs_on(device: torch.device) -> bool:
    """Return True if the kernels run on this device. Warns once if it is a Hopper GPU with another Triton."""
    if (reason := why_not_hopper(device)) is not None:
        warnings.warn(reason, stacklevel=2)
    return attention_kernels(device) == "hopper"


def why_not(q: Kind, *others: Kind) -> str | None:
    """Return why the kernels do not take q, and other tensors of its head dimension; None if they do."""
    if not runs_on(q.device):
        version = ".".join(map(str, capability(q.device)))
        return (
            f"it needs compute capability 9.0 and Triton {' or '.join(f'{known}x' for known in KNOWN_VERSIONS)}; "
            f"{q.device} has {version}, and Triton is {triton.__version__}"
        )
    if q.dtype not in DTYPES or any(one.dtype != q.dtype for one in others):
        return f"it takes bfloat16 and float16, not {q.dtype}"
    if padded_width(q.shape[-1]) not in CHOICES or q.shape[-1] % COLUMNS:
        return f"the head dimension is {q.shape[-1]}, and it takes multiples of {COLUMNS} from 40 to 256"
    for one in (q, *others):
        if not strides_allow_descriptors(one.shape, one.strides, q.dtype.itemsize):
            return f"strides {one.strides} are no multiples of 16 bytes: make the tensor contiguous"
    return None


def takes(scoring: Scoring) -> bool:
    """Return True if the kernels compute such scores: with a positive scale, and without a soft cap."""
    return scoring.softcap is None and scoring.scale > 0


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


def rest(head_dim: int) -> int:
    """Return how many columns of the second half of a tile the scores need: a power of two, or 0 for all.

    The other columns are zero.
    """
    half = padded_width(head_dim) // 2
    needed = max(MIN_DEPTH, 1 << (head_dim - half - 1).bit_length())
    return needed if needed < half else 0


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


def key_tiles(how: Forward, queries: int, keys: int, is_causal: bool) -> list[int]:
    """Return the number of tiles of keys that each tile of queries sees, as the kernel counts them."""
    rows = how.consumers * how.queries
    ends = (min(start + rows, keys) if is_causal else keys for start in range(0, queries, rows))
    return [triton.cdiv(end, how.keys) for end in ends]


L2_BYTES = 25_000_000
"""Size of the keys and values that are processed at the same time: half of the L2 cache."""
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


KEYS_COST = 128
"""The time that a tile of keys takes in the backward kernel beside its queries, in queries."""


@functools.cache
def heads_of_keys(lengths: tuple[int, ...], planes: int, head_bytes: float, multiprocessors: int) -> int:
    """Choose how many heads of keys the backward kernel takes together: of all of them those tiles first that most
    queries see. A program takes the next tile of all when it has fetched what one needs.

    Args:
        lengths: Queries that see each tile of keys of a head; the first has the most.
        planes: Batches times heads of keys.
        head_bytes: Bytes that all tiles of a head read or add to: queries, their gradients, and dQ's sum.
        multiprocessors: Number of the device's multiprocessors.
    """
    if len(lengths) * planes > SIMULATED_TURNS * multiprocessors:
        return 1
    fitting = min(planes, max(1, int(L2_BYTES // head_bytes)))
    sizes = {fitting, *(1 << power for power in range(fitting.bit_length()))}

    def end(span: int) -> int:
        free = [0] * multiprocessors
        for first in range(0, planes, span):
            for length in lengths:
                for _ in range(min(span, planes - first)):
                    heapq.heapreplace(free, free[0] + KEYS_COST + length)
        return max(free)

    return min(sorted(sizes), key=end)
