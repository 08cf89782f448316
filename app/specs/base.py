"""What every job spec has: strict fields, the resources it needs, and how its results are laid out as a table."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

Device = Literal["auto", "cpu", "cuda"]
Scalar = str | int | float | bool | None
MAX_CELLS = 10_000
"""Of one job."""


class StrictModel(BaseModel):
    """A frozen model that refuses unknown fields, NaN, infinity and values of another type ("128" is no number)."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class Resources(StrictModel):
    """What a job needs of a host, known without torch; the queue keeps these as indexed columns of the job."""

    device_type: Device
    """`auto`: a GPU where the worker has one, else the CPU."""
    devices: int
    """Number of GPUs (of processes, on a CPU)."""
    exclusive_host: bool = False
    """Nothing else may run on the host meanwhile. CPU jobs always run alone, whatever this says."""


class SpecBase(StrictModel):
    """Base of every job kind's spec. A subclass sets `kind` to a Literal with its file's name as the default."""

    kind: str

    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    """Named partial specs that forms and the CLI offer."""
    table_rows: ClassVar[tuple[str, ...]] = ()
    """Coordinates that make the rows of this kind's default table."""
    table_columns: ClassVar[tuple[str, ...]] = ()
    """Metrics that make its columns, in this order."""

    def resources(self) -> Resources:
        """Devices this job needs."""
        raise NotImplementedError

    def requirements(self) -> frozenset[str]:
        """Names that a worker must have, as "family:name": "attention:eager", "model:transformer_lm"."""
        return frozenset()

    def coordinates(self) -> dict[str, Scalar]:
        """The coordinates that identify this job's case in its measurements and tables."""
        raise NotImplementedError

    @classmethod
    def example(cls) -> Self:
        """The spec with every default, which runs."""
        return cls.model_validate({})


def listed(values: Sequence[Scalar]) -> Scalar:
    """A coordinate that has several values in one job, as one: "16/32/64"; a single value is itself."""
    return values[0] if len(values) == 1 else "/".join(str(value) for value in values)


def check_lists(spec: BaseModel, fields: Iterable[str]) -> None:
    """See that no list among these fields has a value twice: tables would pool two cells at the same coordinates.

    Raises:
        PydanticCustomError: one has; for a model validator to raise.
    """
    for field in fields:
        values = getattr(spec, field)
        repeated = next((value for index, value in enumerate(values) if value in values[:index]), None)
        if repeated is not None:
            raise field_error(field, f"{repeated!r} is there twice")


def check_number_of_cells(cells: Iterable[object], field: str) -> None:
    """See that they are at most MAX_CELLS, without making more of them than that.

    Raises:
        PydanticCustomError: they are more; blames `field`; for a model validator to raise.
    """
    if sum(1 for _ in itertools.islice(cells, MAX_CELLS + 1)) > MAX_CELLS:
        raise field_error(field, f"more than {MAX_CELLS} cells: make several jobs of it")


def field_error(field: str, message: str) -> PydanticCustomError:
    """An error of a model validator that belongs to one `field` (a name, or a/b path below the model).

    The API appends the field to the pointer; pydantic alone would blame the whole model.
    """
    # Braces would be taken for a template's.
    return PydanticCustomError("field_error", "{message}", {"field": field, "message": message})
