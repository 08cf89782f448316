"""Numbers that the first steps return, such as the loss: two versions of a step that compute the same return the same.

They are read between steps, outside of measured times.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from workers.measure.table import Column, Scalar

STEPS = 5
"""The first steps whose numbers are kept: later ones amplify the smallest difference."""
MAX_NUMBERS = 20
"""Most numbers of a step that are kept."""
MAX_NAME = 100
VALUES = "values"
"""The table of what the first steps returned, and of the work of a step."""
COLUMNS = (
    Column("what", "string"),
    Column("step", "integer"),
    Column("name", "string"),
    Column("value", "number"),
    Column("not_finite", "string"),
)
"""`what` is RETURNED or WORK; `step` counts from 1, null of work; `not_finite` is "nan", "inf" or "-inf", or null."""
RETURNED, WORK = "returned", "work"


class FirstValues:
    """Keeps the numbers that the first STEPS steps return.

    Args:
        read: Returns what the last step has returned.
    """

    def __init__(self, read: Callable[[], object]) -> None:
        self._read = read
        self._has_run = False
        self._steps = 0
        self.rows: list[list[Scalar]] = []

    @property
    def is_full(self) -> bool:
        """Return True if no further step is of interest."""
        return self._steps == STEPS

    def take(self) -> None:
        """Read what the step before has returned; called before each step, and after the last."""
        if self._has_run and not self.is_full:
            self._steps += 1
            kept = list(numbers_in(self._read()))[:MAX_NUMBERS]
            self.rows += [[RETURNED, self._steps, name, *_cells(value)] for name, value in kept]
        self._has_run = True


def work_rows(work: Mapping[str, float | None]) -> list[list[Scalar]]:
    """Return the rows of the work of a step, as far as it is known."""
    return [[WORK, None, kind, *_cells(amount)] for kind, amount in work.items() if amount is not None]


def numbers_in(returned: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers that a step has returned, by name: a number, a tensor of one element, or what of these is in a
    mapping, a sequence or a dataclass, also nested. Waits for the device."""
    if isinstance(returned, torch.Tensor):
        if (value := _number_of(returned)) is not None:
            yield (name or "value")[:MAX_NAME], value
    elif isinstance(returned, numbers.Real) and not isinstance(returned, bool):
        yield (name or "value")[:MAX_NAME], float(returned)
    else:
        for key, inner in _parts(returned):
            yield from numbers_in(inner, f"{name}.{key}" if name else str(key))


def _parts(returned: object) -> Iterator[tuple[Any, Any]]:
    if isinstance(returned, Mapping):
        yield from returned.items()
    elif isinstance(returned, tuple) and hasattr(returned, "_fields"):
        yield from zip(returned._fields, returned, strict=True)
    elif isinstance(returned, list | tuple):
        yield from enumerate(returned)
    elif dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        yield from ((field.name, getattr(returned, field.name, None)) for field in dataclasses.fields(returned))


def _number_of(tensor: torch.Tensor) -> float | None:
    """Return a tensor's only element; None if it has several, or no value that is a number."""
    try:
        if tensor.numel() != 1 or tensor.is_complex() or tensor.dtype == torch.bool:
            return None
        return float(tensor.detach())
    except (RuntimeError, NotImplementedError, ValueError):  # a tensor on `meta`, a fake or a distributed one
        return None


def _cells(value: float) -> tuple[float | None, str | None]:
    return (value, None) if math.isfinite(value) else (None, str(value))
