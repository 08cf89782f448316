"""One pool of ranks per world size for all tests of this folder, which one process runs: each would start its own."""

from collections.abc import Iterator

import pytest

from tests.parallel.pool import Pool


@pytest.fixture(scope="package")
def two_ranks() -> Iterator[Pool]:
    """Two ranks over gloo."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="package")
def three_ranks() -> Iterator[Pool]:
    """Three ranks over gloo."""
    pool = Pool(3)
    yield pool
    pool.close()


@pytest.fixture(scope="package")
def four_ranks() -> Iterator[Pool]:
    """Four ranks over gloo: the fewest for hybrid sharding."""
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture
def ranks(three_ranks: Pool) -> Pool:
    """Three ranks: nothing divided by three is exact, or even. With two, tests/workers/jobs/ddp trains."""
    return three_ranks


@pytest.fixture(scope="package")
def one_gpu() -> Iterator[Pool]:
    """One rank over NCCL."""
    pool = Pool(1, "nccl")
    yield pool
    pool.close()


@pytest.fixture(scope="package")
def gpus() -> Iterator[Pool]:
    """Ranks over NCCL, as many as there are GPUs."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs; there are {torch.cuda.device_count()}")
    pool = Pool(torch.cuda.device_count(), "nccl")
    yield pool
    pool.close()
