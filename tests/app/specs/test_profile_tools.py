"""The fields of a profile that ask for tools of the worker's host."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from app.specs.profile import ProfileSpec


def spec(**fields: Any) -> ProfileSpec:
    return ProfileSpec.model_validate_json(json.dumps(fields))


def test_a_job_requires_the_tools_that_it_asks_for() -> None:
    plain = spec().requirements()
    assert not any(name.startswith("tool:") for name in plain)
    assert spec(nsys=True).requirements() == plain | {"tool:nsys"}
    assert spec(nsys=True, ncu={}).requirements() == plain | {"tool:nsys", "tool:ncu"}


@pytest.mark.parametrize("fields", [{"nsys": True}, {"ncu": {"set": "full"}}])
def test_a_tool_needs_a_gpu(fields: dict[str, Any]) -> None:
    assert spec(**fields).resources().device_type == "cuda"
    assert spec(**fields, device="cuda").resources().device_type == "cuda"
    with pytest.raises(ValidationError, match="profiles the kernels of a GPU: leave it out, or choose device cuda"):
        spec(**fields, device="cpu")


@pytest.mark.parametrize(("kernels", "words"), [("flash(", "no regular expression"), ("a\0", "a control character")])
def test_a_filter_that_is_no_regular_expression_is_refused(kernels: str, words: str) -> None:
    with pytest.raises(ValidationError) as raised:
        spec(ncu={"kernels": kernels})
    (error,) = raised.value.errors()
    assert error["ctx"]["field"] == "kernels"
    assert words in error["msg"]


@pytest.mark.parametrize("kernels", ["flash|fmha", "[[a]", "a{2}"])
@pytest.mark.filterwarnings("error")
def test_a_filter_may_be_any_regular_expression(kernels: str) -> None:
    assert spec(ncu={"kernels": kernels}).ncu.kernels == kernels
