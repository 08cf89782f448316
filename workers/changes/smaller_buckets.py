"""Gradients in smaller buckets, of which the first travel earlier."""

from workers.changes._base import Change
from workers.changes._ranks import DEFAULT_MB, rounded, size_mb, with_buckets

CHANGE = Change(
    causes=("communication",),
    how="a smaller bucket_size_mb",
    why_not=with_buckets(),
    fields=lambda look: {"bucket_size_mb": rounded(min(size_mb(look) / 2, DEFAULT_MB))},
)
