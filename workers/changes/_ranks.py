"""What changes of gradients and parameters that ranks share have in common."""

from collections.abc import Callable, Collection

from app.specs.ddp import FULLY_SHARDED, WITH_BUCKETS
from workers.changes._base import ONE_RANK, Elsewhere, Look

DEFAULT_MB = 25.0
"""The size of a bucket that torch and the spec take by default."""
WhyNot = Callable[[Look], str | None]


def of_strategies(strategies: Collection[str], others: str, also: WhyNot = lambda _look: None) -> WhyNot:
    """Return the `why_not` of a change for steps of several ranks with one of these strategies, about which it asks
    `also`, too; `others` is what all other strategies do, in words."""

    def why_not(look: Look) -> str | None:
        if look.shared is None:
            return ONE_RANK
        strategy: str = look.spec.strategy  # type: ignore[attr-defined]
        return also(look) if strategy in strategies else Elsewhere(f"strategy {strategy} {others}")

    return why_not


def with_buckets(also: WhyNot = lambda _look: None) -> WhyNot:
    return of_strategies(WITH_BUCKETS, "has no buckets", also)


def sharded(also: WhyNot) -> WhyNot:
    return of_strategies(FULLY_SHARDED, "gathers nothing", also)


def size_mb(look: Look) -> float:
    """Return the size of the step's buckets: all gradients at most."""
    assert look.shared is not None
    chosen: float | None = look.spec.bucket_size_mb  # type: ignore[attr-defined]
    return look.shared.gradients_mb if chosen is None else min(chosen, look.shared.gradients_mb)


def rounded(size: float) -> float:
    """Return a size with three digits."""
    return float(f"{size:.3g}")
