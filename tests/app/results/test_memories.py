"""Comparisons of what fills the memory of two jobs."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from app import results
from app.results import render, sheet_of
from app.results.matching import Difference, Spent
from app.results.memories import NOT_LISTED, ROUNDING
from app.store.database.engine import Database
from app.store.records import UnitRecord

CATEGORIES = {"category": "string", "peak_mib": "number", "end_mib": "number"}
ALLOCATIONS = {
    **dict.fromkeys(("at_peak_of", "category", "name", "made_in", "site", "stack", "code"), "string"),
    "count": "integer",
    "total_mib": "number",
}
Row = tuple[str, str | None, str, str | None, str | None, float]
"""Phase, name, category, stack, line of code, MiB."""
SCORES = ("backward", None, "activation", "m.py:10 attend < m.py:3 forward", "scores = q @ k.mT", 400.0)
WEIGHT = ("backward", "layers.*.w", "parameter", "m.py:1 make", "self.w = Parameter(w)", 100.0)
COPY = ("backward", None, "temporary", "m.py:30 loss < m.py:3 forward", "x = x.contiguous()", 88.0)


@pytest.fixture
def memory(ended: Callable[..., int], reported: Any, record: Any) -> Callable[..., int]:
    """Record a job of kind `memory` with these allocations; `more`: MiB by phase and category that are not listed."""

    def run(*rows: Row, more: Any = None, peak: float | None = None, **spec: Any) -> int:
        measured = [] if peak is None else [record("peak_memory_mib", value=peak, unit="MiB")]
        return ended({"kind": "memory", **spec}, tables=tables(reported, rows, more or {}), measurements=measured)

    return run


def tables(reported: Any, rows: Sequence[Row], more: Any, *, unit_index: int = 0) -> list[Any]:
    sums: dict[str, dict[str, float]] = {phase: dict(by_category) for phase, by_category in more.items()}
    listed = []
    for phase, name, category, stack, text, mib in rows:
        of_phase = sums.setdefault(phase, {})
        of_phase[category] = of_phase.get(category, 0.0) + mib
        site = None if stack is None else stack.partition(" < ")[0]
        listed.append([phase, category, name, "forward", site, stack, text, 2, mib])
    found = [
        reported(f"categories-{phase}", [[*one, 0.0] for one in its.items()], unit_index=unit_index, **CATEGORIES)
        for phase, its in sums.items()
    ]
    return [*found, reported("allocations", listed, unit_index=unit_index, **ALLOCATIONS)]


def compared(database: Database, one: int, other: int, limit: int | None = None) -> tuple[str, list[Any], Any]:
    """Return the sentence, the rows and the notes."""
    found = json.loads(render(sheet_of(results.compare(database, [one], [other]), limit), "json"))
    return found["sentence"], found["rows"], found["notes"]


def changes(rows: Sequence[dict[str, Any]], table: str, phase: str) -> dict[Any, Any]:
    name = "category" if table == "categories" else "name"
    return {row[name]: row["change_mib"] for row in rows if (row["table"], row["phase"]) == (table, phase)}


def test_what_came_went_and_grew_adds_up_to_the_difference(database: Database, memory: Callable[..., int]) -> None:
    grown = (*WEIGHT[:-1], 101.0)
    moved = tuple("m.py:15 make" if part == "m.py:1 make" else part for part in grown)
    sentence, rows, _ = compared(database, memory(SCORES, WEIGHT), memory(COPY, moved))
    assert sentence.endswith(
        "By the snapshots, the candidate needs 311 MiB less at its peak (backward): −400 MiB activation at m.py:10 "
        "attend, +88 MiB temporary at m.py:30 loss"
    )
    assert changes(rows, "categories", "backward") == {"activation": -400, "temporary": 88, "parameter": 1}
    found = changes(rows, "allocations", "backward")
    assert found == {"scores = q @ k.mT": -400, "x = x.contiguous()": 88, "layers.*.w": 1}
    (total,) = [row["change_mib"] for row in rows if row["table"] == "total"]
    assert total == sum(found.values()) == -311
    went = next(row for row in rows if row["name"] == "scores = q @ k.mT")
    assert (went["baseline_allocations"], went["candidate_mib"], went["where"]) == (2, None, "m.py:10 attend")


@pytest.mark.parametrize(
    "stack", ["m.py:99 attend < m.py:7 forward", "m.py:10 attend < new.py:1 wrap < m.py:3 forward", "other.py:1 attend"]
)
def test_a_line_that_moved_is_the_same(database: Database, memory: Callable[..., int], stack: str) -> None:
    moved = (*SCORES[:3], stack, *SCORES[4:])
    twice = (*SCORES[:3], "m.py:12 attend < m.py:3 forward", "other = q @ v", 7.0)
    _, rows, _ = compared(database, memory(SCORES, twice), memory(moved, twice))
    assert changes(rows, "allocations", "backward") == {}


def test_a_parameter_is_matched_by_its_name(database: Database, memory: Callable[..., int]) -> None:
    other = (*WEIGHT[:3], "n.py:1 build", "self.register_parameter(w)", 60.0)
    _, rows, _ = compared(database, memory(WEIGHT), memory(other))
    assert changes(rows, "allocations", "backward") == {"layers.*.w": -40}


def test_allocations_without_a_stack_and_equal_ones_are_added(database: Database, memory: Callable[..., int]) -> None:
    def made(*mib: float) -> list[Row]:
        return [("backward", None, "temporary", None, None, one) for one in mib]

    sentence, rows, _ = compared(database, memory(*made(1.0, 2.0)), memory(*made(4.0)))
    assert changes(rows, "allocations", "backward") == {None: 1}
    assert sentence.endswith("1 MiB more at its peak (backward): +1 MiB temporary")


def test_peaks_in_different_phases_are_compared_and_each_phase_that_both_have(database, memory) -> None:
    def of(row: Row, phase: str) -> Row:
        return (phase, *row[1:])

    one = memory(SCORES, of(WEIGHT, "optimizer"), of(COPY, "forward"))
    sentence, rows, _ = compared(database, one, memory(of(SCORES, "optimizer"), of(WEIGHT, "optimizer"), WEIGHT))
    assert "100 MiB more at its peak (backward → optimizer): +100 MiB parameter" in sentence
    assert changes(rows, "allocations", "backward → optimizer") == {"layers.*.w": 100}
    assert changes(rows, "allocations", "backward") == {"scores = q @ k.mT": -400, "layers.*.w": 100}
    assert not changes(rows, "total", "forward"), "one side has no such phase"


def test_what_is_not_listed_and_rounding_are_rows_of_their_own(database: Database, memory: Callable[..., int]) -> None:
    one = memory(WEIGHT, more={"backward": {"gradient": 30.0}}, peak=131.0)
    sentence, rows, notes = compared(database, one, memory(WEIGHT, more={"backward": {"gradient": 10.0}}, peak=114.0))
    assert changes(rows, "allocations", "backward") == {NOT_LISTED: -20, None: 3}
    assert next(row["category"] for row in rows if row["change_mib"] == 3) == ROUNDING
    assert [row["change_mib"] for row in rows if row["table"] == "total"] == [-17]
    assert "needs 17 MiB less" in sentence
    assert sum("lists only its largest allocations" in note for note in notes) == 2


def test_a_matched_row_with_other_code_is_named_by_both(database: Database, memory: Callable[..., int]) -> None:
    def loaded(text: str, mib: float) -> Row:
        return ("backward", None, "parameter", "m.py:1 make", f"{text} \N{LEFTWARDS ARROW} build()", mib)

    _, rows, _ = compared(database, memory(loaded("w = old()", 3.0)), memory(loaded("w = new()", 5.0)))
    assert changes(rows, "allocations", "backward") == {"w = old() → w = new()": 2}


def test_rounding_is_compared_where_it_is_known_of_both_sides(database: Database, memory: Callable[..., int]) -> None:
    """The backward phase is the same, but the peak of one side alone."""
    one = memory(SCORES, peak=430.0)
    _, rows, _ = compared(database, one, memory(SCORES, ("optimizer", *WEIGHT[1:-1], 500.0), peak=507.0))
    assert changes(rows, "allocations", "backward") == {}
    assert changes(rows, "total", "backward → optimizer") == {"all memory": 77}
    _, rows, _ = compared(database, one, memory(SCORES))
    assert changes(rows, "allocations", "backward") == {}, "the other's peak is not known"


def test_running_out_of_memory_is_compared_with_the_peak(database: Database, memory: Callable[..., int]) -> None:
    lacked = [("oom", *row[1:]) for row in (SCORES, WEIGHT, COPY)]
    sentence, rows, _ = compared(database, memory(SCORES, WEIGHT), memory(*lacked))
    assert "the candidate ran out of memory, and then the candidate held 88 MiB more" in sentence
    assert changes(rows, "allocations", "backward → oom") == {"x = x.contiguous()": 88}


def test_a_job_that_lacks_the_tables_is_compared_by_metrics(database, memory, measure) -> None:
    without = measure(("peak_memory_mib", {"value": 7.0}), spec={"kind": "memory"})
    sentence, rows, notes = compared(database, memory(SCORES, peak=400.0), without)
    assert "By the snapshots" not in sentence
    assert [row["metric"] for row in rows] == ["peak_memory_mib"]
    assert "The candidate has no complete tables of what its peaks hold: only metrics are compared." in notes


def test_sides_of_one_job_are_means_of_their_processes(database, ended, reported) -> None:
    side = {"kind": "memory", "context_length": 64}
    spec = {"kind": "compare", "baseline": side, "candidate": {**side, "precision": "bf16"}, "replicates": 4}
    units = [UnitRecord(at, f"{at}", "succeeded", side=("baseline", "candidate")[at % 2]) for at in range(8)]
    of_units = [tables(reported, [(*SCORES[:-1], 400.0 - 100 * (n % 2) + n // 2)], {}, unit_index=n) for n in range(8)]
    job = ended(spec, units=units, tables=[one for its in of_units for one in its])
    sheet = sheet_of(results.compare_sides(database, job))
    (row,) = [row for row in json.loads(render(sheet, "json"))["rows"] if row["table"] == "allocations"]
    assert (row["baseline_mib"], row["candidate_mib"], row["change_mib"]) == (401.5, 301.5, -100)
    assert row["ratio_low"] < 0.751 < row["ratio_high"]


def test_a_lost_peak_of_making_the_model_is_left_out(database: Database, memory: Callable[..., int]) -> None:
    jobs = [memory(SCORES, more={"initialisation": {"parameter": lost}}) for lost in (None, 1.0)]
    sentence, rows, _ = compared(database, *jobs)
    assert sentence.endswith("both sides need the same memory at their peaks (backward)")
    assert {row["phase"] for row in rows} == {"backward"}
    lost = memory(SCORES, more={"forward": {"parameter": None}})
    assert "By the snapshots" not in compared(database, lost, jobs[1])[0]


def test_a_limit_says_what_it_leaves_out(database: Database, memory: Callable[..., int]) -> None:
    _, rows, notes = compared(database, memory(SCORES, WEIGHT, COPY), memory((*WEIGHT[:-1], 1.0)), limit=2)
    assert list(changes(rows, "allocations", "backward").values()) == [-400, -99]
    assert "Shown are the 2 allocations that changed most of 3 of backward." in notes


def test_a_ratio_lies_within_its_interval() -> None:
    """One process among eight that took 100 times as long moves the mean, and hardly the ranks."""
    one, other = Spent((*[1.0] * 7, 100.0), None), Spent((1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99), None)
    baseline, candidate, change, ratio, low, high, *_ = Difference(("a",), one, other).numbers(known=True)
    assert candidate - baseline == change
    assert low <= ratio <= high
