from collections.abc import Sequence

import pytest

from workers.measure.allocations.growth import AfterSteps, pattern
from workers.measure.allocations.ledger import Allocation

LINE = [{"filename": "/home/user/train.py", "line": 12, "name": "step"}]


def after(sizes: Sequence[Sequence[int]]) -> AfterSteps:
    """What one line has alive after each step: the sizes of its allocations."""
    found = AfterSteps()
    for of_step in sizes:
        found.add([Allocation(1, 40, None, name="weight"), *(Allocation(9, size, None, LINE) for size in of_step)])
    return found


GROWING = {
    "a tensor more each step": [[8] * n for n in range(1, 12)],
    "one that is joined with more": [[8 * n] for n in range(1, 12)],
    "beside a cache for every other step": [[8] * n + [12] * (n % 2) for n in range(11)],
    "of which some is released once": [[8] * (n - 3 * (n >= 10)) for n in range(1, 12)],
    "by different amounts": [[8 * n + noise] for n, noise in enumerate((0, 7, -4, 9, 2, -6, 8, -8, 5, 1, -3), 2)],
    "beside one that comes and goes": [[8] * n + [4] for n in range(1, 12)],
}
UNCERTAIN = {
    "two single steps": [[8] * (n // 4) for n in range(11)],
    "one tensor in the last step": [[8] * (n == 10) for n in range(11)],
    "of which half is released in the last steps": [[8] * (n - 5 * (n >= 10)) for n in range(1, 12)],
    "more in the last of two": [[8], [24]],
    "one more in each fifth step": [[8] * (n // 5) for n in range(10, 21)],
    "one more in each tenth step, of many": [[8] * (n // 10) for n in range(99, 111)],
}
STEADY = {
    "a cache that filled in the first steps": [[8] * min(n, 4) for n in range(1, 12)],
    "one tensor in one step": [[8] * (n >= 5) for n in range(11)],
    "the last of a number of tensors of other sizes": [[8] * 3 + [n % 3] for n in range(11)],
    "batches of another size": [[size] for size in (4, 9, 2, 7, 1, 8, 3, 9, 5, 6, 7)],
    "what shrinks": [[8] * (11 - n) for n in range(11)],
}


@pytest.mark.parametrize("sizes", GROWING.values(), ids=GROWING)
def test_memory_that_keeps_growing_is_found_with_its_line(sizes: Sequence[Sequence[int]]) -> None:
    (growth,) = after(sizes).growths()
    assert growth.continues
    assert growth.size == sum(sizes[-1]) - sum(sizes[0])
    assert growth.place == (None, "train.py:12 step")


@pytest.mark.parametrize("sizes", STEADY.values(), ids=STEADY)
def test_memory_that_does_not_keep_growing_is_no_leak(sizes: Sequence[Sequence[int]]) -> None:
    assert not any(growth.continues or growth.may_continue for growth in after(sizes).growths())


@pytest.mark.parametrize("sizes", UNCERTAIN.values(), ids=UNCERTAIN)
def test_memory_that_may_keep_growing_is_neither(sizes: Sequence[Sequence[int]]) -> None:
    (growth,) = after(sizes).growths()
    assert (growth.continues, growth.may_continue) == (False, True)


def test_a_name_with_numbers_stands_for_all_layers() -> None:
    assert pattern("layers.12.attn.q_proj.weight") == "layers.*.attn.q_proj.weight"
    assert pattern("h2o.3") == "h2o.*"
    assert pattern(None) is None
