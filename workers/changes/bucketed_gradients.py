"""Gradients that travel in buckets during the backward pass."""

from workers.changes._base import ONE_RANK, Change, Elsewhere, Look

WITHOUT = ("naive", "flat", "overlapped")


def _why_not(look: Look) -> str | None:
    if look.shared is None:
        return ONE_RANK
    strategy: str = look.spec.strategy  # type: ignore[attr-defined]
    return None if strategy in WITHOUT else Elsewhere(f"strategy {strategy} sends several gradients at once already")


CHANGE = Change(
    causes=("communication", "launches", "host"),
    how="strategy=bucketed",
    why_not=_why_not,
    fields=lambda _: {"strategy": "bucketed"},
)
