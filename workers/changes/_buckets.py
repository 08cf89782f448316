"""What the changes of a bucket's size share."""

from app.specs.ddp import WITH_BUCKETS
from workers.changes._base import ONE_RANK, Elsewhere, Look

DEFAULT_MB = 25.0
"""What torch and the spec take by default."""


def size_mb(look: Look) -> float:
    """Return the size of the step's buckets: all gradients at most."""
    assert look.shared is not None
    chosen: float | None = look.spec.bucket_size_mb  # type: ignore[attr-defined]
    return look.shared.gradients_mb if chosen is None else min(chosen, look.shared.gradients_mb)


def rounded(size: float) -> float:
    """Return a size with three digits."""
    return float(f"{size:.3g}")


def why_no_buckets(look: Look) -> str | None:
    if look.shared is None:
        return ONE_RANK
    strategy: str = look.spec.strategy  # type: ignore[attr-defined]
    return None if strategy in WITH_BUCKETS else Elsewhere(f"strategy {strategy} has no buckets")
