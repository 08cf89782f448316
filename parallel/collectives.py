"""Collective operations for the data-parallel wrappers.

The first part starts averages, gathers and scatters in a process group of any backend. The second part records when a
step's operations ran.
"""

import functools
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kernels.clock import now_s
from kernels.device_events import Event, synchronize

from . import silent_group

MIB = 2**20
END_S = 1.0
"""Longest delay between an operation's end and its notification, in seconds."""


class Work(Protocol):
    """A started operation."""

    def wait(self) -> Any:
        """Wait for the result: on a CPU the host does, on a GPU the current stream."""
        ...


@dataclass(frozen=True)
class Averaging:
    """How a group averages: the caller multiplies a tensor by `factor`, then the group runs `operation`."""

    operation: dist.ReduceOp.RedOpType
    factor: float

    @property
    def in_operation(self) -> bool:
        """Whether the operation itself divides, so that the tensor need not be scaled before."""
        return self.factor == 1.0


def averaging(group: dist.ProcessGroup, device: torch.device) -> Averaging:
    """Return how a group averages: NCCL multiplies each rank's values by 1/ranks while it reads them; for other
    backends, values are scaled before they are summed.

    Scaling before the sum keeps float16 sums in range.
    """
    if cuda_backend(group, device) in ("nccl", silent_group.BACKEND):
        return Averaging(dist.ReduceOp.AVG, 1.0)
    return Averaging(dist.ReduceOp.SUM, 1.0 / group.size())


def runs_together(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if the group runs operations that start together as one: NCCL makes one kernel of them."""
    return cuda_backend(group, device) in ("nccl", silent_group.BACKEND)


def cuda_backend(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return the backend by which the group sends this device's tensors; None for a CPU's."""
    if device.type != "cuda":
        return None
    return dict(pair.split(":") for pair in str(dist.get_backend_config(group)).split(",")).get("cuda")


def group_of(process_group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Return the process group, or for None the default one.

    Raises:
        RuntimeError: it is not initialised.
        ValueError: this rank is not in the group.
    """
    if not dist.is_initialized():
        raise RuntimeError("no process group is initialised: call torch.distributed.init_process_group on every rank")
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        raise ValueError(f"rank {dist.get_rank()} is not in this process group: only its ranks may use it")
    return process_group if process_group is not None else dist.group.WORLD  # type: ignore[return-value]


def check_dtype(option: str, dtype: torch.dtype | None) -> None:
    """Check an option's value.

    Raises:
        TypeError: it is neither None nor a floating-point dtype.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"{option} must be a floating-point dtype, such as torch.bfloat16, not {dtype!r}")


def start_all_reduce(
    tensor: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, dtype: torch.dtype | None = None
) -> Work:
    """Start reducing a contiguous tensor in place; with a dtype, it is sent and added in that."""
    return start_all_reduces([tensor], operation, group, dtype)


def start_all_reduces(
    tensors: Sequence[Tensor],
    operation: dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup,
    dtype: torch.dtype | None = None,
) -> Work:
    """Start reducing contiguous tensors of one dtype and device in place; NCCL makes one kernel of them.

    For use in hooks: it calls the group itself, since `torch.distributed.all_reduce` and the manager that
    `start_together` uses take twice the host's time. The caller keeps the tensors until the operation is done. With a
    dtype, they are sent and added in that.
    """
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    if dtype not in (None, real[0].dtype):
        sent = [tensor.to(dtype) for tensor in real]
        return _CopiedBack(start_all_reduces(sent, operation, group), real, sent)
    if len(real) > 1 and runs_together(group, real[0].device):
        together = _asynchronous(dist.AllreduceCoalescedOptions(), operation)
        start = functools.partial(group.allreduce_coalesced, real, together)
        return _started("all_reduce", sum(tensor.nbytes for tensor in tensors), start)
    alone = _asynchronous(dist.AllreduceOptions(), operation)
    works = [
        _started("all_reduce", tensor.nbytes, functools.partial(group.allreduce, [tensor], alone)) for tensor in real
    ]
    return works[0] if len(works) == 1 else StartedTogether(works)


class _CopiedBack:
    """An operation on copies in another dtype; `wait` writes their results into the tensors."""

    def __init__(self, work: Work, tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        self._work, self._tensors, self._copies = work, list(tensors), list(copies)

    def wait(self) -> None:
        self._work.wait()
        if self._copies:
            torch._foreach_copy_(self._tensors, self._copies)
        self._tensors, self._copies = [], []


def _asynchronous(options: Any, operation: dist.ReduceOp.RedOpType) -> Any:
    """Return options for an operation that runs on NCCL's stream, and for which callers wait later."""
    options.reduceOp = operation
    if hasattr(options, "asyncOp"):
        options.asyncOp = True
    return options


def start_all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Work:
    """Start filling `whole`, one-dimensional, with every rank's `part` in the order of ranks.

    `part` may be this rank's place in `whole`; NCCL then copies nothing.
    """
    if part.dtype.itemsize == 1 or not (part.is_floating_point() or part.is_complex()):
        whole, part = whole.view(torch.uint8), part.view(torch.uint8)  # backends lack bool, int16 and others
    start = functools.partial(_all_gather, whole, part, group=group, async_op=True)
    return _started("all_gather", whole.nbytes, start)


def start_reduce_scatter(
    part: Tensor, whole: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> Work:
    """Start reducing `whole` over the ranks and leaving this rank's piece of it in `part`."""
    start = functools.partial(_reduce_scatter, part, whole, op=operation, group=group, async_op=True)
    return _started("reduce_scatter", whole.nbytes, start)


def start_broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> Work:
    """Start sending `tensor` from the rank `source`, by its number in the default group, to all of the group."""
    start = functools.partial(dist.broadcast, tensor, source, group=group, async_op=True)
    return _started("broadcast", tensor.nbytes, start)


# torch 2.13 renamed both and warns of the former names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class StartedTogether:
    """Operations that were started together; `wait` waits for all of them."""

    def __init__(self, works: Sequence[Work], keep: object = None) -> None:
        self._works = works
        self._keep = keep
        """Tensors that the operations read or write; they must live until the operations are done."""

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._keep = (), None


def start_together(
    starts: Sequence[Callable[[], Work | None]], group: dist.ProcessGroup, device: torch.device, keep: object = None
) -> StartedTogether:
    """Start operations of one kind at once: NCCL makes one kernel of them, so that small ones cost no launch each.

    Args:
        starts: Each starts one operation on tensors of `device`; all are all-gathers, or reduce-scatters with one
            reduction. All-reduces have `start_all_reduces`.
        keep: Tensors that must live until the operations are done.
    """
    if len(starts) < 2 or not runs_together(group, device):
        return StartedTogether([work for start in starts if (work := start()) is not None], keep)

    def start_all() -> Work:
        with dist._coalescing_manager(group=group, async_ops=True) as together:  # type: ignore[attr-defined]
            for start in starts:
                start()
        return together  # type: ignore[no-any-return]

    timeline = _recording[-1] if _recording else None
    return StartedTogether([start_all() if timeline is None else timeline.note_together(start_all)], keep)


def broadcast_module(
    module: nn.Module, group: dist.ProcessGroup, device: torch.device | None = None, *, recurse: bool = True
) -> None:
    """Overwrite parameters and buffers with those of the group's first rank; tied ones once.

    Tensors are sent as bytes, so that every dtype works; those on the meta device stay.

    Args:
        device: Where the ranks compare their modules; None: where the first tensor is.
        recurse: False: only the tensors of the module itself.

    Raises:
        RuntimeError: the ranks' modules differ in names, shapes or dtypes.
    """
    named = {**dict(module.named_parameters(recurse=recurse)), **dict(module.named_buffers(recurse=recurse))}
    described = [(name, tuple(t.shape), t.stride(), str(t.dtype), t.requires_grad) for name, t in named.items()]
    if not named:
        return
    device = device or next(iter(named.values())).device
    check_same_everywhere("module", described, device, group)
    source = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in named.values():
            if tensor.numel() and not tensor.is_meta:
                dense = tensor.detach().contiguous()
                dist.broadcast(dense.view(-1).view(torch.uint8), source, group=group)
                if dense.data_ptr() != tensor.data_ptr():
                    tensor.copy_(dense)


def check_same_everywhere(what: str, value: object, device: torch.device, group: dist.ProcessGroup) -> None:
    """Check that a value's text is the same on all ranks, since ranks that differ would wait for each other.

    Raises:
        RuntimeError: it is not; raised on every rank, and names a rank whose value differs from the first rank's.
    """
    digest = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], signed=True)
    everywhere = torch.empty(group.size(), dtype=torch.int64, device=device)
    start_all_gather(everywhere, torch.tensor([digest], device=device), group).wait()
    digests = everywhere.tolist()
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise RuntimeError(
                f"rank {rank}'s {what} differs from rank 0's: all ranks must build the same, with the same parameters "
                "in the same order, and freeze the same"
            )


ALIGNMENT = 128
"""Alignment in bytes of tensors that share memory: fused optimizers read aligned memory faster."""


def aligned(numel: int, element_size: int) -> int:
    """Return the number of elements to reserve for `numel` of them, so that the next tensor is aligned."""
    step = max(1, ALIGNMENT // element_size)
    return -(-numel // step) * step


def view_like(parameter: Tensor, memory: Tensor, start: int) -> Tensor:
    """Return a view of one-dimensional memory from `start` on, with a parameter's shape and strides.

    Autograd accumulates faster into gradients that have their parameter's strides, and warns of others.
    """
    return memory.as_strided(parameter.shape, strides_of(parameter), memory.storage_offset() + start)


def strides_of(parameter: Tensor) -> tuple[int, ...]:
    """Return the parameter's strides if its elements fill their memory without gaps, else those of a contiguous one."""
    needed = 1
    for size, stride in sorted(zip(parameter.shape, parameter.stride(), strict=True), key=lambda axis: axis[1]):
        if size > 1 and stride != needed:
            return torch.empty(parameter.shape, device="meta").stride()
        needed *= size
    return parameter.stride()


def owns_its_memory(tensor: Tensor) -> bool:
    """Return True if no other tensor uses this one's memory, so that it may be overwritten.

    Gradients of several parameters can share memory, such as those of a and b in `a.view(-1) + b`.
    """
    storage = tensor.untyped_storage()
    # Two users are the tensor and the object that `storage` is.
    return bool(torch._C._storage_Use_Count(storage._cdata) == 2)


class GradientUsage:
    """Exchanges which parameters have a gradient on any rank. Only a rank without some gradient waits for the result.

    Without it, a parameter that no rank used would get a gradient of zeros, and an optimizer with weight decay or
    momentum would change it.
    """

    def __init__(
        self,
        used: Iterable[bool],
        device: torch.device,
        *groups: dist.ProcessGroup,
        order: int | None = None,
        again: bool = False,
    ) -> None:
        """Start the exchange.

        Args:
            used: Whether this rank has a gradient of each parameter.
            order: A number of 31 bits that must be the same on every rank, if any.
            again: Whether this is the step's second exchange, which must be so on every rank.
        """
        here = [True] * 8 + list(used)
        # Elsewhere nothing may be copied from the host, as by an assignment, which no CUDA graph can hold.
        if all(here):
            self._flags = torch.ones(len(here), dtype=torch.uint8, device=device)
        else:
            self._flags = torch.tensor(here, dtype=torch.uint8, device=device)
        if again:
            self._flags[:8].zero_()
        if order is not None:
            numbers = self._flags[:8].view(torch.int32)
            for at, number in enumerate((order, ~order)):  # of one number, the largest bytes of both are complements
                numbers[at].fill_(number)
        for group in groups[:-1]:
            start_all_reduce(self._flags, dist.ReduceOp.MAX, group).wait()
        self._work = start_all_reduce(self._flags, dist.ReduceOp.MAX, groups[-1])
        self._answer: list[int] | None = None

    def used_on_any_rank(self, index: int) -> bool:
        """Return True if some rank has a gradient for the parameter with this index."""
        if self._answer is None:
            self.wait()
            self._answer = self._flags.tolist()
        return bool(self._answer[8 + index])

    def is_one_order(self) -> bool:
        """Return True if `order` was the same on every rank. The host waits."""
        self.used_on_any_rank(0)
        assert self._answer is not None
        return all(sum(both) == 255 for both in zip(self._answer[:4], self._answer[4:8], strict=True))

    def is_again_everywhere(self) -> bool:
        """Return True if it was every rank's second exchange. The host waits."""
        self.used_on_any_rank(0)
        assert self._answer is not None
        return not self._answer[0]

    def wait(self) -> None:
        """Wait for the exchange; on a GPU the current stream waits, not the host."""
        self._work.wait()


# Recording


@dataclass(frozen=True)
class Interval:
    """The span of one operation of a step, in milliseconds from the recording's beginning."""

    operation: str
    size_bytes: int
    """Bytes of the full tensor, or of all tensors that were started together."""
    start_ms: float
    end_ms: float


class Timeline:
    """The spans of all operations that this package started while the timeline recorded, in any thread.

    On a GPU the times are those of events. Operations of one group run there one after the other, so an operation
    begins when it has been started and the previous one has ended. On a CPU operations may run at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._side = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._begin = self._moment()
        self._notes: list[tuple[str, int, Any, list[Any]]] = []
        self._inside: list[tuple[str, int]] | None = None
        """Operations that are being started together."""

    def _moment(self) -> Any:
        """Return the host's time, or an event on the current stream."""
        if not self._on_gpu:
            return now_s()
        event = Event()
        event.record()
        return event

    def note(self, name: str, size_bytes: int, start: Callable[[], Work]) -> Work:
        """Start an operation and record it."""
        if self._inside is not None:
            self._inside.append((name, size_bytes))
            return start()
        begun = self._moment()
        work, ended = self._watched(start())
        self._notes.append((name, size_bytes, begun, ended))
        return work

    def note_together(self, start: Callable[[], Work]) -> Work:
        """Start several operations together and record them as one."""
        self._inside = []
        begun = self._moment()
        work, ended = self._watched(start())
        names, self._inside = self._inside, None
        self._notes.append((names[0][0], sum(size for _, size in names), begun, ended))
        return work

    def _watched(self, work: Work) -> tuple[Work, list[Any]]:
        """Return the operation, and a list to which the moment of its end is added when it ends."""
        ended: list[Any] = []
        if self._side is not None:
            # On a stream of its own, which waits for nothing else.
            with torch.cuda.stream(self._side):
                work.wait()
                ended.append(self._moment())
            return work, ended
        try:
            work.get_future().add_done_callback(lambda future: ended.append(now_s()))  # type: ignore[attr-defined]
        except RuntimeError:
            # gloo does not report the end of a reduce-scatter: its end is the moment when a caller has waited for it.
            return _RecordedWait(work, ended), ended
        return work, ended

    def intervals(self) -> list[Interval]:
        """Return the operations in the order in which they were started.

        Raises:
            RuntimeError: an operation has not ended, since its caller has not waited for it.
        """
        if self._on_gpu:
            synchronize()
        until = now_s() + END_S
        while not all(ended for *_, ended in self._notes):
            # gloo's threads record an end a moment after the waiting caller continues.
            if now_s() > until:
                raise RuntimeError("an operation has not ended: wait for all before you ask for their times")
            time.sleep(0.001)
        intervals: list[Interval] = []
        for name, size_bytes, begun, ended in self._notes:
            start, end = self._since_begin(begun), self._since_begin(ended[0])
            if self._on_gpu and intervals:
                start = max(start, intervals[-1].end_ms)
            intervals.append(Interval(name, size_bytes, start, end))
        return intervals

    def _since_begin(self, moment: Any) -> float:
        if self._on_gpu:
            return float(self._begin.milliseconds_to(moment))
        return 1e3 * float(moment - self._begin)


class _RecordedWait:
    """An operation whose `wait` records the moment of its return as the operation's end."""

    def __init__(self, work: Work, ended: list[Any]) -> None:
        self._work, self._ended = work, ended

    def wait(self) -> None:
        self._work.wait()
        self._ended.append(now_s())


_recording: list[Timeline] = []
"""The timelines that record now; operations go to the last one."""


@contextmanager
def recorded(device: torch.device) -> Iterator[Timeline]:
    """Record a timeline of the operations that this rank starts inside the context."""
    timeline = Timeline(device)
    _recording.append(timeline)
    try:
        yield timeline
    finally:
        _recording.remove(timeline)


def _started(name: str, size_bytes: int, start: Callable[[], Work]) -> Work:
    return _recording[-1].note(name, size_bytes, start) if _recording else start()
