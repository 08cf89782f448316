"""What makes two measurements comparable: the case, which is the measured work, and its key. Standard library only.

A case's identity holds every field of the spec that changes the measured work, flat and normalised. Its key is a hash
of that. Results of equal cases meet by their keys, whichever job measured them; what they ran on stands beside it, as
the device key. Stored keys cannot be mended afterwards: what `canonical` does must never change.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

Scalar = str | int | float | bool | None

KEY_CHARACTERS = 20
"""80 bits: among ten million cases the odds of two equal keys are one in ten billion."""


@dataclass(frozen=True)
class Case:
    """One piece of measured work."""

    kind: str
    identity: Mapping[str, Scalar]
    """Every coordinate that changes the work; null: has no effect here, or is left to the program."""
    labels: Mapping[str, Scalar] = field(default_factory=dict)
    """Coordinates for people, each computed from the identity, such as a preset's name for the sizes of a model."""
    added: Mapping[str, Scalar] = field(default_factory=dict)
    """Coordinates that are left out of the key at this value, because they came later."""

    @property
    def coordinates(self) -> dict[str, Scalar]:
        """Labels and identity: what a measurement's row shows of its case."""
        return {**self.labels, **self.identity}

    @functools.cached_property
    def key(self) -> str:
        """Equal for equal work; see `canonical`."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()[:KEY_CHARACTERS]

    @property
    def canonical(self) -> str:
        """The kind and the identity as JSON with sorted keys, less what is null or at the value it was added with."""
        kept = {
            name: value
            for name, value in self.identity.items()
            if value is not None and not (name in self.added and _same(self.added[name], value))
        }
        return json.dumps([self.kind, kept], sort_keys=True, separators=(",", ":"), allow_nan=False)


def _same(one: Scalar, other: Scalar) -> bool:
    # Python takes 1 and true for equal; JSON does not.
    return json.dumps(one) == json.dumps(other)
