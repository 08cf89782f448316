"""The spec of `estimate`."""

import json
from typing import Any

import pytest

from app.specs import spec_adapter
from app.specs.estimate import EstimateSpec
from tests.app.specs.refusals import assert_refused

STACK = {"architecture": "feed_forward_stack"}


def estimate(**fields: Any) -> EstimateSpec:
    return spec_adapter.validate_json(json.dumps({"kind": "estimate", **fields}))


def test_it_takes_no_device() -> None:
    resources = estimate().resources()
    assert (resources.device_type, resources.devices, resources.exclusive_host) == ("none", 0, False)
    assert estimate().requirements() == {"model:transformer_lm"}


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
def test_16_bit_parameters_need_16_bit_products(precision: str) -> None:
    fields = {"parameter_dtype": "bf16", "precision": precision}
    assert_refused("estimate", fields, "parameter_dtype", "need precision bf16")


def test_the_limit_of_shards_is_the_device_unless_given() -> None:
    """And a stack's device is the scaling book's TPU v5p."""
    assert [estimate(**one).limit_gb for one in ({}, STACK, {**STACK, "shard_limit_gb": 7})] == [80, 95, 7]
