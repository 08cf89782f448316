"""Tables that units reported: listed, merged, sorted, paged."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from app.errors import InvalidRequest
from app.results import Excerpt, list_tables, render, result_table
from app.store.database.engine import Database

KERNELS = {"kernel": "string", "total_ms": "number", "calls": "integer", "fused": "boolean"}
ROWS = [["b", 2.0, 1, True], ["a", None, 3, False], ["c", 1.5, 2, None], ["d", 2.0, 4, True]]


@pytest.fixture
def profiled(ended: Callable[..., int], reported: Any) -> int:
    """A job with two tables; both of its units reported one of them."""
    tables = [
        reported("kernels", ROWS, **KERNELS),
        reported("kernels", [["e", 0.5, 9, False]], unit_index=1, **KERNELS),
        reported("a/b", [[1]], unit_index=1, x="integer"),
    ]
    return ended(tables=tables)


def test_tables_come_in_the_order_in_which_people_read_them(database, ended, reported) -> None:
    names = ["timeline", "extra", "categories-forward", "categories-backward", "allocations", "checks"]
    job = ended({"kind": "memory"}, tables=[reported(name, [[1]], x="integer") for name in names])
    listed = [table["name"] for table in list_tables(database, job)]
    assert listed == ["categories-backward", "categories-forward", "allocations", "timeline", "checks", "extra"]


@pytest.mark.parametrize(
    ("sort", "kernels"),
    [
        ("-kernel", "edcba"),
        ("total_ms", "ecbda"),
        ("-total_ms", "bdcea"),
        ("fused", "aebdc"),
        ("-unit_index", "ebacd"),
        (None, "bacde"),
    ],
)
def test_sorted_by_a_column_with_what_is_unknown_last(database, profiled, sort, kernels) -> None:
    assert "".join(result_table(database, profiled, "kernels", Excerpt(sort=sort)).column("kernel")) == kernels


@pytest.mark.parametrize("typed", ["2", "2.0", "2.*"])
def test_a_whole_number_is_found_as_it_is_shown(database, profiled, typed) -> None:
    assert result_table(database, profiled, "kernels", Excerpt(where=[("total_ms", typed)])).column("kernel") == [
        "b",
        "d",
    ]


def test_a_page_may_begin_and_end_in_any_unit(database, ended, reported) -> None:
    tables = [reported("n", [[4 * unit + row] for row in range(4)], unit_index=unit, n="integer") for unit in range(9)]
    job = ended(tables=tables)
    for limit in (1, 4, 5, 36, None):
        for after in (0, 3, 4, 35, 36, 40):
            end = 36 if limit is None else min(36, after + limit)
            for sort in (None, "n"):
                sheet = result_table(database, job, "n", Excerpt(sort=sort, limit=limit, after=after))
                assert sheet.rows == [[number // 4, number] for number in range(after, end)]
                assert sheet.next == (str(end) if after < end < 36 else None)


def test_a_column_of_the_reporters_own_named_as_ours(database, ended, reported) -> None:
    column = {"name": "unit_index", "type": "integer", "unit": None}
    table = replace(reported("own", [[5]], unit_index=2), columns=[column])
    sheet = result_table(database, ended(tables=[table]), "own")
    assert (sheet.names(), sheet.rows) == (["unit_index", "table.unit_index"], [[2, 5]])


@pytest.fixture
def kernels(ended: Callable[..., int], reported: Any) -> int:
    """A profile with a table of many columns."""
    types = {"name": "string", "class": "string", "total_ms": "number", "calls": "integer", "std_us": "number"}
    rows = [["gemm", "matmul", 2.0, 3, 0.5], ["copy", "copy", 1.0, 2, 0.1]]
    return ended({"kind": "profile"}, tables=[reported("kernels-forward", rows, **types)])


def test_columns_on_request(database: Database, kernels: int) -> None:
    every = result_table(database, kernels, "kernels-forward", Excerpt(columns=["all"]))
    assert "std_us" in render(every, "markdown").splitlines()[0]
    assert "Not shown" not in render(every, "markdown")
    chosen = result_table(database, kernels, "kernels-forward", Excerpt(columns=["calls", "name"], sort="calls"))
    assert render(chosen, "csv") == "calls,name\n2,copy\n3,gemm\n"
    with pytest.raises(InvalidRequest, match=r"no column 'nose'; there is unit_index, name.*, all") as caught:
        result_table(database, kernels, "kernels-forward", Excerpt(columns=["nose"]))
    assert caught.value.errors[0].pointer == "/columns"
