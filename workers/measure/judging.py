"""Checks that an operation's results are right and that it leaves its inputs unchanged.

An operation is checked before it is timed, while it is timed and afterwards: it may be right at first and wrong later,
because of a race, or because it keeps a result. The inputs are the same tensors at each check, and hold other values,
also where only their address, shape or version is looked at.

A checksum of the inputs' bits, computed on their device a part at a time, shows changes: copies would double the memory
that inputs take. Each element's bits are multiplied by an odd 64-bit number that depends on its position, and the
products are added modulo 2^64. A change of one element changes the sum, since multiplying by an odd number is
invertible modulo 2^64; other changes go unnoticed with a probability near 2^-64.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from kernels.device_events import spin
from kernels.tolerance import Error, error
from workers.measure.errors import NotMeasured, text_of
from workers.measure.operations import Operation

UNFIT_GRADIENT = re.compile("returned an (invalid gradient|incorrect number of gradients)")
"""Part of autograd's message when a Function's backward returns what cannot be gradients, of another shape for
instance."""
CHECKSUM_PART = 1 << 20
"""Number of elements whose bits are summed at once; they take some tens of MiB."""
# The constants of splitmix64, as the signed numbers that torch has.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX = 0xBF58476D1CE4E5B9 - (1 << 64)
DELAY_CYCLES = 10_000_000
"""Cycles by which a GPU gets other inputs later than the host issues the call: 5 ms, longer than that takes."""


OTHERS: Mapping[str, Mapping[str, Any]] = {
    "inputs at other addresses": {"moved": True},
    "other calls after its forward pass, which overwrite what it keeps or returns": {"others": True},
}
"""How an operation is checked further, with the options of `judge`."""
BACKWARD: Mapping[str, Mapping[str, Any]] = {
    "a gradient of the output that is not contiguous": {"strided": True},
    **OTHERS,
}
"""The same if it has a backward pass."""
OTHER_CALLS = 8
"""Calls after a forward pass, as many as the layers of a small model make: they come round to each of a few workspaces
that calls take in turn."""
OVERWRITTEN = "has been overwritten by a subsequent run"
"""Part of torch's message when a result is read that a CUDA graph of torch.compile has overwritten."""


class Unfit(Exception):
    """The result is not a tensor of the required shape, dtype and device."""


class WrongResult(NotMeasured):
    """Something computes other results than its reference, so that its times mean nothing."""

    outcome = "wrong"


@dataclass(frozen=True)
class Expected:
    """One right result."""

    tensor: Tensor
    """In float64, or, beside results in half precision, rounded to float32."""
    limit: Error
    """The largest error of a right result; see kernels/tolerance.py."""
    scale: float = 1.0
    """See `error` of kernels/tolerance.py."""


@dataclass(frozen=True)
class Draw:
    """Values of the inputs, and the right results for them."""

    name: str
    """For messages: "large scores"."""
    values: Callable[[], Sequence[Tensor]]
    """Draws the inputs and, unless it is None, `grad_out`: the same values at each call."""
    expected: tuple[Expected, ...]
    """The output and, with `grad_out`, the inputs' gradients."""


@dataclass(frozen=True)
class Reference:
    """The inputs of one size, and the values that they take."""

    inputs: tuple[Tensor, ...]
    grad_out: Tensor | None
    timed: Draw
    """The values that the inputs have when operations are timed, and always unless they are `holding` others."""
    checked: tuple[Draw, ...]
    """Further values for which results must be right."""
    names: tuple[str, ...] = ()
    """What messages call the inputs; (): "input 0", "input 1", …"""
    of: str = ""
    """What messages say has results of the right shape: "kernel=rope"."""
    checksums: tuple[int, ...] = field(init=False)
    """Checksums of the inputs and `grad_out`, taken when they were made."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "checksums", tuple(map(checksum, self._given.values())))

    def name(self, index: int) -> str:
        return self.names[index] if self.names else f"input {index}"

    @property
    def _given(self) -> dict[str, Tensor]:
        """Return the tensors that an operation gets, by the names that messages use."""
        inputs = {self.name(index): tensor for index, tensor in enumerate(self.inputs)}
        return inputs if self.grad_out is None else {**inputs, "the output's gradient": self.grad_out}

    def changed(self) -> list[str]:
        """Return the names of the inputs whose bits have changed."""
        now = ((name, checksum(tensor)) for name, tensor in self._given.items())
        return [name for (name, current), original in zip(now, self.checksums, strict=True) if current != original]

    @contextmanager
    def holding(self, draw: Draw) -> Iterator[None]:
        """Let the inputs have the values of a draw inside the context.

        Their versions, by which caches know changes, stay: a result that is kept by it is kept by its address.
        """
        if draw is self.timed:
            yield
            return
        self._fill(draw)
        try:
            yield
        finally:
            self._fill(self.timed)

    @contextmanager
    def moved(self, draw: Draw) -> Iterator[tuple[Tensor, ...]]:
        """Yield copies of the inputs, which hold a draw. Meanwhile the inputs hold half of it."""
        copies = tuple(one.detach().clone().requires_grad_(one.requires_grad) for one in self.inputs)
        for one in self.inputs:
            with torch.no_grad(), _unsafe_preserve_version_counter(one):
                one.mul_(0.5)
        try:
            yield copies
        finally:
            self._fill(draw)

    def _fill(self, draw: Draw) -> None:
        values = draw.values()
        if self.inputs[0].is_cuda:
            # Work on a stream that does not wait for the current one, and so is in no time, finds the former values.
            spin(DELAY_CYCLES)
        for tensor, value in zip(self._given.values(), values, strict=True):
            with torch.no_grad(), _unsafe_preserve_version_counter(tensor):
                tensor.copy_(value)


def checksum(tensor: Tensor) -> int:
    """Return the checksum of the bits that this module's docstring describes, for comparing tensors of one shape."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().reshape(-1).view(integers[tensor.element_size()])
    positions = torch.arange(min(CHECKSUM_PART, len(bits)), device=tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(bits), CHECKSUM_PART):
        part = bits[start : start + CHECKSUM_PART].long()
        factors = (positions[: len(part)] + (start + 1)) * GOLDEN
        factors.bitwise_xor_(factors >> 29).mul_(MIX).bitwise_or_(1)
        total += (part * factors).sum()
    return int(total)


@dataclass(frozen=True)
class Judgement:
    """The errors of one call's results against the oracle's."""

    errors: Mapping[int, Error]
    """Of the output (0) and of the inputs' gradients (1, 2, …), as far as there are such."""
    wrong: str | None
    """The fault of the results; None if they are right."""


def judge(
    operation: Operation,
    reference: Reference,
    draw: Draw | None = None,
    *,
    strided: bool = False,
    moved: bool = False,
    others: bool = False,
) -> Judgement:
    """Run the operation once, forward and, if it has a backward pass, backward; compare its results with the right
    ones.

    Args:
        operation: It has the reference's inputs.
        draw: The values that the inputs have in this call; None: those of timed calls.
        strided: The output's gradient has gaps of NaN between its values in memory. Autograd passes on
            gradients that are not contiguous, such as those of a sum or of a transposed output.
        moved: It gets copies of the inputs. A CUDA graph that its function has captured at an earlier call reads the
            inputs of that call.
        others: Others are called after the forward pass, on half of each input, as a model's layers call them: neither
            their outputs nor what they keep for their own backward passes may take the place of the first one's, nor
            may the last one's gradients. Each call's are freed before the next: a workspace taken in turn is
            overwritten all the same, and memory need suffice for two calls only.
    """
    draw = draw or reference.timed
    with reference.holding(draw), reference.moved(draw) if moved else nullcontext(operation.inputs) as inputs:
        operation = replace(operation, inputs=inputs)
        if strided and operation.grad_out is not None:
            spread = operation.grad_out.new_full((*operation.grad_out.shape, 2), math.nan)[..., 0]
            operation = replace(operation, grad_out=spread.copy_(operation.grad_out))
        try:
            results = _results(operation, reference, others=others)
            return _compared(dict(enumerate(results)), reference, draw)
        except Unfit as unfit:
            return Judgement({}, str(unfit))
        except RuntimeError as failure:
            if not (others and OVERWRITTEN in text_of(failure)):
                raise
            return Judgement({}, None)  # torch lets nobody take it for the result


def judge_results(
    out: Tensor | None, gradients: Sequence[Tensor | None], reference: Reference, draw: Draw
) -> Judgement:
    """Compare the results of a call that was timed on a draw: the output, the inputs' gradients, or both."""
    try:
        results = {} if out is None else {0: _fitting(0, out, reference)}
        results |= {index: _fitting(index, gradient, reference) for index, gradient in enumerate(gradients, start=1)}
    except Unfit as unfit:
        return Judgement({}, str(unfit))
    return _compared(results, reference, draw)


def _compared(results: Mapping[int, Tensor], reference: Reference, draw: Draw) -> Judgement:
    errors, wrong = {}, []
    for index, result in results.items():
        expected = draw.expected[index]
        found = error(result, expected.tensor, expected.scale)
        errors[index] = found
        if reason := found.why_wrong(expected.limit):
            wrong.append(f"{_name(index, reference)}: {reason}")
    return Judgement(errors, "; ".join(wrong) or None)


def _name(index: int, reference: Reference) -> str:
    return f"the gradient of {reference.name(index - 1)}" if index else "the output"


def _results(operation: Operation, reference: Reference, *, others: bool) -> list[Tensor]:
    """Return the output and, if there is a backward pass, the inputs' gradients. Raises Unfit: one of them is not a
    tensor of the required shape, dtype and device."""
    backward = operation.grad_out is not None
    with torch.set_grad_enabled(backward):
        # The output is checked before the backward pass, where autograd's message about it would be hard to understand.
        out = operation.forward()
        results = [_fitting(0, out, reference)]
        if backward and not out.requires_grad:
            raise Unfit("the output is detached from the inputs, so that it has no backward pass")
        other = None
        halves = tuple((one.detach() / 2).requires_grad_(one.requires_grad) for one in operation.inputs if others)
        for _ in range(OTHER_CALLS if others else 0):
            other = None
            other = operation.function(*halves)
        try:
            gradients = operation.backward(out) if backward else ()
            if other is not None and backward:
                replace(operation, inputs=halves).backward(other)
        except RuntimeError as failure:
            if UNFIT_GRADIENT.search(text_of(failure)) is None:
                raise
            raise Unfit(f"the backward pass: {text_of(failure)}") from failure
    return results + [_fitting(index, gradient, reference) for index, gradient in enumerate(gradients, start=1)]


def _fitting(index: int, result: Any, reference: Reference) -> Tensor:
    """Return a result without its history, if it is a plain tensor of the right shape, with the dtype and on the device
    of its input (the output: of the first). A subclass might compute only when it is read. Raises Unfit: it is not such
    a tensor."""
    name, like = _name(index, reference), reference.inputs[max(0, index - 1)]
    shape = reference.timed.expected[index].tensor.shape
    if type(result) is not Tensor:
        raise Unfit(f"{name} is {'missing' if result is None else f'a {type(result).__name__}, not a plain tensor'}")
    if result.shape != shape:
        whose = f", that of {reference.of}" if reference.of and not index else ""
        raise Unfit(f"{name} has the shape {tuple(result.shape)}, not {tuple(shape)}{whose}")
    if result.dtype != like.dtype:
        raise Unfit(f"{name} is of {result.dtype}, not {like.dtype} as its inputs")
    if result.device != like.device:
        raise Unfit(f"{name} is on {result.device}, not {like.device}")
    return result.detach()
