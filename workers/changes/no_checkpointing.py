"""Our model without activation checkpointing, where the memory suffices."""

from __future__ import annotations

from typing import Any

from workers.changes._base import Change, Elsewhere, Look


def _why_not(look: Look) -> str | None:
    if look.own is not None:
        return Elsewhere("only our model's checkpointing can be switched off from outside")
    return None if look.spec.activation_checkpointing else "the spec has no activation checkpointing"


def _fields(_look: Look) -> dict[str, Any]:
    return {
        "activation_checkpointing": False,
        "checkpoint_scope": "block",
        "checkpoint_layers": None,
        "checkpoint_blocks": 1,
    }


CHANGE = Change(
    causes=("kernels", "attention", "launches"),
    how="activation_checkpointing=false, where the memory suffices",
    why_not=_why_not,
    fields=_fields,
)
