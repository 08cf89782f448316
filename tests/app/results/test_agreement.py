"""How far the numbers that the steps of both sides returned agree."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import TypeAdapter

from app.api import schemas
from app.results.agreement import Agreement, Returned, applied, compare
from app.results.findings import Gate, Judgement
from workers.measure.returned import ROUND, STEPS

NAN, INF = math.nan, math.inf


def side(*processes: Sequence[float], name: str = "loss", work: Sequence[float] = (), seed: int | None = 0) -> Any:
    """What processes returned, each in its first steps, and each process's tokens of a step."""
    by_step = enumerate(zip(*processes, strict=True), start=1)
    returned = {(None, seed, step, name): list(values) for step, values in by_step}
    return Returned(returned, {(None, None, None, "tokens"): list(work)} if work else {})


def long_side(*values: float) -> Returned:
    """What the steps of each process returned, of which as many are kept as a job keeps; all made equally many."""
    kept = {(None, 0, step, "loss"): [value] for step, value in enumerate(values, 1) if step <= STEPS or step in ROUND}
    return Returned(kept, {}, {(None, 0): len(values)})


FALLING = [2.0 * 0.98**step for step in range(200)]


@pytest.mark.parametrize(
    ("candidate", "words", "outcome"),
    [
        (FALLING, "equal (loss, the first 5 steps), and up to step 200 to the last digit", "passed"),
        (FALLING[:60], "up to step 60 to the last digit", "passed"),
        ([*FALLING, *(2.0 * 0.98**step for step in range(200, 900))], "up to step 200", "passed"),
        ([loss * (1 + 1e-9 * 1.08**step) for step, loss in enumerate(FALLING)], "up to step 200 to 0.4 %", "passed"),
        ([*FALLING[:8], *FALLING[8:9] * 192], "differ by up to 98 % (loss, step 200: 0.0358938 → 1.70153)", "wrong"),
        ([*FALLING[:8], *[math.nan] * 192], "differ (loss, step 10: 1.6675 → nan)", "wrong"),
        ([FALLING[step // 2 if step < 190 else step] for step in range(200)], "step 150:", "wrong"),
        ([FALLING[step if step < 20 else 10 + step // 2] for step in range(200)], "differ by up to", "wrong"),
        ([*FALLING, *FALLING[-1:] * 700], "in each step from 200 on, as if it computed nothing", "inconclusive"),
        ([*FALLING[:150], *FALLING[150:151] * 50], "step 200: 0.0358938 → 0.096592", "wrong"),
    ],
)
def test_a_step_that_stops_working_after_the_first_ones(candidate: list[float], words: str, outcome: str) -> None:
    found = compare(long_side(*FALLING), long_side(*candidate))
    assert words in found.sentence()
    assert found.outcome(1e-4) == outcome
    assert found.as_json(1e-4)["last_step"] <= 200


def test_a_number_that_converges_before_others_is_no_sign_of_a_step_that_stopped() -> None:
    def with_accuracy(values: list[float]) -> Returned:
        loss = long_side(*values)
        accuracy = {(*place[:3], "accuracy"): [min(1.0, place[2] / 400)] for place in loss.numbers}
        return Returned(loss.numbers | accuracy, {}, loss.steps)

    longer = [2.0 * 0.98**step for step in range(900)]
    assert compare(with_accuracy(FALLING), with_accuracy(longer)).outcome(1e-4) == "passed"
    stopped = with_accuracy([*FALLING, *FALLING[-1:] * 700])
    assert compare(with_accuracy(FALLING), stopped).outcome(1e-4) == "inconclusive", "the control"


def test_a_number_that_is_lost_after_the_first_steps() -> None:
    whole, cut = long_side(*FALLING), long_side(*FALLING[:20])
    assert compare(whole, cut._replace(steps=whole.steps)).outcome(1e-4) == "missing"
    assert compare(whole, cut).outcome(1e-4) == "passed", "the control: it made no more steps"


def test_steps_that_all_return_the_same_show_little() -> None:
    same = long_side(*[2.0] * 50)
    assert "the same in every step, and so do not show that each step" in compare(same, same).sentence()
    assert compare(same, same).outcome(1e-4) == "passed"
    assert "in every step" not in compare(long_side(*FALLING), long_side(*FALLING)).sentence()


def test_a_number_that_hardly_moves_and_then_stands_still() -> None:
    """As with a small learning rate: within the tolerance, but no longer computed."""
    slow = [2.0 - 1e-7 * step for step in range(100)]
    stopped = [*slow[:10], *slow[10:11] * 90]
    assert compare(long_side(*slow), long_side(*stopped)).outcome(1e-4) == "inconclusive"
    assert compare(long_side(*stopped), long_side(*stopped)).outcome(1e-4) == "passed", "the control: both converge"
    assert compare(long_side(*slow), long_side(*slow)).outcome(1e-4) == "passed"


@pytest.mark.parametrize(
    ("ones", "others", "words", "outcome"),
    [
        (side([2.0, 1.5]), side([2.0, 1.5]), "returned numbers are equal (loss, the first 2 steps)", "passed"),
        (side([2.0]), side([2.00001]), "returned numbers agree to 5.0e-06 (loss, the first step)", "passed"),
        (side([2.0, 2.0]), side([2.0, 1.0]), "differ by up to 50 % (loss, step 2: 2 → 1)", "wrong"),
        (side([2.0]), side([NAN]), "returned numbers differ (loss, step 1: 2 → nan)", "wrong"),
        (side([INF]), side([-INF]), "returned numbers differ (loss, step 1: inf → -inf)", "wrong"),
        (side([2.0, NAN]), side([2.0, NAN]), "both return nan (loss, step 2): only 1 of 2 numbers", "passed"),
        (side([0.0]), side([0.0]), "are equal", "passed"),
        (side([2.0, 1.0]), side([2.0]), "(loss, the first step); only the baseline returns loss in step 2", "missing"),
        (side([2.0], [2.2]), side([2.1], [2.3]), "processes of one side alone differ by 9.1 %", "inconclusive"),
        (side([2.0], [NAN]), side([2.0], [2.0]), "one side alone differ in whether it is finite", "inconclusive"),
        (side([2.0], [2.2]), side([9.0], [9.3]), "differ by up to 78 %", "wrong"),
        (side(), side(), "the step returns no numbers, so no result was compared", "missing"),
        (side([2.0]), side(), "the candidate's step returns no numbers, so no result was compared", "missing"),
        (side([2.0]), side([2.0], name="norm"), "both return no number of the same name", "missing"),
        (side([2.0], work=[64]), side([2.0], work=[32]), "work of a step is not the same: tokens 64 → 32", "passed"),
        (side(work=[64]), side(work=[32]), "tokens 64 → 32", "missing"),
        (side([2.0], work=[64, 64]), side([2.0], work=[64, 32]), "tokens 64 → 64, 32", "passed"),
        (
            side([2.0], seed=1),
            side([1.0], seed=7),
            "the seeds differ (1 → 7), so nothing that steps returned can be compared",
            "not_comparable",
        ),
        (side([2.0], work=[64], seed=1), side([2.0], work=[32], seed=7), "tokens 64 → 32", "not_comparable"),
    ],
)
def test_what_is_said_and_judged(ones: Any, others: Any, words: str, outcome: str) -> None:
    found = compare(ones, others)
    assert words in found.sentence()
    assert found.outcome(1e-4) == outcome
    TypeAdapter(schemas.Agreement).validate_python(found.as_json(1e-4))


def test_a_difference_of_the_tolerance_is_within_it() -> None:
    assert compare(side([1.0]), side([0.95])).outcome(0.05) == "passed", "1 - 0.95 is above 0.05 in floating point"
    assert compare(side([1.0]), side([0.949])).outcome(0.05) == "wrong"


def test_a_number_that_varies_hides_no_other() -> None:
    loss, elapsed = {(None, 0, 1, "loss"): [2.0, 2.0]}, {(None, 0, 1, "elapsed"): [1.0, 9.0]}
    wrong = {(None, 0, 1, "loss"): [1.0, 1.0]}
    assert compare(Returned(loss | elapsed, {}), Returned(wrong | elapsed, {})).outcome(1e-4) == "wrong"
    assert compare(Returned(loss | elapsed, {}), Returned(loss | elapsed, {})).outcome(1e-4) == "inconclusive"


def test_leaving_a_number_out_hides_no_wrong_one() -> None:
    both = {(None, 0, 1, "loss"): [2.0], (None, 0, 1, "norm"): [1.0]}
    assert compare(Returned(both, {}), Returned({(None, 0, 1, "loss"): [1.0]}, {})).outcome(1e-4) == "wrong"


def test_numbers_of_one_seed_meet_each_other_only() -> None:
    """As jobs of a sweep over seeds, which are samples of one case, return them."""
    ones, others = side([2.0], seed=1)[0] | side([3.0], seed=2)[0], side([2.0], seed=1)[0] | side([4.0], seed=3)[0]
    found = compare(Returned(ones, {}), Returned(others, {}))
    assert (found.difference, found.outcome(0.0)) == (0.0, "passed")
    assert found.sentence() == (
        "returned numbers are equal (loss, the first step); only the baseline has seed 2, which was not compared, only "
        "the candidate has seed 3, which was not compared"
    )
    assert compare(Returned(ones, {}), Returned(others | side([9.0], seed=2)[0], {})).outcome(1e-4) == "wrong"


def test_a_number_that_the_candidate_lacks_is_missing() -> None:
    ones = side([2.0]).numbers
    more = {**ones, (None, 0, 1, "norm of the baseline"): [3.0]}
    assert compare(Returned(more, {}), Returned(ones, {})).outcome(1e-4) == "missing"
    added = compare(Returned(ones, {}), Returned(more, {}))
    assert added.outcome(1e-4) == "passed"
    assert "only the candidate returns norm of the baseline" in added.sentence()


FASTER = Judgement("step_ms: candidate is 1.78× faster", "better", "step_ms", None)


def test_a_case_that_the_candidate_lacks_is_no_step_that_returns_nothing() -> None:
    one, other = side([2.0]).numbers, {("other", 0, 1, "loss"): [3.0]}
    found = compare(Returned({**one, **other}, {}), Returned(one, {}))
    assert found.outcome(1e-4) == "missing"
    assert "only the baseline returns loss in a case that the other side has not measured" in found.sentence()


def test_the_sentence_says_it_and_a_tolerance_makes_it_wrong() -> None:
    half = compare(side([2.0]), side([1.0]))
    told = applied(FASTER, half, None)
    assert told.sentence == f"{FASTER.sentence}; returned numbers differ by up to 50 % (loss, step 1: 2 → 1)"
    assert (told.conclusion, told.gate) == ("better", None)
    judged = applied(FASTER, half, 1e-4)
    assert judged.conclusion == "wrong"
    assert (judged.gate.outcome, judged.gate.fail_above_percent) == ("wrong", None)
    assert judged.gate.sentence.endswith("expected to agree to 0.0001")


@pytest.mark.parametrize(("outcome", "worst"), [("passed", "wrong"), ("slower", "wrong"), ("not_confirmed", "wrong")])
def test_a_gate_answers_by_the_worst(outcome: Any, worst: str) -> None:
    judgement = Judgement("…", "worse", "step_ms", Gate(5.0, ["step_ms"], outcome, "so it is"))
    for found, expected in ((compare(side([2.0]), side([1.0])), worst), (compare(side([2.0]), side([2.0])), outcome)):
        gate = applied(judgement, found, 1e-4).gate
        assert gate.outcome == expected
    gate = applied(judgement, compare(side([2.0]), side([1.0])), None).gate
    assert gate.outcome == outcome, "a difference is a difference, and no verdict"
    assert "differ by up to 50 %" in gate.sentence


@pytest.mark.parametrize("conclusion", ["not_comparable", "invalid"])
@pytest.mark.parametrize("has_gate", [True, False])
def test_sides_that_are_not_comparable_have_no_wrong_numbers(conclusion: Any, has_gate: bool) -> None:
    """Another release of torch may return another loss, and so may a step that did other work."""
    judgement = Judgement("so it is", conclusion, "step_ms", Gate(5.0, [], conclusion, "so") if has_gate else None)
    found = compare(side([2.0]), side([1.0]))
    judged = applied(judgement, found.under(judgement), 1e-4)
    assert (judged.conclusion, judged.sentence) == (conclusion, "so it is")
    assert judged.gate == Gate(5.0 if has_gate else None, [], conclusion, "so" if has_gate else "so it is")
    in_json = found.under(judgement).as_json(1e-4)
    assert in_json["outcome"] == conclusion
    TypeAdapter(schemas.Agreement).validate_python(in_json)
    assert applied(FASTER, found.under(FASTER), 1e-4).conclusion == "wrong", "the control"


def test_other_seeds_hide_no_slowdown() -> None:
    found = compare(side([2.0]), side([1.0], seed=1))
    for outcome, worst in (("passed", "not_comparable"), ("inconclusive", "not_comparable"), ("slower", "slower")):
        gate: Any = Gate(5.0, ["step_ms"], outcome, "so it is")  # type: ignore[arg-type]
        judged = applied(Judgement("…", "worse", "step_ms", gate), found, 1e-4)
        assert (judged.gate.outcome, judged.conclusion) == (worst, "worse")
        assert "the seeds differ (0 → 1)" in judged.gate.sentence


def test_jobs_that_kept_nothing() -> None:
    assert applied(FASTER, None, None) is FASTER
    assert applied(FASTER, None, 1e-4).gate.outcome == "missing"
    assert Agreement(0.0).as_json(None)["outcome"] is None
    assert compare(side([2.0]), side([NAN])).as_json(0.1)["relative_difference"] is None
