"""The type of columns that hold JSON, and the stand-in for a stored value that cannot be read.

A disk, an editor or a bug can leave a text that is not JSON, or JSON of another shape. SQLAlchemy's own type would
raise and so fail the whole query: one broken row would hide all others of a list, and stop every claim. This type
returns an empty stand-in instead, which `broken` recognises.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from sqlalchemy import JSON, Dialect, TypeDecorator

from app.errors import job_problem

Shape = Literal["object", "array", "texts", "any"]


class _UnreadableObject(dict[str, Any]):
    """Stands in for an object."""


class _UnreadableArray(list[Any]):
    """Stands in for an array."""


_STAND_INS = frozenset({_UnreadableObject, _UnreadableArray})

_FITS: dict[Shape, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "texts": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    "any": lambda value: value is not None,
}


class StoredJson(TypeDecorator[Any]):
    """A JSON column whose values have this shape; None is SQL's NULL."""

    impl = JSON
    cache_ok = True

    def __init__(self, shape: Shape = "object") -> None:
        super().__init__(none_as_null=True)
        self.shape = shape

    def result_processor(self, dialect: Dialect, coltype: Any) -> Callable[[Any], Any]:
        read = super().result_processor(dialect, coltype) or (lambda value: value)
        shape = self.shape
        fits, stand_in = _FITS[shape], _UnreadableObject if shape in ("object", "any") else _UnreadableArray

        def process(value: Any) -> Any:
            if value is None:
                return None
            try:
                found = read(value)
            except (ValueError, TypeError, RecursionError):
                return stand_in()
            return found if fits(found) else stand_in()

        return process


def is_unreadable(value: object) -> bool:
    """Return True for a stand-in."""
    return type(value) in _STAND_INS


def broken(row: Mapping[Any, Any]) -> dict[str, Any] | None:
    """Return a problem that names the columns of a row whose values cannot be read; None when all can."""
    if _STAND_INS.isdisjoint(map(type, row.values())):  # nearly always; this is the quickest check
        return None
    columns = [str(name) for name, value in row.items() if is_unreadable(value)]
    detail = f"What is stored as {', '.join(columns)} cannot be read: it is no JSON, or has another shape."
    return job_problem("unreadable", detail)


def decoded(texts: Sequence[str | None]) -> list[Any]:
    """Decode JSON texts as they are stored; of one that is broken, None."""
    known = [text or "null" for text in texts]
    with contextlib.suppress(ValueError, RecursionError):  # all at once takes a third of the time
        found = json.loads(f"[{','.join(known)}]")
        if len(found) == len(known):
            return list(found)
    return [_decoded(text) for text in known]


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
