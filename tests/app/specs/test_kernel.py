"""The spec of `kernel`."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from app.specs.kernel import KernelSpec


def test_cells_are_the_whole_grid_and_those_with_one_oracle_follow_each_other() -> None:
    spec = KernelSpec(rows=[64, 32], columns=[8, 7], dtypes=["fp32", "bf16"])
    cells = spec.cells()
    assert len(cells) == len(set(cells)) == 2**4
    assert [(cell.implementation, cell.rows, cell.columns) for cell in cells[:4]] == [
        ("torch", 32, 7),
        ("triton", 32, 7),
        ("torch", 32, 8),
        ("triton", 32, 8),
    ]
    assert cells[0].coordinates().keys() <= spec.coordinates().keys()
    assert spec.coordinates()["rows"] == "64/32"


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(ValidationError, match="weighted_sum"):
        KernelSpec.model_validate_json(json.dumps({"kernel": "weighted_product"}))
