"""What the changes of sharded parameters share."""

from app.specs.ddp import FULLY_SHARDED
from workers.changes._base import ONE_RANK, Elsewhere, Look


def why_not_sharded(look: Look) -> str | None:
    """Return why the step gathers no parameters; None if it does."""
    if look.shared is None:
        return ONE_RANK
    strategy: str = look.spec.strategy  # type: ignore[attr-defined]
    return None if strategy in FULLY_SHARDED else Elsewhere(f"strategy {strategy} gathers nothing")
