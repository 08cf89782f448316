"""The spec of `kernel`."""

from typing import Any

import pytest
from pydantic import ValidationError

from app.specs._base import MAX_CELLS
from app.specs.kernel import KernelSpec


def test_cells_with_one_oracle_follow_each_other() -> None:
    spec = KernelSpec(rows=[64, 32], columns=[8, 7], dtypes=["fp32", "bf16"])
    cells = spec.cells()
    assert len(cells) == len(set(cells)) == 2**4
    assert [(cell.implementation, cell.rows, cell.columns) for cell in cells[:4]] == [
        ("torch", 32, 7),
        ("triton", 32, 7),
        ("torch", 32, 8),
        ("triton", 32, 8),
    ]
    assert cells[0].coordinates().items() <= spec.case(cells[0]).coordinates.items()
    assert spec.summary()["rows"] == "64/32"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": [64, 64]}, "64 is there twice"),
        ({"implementations": ["torch", "torch"]}, "'torch' is there twice"),
        ({"rows": list(range(1, 101)), "columns": list(range(1, 52))}, f"a job has at most {MAX_CELLS}"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        KernelSpec(**fields)


def test_as_many_cells_as_may_be() -> None:
    spec = KernelSpec(rows=list(range(1, 101)), columns=list(range(1, 51)))
    assert spec.number_of_cells() == len(spec.cells()) == MAX_CELLS


def test_uploaded_code_is_one_more_implementation() -> None:
    code = {"sha256": "a" * 64, "function": "norm", "file": "mine.py"}
    spec = KernelSpec.model_validate({"kernel": "rms_norm", "implementations": ["torch"], "code": code})
    plain, own = spec.cells()
    assert own.implementation == "norm@mine.py"
    assert spec.number_of_cells() == 2
    assert spec.requirements() == {"kernel:rms_norm", "code:uploaded"}
    alone = KernelSpec(kernel="rms_norm", implementations=["torch"])
    assert spec.case(plain).key == alone.case(alone.cells()[0]).key
    assert spec.case(own).key != spec.case(plain).key
    edited = spec.model_copy(update={"code": spec.code.model_copy(update={"sha256": "b" * 64})})  # type: ignore[union-attr]
    assert edited.case(own).key == spec.case(own).key
    with pytest.raises(ValidationError, match="there is nothing to measure"):
        KernelSpec(implementations=[])
