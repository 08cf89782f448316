"""Checks that an operation's results are right and that it leaves its inputs unchanged.

An operation is checked when it is first called, and again after it was timed: it may be right at first and wrong later,
because of a race, or because it stores its first result and returns it again. For the second check one input on which
the results depend linearly is negated in place. So a stored result has the wrong sign, the oracle need not be computed
again, and the second check needs no copy of the inputs.

A checksum of the inputs' bits, computed on their device a part at a time, shows changes: copies would double the memory
that inputs take. Each element's bits are multiplied by an odd 64-bit number that depends on its position, and the
products are added modulo 2^64. A change of one element changes the sum, since multiplying by an odd number is
invertible modulo 2^64; other changes go unnoticed with a probability near 2^-64.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kernels.tolerance import Error
    from workers.jobs._values import Values
    from workers.measure.operations import Operation

UNFIT_GRADIENT = re.compile("returned an (invalid gradient|incorrect number of gradients)")
"""Part of autograd's message when a Function's backward returns what cannot be gradients, of another shape for
instance.
"""
CHECKSUM_PART = 1 << 20
"""Number of elements whose bits are summed at once; they take some tens of MiB."""
# The constants of splitmix64, as the signed numbers that torch has.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX = 0xBF58476D1CE4E5B9 - (1 << 64)


class Unfit(Exception):
    """The result is not a tensor of the required shape, dtype and device."""


@dataclass(frozen=True)
class Reference:
    """Random inputs of one size, and the right results for them."""

    inputs: tuple[Tensor, ...]
    grad_out: Tensor | None
    expected: tuple[Tensor, ...]
    """The output and, unless `grad_out` is None, the inputs' gradients, in float64."""
    limits: tuple[Error, ...]
    """Largest errors of right results, in the order of `expected`; see kernels/tolerance.py."""
    linear_in: int
    """The index of an input whose negation negates the output, and the gradients of all other inputs."""
    checksums: tuple[int, ...] = field(init=False)
    """Checksums of the inputs and `grad_out`, taken when they were made."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "checksums", tuple(map(checksum, self._given.values())))

    @property
    def _given(self) -> dict[str, Tensor]:
        """Return the tensors that an operation gets, by the names that messages use."""
        inputs = {f"input {index}": tensor for index, tensor in enumerate(self.inputs)}
        return inputs if self.grad_out is None else {**inputs, "the output's gradient": self.grad_out}

    def changed(self) -> list[str]:
        """Return the names of the inputs whose bits have changed."""
        now = ((name, checksum(tensor)) for name, tensor in self._given.items())
        return [name for (name, current), original in zip(now, self.checksums, strict=True) if current != original]

    @contextmanager
    def negated(self) -> Iterator[None]:
        """Negate the input `linear_in` inside the context. Negating twice gives the same bits again.

        The tensor's version, by which caches know changes, stays: a result that is kept by it is kept by its address.
        """
        import torch
        from torch.autograd.grad_mode import _unsafe_preserve_version_counter

        def negate(tensor: Tensor) -> None:
            with torch.no_grad(), _unsafe_preserve_version_counter(tensor):
                tensor.neg_()

        negate(self.inputs[self.linear_in])
        try:
            yield
        finally:
            negate(self.inputs[self.linear_in])


def checksum(tensor: Tensor) -> int:
    """Return the checksum of the bits that this module's docstring describes, for comparing tensors of one shape."""
    import torch

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

    errors: tuple[float, ...]
    """Relative errors of the output and, if there is a backward pass, of the inputs' gradients."""
    wrong: str | None
    """The fault of the results; None if they are right."""


def judge(operation: Operation, reference: Reference) -> Judgement:
    """Run the operation once, forward and, if it has a backward pass, backward; compare its results with the
    oracle's."""
    return _judge(operation, reference, negated=False)


def judge_negated(operation: Operation, reference: Reference) -> Judgement:
    """Check again with one input negated during the call, so that a stored result of an earlier call is wrong."""
    with reference.negated():
        return _judge(operation, reference, negated=True)


def set_errors(values: Values, *judgements: Judgement) -> None:
    """Set the metrics of the output's error and of the gradients' error, each to the largest of the judgements."""
    for name, place in (("output_error", slice(0, 1)), ("gradient_error", slice(1, None))):
        errors = [error for judgement in judgements for error in judgement.errors[place]]
        if errors:
            finite = all(map(math.isfinite, errors))
            values.set(name, None, [max(errors)] if finite else None, "the results are not finite")


def _judge(operation: Operation, reference: Reference, *, negated: bool) -> Judgement:
    from kernels import tolerance

    errors, wrong = [], []
    try:
        for index, (name, result) in enumerate(_results(operation, reference)):
            # The output comes first; the gradient of the linear input does not depend on that input.
            turned = negated and index != 1 + reference.linear_in
            errors.append(tolerance.error(-result if turned else result, reference.expected[index]))
            if reason := errors[-1].why_wrong(reference.limits[index]):
                wrong.append(f"{name}: {reason}")
    except Unfit as error:
        return Judgement((), str(error))
    return Judgement(tuple(error.relative for error in errors), "; ".join(wrong) or None)


def _results(operation: Operation, reference: Reference) -> list[tuple[str, Tensor]]:
    """Return the output and, if there is a backward pass, the inputs' gradients, by the names that messages use.

    Raises:
        Unfit: one of them is not a tensor of the required shape, dtype and device.
    """
    import torch

    backward = operation.grad_out is not None
    with torch.set_grad_enabled(backward):
        # The output is checked before the backward pass, where autograd's message about it would be hard to understand.
        out = _fitting("the output", operation.forward(), reference.expected[0].shape, reference.inputs[0])
        if backward and not out.requires_grad:
            raise Unfit("the output is detached from the inputs, so that it has no backward pass")
        try:
            gradients = operation.backward(out) if backward else ()
        except RuntimeError as error:
            if UNFIT_GRADIENT.search(str(error)) is None:
                raise
            raise Unfit(f"the backward pass: {error}") from error
    results = [("the output", out.detach())]
    for index, (gradient, like) in enumerate(zip(gradients, reference.inputs, strict=False)):
        name = f"the gradient of input {index}"
        results.append((name, _fitting(name, gradient, like.shape, like)))
    return results


def _fitting(name: str, result: Any, shape: torch.Size, like: Tensor) -> Tensor:
    """Return the result, if it is a plain tensor of this shape, with the dtype and on the device of `like`. A subclass
    might compute only when it is read.

    Raises:
        Unfit: it is not such a tensor.
    """
    import torch

    if type(result) is not torch.Tensor:
        raise Unfit(f"{name} is {'missing' if result is None else f'a {type(result).__name__}, not a plain tensor'}")
    if result.shape != shape:
        raise Unfit(f"{name} has the shape {tuple(result.shape)}, not {tuple(shape)}")
    if result.dtype != like.dtype:
        raise Unfit(f"{name} is of {result.dtype}, not {like.dtype} as its inputs")
    if result.device != like.device:
        raise Unfit(f"{name} is on {result.device}, not {like.device}")
    return result
