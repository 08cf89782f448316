"""The stages of a diagnosis, planned from tables that are made by hand."""

import itertools
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from app.specs import KINDS
from app.specs.diagnosis import DiagnosisSpec
from workers.jobs._base import SoFar, Unit
from workers.jobs.diagnosis import RUNNER, conclude, planning

STEP_MS = {
    "": 100.0,
    "fused_optimizer": 80.0,
    "compile_blocks": 90.0,
    "threads": 100.0,
    "autocast_bf16": 300.0,
    "no_optimizer": 70.0,
}
"""The time of a step by the changes that are applied to it; several together multiply."""
REMOVES = ("no_optimizer",)


def step_ms(changes: list[str]) -> float:
    time = STEP_MS[""]
    for name in changes:
        time *= STEP_MS[name] / STEP_MS[""]
    return time


class Played:
    """A diagnosis whose processes are played: each takes so many seconds and finds what STEP_MS says."""

    def __init__(
        self,
        *,
        budget_s: int = 300,
        seconds: float = 5.0,
        look_s: float | None = None,
        turn_s: float | None = None,
        refused: str = "",
        returned: dict[str, dict[str, float | None]] | None = None,
        fields: dict[str, dict[str, Any]] | None = None,
        ranks: bool = False,
        ways: dict[str, str] | None = None,
        reason: str = "it failed",
        looked_ms: float = STEP_MS[""],
        of_stage: Callable[[str, list[str]], float | None] = lambda _stage, _changes: None,
    ) -> None:
        spec = DiagnosisSpec.example().model_copy(update={"budget_s": budget_s, "seed": 3})
        if ranks:
            spec = spec.model_copy(update={"step": KINDS["ddp"].example()})
        self.units: list[Unit] = []
        self.seconds: list[float] = []
        turns: list[dict[str, Any]] = []
        known = {"unit_index": 0, "cause": "optimizer", "why_not": None, "how": "do it"}
        candidates = [
            {**known, "change": name, "removes": name in REMOVES, "way": (ways or {}).get(name)}
            | {"fields": json.dumps((fields or {}).get(name, {}))}
            for name in STEP_MS
            if name
        ]
        tables: dict[str, list[dict[str, Any]]] = {"candidates": candidates, "turns": turns, "seen": [], "values": []}
        self.spec, self.tables = spec, tables
        planned = RUNNER.plan(spec)
        while planned:
            for unit in planned:
                self.units.append(unit)
                stage, changes = unit.params["stage"], unit.params.get("changes", [])
                self.seconds.append({"look": look_s, "turn": turn_s}.get(stage) or seconds)
                if stage == "conclude":
                    self.found = unit.params
                    continue
                for side in unit.params.get("rounds", [{"changes": changes}]):
                    changes = side["changes"]
                    row = {"stage": stage, "changes": ",".join(changes), "unit_index": len(self.units) - 1}
                    row |= {"device": "cpu", "device_key": "1x cpu"}
                    time = looked_ms if stage == "look" else step_ms(changes)
                    time = of_stage(stage, changes) or time
                    good = {"step_ms": time, "samples": 10, "outcome": "ok", "reason": None}
                    bad = {"step_ms": None, "samples": 0, "outcome": "refused", "reason": reason}
                    for name, value in (returned or {}).get(",".join(changes), {}).items():
                        number = {"value": value, "not_finite": "nan" if value is None else None}
                        place = {"what": "returned", "step": 1, "name": name, "unit_index": len(self.units) - 1}
                        tables["values"].append({**place, **number})
                    turns.append({**row, **(bad if refused in changes else good)})
            planned = RUNNER.further(spec, SoFar(self.units, self.seconds, tables))

    def sides(self, stage: str) -> Counter[str]:
        units = [one.params for one in self.units if one.params["stage"] == stage]
        return Counter("+".join(side.get("changes", ())) for unit in units for side in unit.get("rounds", [unit]))

    def results(self) -> dict[str, conclude.Result]:
        of = [conclude._result(self.found, row) for row in self.found["candidates"]]
        return {one.change: one for one in [*of, conclude._joined(self.found, of)]}


def test_each_change_is_tried_once_and_those_that_help_are_joined_and_measured_in_turns() -> None:
    played = Played()
    assert played.sides("screen") == dict.fromkeys(STEP_MS, 1)
    both = "fused_optimizer+compile_blocks"
    assert played.sides("join") == {both: 1}
    turns = played.sides("turn")
    helping = (both, "fused_optimizer", "compile_blocks", "no_optimizer")
    assert turns == {"": 12, "threads": 4} | dict.fromkeys(helping, 4), "a loser has its interval, too, if it is close"
    results = played.results()
    assert {name: one.verdict for name, one in results.items()} == {
        "fused_optimizer": "better",
        "compile_blocks": "better",
        "threads": "no_difference",
        "autocast_bf16": "inconclusive",  # one process has tried it
        "no_optimizer": "better",
        "together": "better",
    }
    assert results["together"].ratio == pytest.approx(0.72)


def test_what_helped_by_chance_when_it_was_screened_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that does nothing was faster in its one process, and in the first one with others."""
    monkeypatch.setitem(STEP_MS, "threads", 70.0)
    slower = {"turn": 100.0}
    played = Played(of_stage=lambda stage, changes: slower.get(stage) if changes == ["threads"] else None)
    assert played.sides("turn")["threads"] >= 4
    assert played.found["joined"] == ["fused_optimizer", "compile_blocks"]
    assert played.results()["together"].ratio == pytest.approx(0.72)


def test_the_turns_of_those_joined_have_their_time_before_a_third_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STEP_MS, "threads", 95.0)
    played = Played(budget_s=120, seconds=2.0, turn_s=5.0)
    assert played.results()["together"].verdict == "better"
    assert played.results()["threads"].verdict != "better", "no time was left for its turns"
    less = Played(budget_s=100, seconds=2.0, turn_s=5.0)
    assert less.results()["compile_blocks"].verdict == "better", "without time for those joined it has its own"


def test_two_ways_of_the_same_are_not_joined() -> None:
    ways = dict.fromkeys(("fused_optimizer", "compile_blocks"), "compile")
    played = Played(ways=ways)
    assert not played.sides("join")
    assert played.sides("turn")["compile_blocks"], "each is measured"
    assert played.results()["together"].step_ms is None


@pytest.mark.parametrize("reason", [f"{planning.TOO_LONG} 75 s and was ended", "it failed"])
def test_after_one_way_that_took_too_long_the_other_is_not_tried(reason: str) -> None:
    ways = dict.fromkeys(("compile_blocks", "threads"), "compile")
    played = Played(ways=ways, refused="compile_blocks", reason=reason)
    slow = reason != "it failed"
    assert played.results()["compile_blocks"].verdict == "refused"
    assert played.sides("screen")["threads"] == (not slow)
    assert (played.results()["threads"].verdict == "refused") == slow
    if slow:
        assert "compile_blocks, which does the same in another way" in str(played.results()["threads"].reason)


def test_ranks_take_the_turns_of_two_rounds_together() -> None:
    """Their start takes longer than their steps."""
    played = Played(ranks=True, turn_s=20.0)
    units = [one for one in played.units if one.params["stage"] == "turn"]
    assert 2 * len(units) == played.sides("turn")[""], "each has the step as it is"
    assert min(played.sides("turn").values()) >= 4
    orders = [[str(side["changes"]) for side in one.params["rounds"]] for one in units]
    for order in orders:
        first, second = order[: len(order) // 2], order[len(order) // 2 :]
        assert sorted(first) == sorted(second) == sorted(set(order)), "once in a round"
    assert len({order.index("[]") for order in orders}) > 1, "drawn"
    assert {one.start for one in units} == {"fork"}, "ranks are fresh processes anyway"
    assert played.results()["fused_optimizer"].verdict == "better"
    changed = Played(ranks=True, fields={"fused_optimizer": {"optimizer": "x"}}).units
    units = [one for one in changed if one.params["stage"] == "turn"]
    assert any(side["fields"] == {"optimizer": "x"} for one in units for side in one.params["rounds"])


@pytest.mark.parametrize(("warmup_steps", "seconds"), [(3, 14.4 + 4 * 2.6), (None, 4 * 17.0)])
def test_what_the_ranks_start_takes_is_told_from_their_screening(warmup_steps: int | None, seconds: float) -> None:
    """It took 17 s: 3 + 10 steps of 100 ms, as long to build them, and the start. Where steps warm up until they are
    steady, all of it may be theirs."""
    played = Played(ranks=True, seconds=17.0)
    played.units[1].params["warmup_steps"] = warmup_steps
    progress = planning._Progress(played.spec, SoFar(played.units[:2], played.seconds[:2], played.tables))
    assert progress._launch_s(2) == pytest.approx(seconds)


def test_changes_of_one_field_are_not_joined() -> None:
    fields = {"fused_optimizer": {"optimizer": "a"}, "compile_blocks": {"optimizer": "b"}}
    played = Played(fields=fields)
    assert played.found["joined"] == ["fused_optimizer"]
    assert not played.sides("join")
    (one, *_) = [unit for unit in played.units if unit.params.get("changes") == ["compile_blocks"]]
    assert one.params["fields"] == fields["compile_blocks"]


@pytest.mark.parametrize("budget_s", [10, 30, 60, 120])
def test_a_small_budget_is_kept_and_what_was_left_out_is_said(budget_s: int) -> None:
    played = Played(budget_s=budget_s, seconds=5.0)
    taken = 5.0 * sum(one.params["stage"] != "conclude" for one in played.units)
    assert taken <= max(budget_s, 15) + 5, "at least a look, the step as it is and one change"
    results = played.results()
    tried = played.sides("screen").keys()
    assert {name for name, one in results.items() if one.verdict == "not_tried"} == STEP_MS.keys() - tried
    assert "not_tried" in {one.verdict for one in results.values()} or budget_s >= 60
    assert "better" not in {one.verdict for one in results.values()} or budget_s > 10, "without turns"
    assert not Played(budget_s=budget_s, look_s=budget_s + 1.0).sides("screen"), "the look has taken all of it"


def test_time_that_no_turns_have_a_use_for_goes_to_changes_that_were_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow processes had used half of the budget; the rest was left, and the change that helps not tried."""
    for name in ("fused_optimizer", "compile_blocks"):
        monkeypatch.setitem(STEP_MS, name, 110.0)
    monkeypatch.setitem(STEP_MS, "threads", 70.0)
    played = Played(budget_s=60, seconds=9.5, look_s=6.0)
    assert played.sides("screen")["threads"]
    assert sum(played.seconds) <= 60 + 10


def test_a_clear_gain_takes_its_turns_before_a_small_budget_is_spent_on_other_changes() -> None:
    """Each turn takes the start of an interpreter more than the screening; with all screened first, too few turns
    were left for any interval."""
    played = Played(budget_s=60, seconds=2.2, look_s=8.0, turn_s=5.0)
    assert sum(played.seconds) <= 60 + 5
    stages = [one.params["stage"] for one in played.units]
    assert played.results()["fused_optimizer"].verdict == "better"
    assert "screen" in stages[stages.index("turn") :], "the time that is left is for the others"
    assert played.results()["compile_blocks"].verdict in ("inconclusive", "not_tried")


@pytest.mark.parametrize(
    ("device", "step_ms", "steps"), [("cpu", 100.0, None), ("cuda", 100.0, 10), ("cuda", 700.0, 5)]
)
def test_a_gpus_turns_are_warmed_up_for_about_a_second(device: str, step_ms: float, steps: int | None) -> None:
    look = {"stage": "look", "changes": "", "step_ms": step_ms, "samples": 10, "device": device, "unit_index": 0}
    candidate = {"unit_index": 0, "change": "threads", "why_not": None, "removes": False, "fields": "{}"}
    so_far = SoFar(RUNNER.plan(DiagnosisSpec.example()), [5.0], {"turns": [look], "candidates": [candidate]})
    assert {one.params["warmup_steps"] for one in RUNNER.further(DiagnosisSpec.example(), so_far)} == {steps}


def test_each_number_is_compared_with_its_own_size() -> None:
    plain, changed = {"loss": 2.0, "tokens": 1e6}, {"loss": 1.0, "tokens": 1e6}
    played = Played(returned={"": plain, "fused_optimizer": changed, "threads": plain})
    assert played.found["differences"] == pytest.approx({"fused_optimizer": 0.5, "threads": 0.0})


@pytest.mark.parametrize(("same", "expected"), [("loss", {"threads": 0.0}), ("learning_rate", {})])
def test_a_number_that_differs_between_processes_of_the_step_as_it_is_tells_nothing_of_a_change(
    same: str, expected: dict[str, float]
) -> None:
    rates = itertools.count(1.0)

    class Rate(dict[str, float]):
        def items(self) -> Any:
            return {same: 2.0, "tokens_per_s": next(rates)}.items()

    played = Played(returned={"": Rate(), "threads": Rate()})
    assert played.found["differences"] == expected


@pytest.mark.parametrize(("outcome", "alone"), [("refused", "refused"), ("failed", "inconclusive")])
def test_what_turns_have_measured_outlives_a_failure_of_a_later_round(outcome: str, alone: str) -> None:
    played = Played(ranks=True, turn_s=20.0)
    first = next(row for row in played.tables["turns"] if (row["stage"], row["changes"]) == ("turn", "fused_optimizer"))
    played.tables["turns"].append({**first, "step_ms": None, "outcome": outcome, "reason": "out of memory"})

    def verdict() -> str:
        found = planning._Progress(played.spec, SoFar(played.units, played.seconds, played.tables)).findings()
        row = next(row for row in found["candidates"] if row["change"] == "fused_optimizer")
        return conclude._result(found, row).verdict

    assert verdict() == "better"
    played.tables["turns"][:] = [row for row in played.tables["turns"] if row["stage"] != "turn" or not row["step_ms"]]
    assert verdict() == alone, "without turns only one change that failed is to blame"


def test_a_change_whose_numbers_are_none_any_more_is_refused() -> None:
    numbers = {"": {"loss": 2.0, "gap": None}, "fused_optimizer": {"loss": None}, "compile_blocks": {"gap": 1.0}}
    played = Played(returned=numbers)
    assert played.found["joined"] == ["compile_blocks"]
    result = played.results()["fused_optimizer"]
    assert result.verdict == "refused"
    assert "NaN" in str(result.reason)


@pytest.mark.parametrize("kind", ["benchmark", "ddp"])
def test_a_step_that_could_not_be_measured_ends_with_an_answer(kind: str) -> None:
    spec = DiagnosisSpec.example().model_copy(update={"step": KINDS[kind].example()})
    look = RUNNER.plan(spec)
    (last,) = RUNNER.further(spec, SoFar(look, [1.0], {"seen": [], "candidates": []}))
    assert last.params["stage"] == "conclude"
    step = conclude._step(last.params, None)
    assert conclude.answer(step, [], [], conclude._joined(last.params, [])) == [
        "The step could not be measured: its verdict says why."
    ]
    assert RUNNER.further(spec, SoFar([*look, last], [1.0, 1.0], {})) == []


def test_a_look_while_the_host_was_busy_is_rough() -> None:
    disturbed = Played(looked_ms=340.0)
    assert conclude._is_rough(disturbed.found, 100.0)
    assert disturbed.sides("join")["fused_optimizer+threads"] == 0, "as fast as the step that nobody disturbed"
    assert not conclude._is_rough(Played(looked_ms=124.0).found, 100.0)
