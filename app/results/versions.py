"""Which code a result is of: the hash of an uploaded file, or else the commit of the worker's checkout; and where an
uploaded file comes from."""

from collections.abc import Iterator, Mapping
from typing import Any

from app.specs import Scalar

COMMIT_CHARACTERS = 40
VERSION = "version"
"""Column of tables: the version of the uploaded code of a case."""
SHORT = 8
"""Characters of a short version."""
DIRTY = "-dirty"
"""The end of the version of a checkout with changes that are not committed."""


def uploaded_version(spec: Mapping[str, Any], coordinates: Mapping[str, Scalar]) -> str | None:
    """Return the version of the uploaded code that a case runs, by its job's or side's spec and its coordinates, since
    a job may measure cases with its code beside others without; "+" stands between the hashes of several files."""
    return "+".join(str(code["sha256"]) for code in _codes(spec, coordinates)) or None


def revision_of(spec: Mapping[str, Any], coordinates: Mapping[str, Scalar]) -> Mapping[str, Any]:
    """Return where the uploaded code of a case comes from, as its spec has it; of several files, what the first one
    with a revision has. Empty if that is unknown."""
    return next((code["revision"] for code in _codes(spec, coordinates) if code.get("revision")), {})


def revision_text(revision: Mapping[str, Any]) -> str | None:
    """Write a revision in short: "main, 1a2b3c4d-dirty, 1 file changed, 3 insertions(+)"; "." says no more than its
    commit does."""
    commit = revision.get("commit")
    short = commit and short_version(commit + (DIRTY if revision.get("dirty") else ""))
    return (
        ", ".join(part for part in (revision.get("label"), short, revision.get("diff")) if part not in (None, "."))
        or None
    )


def _codes(spec: Mapping[str, Any], coordinates: Mapping[str, Scalar]) -> Iterator[Mapping[str, Any]]:
    for field, code in spec.items():
        if isinstance(code, Mapping) and "sha256" in code and coordinates.get(f"{field}.function") is not None:
            yield code


def version_of(
    spec: Mapping[str, Any], environment: Mapping[str, Any] | None, coordinates: Mapping[str, Scalar]
) -> str | None:
    """Return the version of a measurement of a case in an environment; None if it is unknown."""
    uploaded = uploaded_version(spec, coordinates)
    if uploaded is not None:
        return uploaded
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
