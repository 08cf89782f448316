"""The spec of `estimate`."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from app.specs import spec_adapter
from app.specs.estimate import EstimateSpec

STACK = {"architecture": "feed_forward_stack"}


def estimate(**fields: Any) -> EstimateSpec:
    found = spec_adapter.validate_json(json.dumps({"kind": "estimate", **fields}))
    assert isinstance(found, EstimateSpec)
    return found


def test_it_takes_no_device() -> None:
    resources = estimate().resources()
    assert (resources.device_type, resources.devices, resources.exclusive_host) == ("none", 0, False)
    assert estimate().requirements() == {"model:transformer_lm"}


def test_its_defaults_are_those_of_the_sources() -> None:
    """CS336's problem communication_accounting, and the scaling book's TPU v5p."""
    spec = estimate()
    assert spec.stack.model_dump() == {"d_model": 16_384, "d_ff": 53_248, "num_blocks": 126}
    assert spec.mesh.model_dump() == {
        "fsdp": 16,
        "tensor": 4,
        "fsdp_axes": 2,
        "tensor_axes": 1,
        "link_bytes_per_s": 2 * 9e10,
        "flops_per_s": 4.6e14,
    }
    assert (spec.sharded_activation_fraction, spec.device_gb, spec.limit_gb) == (0.5, 80, 80)
    assert estimate(**STACK).limit_gb == 95
    assert estimate(**STACK, shard_limit_gb=7).limit_gb == 7
    assert (spec.precision, spec.parameter_dtype, spec.communication_dtype) == ("bf16", "fp32", "bf16")


@pytest.mark.parametrize(
    ("fields", "at", "message"),
    [
        ({"architecture": "rnn"}, "architecture", "'transformer', 'feed_forward_stack' or 'attention'"),
        ({"stack": {"num_blocks": 0}}, "stack.num_blocks", "greater than or equal to 1"),
        ({"stack": {"num_layers": 2}}, "stack.num_layers", "not permitted"),
        ({"mesh": {"fsdp": 0}}, "mesh.fsdp", "greater than or equal to 1"),
        ({"mesh": {"tensor": 2.5}}, "mesh.tensor", "valid integer"),
        ({"mesh": {"flops_per_s": 0}}, "mesh.flops_per_s", "greater than or equal to 1"),
        ({"sharded_activation_fraction": 1.01}, "sharded_activation_fraction", "less than or equal to 1"),
        ({"device_gb": 0}, "device_gb", "greater than or equal to 0.001"),
        ({"attention": "flex"}, "attention", "'eager', 'fused'"),
        ({"mode": "generate"}, "mode", "'forward'"),
        ({"model": {"size": "huge"}}, "model.size", "tiny"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(fields: dict[str, Any], at: str, message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        estimate(**fields)
    (error,) = raised.value.errors()
    assert ".".join(map(str, error["loc"])) == f"estimate.{at}"
    assert message in error["msg"]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
def test_16_bit_parameters_need_16_bit_products(precision: str) -> None:
    with pytest.raises(ValidationError) as raised:
        estimate(parameter_dtype="bf16", precision=precision)
    (error,) = raised.value.errors()
    assert error["ctx"]["field"] == "parameter_dtype"
    assert "need precision bf16" in error["msg"]


def test_the_other_architectures_sizes_change_nothing() -> None:
    assert estimate(stack={"num_blocks": 2}).case().key == estimate().case().key
    stack = estimate(**STACK)
    assert estimate(**STACK, model={"size": "xl"}, attention="fused").case().key == stack.case().key
    assert estimate(**STACK, stack={"num_blocks": 2}).case().key != stack.case().key
    assert stack.case().key != estimate().case().key


def test_people_see_the_model_and_the_batch() -> None:
    assert estimate(model={"size": "xl"}).summary() == {
        "model": "xl",
        "batch_size": 4,
        "context_length": 256,
        "precision": "bf16",
    }
    assert estimate(**STACK).summary()["model"] == "stack-d16384-f53248-b126"
    assert estimate().case().coordinates["stack.d_ff"] is None
    assert estimate(**STACK).case().coordinates["model.num_heads"] is None


def test_the_assignments_problem_is_a_preset() -> None:
    spec = estimate(**EstimateSpec.presets["communication_accounting"])
    assert spec.label() == "stack-d16384-f53248-b126"
    assert spec.batch_size * spec.context_length == 1024
