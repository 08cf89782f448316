"""The number of the specs' schema: a worker reads the specs of its own number and of all before it."""

import functools
import hashlib
import json
from typing import Any

from app.specs import spec_adapter
from app.specs._base import NODES

SCHEMA = 2
"""Grows with each release whose specs an earlier release cannot read; `RELEASED` tells when."""
RELEASED = {1: "39c1aa2bd358efd9"}
"""The fingerprint of each released number, the last of them the last release's. Until SCHEMA itself is released, its
fingerprint may change."""
_PREFIX = f"{NODES}:schema-"
"""Workers of release 0.1.0 pass over a job with a name that they lack only if it begins as those of several nodes."""
_FOR_PEOPLE = ("title", "description", "examples", "default", "x-flopwatch-names", "x-flopwatch-needs")


def name_of(number: int) -> str:
    """Return the name that a job's requirements have, so that only workers claim it which read this schema."""
    return f"{_PREFIX}{number}"


def names_up_to(number: int | None) -> frozenset[str]:
    """Return the names that a worker has which reads this schema; None stands for release 0.1.0."""
    return frozenset(map(name_of, range(1, (number or 1) + 1)))


def is_name(name: str) -> bool:
    """Return True if a requirement is a schema's name."""
    return name.startswith(_PREFIX)


@functools.cache
def fingerprint() -> str:
    """Return a digest of what all specs take: fields, types and bounds, without the words about them."""
    schema = json.dumps(_without_words(spec_adapter.json_schema()), sort_keys=True)
    return hashlib.sha256(schema.encode()).hexdigest()[:16]


def _without_words(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_words(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    # A field may be called as one of these: what describes a field is a schema, so it is an object.
    return {
        name: _without_words(value)
        for name, value in schema.items()
        if name not in _FOR_PEOPLE or (isinstance(value, dict) and name != "default")
    }
