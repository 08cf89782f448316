"""Chooses which points of a figure are drawn where there are more points than pixels, so that the picture is the same.

Each line is divided into columns: a pixel wide if the figure has one line, wider if several lines share it. Of each
column, these are drawn: the smallest and the largest value, so that no peak is lost, one point of each doubt, and one
of each outcome without a number. The ends of a line are always drawn. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

MAX_POINTS = 4000
"""A figure with at most this many points, about three for each pixel of its width, draws all of them."""
MIN_COLUMNS = 50
"""Smallest number of columns of a line, however many lines the figure has."""
MAX_CELLS = 12_000
"""A heat map with at most this many cells draws all of them."""


def drawn_indexes(
    places: Sequence[float | None],
    values: Sequence[float | None],
    outcomes: Sequence[str | None],
    doubts: Sequence[str | None],
    *,
    share: float,
    number_of_points: int,
    log: bool,
) -> list[int]:
    """Return the indexes of the points of one line that are drawn, in order.

    Args:
        places: where the points are along x, in order; one without a place is always drawn.
        values: their values; None where there is only an outcome.
        outcomes: their outcomes.
        doubts: the verdicts' doubts about them; None where there are none.
        share: the line's share of the figure's points.
        number_of_points: points of the whole figure.
        log: True if the axis is logarithmic; then all places are positive.
    """
    known = [place for place in places if place is not None]
    if number_of_points <= MAX_POINTS or not known:
        return list(range(len(places)))
    low, high = (math.log(end) if log else end for end in (min(known), max(known)))
    columns = max(MIN_COLUMNS, int(share * MAX_POINTS / 2))
    scale = (columns - 1) / (high - low) if high > low else 0.0
    chosen: dict[Hashable, int] = {"first": 0, "last": len(places) - 1}
    for index, (place, value) in enumerate(zip(places, values, strict=True)):
        if place is None:
            chosen[None, index] = index
            continue
        column = int(((math.log(place) if log else place) - low) * scale)
        if value is None:
            chosen.setdefault((column, "outcome", outcomes[index]), index)
            continue
        if doubts[index] is not None:
            chosen.setdefault((column, "doubt", doubts[index]), index)
        for sign in (1, -1):  # the least, and the greatest
            other = values[chosen.setdefault((column, sign), index)]
            if other is not None and sign * value < sign * other:
                chosen[column, sign] = index
    return sorted(set(chosen.values()))


def heat_map_steps(columns: int, rows: int) -> tuple[int, int]:
    """Return the step between drawn columns and between drawn rows of a heat map; the smaller dimension gets the
    smaller step."""
    across = down = 1
    while -(-columns // across) * -(-rows // down) > MAX_CELLS:
        if columns // across >= rows // down:
            across += 1
        else:
            down += 1
    return across, down
