"""The case, which is the measured work, and its key, by which measurements are matched. Standard library only.

A case's identity holds every field of the spec that changes the measured work, flat and normalised. Its key is a hash
of that. Results of equal cases share a key, even if different jobs measured them. A separate device key names the
device. Stored keys cannot be repaired later, so the behaviour of `canonical` must never change.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

Scalar = str | int | float | bool | None

KEY_CHARACTERS = 20
"""Length of a key: 80 bits. Among ten million cases the odds of two equal keys are one in ten billion."""


@dataclass(frozen=True)
class Case:
    """One piece of measured work."""

    kind: str
    identity: Mapping[str, Scalar]
    """Every coordinate that changes the work. Null: it has no effect here, or the program chooses it."""
    labels: Mapping[str, Scalar] = field(default_factory=dict)
    """Coordinates for people, each computed from the identity, such as a preset's name for the sizes of a model."""
    added: Mapping[str, Scalar] = field(default_factory=dict)
    """Coordinates that the key leaves out at this value, because they were added later."""

    @property
    def coordinates(self) -> dict[str, Scalar]:
        """Return labels and identity, which a measurement's row shows of its case; of one name, the label."""
        return {**self.labels, **self.identity, **self.labels}

    @functools.cached_property
    def key(self) -> str:
        """Return the case key. Equal work has equal keys; see `canonical`."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()[:KEY_CHARACTERS]

    @property
    def canonical(self) -> str:
        """Return the kind and the identity as JSON with sorted keys, without nulls and without coordinates at their
        value in `added`."""
        kept = {
            name: value
            for name, value in self.identity.items()
            if value is not None
            # In Python 1 equals True; in JSON it does not.
            and not (name in self.added and json.dumps(self.added[name]) == json.dumps(value))
        }
        return json.dumps([self.kind, kept], sort_keys=True, separators=(",", ":"), allow_nan=False)
