"""Gradients that travel in buckets during the backward pass."""

from workers.changes._base import Change
from workers.changes._ranks import of_strategies

CHANGE = Change(
    causes=("communication", "launches", "host"),
    how="strategy=bucketed",
    why_not=of_strategies(("naive", "flat", "overlapped"), "sends several gradients at once already"),
    fields=lambda _: {"strategy": "bucketed"},
)
