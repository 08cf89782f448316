"""Parameters that are gathered before the block that needs them computes."""

from workers.changes._base import Change, Look
from workers.changes._ranks import sharded

MOST = 4


def _ahead(look: Look) -> str | None:
    if look.spec.strategy == "torch_fsdp":  # type: ignore[attr-defined]
        return "torch_fsdp gathers a block ahead, and has no setting for more"
    return None if look.spec.prefetch < MOST else f"{MOST} blocks are gathered ahead already"  # type: ignore[attr-defined]


CHANGE = Change(
    causes=("communication",),
    how="a larger prefetch",
    why_not=sharded(_ahead),
    fields=lambda look: {"prefetch": look.spec.prefetch + 1},  # type: ignore[attr-defined]
)
