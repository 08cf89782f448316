"""Saving and loading model and optimizer, at the same and at another number of ranks, over gloo."""

from pathlib import Path

import pytest

from tests.parallel import training
from tests.parallel.pool import Pool

EVERY = [
    ("fully sharded", "AdamW, fused"),
    pytest.param("fully sharded", "SGD", marks=pytest.mark.long),
    pytest.param("fully sharded, gathered once", "AdamW", marks=pytest.mark.long),
    pytest.param("sharded optimizer", "AdamW, fused", marks=pytest.mark.long),
    ("sharded optimizer", "SGD"),
    ("bucketed", "AdamW"),  # nothing is divided, as in the other wrappers
]


@pytest.mark.parametrize(("kind", "optimizer"), EVERY)
def test_another_number_of_ranks_goes_on(two_ranks, three_ranks, tmp_path, kind, optimizer) -> None:
    for few, many, name in ((two_ranks, three_ranks, "up"), (three_ranks, two_ranks, "down")):
        path = str(tmp_path / name)
        few(training.train_and_save, kind, optimizer, path)
        many(training.load_and_go_on, kind, optimizer, path)


@pytest.mark.parametrize(("kind", "optimizer"), EVERY)
def test_as_many_ranks_go_on_bit_by_bit(ranks: Pool, tmp_path: Path, kind: str, optimizer: str) -> None:
    ranks(training.resumed_exactly, kind, optimizer, str(tmp_path / "saved"))


def test_only_rank_0_keeps_what_is_saved(ranks: Pool) -> None:
    """The others hold one parameter at a time, with gloo's copies of it and what malloc keeps (6 to 11 sizes); rank
    0 keeps four, and Adam's two numbers for each, besides."""
    for rank, report in enumerate(ranks(training.peak_of_saving, 1536)):
        assert report["kept"] == pytest.approx(0 if rank else 12, rel=0.01)
        assert report["peak"] < (14 if rank else 28)
