"""The main value of a job in lists."""

import pytest

from app.web.pages.jobs import headline_of


def cells(*outcomes: tuple[str, str, float | None], is_cut: bool = False) -> list[dict[str, object]]:
    plain = {"metric": "peak_memory_mib", "unit": "MiB", "is_cut": is_cut}
    return [{**plain, "case_key": case, "outcome": outcome, "median": median} for case, outcome, median in outcomes]


@pytest.mark.parametrize("outcome", ["oom", "unsupported"])
def test_a_case_without_memory_is_no_success_whatever_it_measured_before(outcome: str) -> None:
    assert headline_of("memory", cells(("a", outcome, None), ("a", "ok", 11.79))) == ("", outcome)


def test_cases_without_a_value_are_counted_beside_the_others() -> None:
    found = headline_of("memory", cells(("a", "ok", 1.0), ("b", "ok", 2.0), ("c", "oom", None)))
    assert found == ("peak_memory_mib", "1 – 2 MiB, 2 cases, 1 oom")


def test_values_that_are_not_all_are_called_the_first() -> None:
    two = cells(("a", "ok", 1.0), ("b", "ok", 2.0), is_cut=True)
    assert headline_of("memory", two) == ("peak_memory_mib", "1 – 2 MiB, first 2 cases")
    assert headline_of("memory", cells(("a", "oom", None), is_cut=True)) == ("", "oom in the first cases")
    some = cells(("a", "oom", None), ("a", "ok", 1.0), is_cut=True)
    assert headline_of("memory", some) == ("peak_memory_mib", "1 MiB, first processes, 1 oom")
