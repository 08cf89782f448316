"""Gradients that travel during the backward pass, each when it is known."""

from workers.changes._base import ONE_RANK, Change, Elsewhere, Look


def _why_not(look: Look) -> str | None:
    if look.shared is None:
        return ONE_RANK
    strategy: str = look.spec.strategy  # type: ignore[attr-defined]
    return None if strategy in ("naive", "flat") else Elsewhere(f"strategy {strategy} overlaps already")


CHANGE = Change(
    causes=("communication",), how="strategy=overlapped", why_not=_why_not, fields=lambda _: {"strategy": "overlapped"}
)
