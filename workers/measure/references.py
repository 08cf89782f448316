"""The inputs on which operations are timed and checked, and the right results for them.

Operations are timed on normally distributed inputs, and also checked on others, which show faults that those hide.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from kernels.attention import drawing
from kernels.attention.oracle import oracle
from kernels.attention.problem import AttentionProblem
from kernels.registry import Kernel, Vary
from kernels.tolerance import Error, error, limits_beside_plain, limits_in_tf32, limits_of_mean
from workers.measure.judging import Draw, Expected, Reference

TIMED: Final = "normally distributed inputs"
AGAIN: Final = "inputs drawn again"


def attention_reference(
    queries: Sequence[int], keys: Sequence[int], dtype: torch.dtype, problem: AttentionProblem, *,
    backward: bool, seed: int, device: torch.device, tf32: bool = False,
) -> Reference:  # fmt: skip
    """Make the inputs of a problem of attention. `queries`: shape of the queries and of the output's gradient. `keys`:
    shape of keys and values. `backward`: whether gradients are checked. `tf32`: whether this process multiplies float32
    matrices in tf32."""
    shapes = queries, keys, keys, queries

    def make(name: str, seed: int, size: float) -> Draw:
        def values() -> list[Tensor]:
            return drawing.draw(shapes, dtype, _generator(device, seed), size)[: 4 if backward else 3]

        q, k, v, *grad_out = values()
        right = oracle(q, k, v, grad_out[0] if grad_out else None, problem, size)
        limits = tuple(map(limits_in_tf32, right.plain)) if tf32 else right.limits
        # The terms of the gradients of q and k, should these be zero: their factor beside k or q, and that.
        scale = size * (1.0 if problem.scale is None else problem.scale * queries[-1] ** 0.5)
        scales = 1.0, scale, scale, 1.0
        return Draw(name, values, _expected((right.out, *right.gradients), limits, scales, dtype))

    spreads = drawing.SPREADS.items()
    sizes = {TIMED: 1.0} | {name: drawing.size_for(spread, problem, queries[-1]) for name, spread in spreads}
    timed, *checked = (make(name, seed + number, size) for number, (name, size) in enumerate(sizes.items()))
    return _reference(timed, checked, backward, names=("q", "k", "v"))


def kernel_reference(
    kernel: Kernel, rows: int, columns: int, dtype: torch.dtype, *, backward: bool, seed: int, device: torch.device
) -> Reference:
    """Make the inputs of an operation of this size; the arguments are those of `attention_reference`."""
    shapes = kernel.shapes(rows, columns)
    out = kernel.plain(*(torch.empty(shape, device="meta") for shape in shapes))
    slope = kernel.slope if dtype.itemsize == 2 else None
    rounding = kernel.rounding_of_position * rows if dtype == torch.float32 else 0.0

    def make(name: str, seed: int, vary: Vary | None) -> Draw:
        def values() -> list[Tensor]:
            generator = _generator(device, seed)
            *inputs, grad_out = (
                torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
                for shape in (*shapes, out.shape)
            )
            inputs = inputs if vary is None else list(vary(*inputs))
            return [tensor.to(dtype) for tensor in (*inputs, *([grad_out] if backward else []))]

        drawn = values()
        inputs, grad_out = (drawn[:-1], drawn[-1]) if backward else (drawn, None)
        right, plain = (
            kernel.expected([cast(tensor) for tensor in inputs], None if grad_out is None else cast(grad_out))
            for cast in (Tensor.double, Tensor.detach)
        )
        limits = [
            limits_of_mean(error(rounded, one), dtype, rows)
            if one is right[0] and one.numel() == 1
            else limits_beside_plain(error(rounded, one), dtype, rounding, rows=_rows(one), slope=slope)
            for rounded, one in zip(plain, right, strict=True)
        ]
        return Draw(name, values, _expected(right, limits, [1.0] * len(right), dtype))

    variations: dict[str, Vary | None] = {TIMED: None, **(kernel.variations or {AGAIN: None})}
    timed, *checked = (make(name, seed + number, vary) for number, (name, vary) in enumerate(variations.items()))
    names = tuple(inspect.signature(kernel.plain).parameters)
    names = names if len(names) == len(shapes) else ()
    return _reference(timed, checked, backward, names, of=f"kernel={kernel.name}")


def _reference(
    timed: Draw, checked: Sequence[Draw], backward: bool, names: tuple[str, ...] = (), of: str = ""
) -> Reference:
    values = [tensor.requires_grad_(backward) for tensor in timed.values()]
    *inputs, grad_out = values if backward else (*values, None)
    return Reference(
        tuple(tensor for tensor in inputs if tensor is not None),
        None if grad_out is None else grad_out.detach(),
        timed,
        tuple(checked),
        names,
        of=of,
    )


def _expected(
    right: Sequence[Tensor], limits: Sequence[Error], scales: Sequence[float], dtype: torch.dtype
) -> tuple[Expected, ...]:
    keep: Callable[[Tensor], Tensor] = partial(Tensor.to, dtype=torch.float32 if dtype.itemsize == 2 else torch.float64)
    return tuple(
        Expected(keep(tensor), limit, scale) for tensor, limit, scale in zip(right, limits, scales, strict=False)
    )


def _rows(tensor: Tensor) -> int:
    """Return the number of rows, of elements if there is one axis."""
    return max(1, tensor.numel() // (tensor.shape[-1] if tensor.dim() > 1 else 1))


def _generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
