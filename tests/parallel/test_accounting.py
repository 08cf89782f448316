"""Formulas for exchanged bytes."""

import pytest

from parallel.accounting import OPERATIONS, STRATEGIES, Traffic, step_traffic, traffic_factor


def ring_bytes(operation: str, ranks: int, size: int) -> float:
    """The most bytes that one rank of a ring sends, counted step by step over pieces of size / ranks."""
    piece = size / ranks
    sent = [0.0] * ranks
    rounds = {"all_reduce": 2 * (ranks - 1)}
    if operation == "send_receive":
        sent = [ranks * piece if ranks > 1 else 0.0] * ranks
    elif operation == "broadcast":
        for rank in range(ranks - 1):  # the last one of the chain sends nothing
            sent[rank] += ranks * piece
    else:
        for _ in range(rounds.get(operation, ranks - 1)):
            for rank in range(ranks):
                sent[rank] += piece
    return max(sent)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_factors_count_what_a_ring_sends(operation: str, ranks: int) -> None:
    assert traffic_factor(operation, ranks) * 840 == pytest.approx(ring_bytes(operation, ranks, 840))


def test_each_micro_batch_of_full_sharding_travels() -> None:
    """Traffic of other steps is in tests/workers/jobs/ddp."""
    traffic = step_traffic("fsdp", gradient_bytes=100, parameter_bytes=100, sharded_bytes=80, micro_batches=3)
    assert traffic == Traffic(all_reduce=20, all_gather=480, reduce_scatter=240)
    adapters = step_traffic("fsdp", gradient_bytes=3, parameter_bytes=3, sharded_bytes=2, frozen_bytes=50)
    assert adapters == Traffic(all_reduce=1, all_gather=104, reduce_scatter=2)


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown operation 'gather'; known are all_reduce"):
        traffic_factor("gather", 2)
    with pytest.raises(ValueError, match="ranks must be 1 or more, not 0"):
        traffic_factor("all_reduce", 0)
    with pytest.raises(ValueError, match="unknown strategy 'ddp'; known are none"):
        step_traffic("ddp", gradient_bytes=1, parameter_bytes=1)
    for strategy in STRATEGIES:
        if strategy in ("none", "fsdp", "torch_fsdp"):
            with pytest.raises(ValueError, match="sharded_optimizer does not go with"):
                step_traffic(strategy, gradient_bytes=1, parameter_bytes=1, sharded_optimizer=True)
