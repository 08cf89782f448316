"""The search for the largest value that fits: exact to its step or, without one, to a sixteenth of the value."""

import random

import pytest

from app.specs._fit import Fit, FitBody


def searched(fit: Fit, limit: int) -> tuple[int | None, int | None, list[int]]:
    """Search where every value up to `limit` fits; returns the largest that fitted, the first that did not, and all."""
    tried: list[int] = []
    while (value := fit.next_value([v for v in tried if v <= limit], [v for v in tried if v > limit])) is not None:
        assert value not in tried
        tried.append(value)
    fitted, not_fitted = [v for v in tried if v <= limit], [v for v in tried if v > limit]
    return max(fitted, default=None), min(not_fitted, default=None), tried


def fit_of(present: int | list[int] | None = 256, least: int = 1, **body: int) -> Fit:
    return Fit.of(FitBody.model_validate({"axis": "context_length", "upto": 65_536, **body}), present, least)


def test_it_is_exact_to_its_step(rng: random.Random) -> None:
    for _ in range(300):
        step, upto = rng.randint(1, 50), rng.randint(50, 100_000)
        fit = fit_of(rng.randint(1, upto), step=step, upto=upto)
        limit = rng.randint(0, upto + step)
        largest, too_large, tried = searched(fit, limit)
        assert all(value % step == 0 and 0 < value <= upto for value in tried)
        assert largest == (min(limit, upto) // step * step or None)
        if too_large is not None:
            assert too_large - (largest or 0) == step
        assert len(tried) <= fit.most_jobs <= 2 * (upto // step).bit_length() + 2


@pytest.mark.parametrize(("coarse", "apart"), [(True, 16), (False, 10**9)])
def test_without_a_step_it_ends_near_the_limit_unless_it_is_to_be_exact(coarse: bool, apart: int) -> None:
    for start, limit in [(4, 1700), (4, 31), (50_000, 1100), (4096, 23), (3, 65_000), (1, 1)]:
        fit = Fit.of(FitBody(axis="batch_size", upto=65_536), start, 1, coarse=coarse)
        largest, too_large, tried = searched(fit, limit)
        assert largest <= limit < too_large <= largest + max(1, largest // apart)
        assert len(tried) <= fit.most_jobs
    assert len(searched(Fit.of(FitBody(axis="batch_size", upto=65_536), 4, 1), 1700)[2]) == 14


@pytest.mark.parametrize("present", [1, 100, 1000])
def test_the_longest_search_takes_nearly_as_many_jobs_as_it_may(present: int) -> None:
    for fit in (fit_of(present, upto=1000), fit_of(present, upto=1000, step=1)):
        longest = max(len(searched(fit, limit)[2]) for limit in range(1001))
        assert longest <= fit.most_jobs <= longest + 2


def test_it_goes_down_where_the_first_value_does_not_fit() -> None:
    largest, too_large, tried = searched(fit_of(4096, step=256), 700)
    assert (largest, too_large) == (512, 768)
    assert tried[:3] == [4096, 2048, 1024]


@pytest.mark.parametrize(
    ("present", "least", "body", "start", "lowest"),
    [
        (256, 1, {}, 256, 1),
        (300, 1, {"step": 64}, 256, 64),
        (None, 2, {}, 2, 2),
        (None, 2, {"step": 8}, 8, 8),
        (256, 1, {"upto": 100}, 100, 1),
        (256, 1, {"start": 32}, 32, 1),
        ([128, 256], 1, {}, 128, 1),
    ],
)
def test_defaults(present: int | list[int] | None, least: int, body: dict[str, int], start: int, lowest: int) -> None:
    fit = fit_of(present, least, **body)
    assert (fit.start, fit.lowest) == (start, lowest)
    assert fit.spec({"kind": "benchmark"}, 7)["context_length"] == ([7] if isinstance(present, list) else 7)


def test_the_base_is_left_as_it_is() -> None:
    base = {"kind": "benchmark", "model": {"size": "tiny"}}
    fit = Fit.of(FitBody(axis="model.num_layers", upto=100), None, 1)
    assert fit.spec(base, 3)["model"] == {"size": "tiny", "num_layers": 3}
    assert base["model"] == {"size": "tiny"}
