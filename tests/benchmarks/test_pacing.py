"""The job's loop beside a plain one, with a small model on a CPU."""

from __future__ import annotations

import pytest

from app.specs.benchmark import BenchmarkSpec
from benchmarks import pacing


@pytest.mark.long
def test_a_row_has_the_three_times_and_their_ratio() -> None:
    fields = {"model": {"size": "tiny"}, "context_length": 16, "optimizer": "torch_adamw", "device": "cpu"}
    size, compiled, *numbers = pacing.row(BenchmarkSpec.model_validate(fields), rounds=1, steps=2)
    isolated, loop, plain = map(float, numbers[:3])
    ratio, of_mean = (float(text.partition(" (")[0]) for text in numbers[3:])
    assert (size, compiled) == ("tiny", "no")
    assert min(isolated, loop, plain) > 0
    assert ratio == pytest.approx(loop / plain, rel=0.01), "of the only round"
    assert of_mean == pytest.approx(ratio, rel=1e-3), "two samples: their median is their mean"
