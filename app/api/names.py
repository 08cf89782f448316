"""Names that only workers know (kinds, models, attention implementations): checking them and naming them in schemas.

The server cannot know them, since it imports no torch. While no worker has registered, any name is accepted, and the
worker that claims the job decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from app.api.pointers import pointer, shown
from app.api.services import Services
from app.errors import FieldError, InvalidRequest
from app.specs import SpecBase

Location = tuple[int | str, ...]


class Known:
    """What the registered workers have, as names per family; false when no worker has registered."""

    def __init__(self, names: dict[str, set[str]]) -> None:
        self.kinds = frozenset(names["kinds"])
        self.capabilities = frozenset(names["capabilities"])

    def __bool__(self) -> bool:
        return bool(self.kinds or self.capabilities)

    def family(self, name: str) -> list[str]:
        """Known names of a family ("attention", "model", …), sorted."""
        prefix = name + ":"
        return sorted(
            capability.removeprefix(prefix) for capability in self.capabilities if capability.startswith(prefix)
        )


def known_names(services: Services) -> Known:
    return Known(services.reading.known_names())


def check_names(spec: SpecBase, known: Known, at: str) -> None:
    """Refuse a kind or name that no worker has; `at` is the pointer to the spec in the body."""
    errors = tuple(FieldError(at + pointer(where), detail) for where, detail in unknown_names(spec, known))
    if errors:
        raise InvalidRequest(f"{errors[0].pointer}: {errors[0].detail}", errors=errors)


def unknown_names(spec: SpecBase, known: Known) -> Iterator[tuple[Location, str]]:
    """Where in `spec` a name stands that no worker has, and what to choose instead."""
    if not known:
        return
    if spec.kind not in known.kinds:
        yield ("kind",), f"No worker runs {shown(spec.kind)}; they run: {', '.join(sorted(known.kinds))}"
    for requirement in sorted(spec.requirements() - known.capabilities):
        family, _, name = requirement.partition(":")
        choices = ", ".join(known.family(family)) or "none at all"
        detail = f"No worker has the {family} {shown(name)}; they have: {choices}"
        yield field_of(spec, family, name), detail


def field_of(spec: SpecBase, family: str, name: str) -> Location:
    """The field of `spec` that asks for `name` of `family`: one called after the family, else any with that value."""
    places = [where for where, value in _leaves(spec.model_dump(mode="json"), ()) if value == name]
    return next((where for where in places if family in where), places[0] if places else ())


def _leaves(value: Any, location: Location) -> Iterator[tuple[Location, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*location, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, (*location, index))
    else:
        yield location, value
