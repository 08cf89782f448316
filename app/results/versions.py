"""Which code a result is of: the hash of an uploaded file, or else the commit of the worker's checkout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.specs import Scalar

COMMIT_CHARACTERS = 40
SHORT = 8
"""Characters of a short version."""
DIRTY = "-dirty"
"""The end of the version of a checkout with changes that are not committed."""


def version_of(environment: Mapping[str, Any] | None, coordinates: Mapping[str, Scalar]) -> str | None:
    """Return the version of a measurement of a case in an environment; None if it is unknown.

    Several uploaded files are written with "+" between their hashes.
    """
    uploaded = [str(value) for name, value in coordinates.items() if name.endswith(".sha256") and value]
    if uploaded:
        return "+".join(uploaded)
    software = (environment or {}).get("software") or {}
    commit = software.get("git_commit")
    return None if not commit else f"{commit}{DIRTY if software.get('git_dirty') else ''}"


def commit_of(version: str | None) -> str | None:
    """Return the commit that a version is, or that its changes are based on; None if it is no commit."""
    commit = (version or "").removesuffix(DIRTY)
    return commit if len(commit) == COMMIT_CHARACTERS else None


def short_version(version: str | None) -> str | None:
    """Write a version in short, as `git log --oneline` does: the first characters of each hash."""
    if version is None:
        return None
    parts = (part.removesuffix(DIRTY)[:SHORT] + (DIRTY if part.endswith(DIRTY) else "") for part in version.split("+"))
    return "+".join(parts)
