"""Linear layers in 8-bit floating point (Micikevicius et al., 2022), by torchao's `float8`, which scales dynamically.

A layer y = x Wᵀ has three products: the output, the gradient of x and the gradient of W. Their factors are cast to
8 bits before each, which reads and writes memory, and then the product takes half the time. So FP8 pays where a product
has many operations for each number that is cast.
"""

import dataclasses
import functools
import importlib
import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from workers.model.compiled import BLOCKS
from workers.model.transformer import OutputLayer

FP8_MULTIPLE = 16
"""What the sizes of a product in 8 bits are multiples of; `app.specs` refuses other numbers of tokens."""
RECIPES = {"tensorwise": 3, "rowwise": 3, "rowwise_with_gw_hp": 2}
"""torchao's recipes, with the number of a layer's three products that are in 8 bits."""
LEAST_INTENSITY = {"tensorwise": 900.0, "rowwise": 1800.0, "rowwise_with_gw_hp": 1800.0}
"""Where the first two recipes begin to pay, measured on an H100 (docs/measurements.md); of the third it is a guess. See
`intensity`."""


class NoFloat8(Exception):
    """Layers cannot compute in FP8: torchao is missing, or a size is not allowed."""


@dataclass(frozen=True)
class LinearLayer:
    """One linear layer of a model, or those at one place of all blocks, and whether it computes in FP8."""

    name: str
    rows: int
    """Rows of its input: tokens of a micro-batch."""
    in_features: int
    out_features: int
    in_fp8: bool = False
    why: str = ""
    """Why it does, or does not."""
    readers: int = 1
    """How many layers, called one after the other, have its input: compiled, they cast it once."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, K and N of its product of the forward pass."""
        return self.rows, self.in_features, self.out_features

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.sizes)


def float8() -> Any:
    """Return torchao's module. Raises NoFloat8: it is not installed, or does not work with this torch."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it tells at import which of its kernels for other purposes do not load
    try:
        return importlib.import_module("torchao.float8")
    except ImportError as error:
        raise NoFloat8(f'needs torchao on the worker: pip install "flopwatch[fp8]" ({error})') from error
    finally:
        logging.disable(before)


def config(recipe: str, *, emulate: bool) -> Any:
    """Return torchao's Float8LinearConfig of a recipe; `emulate`: round to 8 bits, and multiply in float32."""
    return dataclasses.replace(float8().Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)


def intensity(rows: int, in_features: int, out_features: int) -> float:
    """Return M·K·N / (M·K + M·N + K·N): multiply-adds of a layer's product for each number of its three matrices."""
    return 1 / (1 / rows + 1 / in_features + 1 / out_features)


def linear_layers(
    model: nn.Module, rows: int, recipe: str, patterns: Sequence[str], *, model_has_loss: bool = False
) -> list[LinearLayer]:
    """Choose the layers that compute in FP8. Raises NoFloat8: a chosen layer has a size that is no multiple of
    FP8_MULTIPLE, or no layer has such a name.

    Args:
        rows: Tokens of a micro-batch.
        recipe: One of RECIPES.
        patterns: ["auto"]: the layers of blocks whose `intensity` reaches LEAST_INTENSITY. ["all"]: all. Else those
            whose names match one of the patterns, as file names do.
        model_has_loss: Whether the output layer computes the loss, too, which needs its weight as it is.
    """
    found = []
    for name, layer in candidates(model, model_has_loss=model_has_loss):
        sizes = layer.in_features, layer.out_features
        allowed = all(size % FP8_MULTIPLE == 0 for size in sizes)
        in_fp8, why = _chosen(name, allowed, intensity(rows, *sizes), recipe, patterns)
        if in_fp8 and not allowed:
            raise NoFloat8(
                f"layer {name!r} maps {sizes[0]} features to {sizes[1]}, and fp8 takes multiples of {FP8_MULTIPLE}: "
                "leave it out of fp8_filter, or choose other sizes"
            )
        found.append(LinearLayer(name, rows, *sizes, in_fp8, why))
    for pattern in patterns:
        if pattern not in ("auto", "all") and not any(fnmatchcase(one.name, pattern) for one in found):
            known = ", ".join(dict.fromkeys(grouped(one.name) for one in found)) or "none"
            loss = "; the output layer computes the loss, too, and stays as it is" if model_has_loss else ""
            raise NoFloat8(f"fp8_filter: no linear layer has a name like {pattern!r}; there are {known}{loss}")
    return found


def _chosen(name: str, allowed: bool, value: float, recipe: str, patterns: Sequence[str]) -> tuple[bool, str]:
    if list(patterns) != ["auto"]:
        return list(patterns) == ["all"] or any(fnmatchcase(name, one) for one in patterns), "by fp8_filter"
    least = LEAST_INTENSITY[recipe]
    if not allowed:
        return False, f"a size is no multiple of {FP8_MULTIPLE}"
    if f"{BLOCKS}." not in name:
        return False, "outside the blocks"
    return value >= least, f"intensity {value:.0f}, {recipe} pays from {least:.0f}"


def candidates(model: nn.Module, *, model_has_loss: bool) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers that do nothing else, by name."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (
            type(module).forward is nn.Linear.forward or (isinstance(module, OutputLayer) and not model_has_loss)
        ):
            yield name, module


@contextmanager
def calls_of(layers: Iterable[tuple[str, nn.Linear]]) -> Iterator[list[LinearLayer]]:
    """Yield a list that takes each of the layers as often as it is called in a forward pass. Layers that read one input
    follow each other."""
    calls: list[LinearLayer] = []
    last: Tensor | None = None

    def hear(layer: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor, *, name: str) -> None:
        nonlocal last
        if not output.requires_grad or torch._C._current_graph_task_id() >= 0:  # a second pass of a checkpoint
            return
        source = inputs[0] if inputs else output
        before = calls[-1].readers if last is source else 0
        last = source  # alive, so that no other tensor is taken for it
        rows = output.numel() // layer.out_features
        calls.append(LinearLayer(name, rows, layer.in_features, layer.out_features))
        calls[-before - 1 :] = [dataclasses.replace(one, readers=before + 1) for one in calls[-before - 1 :]]

    with ExitStack() as hooks:
        for name, layer in layers:
            hook: Any = functools.partial(hear, name=name)
            hooks.callback(layer.register_forward_hook(hook).remove)
        yield calls


def convert(model: nn.Module, layers: Sequence[LinearLayer], recipe: str, *, emulate: bool) -> None:
    """Let the chosen layers compute in FP8, in place. They keep their parameters. Raises NoFloat8: torchao is
    missing."""
    chosen = {layer.name for layer in layers if layer.in_fp8}
    float8().convert_to_float8_training(
        model, config=config(recipe, emulate=emulate), module_filter_fn=lambda _module, name: name in chosen
    )
    if emulate:
        for name, module in model.named_modules():
            if name in chosen:
                module.register_forward_pre_hook(_cast_as_on_a_gpu)


def _cast_as_on_a_gpu(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """Cast a layer's input as autocast does: torchao looks at that of CUDA only."""
    if not torch.is_autocast_enabled("cpu"):
        return None
    return tuple(x.to(torch.get_autocast_dtype("cpu")) for x in inputs)


def fp8_flops(layers: Sequence[LinearLayer], recipe: str, *, backward: bool) -> int:
    """Return the FLOPs in 8 bits of one micro-batch."""
    return sum(layer.flops for layer in layers if layer.in_fp8) * (RECIPES[recipe] if backward else 1)


def grouped(name: str) -> str:
    """Return the pattern of a layer's name and of those at its place in other blocks: "layers.*.attn.q_proj"."""
    return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)
