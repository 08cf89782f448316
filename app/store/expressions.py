"""Expressions that each engine writes in its own words."""

from typing import Any

from sqlalchemy import JSON, Float
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction


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
