"""The numbers that ranks exchange, and the sizes of their tensors. The operations themselves are tested with ranks, by
tests/workers/jobs/test_collective.py."""

from pathlib import Path

import pytest
import torch

from workers.measure import collective_timing
from workers.measure.collective_timing import DTYPES, MB, Numbers, size_bytes, why_too_large_for_host

CPU = torch.device("cpu")


@pytest.fixture
def short_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that repeat within a small tensor."""
    monkeypatch.setattr(collective_timing, "PATTERN_LENGTH", 97)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 6, 64])
def test_sums_over_ranks_are_exact_in_every_data_type(short_pattern: None, dtype: str, ranks: int) -> None:
    numbers = Numbers(0, ranks, CPU, DTYPES[dtype])
    total = torch.zeros(1000, dtype=DTYPES[dtype])
    own = torch.empty_like(total)
    for rank in range(ranks):
        numbers.fill(own, rank=rank)
        total += own
    assert numbers.wrong(total, factor=ranks) is None
    assert numbers.wrong(total * (-1 / ranks), factor=-1) is None, "they can be added up again"


def test_a_wrong_number_is_found_wherever_it_is(short_pattern: None) -> None:
    numbers = Numbers(0, 2, CPU, torch.float32)
    whole = torch.empty(1000)
    numbers.fill(whole, rank=1)
    assert numbers.wrong(whole, factor=1, shift=numbers.shift(1)) is None
    piece = whole[500:].clone()
    assert numbers.wrong(piece, factor=1, shift=numbers.shift(1), first=500) is None
    assert numbers.wrong(piece, factor=1, shift=numbers.shift(1)) is not None, "a piece of another place"
    assert numbers.wrong(whole, factor=1, shift=numbers.shift(0)) is not None, "another rank's"
    for place, value in ((0, 9.0), (499, float("nan")), (999, float("inf"))):
        broken = whole.clone()
        broken[place] = value
        assert f"number {place} is {value:g} instead of" in str(numbers.wrong(broken, factor=1, shift=numbers.shift(1)))
    assert "number 999 is" in str(numbers.wrong(broken[500:], factor=1, shift=numbers.shift(1), first=500))


def test_every_rank_gets_a_piece_of_the_same_size() -> None:
    assert size_bytes(1, 2) == MB
    assert size_bytes(1, 3) == MB - MB % 48
    assert size_bytes(0.001, 64) == 1024


def test_too_much_for_the_host_is_known_before(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  4194304 kB\nMemAvailable:  1048576 kB\n")
    assert why_too_large_for_host(2**30, meminfo) is None
    assert why_too_large_for_host(2**31, meminfo) == "out of memory: the ranks need 2 GiB, and the host has 1 GiB"
    meminfo.write_text("MemTotal:  4194304 kB\n")
    assert why_too_large_for_host(2**60, meminfo) is None
    assert why_too_large_for_host(2**60, tmp_path / "none") is None
