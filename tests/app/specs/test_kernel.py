"""The spec of `kernel`."""

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


def test_as_many_cells_as_may_be() -> None:
    spec = KernelSpec(rows=list(range(1, 101)), columns=list(range(1, 51)))
    assert spec.number_of_cells() == len(spec.cells()) == MAX_CELLS
    with pytest.raises(ValidationError, match=f"a job has at most {MAX_CELLS}"):
        KernelSpec(rows=list(range(1, 101)), columns=list(range(1, 52)))


def test_uploaded_code_is_one_more_implementation() -> None:
    code = {"sha256": "a" * 64, "function": "norm", "file": "mine.py"}
    spec = KernelSpec.model_validate({"kernel": "rms_norm", "implementations": ["torch"], "code": code})
    plain, own = spec.cells()
    assert own.implementation == "norm@mine.py"
    assert (spec.number_of_cells(), spec.requirements()) == (2, {"kernel:rms_norm", "code:uploaded"})
    alone = KernelSpec(kernel="rms_norm", implementations=["torch"])
    assert spec.case(plain).key == alone.case(alone.cells()[0]).key
    assert spec.case(own).key != spec.case(plain).key
    edited = spec.model_copy(update={"code": spec.code.model_copy(update={"sha256": "b" * 64})})  # type: ignore[union-attr]
    assert edited.case(own).key == spec.case(own).key
    with pytest.raises(ValidationError, match="there is nothing to measure"):
        KernelSpec(implementations=[])
