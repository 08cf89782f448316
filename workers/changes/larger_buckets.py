"""Gradients in larger buckets, of which there are fewer."""

from workers.changes._base import Change, Look
from workers.changes._ranks import rounded, size_mb, with_buckets


def _one(look: Look) -> str | None:
    assert look.shared is not None
    return "one bucket holds all gradients" if size_mb(look) == look.shared.gradients_mb else None


CHANGE = Change(
    causes=("communication", "launches", "host"),
    how="a larger bucket_size_mb",
    why_not=with_buckets(_one),
    fields=lambda look: {"bucket_size_mb": rounded(2 * size_mb(look))},
)
