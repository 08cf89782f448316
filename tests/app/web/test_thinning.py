"""Which points are drawn: whatever is left out would have been drawn over."""

from __future__ import annotations

import math
import random
from collections.abc import Collection

import pytest

from app.web import thinning


def drawn_indexes(
    places: list[float | None],
    values: list[float | None],
    *,
    doubtful: Collection[int] = (),
    share: float = 1.0,
    log: bool = False,
) -> list[int]:
    outcomes = ["ok" if value is not None else "oom" for value in values]
    doubts = ["suspect" if index in doubtful else None for index in range(len(values))]
    number_of_points = int(len(places) / share)
    return thinning.drawn_indexes(
        places, values, outcomes, doubts, share=share, number_of_points=number_of_points, log=log
    )


@pytest.mark.parametrize("log", [False, True])
def test_the_picture_stays_the_same(log: bool) -> None:
    """In every column of pixels the line spans the same values as that of all points."""
    rng = random.Random(1)
    number = 20_000
    places: list[float | None] = [1.0 + at for at in range(number)]
    values: list[float | None] = [rng.lognormvariate(0, 2) for _ in range(number)]
    found = drawn_indexes(places, values, log=log)
    assert found == sorted(set(found))
    assert len(found) <= thinning.MAX_POINTS + 2

    def spans(indexes: list[int]) -> dict[int, tuple[float, float]]:
        columns: dict[int, list[float]] = {}
        for index in indexes:
            place, value = places[index], values[index]
            assert place is not None
            assert value is not None
            position = math.log(place) / math.log(number) if log else (place - 1) / (number - 1)
            columns.setdefault(int(position * (thinning.MAX_POINTS // 2 - 1)), []).append(value)
        return {column: (min(found), max(found)) for column, found in columns.items()}

    assert spans(found) == spans(list(range(number)))


def test_few_points_are_all_drawn() -> None:
    assert drawn_indexes([0.0] * 100, [1.0] * 100) == list(range(100))


def test_ends_and_outcomes_are_drawn() -> None:
    places: list[float | None] = [float(at) for at in range(10_000)]
    values: list[float | None] = [1.0] * 10_000
    values[4321] = None
    found = drawn_indexes(places, values)
    assert {0, 4321, 9999} < set(found)


def test_a_doubt_is_drawn() -> None:
    """A line of which some numbers are doubtful must not look as if all were valid."""
    places: list[float | None] = [float(at) for at in range(10_000)]
    values: list[float | None] = [float(at % 7) for at in range(10_000)]
    doubtful = {at for at in range(10_000) if at % 7 == 3}
    assert doubtful & set(drawn_indexes(places, values, doubtful=doubtful))


def test_points_without_a_place_are_drawn() -> None:
    places: list[float | None] = [None, *(float(at) for at in range(10_000)), None]
    found = drawn_indexes(places, [1.0] * 10_002)
    assert {0, 10_001} < set(found)


def test_lines_share_the_pixels_and_each_has_some() -> None:
    places: list[float | None] = [float(at) for at in range(5000)]
    values: list[float | None] = [float(at % 7) for at in range(5000)]
    half, tiny = (len(drawn_indexes(places, values, share=share)) for share in (0.5, 0.001))
    assert tiny <= 2 * thinning.MIN_COLUMNS + 2 < half <= thinning.MAX_POINTS / 2 + 2


@pytest.mark.parametrize(
    ("columns", "rows", "steps"), [(100, 100, (1, 1)), (200, 100, (2, 1)), (100, 200, (1, 2)), (50_000, 1, (5, 1))]
)
def test_heat_maps_leave_out_whole_rows_and_columns(columns: int, rows: int, steps: tuple[int, int]) -> None:
    assert thinning.heat_map_steps(columns, rows) == steps
