"""Parameters that are gathered, and gradients that are reduced, in bfloat16."""

from workers.changes._base import Change, Look
from workers.changes._ranks import sharded


def _casts(look: Look) -> str | None:
    if look.spec.precision not in ("bf16", "fp8"):
        return f"it computes in {look.spec.precision}"
    return "they travel in bfloat16 already" if look.spec.casts else None  # type: ignore[attr-defined]


CHANGE = Change(
    causes=("communication",),
    how="cast_before_communication=true",
    why_not=sharded(_casts),
    fields=lambda _: {"cast_before_communication": True},
)
