"""Timing collective operations, over gloo with real processes."""

from __future__ import annotations

import pytest

from parallel.accounting import OPERATIONS
from tests.parallel import timing, training
from tests.parallel.pool import Pool


@pytest.mark.parametrize("name", OPERATIONS)
def test_sizes_are_of_the_whole_tensor(ranks: Pool, name: str) -> None:
    for found in ranks(timing.operation, name, 1000):
        assert found["bytes"] == (1000 if ranks.world_size == 2 else 1008)  # equal pieces of whole elements
        assert len(found["times"]) == 3
        assert found["calls"] == 5
        assert all(time > 0 for time in found["times"])


def test_operations_do_what_their_names_say(two_ranks: Pool) -> None:
    assert two_ranks(timing.results, "all_reduce") == [[3, 3], [3, 3]]
    assert two_ranks(timing.results, "all_gather") == [[1, 2], [1, 2]]
    assert two_ranks(timing.results, "reduce_scatter") == [[3, 3], [3, 3]]
    assert two_ranks(timing.results, "broadcast") == [[1, 1], [1, 1]]


def test_a_steps_time_is_the_slowest_ranks(ranks: Pool) -> None:
    last = ranks.world_size - 1
    for found in ranks(timing.uneven_ranks):
        assert found["slowest"] == [1 + last, 5]
        assert found["skew"] == [last, last]
        assert found["ranks"] == [[1 + rank, 5 - rank] for rank in range(ranks.world_size)]


def test_ranks_begin_together(two_ranks: Pool) -> None:
    assert max(two_ranks(timing.late_rank)) < 400  # ms; the last rank came 500 ms late


@pytest.mark.parametrize("what", ["bucketed, in place", "fully sharded"])
def test_operations_can_be_started_together(ranks: Pool, what: str) -> None:
    assert all(count > 4 for count in ranks(training.together, what))


@pytest.mark.parametrize("wrapper", ["naive", "overlapped", "bucketed, one", "fully sharded"])
def test_a_step_can_be_recorded(two_ranks: Pool, wrapper: str) -> None:
    for found in two_ranks(timing.timeline, wrapper):
        intervals = found["intervals"]
        assert found["after"] == len(intervals)  # nothing is noted after the recording
        assert all(0 <= start <= end <= found["took_ms"] + 1000 for _, _, start, end in intervals)
        reduced = [size for name, size, _, _ in intervals if name == "all_reduce"]
        if wrapper == "fully sharded":
            names = [name for name, *_ in intervals]
            assert set(names) == {"all_reduce", "all_gather", "reduce_scatter"}
            assert names[0] == "all_gather"
        else:
            # Every gradient, with gaps for alignment, and a byte per parameter for whether it was used.
            assert found["gradients"] + found["parameters"] <= sum(reduced) <= 2 * found["gradients"] + 4096
            assert len(reduced) == (3 if wrapper == "bucketed, one" else found["parameters"] + 1)


def test_wrong_uses_are_refused(two_ranks: Pool) -> None:
    with pytest.raises(AssertionError, match="unknown operation 'gather'; known are all_reduce"):
        two_ranks(timing.operation, "gather", 8)
    with pytest.raises(AssertionError, match="size_bytes must be 1 or more, not 0"):
        two_ranks(timing.operation, "all_reduce", 0)
