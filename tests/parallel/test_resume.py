"""Saving and loading model and optimizer, at the same and at another number of ranks, over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel import training
from tests.parallel.pool import Pool

KINDS = ["fully sharded", "sharded optimizer", "bucketed"]
OPTIMIZERS = ["AdamW", "AdamW, fused", "SGD"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_another_number_of_ranks_goes_on(
    two_ranks: Pool, three_ranks: Pool, tmp_path: Path, kind: str, optimizer: str
) -> None:
    for few, many, name in ((two_ranks, three_ranks, "up"), (three_ranks, two_ranks, "down")):
        path = str(tmp_path / name)
        few(training.train_and_save, kind, optimizer, path)
        many(training.load_and_go_on, kind, optimizer, path)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_as_many_ranks_go_on_bit_by_bit(two_and_three: Pool, tmp_path: Path, kind: str, optimizer: str) -> None:
    two_and_three(training.resumed_exactly, kind, optimizer, str(tmp_path / "saved"))
