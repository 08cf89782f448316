"""The sharded optimizer, over gloo with real processes."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from parallel.step_check import refuse_shared_memory
from tests.parallel import steps, training
from tests.parallel.pool import Pool


@pytest.mark.parametrize("kind", ["AdamW", "AdamW, fused", "SGD"])
def test_training_equals_the_plain_optimizer(ranks: Pool, kind: str) -> None:
    ranks(training.optimizer_parity, kind)


def test_parameters_without_memory_of_their_own_share_none() -> None:
    one, two = (TwoTensor(torch.ones(2), torch.ones(2)) for _ in range(2))
    refuse_shared_memory([("one", one), ("two", two)])
    with pytest.raises(TypeError, match="a and b are two parameters in one memory"):
        refuse_shared_memory([("a", one.a), ("b", one.a.view(2, 1))])


def test_each_parameters_state_is_on_one_rank(ranks: Pool) -> None:
    reports = ranks(training.optimizer_memory)
    names = [name for one in reports for name in one["parameters"]]
    assert len(names) == len(set(names)) > 8
    total, largest = reports[0]["all"], reports[0]["largest"]
    # Two moments per parameter. Greedy: no rank has more than its share and one largest parameter.
    assert sum(one["bytes"] for one in reports) == 2 * total
    for one in reports:
        assert one["loose"] == ["frozen.weight", "frozen.bias"]  # all others are exchanged in chunks
        assert one["bytes"] / 2 <= total / len(reports) + largest


def test_an_optimizers_own_counters_count_steps(two_ranks: Pool) -> None:
    two_ranks(training.optimizer_counters)


def test_gradients_of_other_ranks_parameters_are_not_told_as_lost(two_ranks: Pool) -> None:
    assert two_ranks(steps.told_as_lost) == [[]] * 2


def test_fewer_parameters_than_ranks(ranks: Pool) -> None:
    ranks(training.few, "sharded optimizer")


def test_parameter_groups_and_later_ones(ranks: Pool) -> None:
    ranks(training.optimizer_groups)


@pytest.mark.parametrize("to", [0, 1])
def test_state_is_consolidated_and_loaded(ranks: Pool, to: int) -> None:
    for rank, report in enumerate(ranks(training.optimizer_state, to)):
        other = (rank + 1) % ranks.world_size
        assert f"this is the part of rank {other} of {ranks.world_size}" in report["refused"]
        assert 0 < report["part"] < report["whole"]


def test_parameters_that_share_memory_stay_where_they_are(ranks: Pool) -> None:
    ranks(training.optimizer_alone_in_memory)


def test_parameters_that_another_thread_is_about_to_release_are_moved(two_ranks: Pool) -> None:
    """With the control: without waiting they stay."""
    assert two_ranks(training.optimizer_waits) == [[0, 1], [0, 1]]


def test_wrong_uses_are_refused(two_ranks: Pool) -> None:
    for closure, rank, groups, empty, different, moved, copied in two_ranks(training.optimizer_refuses):
        assert "takes no closure" in closure
        assert "to must be a rank from 0 to 1, not 9" in rank
        assert "other parameter groups" in groups
        assert "empty parameter list" in empty
        assert "list of parameters differs from rank 0's" in different
        assert "was given new memory" in moved
        assert "can be neither copied nor pickled" in copied
