"""A group in which nothing travels, with real processes. Tests of kind `ddp` run every wrapper over it."""

from tests.parallel import silent
from tests.parallel.pool import Pool


def test_a_rank_gets_its_own_values(ranks: Pool) -> None:
    ranks(silent.operations)


def test_what_is_gathered_has_the_size_of_what_would_come(ranks: Pool) -> None:
    ranks(silent.sizes_stay)
