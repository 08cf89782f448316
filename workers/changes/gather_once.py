"""Parameters that stay gathered from the forward to the backward pass."""

from workers.changes._base import Change, Look
from workers.changes._ranks import sharded


def _once(look: Look) -> str | None:
    return None if look.spec.reshard_after_forward else "they are gathered once already"  # type: ignore[attr-defined]


CHANGE = Change(
    causes=("communication",),
    how="reshard_after_forward=false",
    why_not=sharded(_once),
    fields=lambda _: {"reshard_after_forward": False},
)
