"""Starting and recording collective operations, over gloo with real processes."""

import pytest

from tests.parallel import steps, training
from tests.parallel.pool import Pool


@pytest.mark.parametrize("wrapper", ["naive", "overlapped", "bucketed, one", "fully sharded"])
def test_a_step_can_be_recorded(two_ranks: Pool, wrapper: str) -> None:
    for report in two_ranks(steps.timeline, wrapper):
        intervals = report["intervals"]
        assert report["after"] == len(intervals)  # nothing is noted after the recording
        assert all(0 <= start <= end <= report["took_ms"] + 1000 for _, _, start, end in intervals)
        reduced = [size for name, size, _, _ in intervals if name == "all_reduce"]
        if wrapper == "fully sharded":
            names = [name for name, *_ in intervals]
            assert set(names) == {"all_reduce", "all_gather", "reduce_scatter"}
            assert names[0] == "all_gather"
        else:
            # Every gradient, with gaps for alignment, and a byte per parameter for whether it was used.
            assert report["gradients"] + report["parameters"] <= sum(reduced) <= 2 * report["gradients"] + 4096
            assert len(reduced) == (3 if wrapper == "bucketed, one" else report["parameters"] + 1)


def test_who_used_what_can_be_exchanged_in_a_cuda_graph(two_ranks: Pool) -> None:
    copies = {"aten.lift_fresh.default", "aten._to_copy.default", "aten.copy_.default"}
    for names in two_ranks(steps.flags_of_use):
        assert "aten.ones.default" in names
        assert not names & copies


@pytest.mark.parametrize("wrapper", ["naive", "flat", "overlapped", "bucketed, one", "fully sharded"])
def test_a_wrapper_that_is_gone_keeps_nothing(two_ranks: Pool, wrapper: str) -> None:
    assert two_ranks(training.gone, wrapper) == [0, 0]
