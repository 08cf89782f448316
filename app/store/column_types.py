"""The types of columns: times in UTC, and JSON whose unreadable values do not fail a query; and expressions that each
engine writes in its own words.

A disk, an editor or a bug can leave a text that is no JSON, or JSON of another shape. SQLAlchemy's own type would raise
and so fail the whole query: one broken spec would hide all jobs of a list, and stop every claim. StoredJson reads such
a value as an empty object or array instead, and `broken` tells for a row which of its values are such stand-ins.

Both engines store JSON as text: PostgreSQL's own types order and compare otherwise, or not at all, and refuse values
that json.dumps writes.
"""

import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, DateTime, Dialect, Float, Text, TypeDecorator
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction
from sqlalchemy.types import TypeEngine

from app.errors import job_problem

_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def without_nul(text: str) -> str:
    """Return a JSON text with U+FFFD for NUL, which would make all of it unreadable for PostgreSQL's operators."""
    return _NUL.sub(r"\1\\ufffd", text)


class UtcDateTime(TypeDecorator[datetime]):
    """A column of UTC times with their time zone. It works on SQLite too, which stores no time zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("times in the database are aware: use utc_now()")
        utc = value.astimezone(UTC)
        return utc.replace(tzinfo=None) if dialect.name == "sqlite" else utc

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class _UnreadableObject(dict[str, Any]):
    """Stands in for an object."""


class _UnreadableArray(list[Any]):
    """Stands in for an array."""


_STAND_INS = frozenset({_UnreadableObject, _UnreadableArray})


class StoredJson(TypeDecorator[Any]):
    """A JSON column whose values are of the type `shape`: dict, list, or object for any value. None is SQL's NULL."""

    impl = JSON
    cache_ok = True

    def __init__(self, shape: type = dict) -> None:
        super().__init__(none_as_null=True)
        self.shape = shape

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return Text() if dialect.name == "postgresql" else super().load_dialect_impl(dialect)

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any] | None:
        if dialect.name != "postgresql":
            return super().bind_processor(dialect)
        return lambda value: None if value is None else without_nul(json.dumps(value, ensure_ascii=False))

    def result_processor(self, dialect: Dialect, coltype: Any) -> Callable[[Any], Any]:
        read = json.loads if dialect.name == "postgresql" else super().result_processor(dialect, coltype)
        assert read is not None
        shape = self.shape
        stand_in = _UnreadableArray if shape is list else _UnreadableObject

        def process(value: Any) -> Any:
            if value is None:
                return None
            try:
                stored = read(value)
            except (ValueError, TypeError, RecursionError):
                return stand_in()
            return stored if stored is not None and isinstance(stored, shape) else stand_in()

        return process


def broken(row: Mapping[Any, Any]) -> dict[str, Any] | None:
    """Return a problem that names the columns of a row whose values cannot be read; None when all can."""
    if _STAND_INS.isdisjoint(map(type, row.values())):  # nearly always; this is the quickest check
        return None
    columns = [str(name) for name, value in row.items() if type(value) in _STAND_INS]
    detail = f"What is stored as {', '.join(columns)} cannot be read: it is no JSON, or has another shape."
    return job_problem("unreadable", detail)


class as_json(GenericFunction[Any]):  # noqa: N801 - it is called as a function
    """A column of StoredJson, to take values out of it: `as_json(column)["key"].as_string()`."""

    type = JSON()
    inherit_cache = True


@compiles(as_json)
def _as_json(element: Any, compiler: Any, **kw: Any) -> str:
    return str(compiler.process(element.clauses, **kw))


@compiles(as_json, "postgresql")
def _as_json_of_postgresql(element: Any, compiler: Any, **kw: Any) -> str:
    return f"CAST({compiler.process(element.clauses, **kw)} AS JSON)"


class seconds_between(GenericFunction[float]):  # noqa: N801
    """The seconds from one time to another."""

    type = Float()
    inherit_cache = True


@compiles(seconds_between)
def _seconds_between(element: Any, compiler: Any, **kw: Any) -> str:
    start, end = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"((julianday({end}) - julianday({start})) * 86400.0)"


@compiles(seconds_between, "postgresql")
def _seconds_between_of_postgresql(element: Any, compiler: Any, **kw: Any) -> str:
    start, end = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"EXTRACT(EPOCH FROM {end} - {start})"
