"""Saving and loading a fully sharded model, at the same and at another number of ranks, over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel import training
from tests.parallel.pool import Pool


def test_any_number_of_ranks_loads(two_ranks: Pool, three_ranks: Pool, tmp_path: Path) -> None:
    for one, other in ((two_ranks, three_ranks), (three_ranks, two_ranks)):
        path = str(tmp_path / str(one.world_size))
        one(training.save, path)
        one(training.load, path)
        other(training.load, path)


def test_only_rank_0_keeps_what_is_saved(ranks: Pool) -> None:
    """The others hold one parameter at a time, with gloo's copies of it (3 sizes, up to 5 with what malloc keeps); rank
    0 keeps four, too."""
    for rank, report in enumerate(ranks(training.peak_of_saving, 1536)):
        assert report["kept"] == pytest.approx(0 if rank else 4, rel=0.01)
        assert report["peak"] < (8 if rank else 12)
