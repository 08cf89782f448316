"""Times collective operations over ranks, and checks their results. Each rank runs `time_cells`.

Each rank times a call for itself, from the moment when all ranks are ready to the moment when this rank has its result:
on a GPU by events behind a delay and a barrier on the device, on a CPU by the host's clock after a barrier. A step's
latency is the maximum over the ranks. Times of different ranks are never pooled: that would count each step several
times, and hide the slowest rank behind the others.

The numbers change sign before every call, so a call that does nothing leaves a wrong result. They are small integers,
whose sums are exact in every data type and in any order.
"""

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.clock import now_s
from kernels.device_clock import DeviceClock, Lap, host_lap_ms
from parallel.collectives import group_of, start_all_gather, start_all_reduce, start_reduce_scatter
from parallel.process_group import Rank
from workers.measure.host_memory import MEMINFO, host_memory
from workers.measure.memory import is_out_of_memory, short_message
from workers.measure.warmup import WarmUp

MB = 2**20
PIECE_BYTES = 16
"""Each rank's piece of a tensor is a multiple of this size: NCCL is slow on pieces that are not aligned to it."""
PATTERN_LENGTH = 2**20 + 7
"""A prime, so that swapped pieces have different numbers."""
LARGEST_NUMBER = 3
"""Numbers in tensors are 1 to HIGHEST, changed by at most 1. 64 ranks of them sum up to less than 256, and bfloat16
holds all integers to 256."""
MAX_ERROR = 0.25
"""Largest error of a right number. If the number of ranks is no power of two, dividing an all-reduce's numbers by it
after each call adds a relative error of 1e-7."""
HEARTBEAT_S = 1.0
DTYPES: Final[Mapping[str, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UNSUPPORTED_DTYPE_MESSAGES = ("Invalid scalar type", "Unsupported data type", "unsupported data type")
"""Parts of the errors of gloo and NCCL for a data type that they do not move."""


def size_bytes(size_mb: float, ranks: int) -> int:
    """Return the size of the full tensor: `size_mb`, rounded down to pieces of PIECE_BYTES for every rank."""
    unit = ranks * PIECE_BYTES
    return int(size_mb * MB) // unit * unit


class Numbers:
    """The numbers in the ranks' tensors: rank r has pattern(i) + shift(r) at index i, and the shifts sum up to 0.

    So the sum over all ranks is ranks × pattern(i); divided by the number of ranks, it is the input of the next call.
    """

    def __init__(self, seed: int, ranks: int, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        pattern = torch.randint(1, LARGEST_NUMBER + 1, (PATTERN_LENGTH,), generator=generator)
        self._pattern = pattern.to(device=device, dtype=dtype)
        self._ranks = ranks
        self.dtype = dtype

    def shift(self, rank: int) -> int:
        """Return 1, -1, 1, -1, … by rank, and 0 for the last of an odd number of ranks."""
        if rank == self._ranks - 1 and self._ranks % 2:
            return 0
        return -1 if rank % 2 else 1

    def fill(self, tensor: Tensor, *, rank: int, first: int = 0) -> None:
        """Write a rank's numbers from index `first` on into a one-dimensional tensor."""
        for _, part, pattern in self._parts(tensor, first):
            torch.add(pattern, self.shift(rank), out=part)

    def wrong(self, tensor: Tensor, *, factor: int, shift: int = 0, first: int = 0) -> str | None:
        """Describe the first wrong number of a result that should be factor × (pattern + shift); None if none is."""
        for start, part, pattern in self._parts(tensor, first):
            expected = (pattern + shift) * factor
            # Written so that a NaN is wrong, too.
            bad = torch.nonzero(~((part - expected).abs() <= MAX_ERROR))
            if len(bad):
                place = int(bad[0])
                value, right = float(part[place]), float(expected[place])
                return f"number {first + start + place} is {value:g} instead of {right:g}, and others are wrong, too"
        return None

    def _parts(self, tensor: Tensor, first: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each part's start, the part, and its pattern. Expanding the whole pattern would double the memory."""
        start = 0
        while start < tensor.numel():
            offset = (first + start) % PATTERN_LENGTH
            length = min(PATTERN_LENGTH - offset, tensor.numel() - start)
            yield start, tensor[start : start + length], self._pattern[offset : offset + length]
            start += length


class Collective(abc.ABC):
    """One operation on its own tensors, which can be called repeatedly; the numbers change between calls. `numel`:
    numbers in the full tensor, a multiple of the group's ranks. `numbers`: gives the numbers; their data type is the
    tensors'."""

    tensors: ClassVar[float]
    """Full tensors that a rank needs on a CPU. Gloo's own copies were measured as growth of the ranks' resident memory,
    with torch 2.13."""
    pieces: ClassVar[int] = 0
    """A rank's pieces of them that it needs beside these."""

    def __init__(self, numel: int, numbers: Numbers, rank: Rank, group: dist.ProcessGroup) -> None:
        self._numbers, self._rank, self._group = numbers, rank, group
        self._numel, self._piece = numel, numel // rank.world_size
        self._sign = 0
        """The sign of the last call's numbers; 0 before the first."""
        self.make()

    def prepare(self) -> None:
        """Change the sign of the tensors' numbers for the next call."""
        if self._sign:
            self.turn()
        self._sign = -self._sign or 1

    def _empty(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self._numbers.dtype, device=self._rank.device)

    @classmethod
    def host_bytes(cls, size: int, ranks: int) -> int:
        """Return the bytes that a rank needs on a CPU for a full tensor of `size`, with gloo's own copies."""
        return int(cls.tensors * size) + cls.pieces * (size // ranks)

    @abc.abstractmethod
    def make(self) -> None:
        """Make the tensors, with the numbers of the first call."""

    @abc.abstractmethod
    def turn(self) -> None:
        """Change the sign of this rank's numbers after a call."""

    @abc.abstractmethod
    def call(self) -> None:
        """Call the operation. On a GPU the current stream waits for its result, on a CPU the host does."""

    @abc.abstractmethod
    def wrong(self) -> str | None:
        """Describe what is wrong with the last call's result on this rank; None if it is right."""


class AllReduce(Collective):
    """Every rank's tensor becomes the sum of all."""

    tensors = 1.25

    def make(self) -> None:
        self._tensor = self._empty(self._numel)
        self._numbers.fill(self._tensor, rank=self._rank.index)

    def turn(self) -> None:
        self._tensor.mul_(-1 / self._rank.world_size)

    def call(self) -> None:
        start_all_reduce(self._tensor, dist.ReduceOp.SUM, self._group).wait()

    def wrong(self) -> str | None:
        return self._numbers.wrong(self._tensor, factor=self._sign * self._rank.world_size)


class AllGather(Collective):
    """Every rank gets the pieces of all, one after the other."""

    tensors, pieces = 2.0, 1

    def make(self) -> None:
        self._whole, self._part = self._empty(self._numel), self._empty(self._piece)
        self._numbers.fill(self._part, rank=self._rank.index, first=self._rank.index * self._piece)

    def turn(self) -> None:
        self._part.neg_()

    def call(self) -> None:
        start_all_gather(self._whole, self._part, self._group).wait()

    def wrong(self) -> str | None:
        for rank in range(self._rank.world_size):
            shift, first = self._numbers.shift(rank), rank * self._piece
            part = self._whole[first : first + self._piece]
            if wrong := self._numbers.wrong(part, factor=self._sign, shift=shift, first=first):
                return wrong
        return None


class ReduceScatter(Collective):
    """Every rank gets its piece of the sum of all tensors."""

    tensors, pieces = 2.0, 1

    def make(self) -> None:
        self._whole, self._part = self._empty(self._numel), self._empty(self._piece)
        self._numbers.fill(self._whole, rank=self._rank.index)

    def turn(self) -> None:
        self._whole.neg_()

    def call(self) -> None:
        start_reduce_scatter(self._part, self._whole, dist.ReduceOp.SUM, self._group).wait()

    def wrong(self) -> str | None:
        factor, first = self._sign * self._rank.world_size, self._rank.index * self._piece
        return self._numbers.wrong(self._part, factor=factor, first=first)


class Broadcast(Collective):
    """Every rank gets rank 0's tensor."""

    tensors = 1.0

    def make(self) -> None:
        self._tensor = self._empty(self._numel)
        # The others begin with numbers that are wrong.
        self._numbers.fill(self._tensor, rank=0)
        if self._rank.index:
            self._tensor.neg_()

    def turn(self) -> None:
        if self._rank.index == 0:
            self._tensor.neg_()

    def call(self) -> None:
        dist.broadcast(self._tensor, 0, group=self._group)

    def wrong(self) -> str | None:
        return self._numbers.wrong(self._tensor, factor=self._sign, shift=self._numbers.shift(0))


class Exchange(Collective):
    """Every rank sends a tensor, and receives one of the same size."""

    tensors = 2.0

    def make(self) -> None:
        self._sent, self._received = self._empty(self._numel), self._empty(self._numel)
        self._numbers.fill(self._sent, rank=self._rank.index)

    def turn(self) -> None:
        self._sent.neg_()


class AllToAll(Exchange):
    """Every rank sends each rank a piece of its own."""

    def call(self) -> None:
        dist.all_to_all_single(self._received, self._sent, group=self._group)

    def wrong(self) -> str | None:
        first = self._rank.index * self._piece
        for rank, part in enumerate(self._received.split(self._piece)):  # type: ignore[no-untyped-call]
            shift = self._numbers.shift(rank)
            if wrong := self._numbers.wrong(part, factor=self._sign, shift=shift, first=first):
                return wrong
        return None


class SendReceive(Exchange):
    """Every rank sends the next rank its tensor, the last rank the first, and receives another."""

    def make(self) -> None:
        super().make()
        index, ranks = self._rank.index, self._rank.world_size
        self._from = (index - 1) % ranks
        send = dist.P2POp(dist.isend, self._sent, group=self._group, group_peer=(index + 1) % ranks)
        self._both = [send, dist.P2POp(dist.irecv, self._received, group=self._group, group_peer=self._from)]

    def call(self) -> None:
        for work in dist.batch_isend_irecv(self._both):
            work.wait()

    def wrong(self) -> str | None:
        return self._numbers.wrong(self._received, factor=self._sign, shift=self._numbers.shift(self._from))


OPERATIONS: Final[Mapping[str, type[Collective]]] = {
    "all_reduce": AllReduce,
    "all_gather": AllGather,
    "reduce_scatter": ReduceScatter,
    "broadcast": Broadcast,
    "all_to_all": AllToAll,
    "send_receive": SendReceive,
}


@dataclass(frozen=True)
class TimedCollective:
    """One operation at one size, as it is sent to the ranks. `position`: its index among the job's cells, which all
    reports about it contain."""

    position: int
    operation: str
    dtype: str
    size_mb: float


class CellTimer:
    """Times cells on one rank, and reports them.

    Ranks agree on every decision that changes the number of calls (is there memory, is the warm-up over), since a rank
    that made one call more than the others would wait for ever.
    """

    def __init__(self, rank: Rank, warmup: int | None, steps: int, seed: int) -> None:
        self._rank, self._warmup, self._steps, self._seed = rank, warmup, steps, seed
        self._group = group_of()
        self._token = torch.zeros(1, device=rank.device)
        self._clock = DeviceClock(rank.device) if rank.device.type == "cuda" else None
        self._heartbeat_at = float("-inf")
        self._wait_for_all()
        self._heartbeat()

    def measure(self, cell: TimedCollective) -> None:
        """Measure one cell and report it: {"event": "oom" | "raised" | "done", …}. Raises Exception: what the operation
        raised, after it was reported: the others may be waiting for this rank."""
        try:
            self._report(cell, **self.timed(cell))
        except Exception as error:
            oom, text = is_out_of_memory(error), f"{type(error).__name__}: {short_message(error)}"
            unsupported = any(message in str(error) for message in UNSUPPORTED_DTYPE_MESSAGES)
            outcome = "oom" if oom else "unsupported" if unsupported else "failed"
            self._report(cell, "raised", outcome=outcome, reason=text)
            raise
        if self._clock is not None:
            torch.cuda.empty_cache()
        # No rank continues before all have reported this cell and freed its memory.
        self._wait_for_all()

    def timed(self, cell: TimedCollective) -> dict[str, Any]:
        """Measure one cell. Returns {"event": "oom" | "done", …}, and reports what it does meanwhile."""
        self._report(cell, "warming up")
        size = size_bytes(cell.size_mb, self._rank.world_size)
        operation, reason = self._make(cell, size)
        self._heartbeat()
        if operation is None:
            return {"event": "oom", "reason": reason}
        if self._clock is not None:
            self._clock.forget()
        # This call is not timed: it sets up what backend and operation need for this size.
        self._lap(operation)
        wrong = operation.wrong()
        warming = WarmUp(self._warmup)
        while not self._answer_of_first(warming.over):
            warming.add(self._lap(operation).device_ms)
        self._report(cell, "measuring")
        laps = [self._lap(operation) for _ in range(self._steps)]
        return {
            "event": "done",
            "bytes": size,
            "times_ms": [lap.device_ms for lap in laps],
            "host_us": None if self._clock is None else [lap.host_us for lap in laps],
            "hidden": sum(lap.hidden for lap in laps),
            "warmup": warming.calls,
            "steady": warming.steady,
            "too_slow": warming.too_slow,
            "hidden_drift": warming.hidden,
            "threads": torch.get_num_threads(),
            "wrong": wrong or operation.wrong(),
        }

    def _make(self, cell: TimedCollective, size: int) -> tuple[Collective | None, str | None]:
        """Make the operation. If any rank lacks memory for it, return None, and the reason if that is this rank."""
        kind, dtype = OPERATIONS[cell.operation], DTYPES[cell.dtype]
        operation, reason = None, None
        if self._clock is None:
            reason = why_too_large_for_host(kind.host_bytes(size, self._rank.world_size) * self._rank.world_size)
        if self._all_agree(reason is None):
            try:
                numbers = Numbers(self._seed, self._rank.world_size, self._rank.device, dtype)
                operation = kind(size // dtype.itemsize, numbers, self._rank, self._group)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = f"out of memory in the tensors: {short_message(error)}"
            if self._all_agree(operation is not None):
                return operation, None
        return None, reason

    def _lap(self, operation: Collective) -> Lap:
        """Call the operation once, together with the other ranks."""
        if self._clock is not None:
            lap = self._clock.lap_together(operation.call, operation.prepare, self._align)
        else:
            time_ms = host_lap_ms(operation.call, lambda: self._ready(operation))
            lap = Lap(time_ms, 1e3 * time_ms, hidden=True)
        self._heartbeat()
        return lap

    def _ready(self, operation: Collective) -> None:
        operation.prepare()
        dist.barrier(self._group)

    def _align(self) -> None:
        """Make the devices wait for each other; the hosts continue."""
        start_all_reduce(self._token, dist.ReduceOp.SUM, self._group).wait()

    def _wait_for_all(self) -> None:
        self._align()
        self._token.zero_().item()

    def _all_agree(self, answer: bool) -> bool:
        flag = torch.tensor([int(answer)], device=self._rank.device)
        start_all_reduce(flag, dist.ReduceOp.MIN, self._group).wait()
        return bool(flag.item())

    def _answer_of_first(self, answer: bool) -> bool:
        flag = torch.tensor([int(answer)], device=self._rank.device)
        dist.broadcast(flag, 0, group=self._group)
        return bool(flag.item())

    def _heartbeat(self) -> None:
        """Send a heartbeat of this rank, at most once a second."""
        now = now_s()
        if now - self._heartbeat_at >= HEARTBEAT_S:
            self._rank.step_done()
            self._heartbeat_at = now

    def _report(self, cell: TimedCollective, event: str, **content: Any) -> None:
        self._rank.report({"position": cell.position, "event": event, **content})


def time_cells(rank: Rank, cells: Sequence[Mapping[str, Any]], warmup: int | None, steps: int, seed: int) -> None:
    """Measure cells one after the other on this rank: the function to `launch`. `cells`: the fields of each
    TimedCollective. `warmup`: calls before measuring; None: until rank 0's times are steady."""
    timer = CellTimer(rank, warmup, steps, seed)
    for cell in cells:
        timer.measure(TimedCollective(**cell))


def why_too_large_for_host(needed: int, meminfo: Path = MEMINFO) -> str | None:
    """Return why the host cannot hold `needed` bytes of all ranks; None if it can, or if its memory is unknown.

    Without this check the kernel would grant the memory, and kill a rank once the rank uses it.
    """
    available = host_memory("MemAvailable", meminfo)
    if available is None or needed <= available:
        return None
    return f"out of memory: the ranks need {needed / 2**30:.4g} GiB, and the host has {available / 2**30:.4g} GiB"
