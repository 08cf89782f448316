"""Whether what an operation gives is right: first whether it can be, as somebody's own kernel may return anything; then
how far it is from the oracle.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from workers.jobs._cells import Problem, Values
    from workers.measure.operations import Operation

UNFIT_GRADIENT = re.compile("returned an (invalid gradient|incorrect number of gradients)")
"""In autograd's errors: a Function's backward gave what cannot be the gradients, of another shape for instance."""


class Unfit(Exception):
    """No tensor of the shape, dtype and device that the result has to have, whatever its numbers."""


def compare(operation: Operation, problem: Problem, values: Values) -> str | None:
    """Run the operation once; set its errors, and say what is wrong with its results, or None."""
    from kernels import tolerance

    errors, wrong = [], []
    try:
        for (name, result), expected in zip(_results(operation, problem), problem.expected, strict=False):
            errors.append(tolerance.error(result, expected))
            if reason := errors[-1].why_wrong(problem.tolerance):
                wrong.append(f"{name}: {reason}")
    except Unfit as error:
        return str(error)
    relative = [error.relative for error in errors]
    for name, phase, found in (("output_error", "forward", relative[:1]), ("gradient_error", "backward", relative[1:])):
        if found:
            finite = all(map(math.isfinite, found))
            values.set(name, phase, [max(found)] if finite else None, "the results are not finite")
    return "; ".join(wrong) or None


def _results(operation: Operation, problem: Problem) -> list[tuple[str, Tensor]]:
    """The output and, where there is a backward pass, the inputs' gradients, by what to call them.

    Raises:
        Unfit: one of them cannot be what it should be.
    """
    import torch

    backward = operation.grad_out is not None
    with torch.set_grad_enabled(backward):
        # An output that does not fit is nothing to go back from: autograd's complaint would be a riddle.
        out = _fitting("the output", operation.forward(), problem.expected[0].shape, problem.inputs[0])
        if backward and not out.requires_grad:
            raise Unfit("the output is detached from the inputs, so that it has no backward pass")
        try:
            gradients = operation.backward(out) if backward else ()
        except RuntimeError as error:
            if UNFIT_GRADIENT.search(str(error)) is None:
                raise
            raise Unfit(f"the backward pass: {error}") from error
    results = [("the output", out.detach())]
    for index, (gradient, like) in enumerate(zip(gradients, problem.inputs, strict=False)):
        name = f"the gradient of input {index}"
        results.append((name, _fitting(name, gradient, like.shape, like)))
    return results


def _fitting(name: str, result: object, shape: torch.Size, like: Tensor) -> Tensor:
    """The result, which is a tensor of this shape, with the dtype and on the device of `like`.

    Raises:
        Unfit: it is not.
    """
    import torch

    if not isinstance(result, torch.Tensor):
        raise Unfit(f"{name} is {'missing' if result is None else f'a {type(result).__name__}, not a tensor'}")
    if result.shape != shape:
        raise Unfit(f"{name} has the shape {tuple(result.shape)}, not {tuple(shape)}")
    if result.dtype != like.dtype:
        raise Unfit(f"{name} is of {result.dtype}, not {like.dtype} as its inputs")
    if result.device != like.device:
        raise Unfit(f"{name} is on {result.device}, not {like.device}")
    return result
