import pytest

from workers.measure.profiling.attention import Roofline


def test_the_side_of_the_roofline() -> None:
    line = Roofline(tflops=50.0, gb_per_s=4000.0)
    assert line.ridge == pytest.approx(12.5)
    assert (line.side(12.4), line.side(12.6)) == ("memory-bound", "compute-bound")
    assert line.limit_tflops(1.0) == pytest.approx(4.0)
    assert line.limit_tflops(100.0) == pytest.approx(50.0)
