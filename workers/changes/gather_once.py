"""Parameters that stay gathered from the forward to the backward pass."""

from workers.changes._base import Change, Look
from workers.changes._sharding import why_not_sharded


def _why_not(look: Look) -> str | None:
    once = "they are gathered once already"
    return why_not_sharded(look) or (None if look.spec.reshard_after_forward else once)  # type: ignore[attr-defined]


CHANGE = Change(
    causes=("communication",),
    how="reshard_after_forward=false",
    why_not=_why_not,
    fields=lambda _: {"reshard_after_forward": False},
)
