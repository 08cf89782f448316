"""Backward passes under full sharding, of every kind, over gloo with real processes."""

import pytest

from tests.parallel import outputs, passes, training
from tests.parallel.pool import Pool


def test_units_that_run_repeatedly_in_every_kind_of_pass(ranks: Pool) -> None:
    for failed in ranks(passes.some, None):
        assert failed == []


@pytest.mark.long
@pytest.mark.parametrize("kind", passes.INPUTS)
@pytest.mark.parametrize("compute", [None, "bfloat16"])
def test_the_whole_table_of_passes(ranks: Pool, kind: str, compute: str | None) -> None:
    for failed in ranks(passes.table, kind, compute):
        assert failed == []


def test_ranks_that_are_done_with_a_repeated_unit_at_different_times(ranks: Pool) -> None:
    assert ranks(passes.experts) == [[]] * 3


def test_operations_of_a_plain_step(two_ranks: Pool) -> None:
    """Each unit is gathered while another computes, and at most one is being reduced meanwhile."""
    forward = "+embedding +blocks.0 +blocks.1 +blocks.2 +blocks.3 +head backward"
    backward = (
        "+blocks.3 +blocks.2 -head +blocks.1 -blocks.3 wait +blocks.0 -blocks.2 wait +embedding -blocks.1 wait "
        "-blocks.0 wait -embedding wait finish wait"
    )
    for found in two_ranks(passes.operations, True):
        assert " ".join(found) == f"{forward} {backward}"
    for found in two_ranks(passes.operations, False):
        kept = [word for word in backward.split() if not word.startswith("+")]
        assert found == [*forward.split(), *kept]


def test_units_may_return_anything(ranks: Pool) -> None:
    for wrong in ranks(outputs.returned):
        assert wrong == {}


def test_units_in_whose_outputs_nothing_is_found_are_refused(two_ranks: Pool) -> None:
    for errors in two_ranks(outputs.unseen):
        assert "the unit 'blocks.0' (Unit) returns function, in which no tensor is found" in errors["function"]
        assert "has been modified by an inplace operation" in errors["nothing"]
        assert "returns int" in errors["number"]
        assert errors["raises"] == "division by zero"
        assert "the unit '' (Model) returns its parameter blocks.1.up.weight" in errors["a parameter"]


def test_a_unit_that_calls_itself(two_ranks: Pool) -> None:
    assert two_ranks(outputs.within_itself) == [[], []]


def test_what_a_unit_does_not_return_is_right_or_refused(two_ranks: Pool) -> None:
    assert two_ranks(outputs.sidelong, "before") == [[], []]
    for when in ("after", "read"):
        with pytest.raises(AssertionError, match="has been modified by an inplace operation"):
            two_ranks(outputs.sidelong, when)


def test_derivatives_by_the_inputs(two_ranks: Pool) -> None:
    refused = {
        "create_graph": "full sharding has no second derivatives",
        "func.grad": "BucketedDataParallel",
        "functional_call": "stem.weight is another parameter than when FullyShardedDataParallel wrapped the model",
        "parts": "not have been used in the graph",
    }
    for found in two_ranks(outputs.derivatives):
        for name, text in found.items():
            assert (refused[name] in text) if name in refused else text == "", name


def test_copies_are_refused(two_ranks: Pool) -> None:
    for of_model, of_module in two_ranks(outputs.copies):
        assert "can be neither copied nor pickled" in of_model
        assert "this is a copy of a module in a FullyShardedDataParallel" in of_module


def test_an_error_in_the_backward_pass_leaves_no_gradients(two_ranks: Pool) -> None:
    assert two_ranks(outputs.after_an_error) == [[], []]


def test_a_dropped_model_is_freed_without_the_garbage_collector(two_ranks: Pool) -> None:
    """Else it outlives the process group."""
    assert two_ranks(training.freed_by_count) == [[], []]
