"""The spec of `ceiling`."""

import pytest
from pydantic import ValidationError

from app.specs.ceiling import CeilingSpec


def test_a_data_type_is_measured_once() -> None:
    with pytest.raises(ValidationError, match="'bf16' is there twice"):
        CeilingSpec(dtypes=["bf16", "fp32", "bf16"])
