"""Data parallelism: each rank has the whole model and a part of the batch; gradients are averaged.

Four wrappers that differ in when and how gradients are communicated:

NaiveDataParallel       after the backward pass, one all-reduce per parameter
FlatDataParallel        after the backward pass, one all-reduce of everything
OverlappedDataParallel  during the backward pass, one all-reduce per parameter
BucketedDataParallel    during the backward pass, one all-reduce per bucket of parameters

    model = BucketedDataParallel(model, bucket_size_mb=25)
    loss_of(model(inputs)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

In all of them, all ranks run their operations in one order, which depends only on the module: the order in which
parameters were registered, or its reverse. It depends neither on the order in which autograd finishes gradients nor on
which gradients it computes. So ranks that use different parameters still run the same operations. A rank without a
gradient for a parameter contributes zeros; a parameter that no rank used keeps the gradient None.

On GPUs the operations run on NCCL's stream, beside the backward pass.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .collectives import (
    MIB,
    Averaging,
    GradientUsage,
    Work,
    aligned,
    averaging,
    broadcast_module,
    check_dtype,
    group_of,
    owns_its_memory,
    start_all_reduce,
    start_all_reduces,
    strides_of,
    view_like,
)
from .step_check import check_steps_of, refuse_forgetting, refuse_strangers, refuse_wrapped


class DataParallel(nn.Module):
    """Base of the wrappers: broadcast at construction, `no_sync`, and the parameters to average.

    Parameters that are frozen at construction are broadcast but never averaged. Buffers are broadcast at construction
    only. Gradients must be dense. Outside `no_sync` all ranks must run equally many backward passes per step. A step of
    a torch optimizer with gradients that are not averaged yet raises a RuntimeError.

    Args:
        module: The model, on its device, the same on every rank. All ranks get the first rank's values.
        process_group: The ranks; by default all of them.
        reduce_dtype: The dtype in which gradients travel and are averaged, such as torch.bfloat16, for half the bytes
            of float32 and 8 bits of precision; they keep their own dtype. None: their own.

    Raises:
        RuntimeError: no process group is initialised, or the ranks' modules differ.
        TypeError: `reduce_dtype` is no floating-point dtype, or the module is wrapped already, in whole or in part.
        ValueError: this rank is not in the process group.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_dtype("reduce_dtype", reduce_dtype)
        self.reduce_dtype = reduce_dtype
        self.group = group_of(process_group)
        self.module = module
        refuse_wrapped(module)
        broadcast_module(module, self.group)
        # named_parameters() names a tied parameter once.
        self.trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._known = set(map(id, self.trainable.values()))
        self.synchronizes = True
        self._follow_gradients()
        check_steps_of(self)

    def _follow_gradients(self) -> None:
        """Register the hooks by which the wrapper learns of gradients."""
        raise NotImplementedError

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        return self.module(*inputs, **named_inputs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only: inside, backward passes and `finish_gradient_synchronization` send
        nothing. The first backward pass outside, or else `finish_gradient_synchronization` there, averages what has
        accumulated."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = before

    def finish_gradient_synchronization(self) -> None:
        """Complete the averages; call it on every rank after `backward()` and before the optimizer's step.

        On a GPU the current stream waits, not the host.

        Raises:
            RuntimeError: a gradient is sparse, a parameter was unfrozen, added, replaced or given another memory format
                since the model was wrapped, or gradients were averaged with those of another rank's next step.
        """
        refuse_strangers(self.module, self._known)
        if self.synchronizes and self.trainable:
            with torch.no_grad():
                self._finish()

    def _finish(self) -> None:
        raise NotImplementedError

    def has_unfinished_gradients(self) -> bool:
        """Return True if gradients have come outside `no_sync` since the last synchronization."""
        return self.synchronizes and self._any_arrived()

    def has_sent_gradients(self) -> bool:
        """Return True if there are gradients that `zero_grad` would not reach."""
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of a module. Raises RuntimeError: gradients are being averaged, so that it would not reach them."""
        refuse_forgetting(self)
        super().zero_grad(set_to_none)

    def trained_parameters(self) -> Iterable[nn.Parameter]:
        return self.trainable.values()

    def _any_arrived(self) -> bool:
        raise NotImplementedError

    @functools.cached_property
    def _device(self) -> torch.device:
        return next(iter(self.trainable.values())).device

    @functools.cached_property
    def _averaging(self) -> Averaging:
        return averaging(self.group, self._device)

    def _usage(self) -> GradientUsage:
        return GradientUsage((p.grad is not None for p in self.trainable.values()), self._device, self.group)


def dense_gradient(name: str, parameter: nn.Parameter) -> Tensor | None:
    """Return a parameter's gradient. Raises RuntimeError: it is sparse."""
    gradient = parameter.grad
    if gradient is not None and gradient.layout != torch.strided:
        raise RuntimeError(f"the gradient of {name} is sparse: data parallelism averages dense ones (sparse=False)")
    return gradient


class AfterBackward(DataParallel):
    """Base of the wrappers that communicate nothing before `finish_gradient_synchronization`."""

    def _follow_gradients(self) -> None:
        self._arrived = False
        wrapper = weakref.ref(self)

        def note(_: Tensor) -> None:
            this = wrapper()
            if this is not None and this.synchronizes:
                this._arrived = True

        for parameter in self.trainable.values():
            hook = parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
            weakref.finalize(self, hook.remove)

    def _any_arrived(self) -> bool:
        return self._arrived


class NaiveDataParallel(AfterBackward):
    """Averages after the backward pass, parameter by parameter. Nothing overlaps, and each operation has its own
    latency.

    See DataParallel for arguments and errors.
    """

    def _finish(self) -> None:
        self._arrived = False
        usage = self._usage()
        for index, (name, parameter) in enumerate(self.trainable.items()):
            gradient = dense_gradient(name, parameter)
            total = torch.zeros_like(parameter) if gradient is None else gradient
            dense = total.contiguous()
            if not self._averaging.in_operation:
                dense.mul_(self._averaging.factor)
            start_all_reduce(dense, self._averaging.operation, self.group, self.reduce_dtype).wait()
            if dense is not total:
                total.copy_(dense)
            if gradient is None and usage.used_on_any_rank(index):
                parameter.grad = total
        usage.wait()


class FlatDataParallel(AfterBackward):
    """Averages all gradients of a dtype after the backward pass as one tensor, of which they become views.

    Nothing overlaps; while the gradients are copied each exists twice. See DataParallel for arguments and errors.
    """

    def _finish(self) -> None:
        self._arrived = False
        usage = self._usage()
        kinds: dict[tuple[torch.device, torch.dtype], list[tuple[int, str, nn.Parameter]]] = {}
        for index, (name, parameter) in enumerate(self.trainable.items()):
            kinds.setdefault((parameter.device, parameter.dtype), []).append((index, name, parameter))
        for kind in kinds.values():
            gradients = [dense_gradient(name, parameter) for _, name, parameter in kind]
            sizes = [parameter.numel() for _, _, parameter in kind]
            starts = [0, *accumulate(sizes)]
            flat = kind[0][2].new_empty(starts[-1])
            places = [view_like(parameter, flat, start) for (_, _, parameter), start in zip(kind, starts, strict=False)]
            for place, gradient in zip(places, gradients, strict=True):
                place.zero_() if gradient is None else place.copy_(gradient)
            if not self._averaging.in_operation:
                flat.mul_(self._averaging.factor)
            start_all_reduce(flat, self._averaging.operation, self.group, self.reduce_dtype).wait()
            for (index, _, parameter), gradient, place in zip(kind, gradients, places, strict=True):
                if gradient is not None or usage.used_on_any_rank(index):
                    parameter.grad = place
        usage.wait()


class Bucket:
    """Parameters of one dtype whose gradients are averaged together, and those gradients while they are communicated.

    When the last gradient is complete, one call copies all gradients next to each other; from then on they are views of
    that memory. A parameter that is alone in its bucket is not copied: its gradient is the bucket. The memory is
    allocated when the bucket is sent, and freed when the gradients are set to None.

    Autograd appends each parameter whose gradient is complete to `arrived`. The hook is `list.append`, in C: Python
    code for each parameter would delay the backward pass if the host is slower than the device. Only one parameter has
    a Python hook, set by `watch`: the one whose gradient arrived last in the previous round. If another gradient
    arrives last, the bucket is not full when that hook runs; it is then sent by a later bucket's hook, or at the end of
    the round.
    """

    def __init__(self, members: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.names = [name for name, _ in members]
        self.parameters = [parameter for _, parameter in members]
        first = self.parameters[0]
        self.dtype, self.device = first.dtype, first.device
        self._places: list[tuple[torch.Size, tuple[int, ...], int]] = []
        """Each gradient's shape, strides, and offset in the bucket's memory in elements."""
        self.numel = 0
        for parameter in self.parameters:
            self._places.append((parameter.shape, strides_of(parameter), self.numel))
            self.numel += aligned(parameter.numel(), first.element_size())
        self._images = [(name, p, p.stride()) for name, p in members if p.dim() > 3]
        """Those to which `model.to(memory_format=…)` would give other strides."""
        self._address = 0
        """Address of the memory of the last round."""
        self.arrived: list[Tensor] = []
        """Parameters in the order in which autograd completed their gradients in this round."""
        self.watched: nn.Parameter | None = None
        self._notes = [p.register_post_accumulate_grad_hook(self.arrived.append) for p in self.parameters]  # type: ignore[no-untyped-call]
        self._watch: Any = None
        self.begin()

    def begin(self) -> None:
        """Begin a round: no gradient has arrived yet."""
        self.arrived.clear()
        self.accumulated = False
        """Whether a pass inside `no_sync` added to a gradient that had arrived."""
        self.memory: Tensor | None = None
        self.views: list[Tensor] = []
        """The gradients that are being sent."""
        self.missing: list[int] = []
        """Indices of parameters that have no gradient on this rank in this round."""
        self.work: Work | None = None

    def watch(self, parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
        """Call `hook` when this parameter's gradient is complete, instead of the parameter watched before."""
        if self._watch is not None:
            self._watch.remove()
        self.watched = parameter
        # Runs after the hook that appends to `arrived`: hooks run in the order of registration.
        self._watch = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def remove_hooks(self) -> None:
        for handle in (*self._notes, self._watch):
            handle.remove()
        self.arrived.clear()

    @property
    def full(self) -> bool:
        """True if every parameter's gradient has arrived. A second backward pass makes a gradient arrive again."""
        return len(set(map(id, self.arrived))) == len(self.parameters)

    @property
    def arrived_again(self) -> bool:
        """True if a backward pass added to a gradient that had arrived."""
        return self.accumulated or len(set(map(id, self.arrived))) < len(self.arrived)

    @property
    def last(self) -> nn.Parameter | None:
        """The parameter whose gradient arrived last; None if another gradient arrived twice before."""
        first_pass = self.arrived[: len(self.parameters)]
        if len(set(map(id, first_pass))) < len(self.parameters):
            return None
        return first_pass[-1]  # type: ignore[return-value]

    def drop_arrivals_after(self, count: int) -> None:
        """Drop all arrivals after the first `count`, which happened inside `no_sync`."""
        if len(self.arrived) > count:
            before = set(map(id, self.arrived[:count]))
            self.accumulated = self.accumulated or not before.isdisjoint(map(id, self.arrived[count:]))
            del self.arrived[count:]

    def collect(self, factor: float) -> None:
        """Collect all gradients, scaled by `factor`; the parameters' gradients are None until the round ends.

        Autograd may accumulate further gradients meanwhile, in other memory than that being sent.
        """
        gradients = [dense_gradient(name, p) for name, p in zip(self.names, self.parameters, strict=True)]
        for name, parameter, strides in self._images:
            if parameter.stride() != strides:
                raise RuntimeError(
                    f"{name} has another memory format than when the model was wrapped, and fused optimizers would "
                    "take its gradient's elements for others: call model.to(memory_format=…) before you wrap it"
                )
        for parameter in self.parameters:
            parameter.grad = None
        self.missing = [index for index, gradient in enumerate(gradients) if gradient is None]
        if len(gradients) == 1:
            self.memory = self._in_place(gradients[0], factor)
            self.views = [self.memory]
            return
        memory = self.memory = self._memory_of(gradients)
        self.views = [memory.as_strided(*place) for place in self._places]
        if factor == 1.0 and not self.missing and self.views[0].data_ptr() != gradients[0].data_ptr():  # type: ignore[union-attr]
            # The memory is new, so every gradient is elsewhere.
            torch._foreach_copy_(self.views, gradients)  # type: ignore[arg-type]
            return
        to: list[Tensor] = []
        copied: list[Tensor] = []
        for view, gradient in zip(self.views, gradients, strict=True):
            if gradient is None:
                view.zero_()
            elif factor != 1.0:
                torch.mul(gradient, factor, out=view)
            elif view.data_ptr() != gradient.data_ptr():
                to.append(view)
                copied.append(gradient)
        if to:
            torch._foreach_copy_(to, copied)

    def _in_place(self, gradient: Tensor | None, factor: float) -> Tensor:
        """Return the only gradient without copying it, or a copy if other tensors use its memory."""
        shape, strides, _ = self._places[0]
        if gradient is not None and gradient.stride() == strides and owns_its_memory(gradient):
            gradient = gradient.detach()
            return gradient if factor == 1.0 else gradient.mul_(factor)
        copy = torch.empty_strided(shape, strides, dtype=self.dtype, device=self.device)
        return copy.zero_() if gradient is None else torch.mul(gradient, factor, out=copy)

    def send(
        self, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, dtype: torch.dtype | None = None
    ) -> None:
        """Start reducing the gradients, in another dtype if there is one."""
        assert self.memory is not None
        flat = self.memory if self.memory.is_contiguous() else self.memory.as_strided((self.memory.numel(),), (1,))
        self.work = start_all_reduces([flat], operation, group, dtype)

    def set_gradients(self, used: Callable[[str], bool]) -> None:
        """Wait for the averages and make them the parameters' gradients. `used` returns whether the parameter of a name
        has a gradient on any rank."""
        assert self.work is not None
        self.work.wait()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view
        for index in self.missing:
            if not used(self.names[index]):
                self.parameters[index].grad = None

    def _memory_of(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the memory of the previous round if the gradients are still there, otherwise new memory."""
        for gradient, (_, _, start) in zip(gradients, self._places, strict=True):
            if gradient is not None:
                storage = gradient.untyped_storage()
                same = storage.data_ptr() == self._address and storage.nbytes() == self.numel * gradient.element_size()
                if same and gradient.storage_offset() == start:
                    return gradient.detach().as_strided((self.numel,), (1,), 0)
                break
        memory = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        self._address = memory.untyped_storage().data_ptr()
        return memory


class OverlappingDataParallel(DataParallel):
    """Base of the overlapping wrappers: buckets that are averaged while the backward pass continues.

    A bucket is sent when it is full and all buckets before it are sent. `finish_gradient_synchronization` sends the
    rest, waits, and gives every parameter its gradient; from a bucket's sending to then, its gradients are None.

    Each bucket watches the parameter whose gradient arrived last in the previous round, since a check at every
    parameter would take too much host time. This affects only the moment of sending, not the content or the order.
    """

    def _follow_gradients(self) -> None:
        # The last layers' gradients are complete first.
        divided = self._divided(list(reversed(self.trainable.items())))
        self.buckets = [Bucket(members) for members in divided]
        self._index_of = {name: index for index, name in enumerate(self.trainable)}
        self._sent = 0
        self._used_by_any: GradientUsage | None = None
        self._hook = _hook(weakref.ref(self))
        for bucket in self.buckets:
            bucket.watch(bucket.parameters[-1], self._hook)
        # The hooks of a deleted wrapper must not keep its parameters alive, and must not collect the gradients of the
        # next wrapper.
        weakref.finalize(self, _remove_hooks, self.buckets)

    def _divided(self, parameters: list[tuple[str, nn.Parameter]]) -> list[list[tuple[str, nn.Parameter]]]:
        """Return the parameters by their buckets."""
        raise NotImplementedError

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before = [len(bucket.arrived) for bucket in self.buckets]
        try:
            with super().no_sync():
                yield
        finally:
            for bucket, count in zip(self.buckets, before, strict=True):
                bucket.drop_arrivals_after(count)

    no_sync.__doc__ = DataParallel.no_sync.__doc__

    def _any_arrived(self) -> bool:
        return any(bucket.arrived for bucket in self.buckets)

    def has_sent_gradients(self) -> bool:
        return self._sent > 0

    def send_full_buckets(self, parameter: nn.Parameter) -> None:
        """Send the buckets that are full, in order, up to the first one that is not, once a watched parameter's
        gradient is complete."""
        if not self.synchronizes:
            return
        hooks: Any = parameter._post_accumulate_grad_hooks
        if next(reversed(hooks.values())) is not self._hook:
            # Hooks have been registered since, and are yet to run; they would find the gradient sent.
            next(one for one in self.buckets if one.watched is parameter).watch(parameter, self._hook)
            return
        while self._sent < len(self.buckets) and self.buckets[self._sent].full:
            if torch.is_grad_enabled():
                # The backward pass is itself recorded.
                with torch.no_grad():
                    self._send_next()
            else:
                self._send_next()

    def _send_next(self, *, again: bool = False) -> None:
        bucket = self.buckets[self._sent]
        bucket.collect(self._averaging.factor)
        self._sent += 1
        if self._sent == len(self.buckets):
            # Before the last bucket: after it, the latency of this small operation would not overlap with anything.
            missing = {bucket.names[index] for bucket in self.buckets for index in bucket.missing}
            self._used_by_any = GradientUsage(
                (name not in missing for name in self.trainable), self._device, self.group, again=again
            )
        bucket.send(self._averaging.operation, self.group, self.reduce_dtype)

    def _finish(self) -> None:
        # The ranks must agree on a second round, so this does not ask whether a bucket was sent in between.
        again = any(bucket.arrived_again for bucket in self.buckets)
        late = self._end_round()
        if again or late:
            # Averaging again does not change gradients that are averages already.
            for parameter, gradient in late:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            self._end_round(again=True)

    def _end_round(self, *, again: bool = False) -> list[tuple[nn.Parameter, Tensor]]:
        """Send the other buckets, wait, and set the averages as gradients; return gradients that arrived too late."""
        sent = self.buckets[: self._sent]
        late = [(p, gradient) for bucket in sent for p in bucket.parameters if (gradient := p.grad) is not None]
        while self._sent < len(self.buckets):
            self._send_next(again=again)
        usage = self._used_by_any
        assert usage is not None
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if again and not capturing and not usage.is_again_everywhere():
            raise RuntimeError(_OTHER_PASSES)
        for bucket in self.buckets:
            bucket.set_gradients(lambda name: usage.used_on_any_rank(self._index_of[name]))
            last = bucket.last
            if last is not None and last is not bucket.watched:
                bucket.watch(last, self._hook)
            bucket.begin()
        usage.wait()
        self._used_by_any, self._sent = None, 0
        return late


_OTHER_PASSES = (
    "another rank has run fewer backward passes in this step, or of other parameters, so that gradients of different "
    "steps were averaged: run equal ones on all ranks (a checkpoint with use_reentrant=True is one), or all but the "
    "last in no_sync(); NaiveDataParallel takes any"
)


def _hook(this: weakref.ReferenceType[OverlappingDataParallel]) -> Callable[[Tensor], None]:
    def gradient_is_complete(parameter: Any) -> None:
        wrapper = this()
        if wrapper is not None:
            wrapper.send_full_buckets(parameter)

    return gradient_is_complete


def _remove_hooks(buckets: list[Bucket]) -> None:
    for bucket in buckets:
        bucket.remove_hooks()


class OverlappedDataParallel(OverlappingDataParallel):
    """Averages each parameter's gradient in place, as soon as it and those of later parameters of the model are
    complete.

    See DataParallel for arguments and errors.
    """

    def _divided(self, parameters: list[tuple[str, nn.Parameter]]) -> list[list[tuple[str, nn.Parameter]]]:
        return [[parameter] for parameter in parameters]


class BucketedDataParallel(OverlappingDataParallel):
    """Averages gradients in buckets, each as soon as it and those before it are full.

    Buckets are filled in the reverse order of registration, one dtype each, and gradients are views of their bucket. A
    parameter of a bucket's size or more is a bucket of its own, whose gradient is averaged where autograd left it: only
    small gradients are copied, once, all of a bucket by one call. Beyond the gradients themselves, memory is taken for
    the bucket that is being copied.

    Each bucket has one hook in Python, on the parameter whose gradient came last in the step before (see Bucket).

    Bucketing follows Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (VLDB 2020),
    section 3.2.3.

    Args:
        module: As in DataParallel.
        bucket_size_mb: Largest size of a bucket of several parameters in MB of 2²⁰ bytes; None: one bucket (per dtype),
            so that nothing overlaps but the order of its parts.
        process_group: As in DataParallel.
        reduce_dtype: As in DataParallel.

    Raises:
        ValueError: the size is not positive.
        RuntimeError, TypeError, ValueError: as in DataParallel.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | None = 25.0,
        *,
        process_group: dist.ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        if bucket_size_mb is not None and not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb must be more than 0, not {bucket_size_mb}")
        self._limit = float("inf") if bucket_size_mb is None else bucket_size_mb * MIB
        super().__init__(module, process_group, reduce_dtype=reduce_dtype)

    def _divided(self, parameters: list[tuple[str, nn.Parameter]]) -> list[list[tuple[str, nn.Parameter]]]:
        return into_buckets(parameters, self._limit)


def into_buckets(parameters: Sequence[tuple[str, nn.Parameter]], limit: float) -> list[list[tuple[str, nn.Parameter]]]:
    """Divide parameters, in the order given, into buckets of at most `limit` bytes; larger ones have their own.

    Buckets are in the order in which they are full: by the place of their last parameter.
    """
    buckets: list[list[tuple[int, str, nn.Parameter]]] = []
    filling: dict[tuple[torch.device, torch.dtype], list[tuple[int, str, nn.Parameter]]] = {}
    for place, (name, parameter) in enumerate(parameters):
        kind = (parameter.device, parameter.dtype)
        if parameter.nbytes >= limit:
            buckets.append([(place, name, parameter)])
            continue
        bucket = filling.setdefault(kind, [])
        if bucket and sum(member.nbytes for _, _, member in bucket) + parameter.nbytes > limit:
            buckets.append(bucket)
            bucket = filling[kind] = []
        bucket.append((place, name, parameter))
    buckets += [bucket for bucket in filling.values() if bucket]
    buckets.sort(key=lambda bucket: bucket[-1][0])
    return [[(name, parameter) for _, name, parameter in bucket] for bucket in buckets]
