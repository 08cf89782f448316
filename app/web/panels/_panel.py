"""One panel of a job's page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.errors import Conflict
from app.web.plots.drawing import Figure


@dataclass(frozen=True)
class Panel:
    """A plot with its text, or a view made by a template, or both."""

    name: str
    """Last part of the plot's address, unique in the job: "timeline"."""
    title: str
    """Heading of the panel, and accessible name of its plot."""
    text: str = ""
    """A text that explains how to read it; texts in `backticks` become code."""
    draw: Callable[[], Figure] | None = None
    """Makes the plot's JSON; None: there is no plot."""
    log: str = ""
    """Axes that get a switch between linear and logarithmic: "x", "y" or "x y"."""
    template: str | None = None
    """A template of `html/panels`, shown below the plot, which sees the panel as `panel`."""
    values: Mapping[str, Any] = field(default_factory=dict)
    folded: bool = False
    """True if it is closed at first; its plot is drawn when it is opened."""
    more: Sequence[Panel] = ()
    """Plots of the same metric that stand below it, all closed at first."""

    def figure(self) -> Figure:
        """Draw the plot. Raises Conflict where another version has reported a table of this name with other columns."""
        assert self.draw is not None
        try:
            return self.draw()
        except (KeyError, TypeError, ValueError) as error:
            raise Conflict(f"What the job reported is not what this version draws: {error!r}.") from error
