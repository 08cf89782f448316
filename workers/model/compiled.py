"""torch.compile over a model: block by block, or as a whole."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

BLOCKS = "layers"
"""The attribute that holds a model's blocks: a torch.nn.ModuleList of modules of one class."""


class NoBlocks(Exception):
    """The model has no list of its blocks."""


def compile_blocks(model: nn.Module, *, inside_hooks: bool = False) -> nn.Module:
    """Compile each block by itself, in place. Blocks of one class share their compiled code: it is made once.

    An output layer that computes the loss itself compiles that, too, by its method `compile_loss`. Raises NoBlocks: the
    model has no list of blocks.

    Args:
        model: A model with a list of its blocks.
        inside_hooks: Compile only `forward`, and leave hooks on blocks uncompiled, such as those of sharding, which
            replace parameters.
    """
    blocks = getattr(model, BLOCKS, None)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        raise NoBlocks(
            f"{type(model).__name__} has no blocks to compile by themselves: it would offer them as {BLOCKS!r}, "
            "a torch.nn.ModuleList; or choose compile_scope model"
        )
    for block in blocks:
        if inside_hooks:
            block.forward = torch.compile(block.forward)
        else:
            block.compile()
    for module in model.modules():
        compile_loss = getattr(module, "compile_loss", None)
        if compile_loss is not None:
            compile_loss()
    return model


def compile_model(model: nn.Module) -> Callable[..., Any]:
    """Return the model, which will be compiled as a whole when it is first called."""
    compiled: Callable[..., Any] = torch.compile(model)
    return compiled
