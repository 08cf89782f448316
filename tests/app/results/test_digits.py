import random
from typing import Any

import pytest

from app.results import Cell, Column, Sheet
from app.results.digits import column_texts
from app.results.heads import separated


def texts(*numbers: float | tuple[float, float], unit: str = "ms") -> list[str]:
    cells = [Cell(n[0], n[1], 10, "ok") if isinstance(n, tuple) else Cell(n, None, 10, "ok") for n in numbers]
    return column_texts(cells, Column("x", "number", unit, role="metric"))


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ([55.67, 912.24, 57.878], ["55.7", "912.2", "57.9"]),
        ([812.2, 2672.1], ["812", "2672"]),
        ([(21.3456, 0.0123), (99.9, 0.5)], ["21.35 ± 0.01", "99.90 ± 0.50"]),
        ([(231.4, 138.2), (95.2, 40.0)], ["231 ± 138", "95 ± 40"]),
        ([0.01234, 1234.5], ["0.01234", "1234"]),
        ([3.0, 40.0], ["3", "40"]),
        ([(16.1, 13.5), 0.22713], ["16 ± 14", "0.2271"]),
        ([1.49e-6, 0.0001524], ["1.49e-06", "0.000152"]),
        ([(1.49e-5, 2e-6), (0.2, 0.01)], ["1.49e-05 ± 2e-06", "0.200 ± 0.010"]),
    ],
)
def test_a_column_has_as_many_decimals_as_suit_it(numbers: list[Any], shown: list[str]) -> None:
    assert texts(*numbers) == shown


def test_a_measured_number_is_never_zero(rng: random.Random) -> None:
    assert texts((0.123176, 14.0)) == ["0.1 ± 14.0"]
    for _ in range(200):
        noisy = [(rng.lognormvariate(0, 3), rng.lognormvariate(2, 3)) for _ in range(rng.randint(1, 3))]
        assert all(float(text.split(" ")[0]) for text in texts(*noisy)), (noisy, texts(*noisy))


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (Cell(1.1849, None, None, "ok"), "1.18×"),
        (Cell(0.0123, None, None, "ok"), "0.012×"),
        (Cell(1.234e-9, None, None, "ok", low=1.1e-9, high=1.4e-9), "1.2e-09× (1.1e-09–1.4e-09)"),
        (Cell(None, None, None, "no counterpart"), "no counterpart"),
        (Cell(None, None, None, None), "–"),
    ],
)
def test_gains(cell: Cell, text: str) -> None:
    assert column_texts([cell], Column("step_ms_speedup", "number", "1", role="gain")) == [text]


def test_zero_has_no_sign() -> None:
    assert texts((-0.3, 60.0)) == ["-0.3 ± 60.0"]
    assert texts((-0.3, 60.0), (-20.0, 80.0)) == ["-0.3 ± 60.0", "-20.0 ± 80.0"]
    assert texts(-0.0) == ["0"]


def test_a_median_of_few_has_its_range() -> None:
    column = Column("x", "number", "ms", role="metric")
    few = Cell(284.25, None, 4, "ok", least=15.5, greatest=635.0)
    equal = Cell(300.0, None, 4, "ok", least=300.0, greatest=300.0)
    assert column_texts([few, equal], column) == ["284.2 (15.5–635.0)", "300.0"]
    (apart,) = separated(Sheet([column], [[few]], statistic="median")).rows
    assert [(cell.value, cell.least) for cell in apart] == [(284.25, None), (15.5, None), (635.0, None)]
