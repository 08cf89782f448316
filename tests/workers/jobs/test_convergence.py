"""Losses of both sides of a comparison: what training runs say of equal, of narrower and of broken arithmetic."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from app.specs import spec_adapter
from app.specs.benchmark import BenchmarkSpec
from app.specs.compare import CompareSpec
from tests.workers.reporting import Report
from workers.jobs._convergence import Run, loss_rows, sentences, steps_to, train
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


def trained(fields: dict[str, Any], pairs: int = PAIRS) -> list[Run]:
    spec = BenchmarkSpec(**fields, measure_steps=STEPS, optimizer="torch_adamw")
    device, build = building.prepare(spec)
    return [train(spec.model_copy(update={"seed": seed}), device, build) for seed in range(pairs)]


@pytest.fixture(scope="module")
def bf16() -> list[Run]:
    return trained(BF16)


def test_bf16_against_itself_shows_no_difference(bf16: list[Run]) -> None:
    said, faster = sentences({"baseline": bf16, "candidate": trained(BF16)})
    assert said.startswith("no difference of the losses at all: both sides compute the same after 30 steps")
    needed = re.search(r"it needs (\d+) steps of .* ms, the baseline (\d+) of", faster)
    assert needed is not None
    assert needed[1] == needed[2]


def test_fp8_trains_and_a_scale_that_stays_at_1_does_not(bf16: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scales, numbers below 2^-9 round to 0, and gradients are such numbers."""
    pytest.importorskip("torchao")
    fp8 = trained(FP8, 2)
    scaling = pytest.importorskip("torchao.float8.float8_scaling_utils")
    right = scaling.tensor_to_scale
    monkeypatch.setattr(
        scaling, "tensor_to_scale", lambda *inputs, **options: torch.ones_like(right(*inputs, **options))
    )
    said, _ = sentences({"baseline": bf16, "candidate": trained(FP8)})
    assert said.startswith("the candidate's loss is 0.0"), said
    assert " higher than 3." in said
    rows = loss_rows({"baseline": bf16[:2], "candidate": fp8})
    assert abs(rows[-1][3] or 0) < 0.01, "with scales, 8 bits are enough here"


def curves(losses: list[list[float]], step_ms: float = 2.0) -> list[Run]:
    return [Run(one, step_ms) for one in losses]


def falling(steps: int, rate: float, above: float = 0.0) -> list[float]:
    return [1 + above + math.exp(-rate * step) for step in range(steps)]


def test_a_faster_step_that_learns_less_is_less_faster_to_the_loss() -> None:
    baseline = curves([falling(100, 0.05) for _ in range(6)], 3.0)
    candidate = curves([falling(100, 0.04, 1e-4 * pair) for pair in range(6)], 2.0)
    said, faster = sentences({"baseline": baseline, "candidate": candidate})
    assert "higher than 1.0" in said
    assert "6 pairs" in said
    assert faster.startswith("per step the candidate is 1.5× faster (95 % interval of the speed-up 1.5 to 1.5)")
    needed = steps_to(max(sum(run.losses[-10:]) / 10 for run in candidate), [run.losses for run in baseline])
    assert needed is not None
    assert needed < 90
    assert f"100 steps of 2 ms, the baseline {needed} of 3 ms" in faster
    assert f"it is {1.5 * needed / 100:.3g}× faster" in faster or f"it is {100 / needed / 1.5:.3g}× slower" in faster


def test_differences_of_both_signs_are_none() -> None:
    baseline = curves([falling(50, 0.05) for _ in range(6)])
    candidate = curves([falling(50, 0.05, above) for above in (-0.02, -0.01, 0.0, 0.01, 0.01, 0.02)])
    said = sentences({"baseline": baseline, "candidate": candidate})[0]
    assert said.startswith("no difference of the losses is shown after 50 steps")
    assert "95 % interval -0.02 to +0.02" in said


def test_a_loss_that_is_not_finite_is_said_with_its_step() -> None:
    baseline = curves([falling(50, 0.05) for _ in range(6)])
    broken = [[*falling(30, 0.05), *[math.nan] * 20], *[falling(50, 0.05) for _ in range(5)]]
    (said,) = sentences({"baseline": baseline, "candidate": curves(broken)})
    assert said == "the candidate's loss is not finite from step 31 on: it does not train"
    assert loss_rows({"baseline": baseline, "candidate": curves(broken)})[-1][2:] == [None] * 4


def test_chains_are_equal_for_equal_seeds_and_can_be_learned() -> None:
    one, same, other = (ChainBatches(300, 8, 64, CPU, seed, 4) for seed in (1, 1, 2))
    batches = [one.next() for _ in range(4)]
    assert all(torch.equal(inputs, same.next()[0]) for inputs, _ in batches)
    assert not torch.equal(batches[0][0], other.next()[0])
    followers: dict[int, set[int]] = {}
    for inputs, targets in batches:
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        for letter, after in zip(inputs.flatten().tolist(), targets.flatten().tolist(), strict=True):
            followers.setdefault(letter, set()).add(after)
    assert max(map(len, followers.values())) <= 4
    assert max(followers) < 256
    with pytest.raises(StopIteration):
        one.next()


def compare(**fields: Any) -> CompareSpec:
    sides = {"baseline": {"kind": "benchmark", **BF16}, "candidate": {"kind": "benchmark", **BF16, "precision": "fp32"}}
    spec = spec_adapter.validate_json(json.dumps({"kind": "compare", "replicates": 1, "seed": 1, **sides, **fields}))
    assert isinstance(spec, CompareSpec)
    return spec


def test_a_comparison_ends_with_its_pairs_of_runs(tmp_path: Path) -> None:
    spec = compare(convergence_steps=20)
    *turns, last = RUNNER.plan(spec)
    assert [unit.side is None for unit in turns] == [False, False]
    assert (last.side, last.title) == (None, "convergence, 6 pairs of 20 steps")
    report = Report(tmp_path)
    RUNNER.run(spec, last, report)
    assert [row["step"] for row in report.table_rows("losses")] == list(range(1, 21))
    assert "20 steps" in report.table_rows("convergence")[0]["convergence"]
    assert not report.rows, "it measures no case"


@pytest.mark.parametrize(
    ("side", "words"),
    [
        ({"mode": "forward"}, "candidate/mode|choose train_step"),
        ({"context_length": 32}, "is 32, the baseline's 16: convergence_steps needs equal batches"),
        ({"model": {**MODEL, "vocab_size": 64}}, "is 64, the baseline's 32"),
        ({"seed": 1}, "is 1, the baseline's 0"),
    ],
)
def test_sides_that_cannot_train_on_equal_batches_are_refused(side: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compare(convergence_steps=20, candidate={"kind": "benchmark", **BF16, **side})
