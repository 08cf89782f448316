"""Gradients in buckets of the size that latency and bandwidth of the ranks' all-reduces suggest."""

from typing import Any

from workers.changes._base import Change, Look
from workers.changes._ranks import rounded, size_mb, with_buckets


def _has_it(look: Look) -> str | None:
    assert look.shared is not None
    if look.shared.best_bucket_mb is None:
        return "the times of all-reduces suggest no size"
    return "its buckets have that size" if rounded(look.shared.best_bucket_mb) == rounded(size_mb(look)) else None


def _fields(look: Look) -> dict[str, Any]:
    assert look.shared is not None
    return {"bucket_size_mb": rounded(look.shared.best_bucket_mb or 0.0)}


CHANGE = Change(causes=("communication",), how="the best bucket_size_mb", why_not=with_buckets(_has_it), fields=_fields)
