"""The spec of `ceiling`."""

from app.specs.ceiling import CeilingSpec


def test_each_data_type_is_a_case_of_its_own_and_so_is_the_copy() -> None:
    one, two = (CeilingSpec(dtypes=dtypes) for dtypes in (["bf16"], ["bf16", "fp32"]))
    first, second = ({case.key for case in spec.cases()} for spec in (one, two))
    assert (len(first), len(second)) == (2, 3)
    assert first < second, "a data type has its key, whatever else is measured"
