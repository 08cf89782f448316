"""The spec of `ceiling`."""

import pytest
from pydantic import ValidationError

from app.specs.ceiling import CeilingSpec


def test_sizes_are_the_devices_unless_given() -> None:
    spec = CeilingSpec()
    assert (spec.matrix_size, spec.copy_mib) == (None, None)
    assert spec.resources().devices == 1
    assert spec.summary() == {"dtype": "fp32/tf32/bf16/fp16"}


def test_a_data_type_is_measured_once() -> None:
    with pytest.raises(ValidationError, match="'bf16' is there twice"):
        CeilingSpec(dtypes=["bf16", "fp32", "bf16"])
