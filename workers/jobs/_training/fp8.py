"""Precision fp8 of a training step: which linear layers compute in it, and what a result must say of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.specs._training import TrainingSpec
from workers.measure.check import Check
from workers.measure.table import Column
from workers.outcome import Unsupported
from workers.reporter import Reporter

if TYPE_CHECKING:
    import torch

    from workers.model.float8 import LinearLayer


def to_float8(spec: TrainingSpec, device: torch.device, model: torch.nn.Module) -> Sequence[LinearLayer]:
    """With precision fp8, let the chosen linear layers compute in it, and return all of them; else none. Raises
    Unsupported: torchao is missing, a layer's sizes are not allowed, or no layer is chosen."""
    from workers.model import float8

    if spec.precision != "fp8":
        return ()
    rows = spec.batch_size * spec.context_length
    try:
        layers = float8.linear_layers(model, rows, spec.fp8_recipe, spec.fp8_filter, model_has_loss=spec.model_has_loss)
        float8.convert(model, layers, spec.fp8_recipe, emulate=device.type == "cpu")
    except float8.NoFloat8 as error:
        raise Unsupported(f"precision fp8: {error}") from error
    if not layers:
        raise Unsupported("precision fp8: the model has no linear layer that fp8 can take: choose precision bf16")
    if not any(layer.in_fp8 for layer in layers):
        first = {layer.why: float8.grouped(layer.name) for layer in reversed(layers)}
        why = "; ".join(f"{name}: {reason}" for reason, name in first.items())
        raise Unsupported(
            f"precision fp8: fp8_filter chooses none of the linear layers ({why}): "
            "choose precision bf16, or fp8_filter all"
        )
    return layers


def fp8_notes(spec: TrainingSpec, device: torch.device) -> list[Check]:
    """Return the checks of what makes FP8 slower than it is."""
    if spec.precision != "fp8":
        return []
    notes = []
    if device.type == "cpu":
        notes.append(
            Check("emulated", False, "a CPU emulates fp8: values are right, times are not those of fp8", "note")
        )
    if not spec.compile:
        slow = (
            "without compile, casts to fp8 are kernels of their own, which mostly cost more than fp8 gains: set compile"
        )
        notes.append(Check("compiled", False, slow, "note"))
    return notes


def report_layers(layers: Sequence[LinearLayer], report: Reporter) -> None:
    """Report the table `linear_layers`: layers at one place of several blocks are one row."""
    from workers.model.float8 import grouped

    if not layers:
        return
    rows = Counter(
        (grouped(one.name), one.rows, one.in_features, one.out_features, one.in_fp8, one.why) for one in layers
    )
    columns = Column.parse(
        "layer, tokens: integer, in_features: integer, out_features: integer, fp8: boolean, why, layers: integer"
    )
    report.table("linear_layers", columns, [[*row, count] for row, count in rows.items()])
