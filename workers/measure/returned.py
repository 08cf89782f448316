"""Numbers that steps return, such as the loss: two versions of a step that compute the same return the same.

Those of the first steps are kept, and of later ones at round numbers, so that a step that stops working is seen. They
are read between steps, outside of measured times.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import torch

from workers.measure.check import Check
from workers.measure.table import Column, Scalar

STEPS = 5
"""The first steps, whose numbers are all kept: later ones amplify the smallest difference."""
ROUND = frozenset(
    int(factor * 10**power) for power in range(1, 7) for factor in (0.6, 0.8, 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
)
"""The later steps whose numbers are kept, so that sides that make different numbers of steps have some in common."""
MAX_NUMBERS = 20
"""Most numbers of a step that are kept."""
MAX_NAME = 100
VALUES = "values"
"""The table of what steps returned, of the number of steps, and of the work of a step."""
COLUMNS = Column.parse("what, step: integer, name, value: number, not_finite")
"""`what` is RETURNED, MADE or WORK; `step` counts from 1, null but for RETURNED; `not_finite` is "nan", "inf" or
"-inf", or null."""
RETURNED, MADE, WORK = "returned", "steps", "work"


class ReturnedNumbers:
    """Keeps the numbers that the first STEPS steps return, and those at ROUND. `read`: returns what the last step has
    returned."""

    def __init__(self, read: Callable[[], object]) -> None:
        self._read = read
        self._begun = 0
        self._rows: list[list[Scalar]] = []

    @property
    def wants_next(self) -> bool:
        """Return True if what the step that begins now returns is of interest."""
        return self._begun <= STEPS or self._begun in ROUND

    def take(self) -> None:
        """Read what the step before has returned; called before each step, and after the last."""
        if self._begun and self.wants_next:
            kept = list(numbers_in(self._read()))[:MAX_NUMBERS]
            self._rows += [[RETURNED, self._begun, name, *_cells(value)] for name, value in kept]
        self._begun += 1

    @property
    def rows(self) -> list[list[Scalar]]:
        """The table's rows: what was returned, and the number of steps up to the last `take`."""
        return [*self._rows, [MADE, None, "steps", max(0, self._begun - 1), None]]

    def checks(self, *, may_train: bool = False) -> list[Check]:
        """Return the checks of what was returned. `may_train`: that of a step of the user's own."""
        return [*check_finite(self._rows), *(check_constant(self._rows) if may_train else ())]


def check_finite(rows: Iterable[Sequence[Scalar]]) -> list[Check]:
    """Return the check that what steps returned is finite; none if it all is.

    Without an end to it, as of a loss that has become NaN, the step that was timed is broken. A note is what comes and
    goes, as a gradient's norm in the first steps with loss scaling; what only the last reading has, which may pass; and
    a number that was infinite in all, such as the best loss so far, unless it is the loss or the only one.
    """
    read: dict[str, list[Sequence[Scalar]]] = {}
    for row in rows:
        if row[0] == RETURNED:
            read.setdefault(str(row[2]), []).append(row)
    lasting: list[str] = []
    notes: list[str] = []
    for name, its in read.items():
        bad = [row for row in its if row[4] is not None]
        finite = max((at for at, row in enumerate(its) if row[4] is None), default=-1)
        if ending := its[finite + 1 :]:
            never = finite < 0
            meant = never and len(read) > 1 and name.split(".")[-1] != "loss"
            is_note = (meant or len(ending) == 1) and not (never and ending[-1][4] == "nan")
            (notes if is_note else lasting).append(f"{name} is {ending[0][4]} from step {ending[0][1]} on")
        elif bad:
            notes.append(f"step {bad[0][1]}: {name} is {bad[0][4]}, and later finite")
    if lasting:
        return [Check("finite", False, "; ".join(lasting[:3]))]
    return [Check("finite", False, notes[0], "note")] if notes else []


def check_constant(rows: Iterable[Sequence[Scalar]]) -> list[Check]:
    """Note that what steps return, or the loss in it, never changes, as if they trained nothing; no check if it does,
    or little is known. Whole numbers, such as counts, tell nothing, nor do those of 16 bits, which hide small steps."""
    read: dict[str, list[float]] = {}
    for row in rows:
        if row[0] == RETURNED and isinstance(row[3], float):
            read.setdefault(str(row[2]), []).append(row[3])
    still = {name: its[0] for name, its in read.items() if len(its) > STEPS and len({*its}) == 1}
    fine = [name for name, one in still.items() if one % 1 and not _has_16_bits(one)]
    all_still = len(still) == len(read) and bool(fine)
    told = [name for name in fine if f" {name}".endswith((" loss", ".loss")) or all_still]
    if not told:
        return []
    detail = f"{told[0]} is {still[told[0]]:.6g} in each step, as if nothing were updated: is the backward pass or the "
    detail += "optimizer's step missing, or the learning rate 0? An evaluation calls model.eval()"
    return [Check("constant", False, detail, "note")]


def _has_16_bits(number: float) -> bool:
    exact = torch.tensor(number, dtype=torch.float64)
    return any(exact.to(dtype).double().item() == number for dtype in (torch.bfloat16, torch.float16))


def work_rows(work: Mapping[str, float | None]) -> list[list[Scalar]]:
    """Return the rows of the work of a step, as far as it is known."""
    return [[WORK, None, kind, *_cells(amount)] for kind, amount in work.items() if amount is not None]


def numbers_in(returned: object) -> Iterator[tuple[str, float]]:
    """Yield the numbers that a step has returned, by name: a number, a tensor of one element, or what of these is in a
    mapping, a sequence or a dataclass, also nested. Waits for the device."""
    for name, one in _leaves(returned):
        with suppress(OverflowError):  # of an integer that no float can hold
            if (value := _number_of(one) if isinstance(one, torch.Tensor) else float(one)) is not None:
                yield (name or "value")[:MAX_NAME], value


def slim(returned: object) -> dict[str, Any]:
    """Return what `numbers_in` reads of it, without waiting for the device: the rest, such as logits or a graph, may be
    dropped."""
    return dict(islice(_leaves(returned), MAX_NUMBERS))


def _leaves(returned: object, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(returned, torch.Tensor):
        try:
            single = returned.detach() if returned.numel() == 1 else None
        except (RuntimeError, NotImplementedError):  # a subclass that lacks one of them
            return
        if single is not None:
            yield name, single
    elif isinstance(returned, numbers.Real) and not isinstance(returned, bool):
        yield name, returned
    else:
        for key, inner in _parts(returned):
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))


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
    """Return a tensor's only element; None if it has no value that is a number."""
    try:
        if tensor.is_complex() or tensor.dtype == torch.bool:
            return None
        return float(tensor)
    except (RuntimeError, NotImplementedError, ValueError):  # a tensor on `meta`, a fake or a distributed one
        return None


def _cells(value: float) -> tuple[float | None, str | None]:
    return (value, None) if math.isfinite(value) else (None, str(value))
