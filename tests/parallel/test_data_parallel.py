"""The data-parallel wrappers, over gloo with real processes."""

from collections.abc import Iterable

import pytest
import torch

from tests.parallel import guards, training
from tests.parallel.pool import Pool

WRAPPERS = ["naive", "flat", "overlapped", "bucketed, one", "bucketed, tiny", "bucketed"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_training_equals_one_process_with_the_whole_batch(ranks: Pool, wrapper: str) -> None:
    ranks(training.parity, wrapper)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_may_travel_in_bfloat16(ranks: Pool, wrapper: str) -> None:
    for report in ranks(training.reduced_in_bfloat16, wrapper):
        # Half of float32 and a quarter of float64, beside a byte per parameter for who used it.
        assert report["sent"]["torch.bfloat16"] < 0.6 * report["sent"]["None"]
        assert report["errors"]["None"] < 1e-5 < 1e-4 < report["errors"]["torch.bfloat16"] < 2**-6


def test_gradients_are_views_of_the_bucket(two_ranks: Pool) -> None:
    for before, after in two_ranks(training.bucket_views):
        assert before[torch.float32] == after[torch.float32]


@pytest.mark.parametrize("wrapper", ["flat", "bucketed", "fully sharded"])
def test_complex_gradients_that_travel_in_another_dtype(ranks: Pool, wrapper: str) -> None:
    ranks(training.complex_reduced_in_float64, wrapper)


def test_ranks_with_fewer_batches_are_named(ranks: Pool) -> None:
    assert ranks(training.uneven, [4, 4, 4]) == [[4, ""]] * 3
    for steps, text in ranks(training.uneven, [4, 2, 4]):
        assert steps == 2
        assert "rank 1 has no more batches after 2 steps, and rank 0 has" in text


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_accumulate(ranks: Pool, wrapper: str) -> None:
    ranks(training.accumulation, wrapper)


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "fully sharded"])
def test_ranks_may_use_different_parameters(ranks: Pool, wrapper: str) -> None:
    ranks(training.branches, wrapper, {0: [0, 1], 1: [1, 0, 2], 2: [2]})


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_rank_may_have_no_backward_pass(ranks: Pool, wrapper: str) -> None:
    ranks(training.no_gradient_at_all, wrapper)


FORWARD, BACKWARD = [0, 1, 2, 3], [3, 2, 1, 0]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("alone_first", [True, False])
def test_the_order_of_gradients_may_change(two_ranks: Pool, set_to_none: bool, alone_first: bool) -> None:
    """The step in which the order changes, or the last parameter is not used, sends the bucket at its end; the next
    step of that order sends in the backward pass."""
    steps = [FORWARD, BACKWARD, BACKWARD, FORWARD, FORWARD, [1, 2, 3], FORWARD]
    for report in two_ranks(training.orders, "bucketed, one", set_to_none, steps, alone_first):
        assert report["sent"] == [1, 0, 1, 0, 1, 0, 1]
        assert report["operations"] == [2] * 7  # the bucket, and who used what


@pytest.mark.parametrize("wrapper", ["overlapped", "bucketed, tiny"])
def test_orders_may_change_with_several_buckets(ranks: Pool, wrapper: str) -> None:
    for report in ranks(training.orders, wrapper, False, [FORWARD, BACKWARD, [1, 3], FORWARD, FORWARD]):
        assert report["sent"][0] == report["sent"][-1] > 1


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_backward_pass_that_is_given_up(two_ranks: Pool, wrapper: str) -> None:
    two_ranks(training.given_up, wrapper)


def test_gradients_in_one_memory_are_averaged_once(ranks: Pool) -> None:
    ranks(training.aliased)


def test_a_former_wrapper_is_gone(two_ranks: Pool) -> None:
    two_ranks(training.rewrapped)


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "fully sharded"])
def test_a_forgotten_synchronization_is_noticed(two_ranks: Pool, wrapper: str) -> None:
    for *forgotten, finished in two_ranks(guards.unfinished, wrapper):
        assert all("call finish_gradient_synchronization() after backward()" in error for error in forgotten)
        assert finished == "nothing was raised"


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_hooks_that_are_registered_later_come_before_the_average(two_ranks: Pool, wrapper: str) -> None:
    overlaps = wrapper.startswith(("overlapped", "bucketed"))
    assert two_ranks(guards.hooked_later, wrapper) == [([4.0] * 4, overlaps)] * 2


@pytest.mark.parametrize("wrapper", ["naive", "bucketed, tiny"])
def test_wrappers_can_be_compiled_as_a_whole(two_ranks: Pool, wrapper: str) -> None:
    two_ranks(guards.compiled, wrapper)


@pytest.mark.parametrize("wrapper", ["overlapped", "bucketed"])
def test_a_rank_with_more_backward_passes_learns_of_it(two_ranks: Pool, wrapper: str) -> None:
    (error,), others = two_ranks(guards.uneven_passes, wrapper)
    assert "another rank has run fewer backward passes in this step" in error
    assert others == ["nothing was raised"] * 2


@pytest.mark.parametrize(
    ("way", "wrappers", "message"),
    [
        ("unfreeze", WRAPPERS, "0.weight needs a gradient now"),
        ("unfreeze", ["fully sharded"], "requires_grad of 0.weight was False when the model was wrapped"),
        ("freeze", ["fully sharded"], "requires_grad of 0.weight was True when the model was wrapped"),
        ("clip", ["fully sharded"], "after backward() and before clip_grad_norm_()"),
        ("replace", [*WRAPPERS, "fully sharded"], "1.weight needs a gradient now, and was frozen or not there"),
        ("closure", [*WRAPPERS, "fully sharded"], "before the optimizer's step(), also in a closure"),
        ("skip", ["overlapped", "bucketed", "fully sharded"], "before the optimizer's zero_grad()"),
        ("skip after no_sync", ["fully sharded"], "before the optimizer's zero_grad()"),
        ("step after no_sync", ["fully sharded"], "before the optimizer's step()"),
        ("forget", ["overlapped", "bucketed", "fully sharded"], "before zero_grad(), also in a closure"),
        ("early", ["fully sharded"], "make the optimizer after it"),
        ("Adafactor", ["fully sharded"], "Adafactor needs whole parameters"),
        ("LBFGS", ["fully sharded"], "LBFGS needs whole parameters"),
        ("MuonWithAuxAdam", ["fully sharded"], "MuonWithAuxAdam needs whole parameters"),
        ("gradients' sum", ["fully sharded"], "sum of a gradient"),
        ("gradient's elements", ["fully sharded"], "any of a gradient"),
        ("gradients as one", ["fully sharded"], "cat of a gradient"),
        ("parameter's norm", ["fully sharded"], "norm of a parameter"),
        ("initialise", ["fully sharded"], "initialise the model before you wrap it"),
        ("change in the forward pass", ["fully sharded"], "'0' (Linear) has changed its parameter 0.weight in place"),
        ("change between the passes", ["fully sharded"], "0.weight was changed in place, as by an optimizer's step"),
        ("order", ["fully sharded"], "the ranks ran the model's units in different orders"),
        ("format", ["overlapped", "bucketed"], "1.image has another memory format than when the model was wrapped"),
        ("former", ["fully sharded"], "0.weight is still used as it was before FullyShardedDataParallel divided it"),
        ("another head", ["fully sharded"], "call the same blocks in the same order, and differentiate them"),
    ],
)
def test_a_step_that_would_train_wrongly(two_ranks: Pool, way: str, wrappers: Iterable[str], message: str) -> None:
    for wrapper in wrappers:
        for error in two_ranks(guards.misused, wrapper, way):
            assert message in error, wrapper


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("different", "rank 1's module differs from rank 0's"),
        ("size", "bucket_size_mb must be more than 0, not 0"),
        ("sparse", "the gradient of weight is sparse"),
    ],
)
def test_wrong_uses_are_refused(two_ranks: Pool, what: str, message: str) -> None:
    assert all(message in answer for answer in two_ranks(training.raises, what))
