"""What a job may ask for: one frozen pydantic model per kind, one file per kind.

The kinds are the modules of this folder that define a class named <Kind>Spec with a `kind` field; to add one, add a
file here and one of the same name in workers/jobs. Nothing else knows the list.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Annotated, Any

from pydantic import GetPydanticSchema, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from app.specs.base import Resources, Scalar, SpecBase

__all__ = ["KINDS", "JobSpec", "Resources", "Scalar", "SpecBase", "spec_adapter"]

NOT_KINDS = {"base", "sweep"}


def _walk() -> dict[str, type[SpecBase]]:
    kinds: dict[str, type[SpecBase]] = {}
    for module_info in pkgutil.iter_modules(__path__):
        if module_info.name in NOT_KINDS:
            continue
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        found = [
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, SpecBase) and value.__module__ == module.__name__
        ]
        if len(found) != 1:
            raise RuntimeError(f"{module.__name__} must define exactly one spec, not {len(found)}")
        kind = found[0].model_fields["kind"].default
        if kind != module_info.name:
            raise RuntimeError(f"{module.__name__} defines kind {kind!r}: name the file after the kind")
        kinds[kind] = found[0]
    return kinds


KINDS: dict[str, type[SpecBase]] = _walk()


def _tagged_union(_source: Any, handler: Any) -> CoreSchema:
    # By hand, because pydantic's own discriminator refuses a union of one.
    return core_schema.tagged_union_schema({kind: handler(spec) for kind, spec in KINDS.items()}, discriminator="kind")


JobSpec = Annotated[SpecBase, GetPydanticSchema(_tagged_union)]

spec_adapter: TypeAdapter[SpecBase] = TypeAdapter(JobSpec)
