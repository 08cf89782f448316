"""The specs of jobs: one frozen pydantic model per kind, one file per kind.

The kinds are the modules of this folder that define a class named <Kind>Spec with a `kind` field; to add one, add a
file here and one of the same name in workers/jobs. Nothing else knows the list. Modules whose names begin with an
underscore are not kinds.
"""

import functools
import importlib
import json
import pkgutil
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from app.specs._base import Resources, SpecBase, flat, listed
from app.specs._identity import Case, Scalar
from app.specs._union import KINDS, JobSpec

__all__ = [
    "KINDS", "Case", "JobSpec", "Resources", "Scalar", "SpecBase", "in_lists", "spec_adapter", "without_effect_in",
]  # fmt: skip


def _walk() -> dict[str, type[SpecBase]]:
    kinds: dict[str, type[SpecBase]] = {}
    for module_info in pkgutil.iter_modules(__path__):
        if module_info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        specs = [
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, SpecBase) and value.__module__ == module.__name__
        ]
        if len(specs) != 1:
            raise RuntimeError(f"{module.__name__} must define exactly one spec, not {len(specs)}")
        kind = specs[0].model_fields["kind"].default
        if kind != module_info.name:
            raise RuntimeError(f"{module.__name__} defines kind {kind!r}: name the file after the kind")
        kinds[kind] = specs[0]
    return kinds


KINDS.update(_walk())

spec_adapter: TypeAdapter[SpecBase] = TypeAdapter(JobSpec)


def in_lists(spec: SpecBase) -> dict[str, Scalar]:
    """Return what lists show of a job, so that no two look the same: its summary, the fields that make no other case
    and are not as by default, and the version of uploaded code, in short."""
    fields, usual = flat(spec.model_dump(mode="json")), flat(spec.example().model_dump(mode="json"))
    more = {
        name: listed(value) if isinstance(value, list) else value
        for name, value in fields.items()
        if {name, name.partition(".")[0]} & (spec.unmeasured - {"device"}) and value != usual.get(name)
    }
    versions = dict.fromkeys(str(value)[:8] for name, value in fields.items() if name.endswith(".sha256"))
    return {**spec.summary(), **more, **({"version": "+".join(versions)} if versions else {})}


def without_effect_in(spec: Mapping[str, Any]) -> list[str]:
    """Return the fields of a spec that change nothing; none if it is of another version than this one."""
    return list(_without_effect(json.dumps(spec)))


@functools.lru_cache(maxsize=256)
def _without_effect(spec: str) -> tuple[str, ...]:
    try:
        return tuple(spec_adapter.validate_json(spec).without_effect())
    except ValidationError:
        return ()
