"""No activation checkpointing, where the memory suffices."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import checkpoint

from workers.changes._base import Change, Elsewhere, Look, all_replaced

OPTIONS = ("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state")


def _why_not(look: Look) -> str | None:
    if look.own is not None:
        return None if look.checkpoints else Elsewhere("the step does not call torch.utils.checkpoint")
    return None if look.spec.activation_checkpointing else "the spec has no activation checkpointing"


def _called(_device: torch.device) -> AbstractContextManager[None]:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return function(*arguments, **{name: value for name, value in options.items() if name not in OPTIONS})

    places = ((checkpoint, "checkpoint"), (checkpoint_wrapper, "torch_utils_checkpoint"))
    return all_replaced(lambda _plain: call, *places)


def _fields(_look: Look) -> dict[str, Any]:
    return {
        "activation_checkpointing": False,
        "checkpoint_scope": "block",
        "checkpoint_layers": None,
        "checkpoint_blocks": 1,
    }


CHANGE = Change(
    causes=("kernels", "launches"),
    how="no activation checkpointing, where the memory suffices",
    why_not=_why_not,
    fields=_fields,
    before=_called,
)
