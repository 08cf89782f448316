import pytest

from workers.measure.ceilings import Ceiling, Rate
from workers.measure.profiling.attention import Roofline, roofline


def test_the_side_of_the_roofline() -> None:
    line = Roofline(tflops=50.0, gb_per_s=4000.0)
    assert line.ridge == pytest.approx(12.5)
    assert (line.side(12.4), line.side(12.6)) == ("memory-bound", "compute-bound")
    assert line.limit_tflops(1.0) == pytest.approx(4.0)
    assert line.limit_tflops(100.0) == pytest.approx(50.0)


def test_the_roofline_is_of_the_precision() -> None:
    rate = Rate(50.0, "2026-01-01T00:00:00Z")
    known = Ceiling("GPU", {"fp32": rate}, Rate(4000.0, "2026-01-01T00:00:00Z"))
    assert roofline(known, "fp32") == Roofline(50.0, 4000.0)
    for ceiling, words in ((known, "in bf16"), (None, "in bf16"), (Ceiling("GPU", {"bf16": rate}), "copies")):
        assert f"{words} is on record" in str(roofline(ceiling, "bf16"))
