"""Gradients in larger buckets, of which there are fewer."""

from workers.changes._base import Change, Look
from workers.changes._buckets import rounded, size_mb, why_no_buckets


def _why_not(look: Look) -> str | None:
    if (reason := why_no_buckets(look)) is not None:
        return reason
    assert look.shared is not None
    return "one bucket holds all gradients" if size_mb(look) == look.shared.gradients_mb else None


CHANGE = Change(
    causes=("communication", "launches", "host"),
    how="a larger bucket_size_mb",
    why_not=_why_not,
    fields=lambda look: {"bucket_size_mb": rounded(2 * size_mb(look))},
)
