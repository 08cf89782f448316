"""The union of all kinds, built when it is first used, so that a spec can hold specs of other kinds."""

from typing import Annotated, Any

from pydantic import GetPydanticSchema
from pydantic_core import CoreSchema, core_schema

from app.specs._base import SpecBase

KINDS: dict[str, type[SpecBase]] = {}
"""The spec of each kind; the package fills it when it is imported."""


def _tagged_union(handler: Any, *, plain: bool) -> CoreSchema:
    chosen = {kind: handler(spec) for kind, spec in KINDS.items() if not (plain and spec.holds_specs)}
    # By hand, because pydantic's own discriminator refuses a union of one.
    return core_schema.tagged_union_schema(chosen, discriminator="kind")


JobSpec = Annotated[SpecBase, GetPydanticSchema(lambda _source, handler: _tagged_union(handler, plain=False))]
PlainSpec = Annotated[SpecBase, GetPydanticSchema(lambda _source, handler: _tagged_union(handler, plain=True))]
"""A spec of any kind that contains no other specs. A model with such a field sets `defer_build=True` in its config."""
