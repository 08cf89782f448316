"""Gradients that travel during the backward pass, each when it is known."""

from workers.changes._base import Change
from workers.changes._ranks import of_strategies

CHANGE = Change(
    causes=("communication",),
    how="strategy=overlapped",
    why_not=of_strategies(("naive", "flat"), "overlaps already"),
    fields=lambda _: {"strategy": "overlapped"},
)
