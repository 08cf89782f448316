"""Losses of both sides of a comparison: what training runs say of equal, of narrower and of broken arithmetic."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from app.specs import spec_adapter
from app.specs.benchmark import BenchmarkSpec
from app.specs.compare import CompareSpec
from tests.workers.reporting import reported
from workers.jobs._convergence import learned, loss_rows, sees_ahead, sentences, steps_to, train
from workers.jobs._training import building
from workers.jobs.compare import RUNNER
from workers.model.batches import ChainBatches

CPU = torch.device("cpu")
MODEL = {"d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 1, "vocab_size": 32}
BF16 = {"model": MODEL, "batch_size": 4, "context_length": 16, "device": "cpu", "precision": "bf16", "warmup_steps": 0}
FP8 = {**BF16, "precision": "fp8", "fp8_filter": ["all"], "fp8_recipe": "rowwise"}
PAIRS, STEPS = 6, 30


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products are no faster with several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(fields: dict[str, Any]) -> list[list[float]]:
    spec = BenchmarkSpec(**fields, measure_steps=STEPS, optimizer="torch_adamw")
    device, build = building.prepare(spec)
    return [train(spec.model_copy(update={"seed": seed}), device, build) for seed in range(PAIRS)]


@pytest.fixture(scope="module")
def bf16() -> list[list[float]]:
    return trained(BF16)


def test_losses_are_those_of_all_micro_batches() -> None:
    model = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 100}
    fields = {"model": model, "context_length": 16, "measure_steps": 3, "device": "cpu"}
    whole, parts = (
        BenchmarkSpec.model_validate({**fields, "batch_size": 4 // number, "accumulation_steps": number})
        for number in (1, 4)
    )
    assert train(parts, *building.prepare(parts)) == pytest.approx(train(whole, *building.prepare(whole)), rel=1e-3)


def test_a_loss_near_that_of_guessing_says_that_nothing_was_learned_yet() -> None:
    few, many = ({"baseline": [[5.5, loss]], "candidate": [[5.5, loss]]} for loss in (5.4, 4.3))
    assert learned(few, 1000).detail == (
        "not learned yet, so more steps are needed: 5.4 is 97 % of 5.545, the loss of guessing one of 256 letters"
    )
    assert learned(many, 1000).ok
    assert not learned(many, 64).ok
    one = {"baseline": many["baseline"], "candidate": few["candidate"]}
    assert learned(one, 1000).detail.startswith("the candidate has hardly learned in these steps: 5.4 is 97 %")


def test_a_loss_below_the_entropy_of_the_text_is_suspect() -> None:
    """As of attention without its mask: the next letter is among its inputs."""
    honest, peeking = [[5.5, 1.22]], [[5.5, 1.1]]
    assert learned({"baseline": honest, "candidate": honest}, 64).ok
    check = learned({"baseline": honest, "candidate": peeking}, 64)
    assert (check.ok, check.severity) == (False, "suspect")
    assert check.detail.startswith("the candidate's loss of 1.1 is below 1.213, the entropy of the text")
    assert learned({"baseline": [[0.7, 0.7]], "candidate": [[0.7, 0.7]]}, 2).ok is False, "two letters"
    for letters in (1, 2, 3, 64):
        chances = [Counter(row.tolist()) for row in ChainBatches(letters, 1, 1, CPU, seed=0).followers]
        expected = {round(-sum(n / 8 * math.log(n / 8) for n in row.values()), 12) for row in chances}
        assert {round(ChainBatches.entropy(letters), 12)} == expected


def test_bf16_against_itself_shows_no_difference(bf16: list[list[float]]) -> None:
    said, faster = sentences({"baseline": bf16, "candidate": trained(BF16)})
    assert said.startswith("no difference of the losses at all: both sides compute the same after 30 steps")
    needed = re.search(r"the candidate needs (\d+) steps, the baseline (\d+)$", faster)
    assert needed[1] == needed[2]


def falling(steps: int, rate: float, above: float = 0.0) -> list[float]:
    return [1 + above + math.exp(-rate * step) for step in range(steps)]


def test_a_candidate_that_learns_less_needs_more_steps_to_the_same_loss() -> None:
    baseline = [falling(100, 0.05) for _ in range(6)]
    candidate = [falling(100, 0.04, 1e-4 * pair) for pair in range(6)]
    said, needed = sentences({"baseline": baseline, "candidate": candidate})
    assert "higher than 1.0" in said
    assert "6 pairs" in said
    target = max(sum(losses[-10:]) / 10 for losses in candidate)
    assert steps_to(target, baseline) < 90
    assert re.search(r"the candidate needs 100 steps, the baseline [78]\d$", needed), needed
    assert "faster" not in said + needed


def test_differences_of_both_signs_or_of_rounding_are_none() -> None:
    baseline = [falling(50, 0.05) for _ in range(6)]
    candidate = [falling(50, 0.05, above) for above in (-0.02, -0.01, 0.0, 0.01, 0.01, 0.02)]
    said = sentences({"baseline": baseline, "candidate": candidate})[0]
    assert said.startswith("no difference of the losses is shown after 50 steps")
    assert "95 % interval -0.02 to +0.02" in said
    rounded = [[loss - off for loss in baseline[0]] for off in (1e-7, 2e-7, 1e-7, 3e-7, 1e-7, 2e-7)]
    said = sentences({"baseline": baseline, "candidate": rounded})[0]
    assert said.startswith("no difference of the losses is shown after 50 steps")


def test_one_run_of_six_that_trains_worse_is_not_no_difference() -> None:
    baseline = [falling(50, 0.05) for _ in range(6)]
    said = sentences({"baseline": baseline, "candidate": [*baseline[1:], [3 + loss for loss in baseline[0]]]})[0]
    assert said.startswith("inconclusive after 50 steps")
    assert said.endswith("95 % interval +0 to +3; more convergence_pairs would tell")


@pytest.mark.parametrize(
    ("baseline", "candidate", "words"),
    [
        ({}, {1: math.inf}, ["no difference of the losses is shown", "to a loss of"]),
        (
            {50: math.nan},
            {48: math.inf, 3: math.nan},
            ["baseline's loss is not finite in the last 5 steps", "candidate's"],
        ),
    ],
)
def test_the_last_steps_of_each_side_say_whether_it_trains(baseline, candidate, words) -> None:
    def side(broken: dict[int, float], more: float) -> list[list[float]]:
        one = [broken.get(step, loss) for step, loss in enumerate(falling(50, 0.05), start=1)]
        return [one, *(falling(50, 0.05, more * sign) for sign in (1, -1, 2, -2, 0))]

    runs = {"baseline": side(baseline, 0.0), "candidate": side(candidate, 0.01)}
    said = sentences(runs)
    assert len(said) == len(words)
    for line, start in zip(said, words, strict=True):
        assert start in line
    assert (loss_rows(runs)[-1][1] is None) == bool(baseline)


def test_chains_are_equal_for_equal_seeds_and_can_be_learned() -> None:
    one, same, other = (ChainBatches(300, 8, 64, CPU, seed) for seed in (1, 1, 2))
    batches = [one.next() for _ in range(4)]
    assert all(torch.equal(inputs, same.next()[0]) for inputs, _ in batches)
    assert not torch.equal(batches[0][0], other.next()[0])
    followers: dict[int, set[int]] = {}
    for inputs, targets in batches:
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        for letter, after in zip(inputs.flatten().tolist(), targets.flatten().tolist(), strict=True):
            followers.setdefault(letter, set()).add(after)
    assert max(map(len, followers.values())) <= 4
    assert all(row.unique().numel() == 4 for row in one.followers), "fewer would lower the entropy"
    assert max(followers) < 256


def compare(**fields: Any) -> CompareSpec:
    sides = {"baseline": {"kind": "benchmark", **BF16}, "candidate": {"kind": "benchmark", **BF16, "precision": "fp32"}}
    return spec_adapter.validate_json(json.dumps({"kind": "compare", "replicates": 1, "seed": 1, **sides, **fields}))


def test_a_comparison_ends_with_its_pairs_of_runs(tmp_path: Path) -> None:
    wider = {"kind": "benchmark", **BF16, "model": {**MODEL, "d_ff": 48}}
    spec = compare(convergence_steps=20, candidate=wider)
    *turns, last = RUNNER.plan(spec)
    assert [unit.side is None for unit in turns] == [False, False]
    assert (last.side, last.title) == (None, "convergence, 6 pairs of 20 steps")
    report = reported(spec, tmp_path, last)
    assert [row["step"] for row in report.table_rows("losses")] == list(range(1, 21))
    told = [row["convergence"] for row in report.table_rows("convergence")]
    assert told[0].startswith("not learned yet")
    assert "20 steps" in told[1]
    assert [one["name"] for one in report.verdict["checks"] if not one["ok"]] == ["models", "learned"]
    assert not report.rows, "it measures no case"


PEEKS = """
import torch
import torch.nn.functional as F
from workers.model import TransformerLM

torch.autograd.set_detect_anomaly(True)

class Peeks(TransformerLM):
    def __init__(self, *sizes, attention, **options):
        def without_mask(q, k, v, is_causal):
            return F.scaled_dot_product_attention(q, k, v)
        super().__init__(*sizes, attention=without_mask, **options)
"""


def test_a_side_whose_model_sees_what_it_predicts_is_suspect_and_its_settings_are_its_own(tmp_path, upload) -> None:
    spec = compare(convergence_steps=20, candidate={"kind": "benchmark", **BF16, "code": upload(PEEKS, "Peeks")})
    report = reported(spec, tmp_path, RUNNER.plan(spec)[-1])
    assert not torch.is_anomaly_enabled()
    checks = {one["name"]: one for one in report.verdict["checks"]}
    assert not checks["settings"]["ok"]
    assert "detection of anomalies from False to True" in checks["settings"]["detail"]
    check = checks["causal"]
    assert (check["ok"], check["severity"]) == (False, "suspect")
    assert check["detail"].startswith("the candidate's model sees the letters that it predicts")
    assert check["detail"] in [row["convergence"] for row in report.table_rows("convergence")][:2]
    for fields in ({}, FP8, {"attention": "cpu_flash", "precision": "fp32"}, {"activation_checkpointing": True}):
        causal = BenchmarkSpec.model_validate({**BF16, **fields, "mode": "train_step"})
        assert not sees_ahead(causal, *building.prepare(causal)), fields


@pytest.mark.parametrize(
    ("side", "words"),
    [
        ({"mode": "forward"}, "candidate/mode|choose train_step"),
        ({"step_code": {"sha256": "a" * 64, "function": "f"}}, "candidate/step_code|our models only"),
        ({"context_length": 32}, "is 32, the baseline's 16: convergence_steps needs equal batches"),
        ({"model": {**MODEL, "vocab_size": 64}}, "is 64, the baseline's 32"),
        ({"seed": 1}, "is 1, the baseline's 0"),
    ],
)
def test_sides_that_cannot_train_on_equal_batches_are_refused(side: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compare(convergence_steps=20, candidate={"kind": "benchmark", **BF16, **side})
