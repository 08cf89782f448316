"""How a comparison runs: whose turn it is, and that the inner kind's runner does the rest."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from app.specs import spec_adapter
from app.specs.compare import CompareSpec
from workers.jobs import RUNNERS
from workers.jobs._base import Collecting, Resumable, Unit, Wrapping
from workers.jobs.compare import RUNNER, turns
from workers.outcome import Failed

SEED = 5  # draws b c c b of two replicates
TINY = {"kind": "benchmark", "model": {"size": "tiny"}, "context_length": 8}
GRID = {"kind": "attention", "implementations": ["eager", "tiled"], "sequence_lengths": [16], "dtypes": ["fp32"]}


def compare(baseline: dict[str, Any], candidate: dict[str, Any], replicates: int = 2) -> CompareSpec:
    spec = {"kind": "compare", "baseline": baseline, "candidate": candidate, "replicates": replicates, "seed": SEED}
    return spec_adapter.validate_json(json.dumps(spec))


def sent(unit: Unit) -> Unit:
    """The unit as its process gets it."""
    return Unit(**json.loads(json.dumps(asdict(unit))))


def initials(order: Sequence[str | None]) -> str:
    return "".join(str(side)[0] for side in order)


def test_turns_are_drawn_in_blocks_from_a_seed() -> None:
    drawn = [initials(turns(8, seed)) for seed in range(700)]
    assert len(set(drawn)) > 600, "of 70 · 70"
    halves = Counter(half for order in drawn for half in (order[:8], order[8:]))
    assert {(half.count("b"), half.count("c")) for half in halves} == {(4, 4)}
    assert len(halves) == 70, "every order of a block comes"
    assert max(halves.values()) < 45, "and none much more often than the 20 times of its share"
    assert turns(8, 7) == turns(8, 7)


@pytest.mark.parametrize("replicates", [1, 3, 4, 7, 9, 11, 30, 100])
def test_each_side_has_its_turns_in_blocks_of_four_or_more_each(replicates: int) -> None:
    order = initials(turns(replicates, 1))
    assert (order.count("b"), order.count("c")) == (replicates, replicates)
    longest = max(len(run) for run in re.findall("b+|c+", order))
    assert longest <= 14, "two blocks of seven turns a side at most meet with the same side"


def test_a_comparison_without_a_seed_gets_one_at_submission_and_keeps_it() -> None:
    spec = compare(TINY, TINY, replicates=8).model_copy(update={"seed": None})
    kept = [spec.drawn() for _ in range(5)]
    assert len({one.seed for one in kept}) == 5
    orders = [[unit.side for unit in RUNNER.plan(one)] for one in kept]
    assert orders == [[unit.side for unit in RUNNER.plan(one.drawn())] for one in kept], "another attempt"
    assert len(set(map(tuple, orders))) > 1
    assert kept[0].cases() == spec.cases()


class Recorder:
    """A runner that writes down what it is asked for; its jobs have two units of which the second is wrapped."""

    kind = "benchmark"

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any, Unit]] = []

    def plan(self, _spec: Any) -> list[Unit]:
        return [
            Unit("model", params={"part": 0}, environment={"OMP_NUM_THREADS": "1"}),
            Unit("profile", params={"part": 1}, start="exec", wrap=("nsys", "-o", "{scratch}/report")),
        ]

    def run(self, spec: Any, unit: Unit, _report: Any) -> None:
        self.asked.append(("run", spec, unit))

    def resume(self, spec: Any, unit: Unit, position: int, _failure: Failed) -> Unit | None:
        self.asked.append(("resume", spec, unit))
        return Unit("rest of the model", params={"part": 0, "from": position}) if position < 5 else None

    def collect(self, spec: Any, unit: Unit, scratch: Path, _report: Any) -> None:
        self.asked.append((f"collect {scratch}", spec, unit))

    def wrapper_error(self, spec: Any, unit: Unit, scratch: Path, output: str, *, succeeded: bool) -> str | None:
        self.asked.append((f"error {scratch} {output} {succeeded}", spec, unit))
        return f"{output} means trouble"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setitem(RUNNERS, "benchmark", found)
    return found


def test_a_turn_runs_every_unit_of_the_inner_plan(recorder: Recorder) -> None:
    units = RUNNER.plan(compare(TINY, TINY))
    assert [unit.side for unit in units] == [side for side in turns(2, SEED) for _ in "ab"]
    assert {unit.start for unit in units} == {"exec"}, "fresh processes"
    units.sort(key=lambda unit: str(unit.side))
    assert [unit.title for unit in units[:2]] == [
        "baseline, replicate 1 of 2: model",
        "baseline, replicate 1 of 2: profile",
    ]
    assert [(dict(unit.environment), list(unit.wrap)) for unit in units[:2]] == [
        ({"OMP_NUM_THREADS": "1"}, []),
        ({}, ["nsys", "-o", "{scratch}/report"]),
    ]


def test_what_is_left_after_a_crash_is_of_the_same_side(recorder: Recorder) -> None:
    assert isinstance(RUNNER, Resumable)
    spec = compare(TINY, {**TINY, "seed": 3})
    crashed = sent(RUNNER.plan(spec)[2])
    rest = RUNNER.resume(spec, crashed, 4, Failed("crashed", "killed"))
    assert (rest.title, rest.side, rest.start) == (crashed.title, "candidate", "exec")
    assert recorder.asked[0][1] is spec.candidate
    RUNNER.run(spec, sent(rest), None)  # type: ignore[arg-type]
    _, inner, unit = recorder.asked[-1]
    assert inner is spec.candidate
    assert (unit.title, unit.params, unit.side) == ("rest of the model", {"part": 0, "from": 4}, None)
    assert RUNNER.resume(spec, crashed, 5, Failed("crashed", "killed")) is None


def test_what_wrappers_write_and_tell_is_read_by_the_inner_runner(recorder: Recorder, tmp_path: Path) -> None:
    assert isinstance(RUNNER, Wrapping)
    assert isinstance(RUNNER, Collecting)
    spec = compare(TINY, TINY)
    of_side = sent(RUNNER.plan(spec)[3])
    RUNNER.collect(spec, of_side, tmp_path, None)  # type: ignore[arg-type]
    assert RUNNER.wrapper_error(spec, of_side, tmp_path, "ERR", succeeded=True) == "ERR means trouble"
    assert [what for what, *_ in recorder.asked] == [f"collect {tmp_path}", f"error {tmp_path} ERR True"]
    assert all(inner is spec.candidate and unit.title == "profile" for _, inner, unit in recorder.asked)
    without = compare(GRID, GRID)
    unit = sent(RUNNER.plan(without)[0])
    RUNNER.collect(without, unit, tmp_path, None)  # type: ignore[arg-type]
    assert RUNNER.wrapper_error(without, unit, tmp_path, "ERR", succeeded=True) is None
