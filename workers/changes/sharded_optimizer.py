"""Each rank updates a part of the parameters, and fetches the rest."""

from workers.changes._base import ONE_RANK, Change, Look


def _why_not(look: Look) -> str | None:
    if look.shared is None:
        return ONE_RANK
    return "it is sharded already" if look.spec.sharded_optimizer else None  # type: ignore[attr-defined]


CHANGE = Change(
    causes=("optimizer",), how="sharded_optimizer=true", why_not=_why_not, fields=lambda _: {"sharded_optimizer": True}
)
