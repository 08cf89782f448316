"""Gradients in larger buckets, of which there are fewer."""

from typing import Any

from workers.changes._base import Change, Look
from workers.changes._buckets import rounded, size_mb, why_no_buckets


def _why_not(look: Look) -> str | None:
    if (reason := why_no_buckets(look)) is not None:
        return reason
    assert look.shared is not None
    return "one bucket holds all gradients" if size_mb(look) == look.shared.gradients_mb else None


def _fields(look: Look) -> dict[str, Any]:
    return {"bucket_size_mb": rounded(2 * size_mb(look))}


CHANGE = Change(
    causes=("communication", "launches", "host"), how="a larger bucket_size_mb", why_not=_why_not, fields=_fields
)
