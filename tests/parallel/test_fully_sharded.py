"""Fully sharded data parallelism, over gloo with real processes."""

import pytest

from tests.parallel import guards, outputs, sharding, training
from tests.parallel.pool import Pool


def test_training_equals_one_process_with_the_whole_batch(ranks: Pool) -> None:
    ranks(training.fully_sharded_parity)


@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_activation_checkpointing(two_ranks: Pool, where: str, how: str) -> None:
    two_ranks(training.fully_sharded_parity, f"{where} {how}")


@pytest.mark.parametrize(("evaluate_first", "checkpoint"), [(False, True), (True, False)])
def test_parameters_used_outside_their_modules(ranks: Pool, evaluate_first: bool, checkpoint: bool) -> None:
    for report in ranks(training.fully_sharded_used_outside, evaluate_first, checkpoint):
        assert report["memory"] == 0
        # The others are whole only while their unit runs.
        assert sorted(report["root"]) == [
            "attention.in_proj_weight",
            "attention.out_proj.weight",
            "blocks.0.up.weight",
            "blocks.1.down.weight",
            "embedding.weight",
        ]


@pytest.mark.parametrize("compute", [None, "bfloat16"])
def test_parameters_used_elsewhere_from_a_later_step_on(two_ranks: Pool, compute: str | None) -> None:
    for wrong in two_ranks(outputs.used_later, compute):
        assert wrong == []


@pytest.mark.parametrize("checkpoint", ["", pytest.param("inside non-reentrant", marks=pytest.mark.long)])
def test_units_may_stay_whole_between_their_passes(ranks: Pool, checkpoint: str) -> None:
    ranks(sharding.not_resharded, checkpoint)


def test_bytes_of_a_step(ranks: Pool) -> None:
    """Gathering once is ZeRO's stage 2: a reduction to the owners, and a gather; a sharded optimizer reduces
    for all ranks, and aligns parameters."""
    for sent in ranks(sharding.bytes_of_a_step):
        assert sent["gathered once"] == pytest.approx(2 * sent["P"])
        assert sent["fully sharded"] == pytest.approx(3 * sent["P"])
        assert 3 * sent["P"] <= sent["sharded optimizer"] < 3.6 * sent["P"]


def test_replicas_of_shards(four_ranks: Pool) -> None:
    four_ranks(sharding.hybrid)
    four_ranks(sharding.hybrid_branches)
    for errors in four_ranks(sharding.wrong_replicas):
        assert all("replicas must be the ranks with the same place" in error for error in errors)


@pytest.mark.parametrize(
    ("compute", "reduce", "clip"),
    [
        (None, None, True),
        (None, None, False),
        ("bfloat16", None, True),
        ("bfloat16", "float32", False),
        ("float16", None, False),
        (None, "bfloat16", False),
    ],
)
def test_training_beside_torchs(ranks: Pool, compute: str | None, reduce: str | None, clip: bool) -> None:
    """In float32 to its rounding; in half precision as near to it as torch's, whose sums have another order."""
    for difference in ranks(sharding.beside_torchs, compute, reduce, clip):
        if compute is None and reduce is None:
            assert max(difference.values()) < 1e-6
        else:
            assert 0 < difference["ours and alone"] < 2 * difference["torch's and alone"] + 1e-4


def test_gradients_accumulate_in_the_dtype_of_the_reduction(ranks: Pool) -> None:
    for error in ranks(sharding.accumulated):
        for axes in (1, 2):
            assert error[f"float32 {axes}"] < 1e-6 < 1e-4 < error[f"bfloat16 {axes}"]


@pytest.mark.parametrize("compute", [None, "bfloat16"])
def test_a_module_on_the_meta_device(ranks: Pool, compute: str | None) -> None:
    for report in ranks(sharding.from_meta, compute):
        # Beyond the parts, one layer's parameters exist at a time.
        assert report["existing"] < 0.9 * report["all"]
        device, values = report["errors"]
        assert "pass device=" in device
        assert "Everything has no reset_parameters(), so scalar, scale, count, mask would have any values" in values


def test_a_module_of_which_a_part_is_on_the_meta_device(two_ranks: Pool) -> None:
    two_ranks(sharding.partly_meta)


def test_frozen_parameters_of_every_dtype(ranks: Pool) -> None:
    ranks(sharding.kinds_of_numbers)


@pytest.mark.parametrize("passes", ["0 1 finished", "1", "1 2 finished", "0 1 2"])
def test_gradients_accumulate_without_being_sent(ranks: Pool, passes: str) -> None:
    ranks(training.fully_sharded_parity, "", 3, passes)


def test_states_that_do_not_fit_are_refused_on_every_rank(ranks: Pool) -> None:
    for names, shape, groups in ranks(training.wrong_states):
        assert "missing are [], unknown are ['other']" in names
        assert "norm.weight has the shape (3,) in the state and (8,) in the module" in shape
        assert "other parameter groups" in groups


@pytest.mark.parametrize(
    ("how", "norm_type", "penalised"),
    [
        ("ours", 2.0, ""),
        ("torch's", 1.0, ""),
        ("torch's", float("inf"), ""),
        ("ours", 2.0, "in the loss"),
        ("torch's", 2.0, "in a pass of its own"),
    ],
)
def test_gradients_are_clipped_by_the_norm_of_all_parts(ranks: Pool, how, norm_type, penalised) -> None:
    """Also those that autograd or a user wrote."""
    norms = ranks(guards.clipped, how, norm_type, penalised)
    assert all(one == norms[0] for one in norms)


def test_parts_have_their_parameters_number_of_axes(two_ranks: Pool) -> None:
    for numbers in two_ranks(guards.groups_by_axes):
        assert all(numbers)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW, fused"])  # only fused ones unscale by themselves
@pytest.mark.parametrize("kind", ["fully sharded", "sharded optimizer"])
def test_infinity_in_one_ranks_part_skips_the_step_on_all(ranks: Pool, kind: str, optimizer: str) -> None:
    for scales in ranks(training.scaled, kind, optimizer):
        assert scales == [64.0, 32.0, 32.0, 32.0]


def test_infinity_in_a_gradient_that_autograd_wrote_skips_the_step_on_all_ranks(two_ranks: Pool) -> None:
    assert two_ranks(guards.scaled_with_penalty) == [[32.0, True]] * 2


def test_what_fills_up_a_part_counts_for_nothing(ranks: Pool) -> None:
    assert ranks(guards.filled_up) == [[True] * 3] * 3


def test_a_layer_that_is_called_after_a_step_has_the_new_values(two_ranks: Pool) -> None:
    two_ranks(guards.called_after_a_step)


def test_results_of_the_shape_of_a_part_are_parts(two_ranks: Pool) -> None:
    two_ranks(guards.results_of_parts)


def test_hooks_of_parameters_are_refused(two_ranks: Pool) -> None:
    for *errors, removed in two_ranks(guards.refused_hooks):
        assert ["on 1.bias of" in error for error in errors] == [True, True, False, False, False, False]
        assert all("hooks do not work on" in error for error in errors)
        assert removed == "nothing was raised"


def test_wrapping_twice_is_refused(two_ranks: Pool) -> None:
    for errors in two_ranks(guards.wrapped_twice):
        assert all("already: wrap the whole model once" in error for error in errors["wrapper within"])
        assert all("is this rank's part of a parameter" in error for error in errors["parts"])
        assert "DistributedDataParallel is not needed" in errors["torch's wrapper"][0]


def test_wrong_arguments_are_refused(two_ranks: Pool) -> None:
    errors = two_ranks(guards.wrong_arguments)[1]
    dtype = "must be a floating-point dtype, such as torch.bfloat16, not"
    assert errors[:4] == [
        f"reduce_dtype {dtype} torch.int32",
        f"reduce_dtype {dtype} 'bfloat16'",
        f"reduce_dtype {dtype} torch.int32",
        f"compute_dtype {dtype} 'bfloat16'",
    ]
    assert "block.forward = torch.compile(block.forward)" in errors[4]
    assert "0 is compiled" in errors[5]
    assert "0 is a FullyShardedDataParallel already" in errors[6]
    assert errors[7] == errors[8] == "rank 1 is not in this process group: only its ranks may use it"
    assert "0.weight and 1.weight are two parameters in one memory" in errors[9]
    assert "parameter 0 and parameter 2 are two parameters in one memory" in errors[10]


def test_torchs_ways_to_save_and_load_parts_are_refused(two_ranks: Pool) -> None:
    for errors in two_ranks(guards.states_of_parts):
        assert len(errors) == 8
        for error in errors:
            assert "full_state_dict()" in error
            assert "load_full_state_dict()" in error


def test_states_of_another_models_optimizer_are_refused_on_every_rank(two_ranks: Pool) -> None:
    for weight, bias, number, part in two_ranks(guards.foreign_optimizer_states):
        assert "exp_avg of weight has the shape (6, 2) in the state and the parameter (3, 4)" in weight
        assert "exp_avg of bias has the shape (1,) in the state and the parameter (3,)" in bias
        assert "parameter 7" in number
        assert "the loaded exp_avg has the shape (3, 4), and this rank's part of its parameter (6,)" in part


def test_a_parameter_with_fewer_elements_than_ranks(ranks: Pool) -> None:
    ranks(training.few, "fully sharded")


def test_parameters_are_parts_whenever_no_unit_runs(two_ranks: Pool) -> None:
    two_ranks(training.fully_sharded_zeroed_between)


def test_the_wrapped_module_can_be_called_itself(two_ranks: Pool) -> None:
    for lengths in two_ranks(training.fully_sharded_called_inside):
        assert lengths[0] == lengths[1] == lengths[2] > 0


def test_ranks_may_use_different_units_that_are_not_divided(two_ranks: Pool) -> None:
    two_ranks(guards.branches_of_whole_units)


def test_computation_in_another_dtype(ranks: Pool) -> None:
    for report in ranks(training.fully_sharded_compute_dtype):
        assert report["computed"] == ["torch.bfloat16"]
        assert report["masters"] == ["torch.float32", "torch.float64"]
        assert (report["state"], report["gradient"]) == ("torch.float32", "torch.float32")
        for ours, theirs in report["losses"]:
            assert ours == pytest.approx(theirs, rel=0.03)
        assert report["losses"][-1][0] < report["losses"][0][0]
