"""The categories of allocations, in histories written by hand."""

from typing import Any

import pytest

from workers.measure.allocations.categories import CATEGORIES, Owner
from workers.measure.allocations.ledger import Allocation, Ledger, Stretch, thinned

KIB = 1024


def made(*events: tuple[str, int, int]) -> list[dict[str, Any]]:
    """A history, of ("+", address, size) for an allocation and ("-", address, size) for a release."""
    return [
        {"action": action, "addr": address, "size": size, "frames": []}
        for sign, address, size in events
        for action in (("alloc",) if sign == "+" else ("free_requested", "free_completed"))
    ]


def owner(category: str, size: int, name: str = "weight") -> Owner:
    return Owner(CATEGORIES.index(category), name, size)


def by_category(usage: tuple[int, ...]) -> dict[str, int]:
    return {category: size for category, size in zip(CATEGORIES, usage, strict=True) if size}


PARAMETER, STATE, BATCH, SAVED, SCRATCH, GRADIENT, WORKSPACE = (KIB * number for number in range(100, 107))


def training_step() -> tuple[Ledger, list[Stretch]]:
    """A step: 40 bytes of parameters, 80 of state, and a workspace of 5 without an owner."""
    known = [Allocation(PARAMETER, 40, None), Allocation(STATE, 80, None), Allocation(WORKSPACE, 5, None)]
    ledger = Ledger(known)
    owners = {PARAMETER: owner("parameter", 40), STATE: owner("optimizer_state", 80)}
    with_batch = {**owners, BATCH: owner("input", 8, "batch")}
    with_gradient = {**with_batch, GRADIENT: owner("gradient", 40)}
    phases = [
        ("preparation", made(("+", BATCH, 8)), with_batch),
        ("forward", made(("+", SAVED, 16), ("+", SCRATCH, 32), ("-", SCRATCH, 32)), with_batch),
        (
            "backward",
            made(("+", SCRATCH, 24), ("+", GRADIENT, 40), ("-", SAVED, 16), ("-", SCRATCH, 24)),
            with_gradient,
        ),
        ("optimizer", made(("+", SCRATCH, 40), ("-", SCRATCH, 40), ("-", GRADIENT, 40)), with_batch),
    ]
    return ledger, [ledger.follow(*phase) for phase in phases]


def test_each_allocation_has_the_category_of_the_rule() -> None:
    ledger, (_, forward, backward, optimizer) = training_step()
    always = {"parameter": 40, "optimizer_state": 80, "unknown": 5, "input": 8}
    assert by_category(forward.peak.usage) == {**always, "activation": 16, "temporary": 32}
    assert by_category(forward.end.usage) == {**always, "activation": 16}
    assert by_category(backward.peak.usage) == {**always, "activation": 16, "temporary": 24, "gradient": 40}
    assert by_category(backward.end.usage) == {**always, "gradient": 40}
    assert by_category(optimizer.peak.usage) == {**always, "gradient": 40, "temporary": 40}
    assert by_category(optimizer.end.usage) == always
    assert sum(one.size for one in ledger.alive.values()) == sum(always.values())
    names = {one.address: (one.name, one.made_in) for one in backward.at_peak}
    assert names[GRADIENT] == ("weight", "backward")
    assert names[SAVED] == (None, "forward")
    assert names[PARAMETER] == ("weight", None)


def test_a_release_without_allocation_counts_from_the_start() -> None:
    stretch = Ledger().follow("forward", made(("+", SAVED, 1), ("-", WORKSPACE, 64)), {})
    assert (stretch.start.total, stretch.peak.total, stretch.end.total) == (64, 65, 1)
    assert {one.address for one in stretch.at_peak} == {SAVED, WORKSPACE}


def test_an_address_that_is_used_again_is_another_allocation() -> None:
    events = made(("+", SAVED, 8), ("-", SAVED, 8), ("+", SAVED, 16))
    stretch = Ledger().follow("forward", events, {})
    assert by_category(stretch.end.usage) == {"activation": 16}
    assert [CATEGORIES[one.category] for one in stretch.made] == ["temporary", "activation"]


def test_the_allocators_hold_at_the_peak() -> None:
    events = [
        {"action": "segment_alloc", "addr": 0, "size": 200},
        *made(("+", 0, 100), ("-", 0, 100)),
        {"action": "segment_alloc", "addr": 1000, "size": 300},
        {"action": "segment_free", "addr": 0, "size": 200},
    ]
    stretch = Ledger().follow("forward", events, {}, reserved=300)
    assert stretch.peak.entry == 1
    assert stretch.reserved_at_peak == 200


def test_after_a_gap_what_is_still_there_keeps_its_category() -> None:
    """Only the last entries of the backward pass are left; the block of the activation was released in the gap."""
    ledger = Ledger([Allocation(PARAMETER, 40, None), Allocation(WORKSPACE, 5, None)])
    parameter = {PARAMETER: owner("parameter", 40)}
    ledger.follow("forward", made(("+", SAVED, 16), ("+", BATCH, 8)), {**parameter, BATCH: owner("input", 8)})
    sizes = {PARAMETER: 40, BATCH: 8, WORKSPACE: 5, GRADIENT: 40}
    blocks = {address: Allocation(address, size, None) for address, size in sizes.items()}
    events = made(("+", GRADIENT, 40), ("+", SCRATCH, 24), ("-", SCRATCH, 24))
    stretch = ledger.follow(
        "backward", events, {**parameter, GRADIENT: owner("gradient", 40)}, blocks=blocks, lost=True
    )
    assert stretch.lost
    always = {"parameter": 40, "input": 8, "unknown": 5}
    assert by_category(stretch.start.usage) == always
    assert by_category(stretch.peak.usage) == {**always, "gradient": 40, "temporary": 24}
    assert set(ledger.alive) == set(blocks)


def test_an_owner_overrides_what_a_gap_has_mistaken() -> None:
    """The gradient has the address and the size of an activation that was released in the gap."""
    ledger = Ledger()
    ledger.follow("forward", made(("+", SAVED, 16)), {})
    stretch = ledger.follow(
        "backward", [], {SAVED: owner("gradient", 16)}, blocks={SAVED: Allocation(SAVED, 16, None)}, lost=True
    )
    assert by_category(stretch.end.usage) == {"gradient": 16}


@pytest.mark.parametrize("most", [10, 100, 1000])
def test_a_thinned_timeline_keeps_ends_and_peaks(rng: Any, most: int) -> None:
    events: list[tuple[str, int, int]] = []
    living: list[tuple[int, int]] = []
    for number in range(5000):
        if living and rng.random() < 0.5:
            events.append(("-", *living.pop(rng.randrange(len(living)))))
        else:
            living.append((number, rng.randrange(1, 1000)))
            events.append(("+", *living[-1]))
    stretch = Ledger(max_points=most).follow("forward", made(*events), {})
    assert len(stretch.points) <= most
    assert stretch.points[0] == stretch.start
    assert stretch.points[-1] == stretch.end
    assert max(point.total for point in stretch.points) == stretch.peak.total
    again = thinned(stretch.points, most // 2)
    assert len(again) <= most // 2 + 1
    assert max(point.total for point in again) == stretch.peak.total
    assert [point.entry for point in again] == sorted(point.entry for point in again)
