"""Samples over the index of their step: lines, names, and what is drawn of very many."""

import random
from collections.abc import Iterable
from typing import Any

from app.web.samples import MAX_POINTS, MIN_STRETCHES, over_steps, thinned


def row(samples: list[float], unit_index: int = 0, **fields: Any) -> dict[str, Any]:
    return {"metric": "step_ms", "phase": "step", "unit": "ms", "unit_index": unit_index, "samples": samples, **fields}


def test_milliseconds_are_drawn_before_other_units() -> None:
    rate = row([5.0, 6.0], metric="tokens_per_s", phase=None, unit="tokens/s")
    assert [trace["name"] for trace in over_steps([rate, row([1.0, 2.0])], 1)["data"]] == ["step"]
    figure = over_steps([rate], 1)
    assert [trace["name"] for trace in figure["data"]] == ["tokens/s"]
    assert figure["layout"]["yaxis"]["title"]["text"] == "Tokens/s"


def test_many_long_lines_have_a_bounded_number_of_points() -> None:
    figure = over_steps([row([1.0, 2.0] * 1000, unit_index) for unit_index in range(100)], 100)
    assert len(figure["data"]) == 100
    assert all(2 <= len(trace["x"]) <= 2 * MIN_STRETCHES + 2 for trace in figure["data"])


def test_no_peak_of_a_long_line_is_lost(rng: random.Random) -> None:
    samples: list[float | None] = [rng.lognormvariate(0, 2) for _ in range(20_000)]
    samples[7] = None
    steps = thinned(samples, len(samples))
    assert {0, 19_999} < set(steps)
    assert 7 not in steps
    assert len(steps) <= MAX_POINTS + 2

    def spans(indexes: Iterable[int]) -> dict[int, tuple[float, float]]:
        stretches: dict[int, list[float]] = {}
        for index in indexes:
            if (value := samples[index]) is not None:
                stretches.setdefault(index // 10, []).append(value)
        return {stretch: (min(values), max(values)) for stretch, values in stretches.items()}

    assert spans(steps) == spans(range(20_000))
