"""Parameters that are gathered before the block that needs them computes."""

from workers.changes._base import Change, Look
from workers.changes._sharding import why_not_sharded

MOST = 4


def _why_not(look: Look) -> str | None:
    if look.shared is not None and look.spec.strategy == "torch_fsdp":  # type: ignore[attr-defined]
        return "torch_fsdp gathers a block ahead, and has no setting for more"
    many = f"{MOST} blocks are gathered ahead already"
    return why_not_sharded(look) or (None if look.spec.prefetch < MOST else many)  # type: ignore[attr-defined]


CHANGE = Change(
    causes=("communication",),
    how="a larger prefetch",
    why_not=_why_not,
    fields=lambda look: {"prefetch": look.spec.prefetch + 1},  # type: ignore[attr-defined]
)
