"""No activation checkpointing, where the memory suffices."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint

from workers.changes._base import Change, Elsewhere, Look, all_replaced, replaced, used

OPTIONS = ("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state")


def _why_not(look: Look) -> str | None:
    if look.own is not None:
        return None if look.checkpoints else Elsewhere("the step does not call torch.utils.checkpoint")
    return None if look.spec.activation_checkpointing else "the spec has no activation checkpointing"


@contextmanager
def _called(_device: torch.device) -> Iterator[None]:
    from torch._dynamo.variables import builder
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        called()
        return function(*arguments, **{name: value for name, value in options.items() if name not in OPTIONS})

    places = ((checkpoint, "checkpoint"), (checkpoint_wrapper, "torch_utils_checkpoint"))
    # What has the name is a checkpoint to torch.compile, too, whatever it does.
    compiler = replaced(builder, "is_utils_checkpoint", lambda _function: False)
    instead = all_replaced(lambda _plain: call, *places)
    with used("the step does not call torch.utils.checkpoint") as called, instead, compiler:
        yield


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
