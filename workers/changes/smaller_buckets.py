"""Gradients in smaller buckets, of which the first travel earlier."""

from typing import Any

from workers.changes._base import Change, Look
from workers.changes._buckets import DEFAULT_MB, rounded, size_mb, why_no_buckets


def _fields(look: Look) -> dict[str, Any]:
    return {"bucket_size_mb": rounded(min(size_mb(look) / 2, DEFAULT_MB))}


CHANGE = Change(causes=("communication",), how="a smaller bucket_size_mb", why_not=why_no_buckets, fields=_fields)
