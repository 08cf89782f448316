"""The runner of `ddp`: one launch of two ranks measures every strategy, and the runner reports what they return."""

import copy
import gzip
import hashlib
import json
import pickle
import re
import shutil
import statistics
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parallel.bucket_size import fit
from workers.jobs._latency_fits import NO_LINE
from workers.jobs.ddp.buckets import bucket_rows
from workers.jobs.ddp.timing import LATER_WARMUP
from workers.outcome import RunnerError, Unsupported

pytest.importorskip("pydantic", reason="the service's dependencies are not installed")

import torch

from app.specs import KINDS, spec_adapter
from app.specs.ddp import DdpSpec
from parallel import process_group
from parallel.process_group import RanksFailed, launch
from tests.parallel.pool import Pool
from tests.workers.jobs.ddp.planted_steps import MORE
from tests.workers.jobs.ddp.ranks import (
    BEGINS_LATE_S,
    FORGOTTEN,
    PROFILED,
    SLOWER_MS,
    dtypes_in_blocks,
    replicas,
    run_all,
    run_one,
)
from tests.workers.reporting import Report, reported
from workers import uploaded
from workers.jobs import _ranks
from workers.jobs._base import Unit
from workers.jobs._values import Values
from workers.jobs.ddp import strategies, timing
from workers.jobs.ddp.buckets import report_buckets
from workers.jobs.ddp.parity import SMALL_SHARE, gradient_errors, largest_error, relative_error, small_gradients
from workers.jobs.ddp.rank import rounds_of, run_rank
from workers.jobs.ddp.replicas import check_replicas
from workers.jobs.ddp.timelines import ranks_of
from workers.jobs.ddp.values import (
    PARITY,
    add_exposed,
    add_overlap,
    add_values,
    check_communicates,
    check_graphs,
    check_host,
    check_parity,
    check_profiled,
    metrics,
    precisions_of_ranks,
    tolerance,
    turns_of,
)
from workers.measure import validity
from workers.measure.compilation import Compilation
from workers.measure.memory import memory_meter
from workers.outcome import Crashed

MODEL = {"d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 61}
MATRICES = 2 * 61 * 16 + 2 * (4 * 16**2 + 3 * 16 * 24)
PARAMETERS = MATRICES + 5 * 16
ROOT = 2 * 61 * 16 + 16
MIB = 2**20
SMALL = {"model": MODEL, "context_length": 8, "warmup_steps": 0, "measure_steps": 1}
LARGEST = {**DdpSpec.presets["8b"], "checkpoint_layers": 1}
MASTER = {"precision": "bf16", "parameter_dtype": "bf16", "master_weights": True}
STEPS = Path(__file__).with_name("planted_steps.py").read_bytes()
CODE = {"sha256": hashlib.sha256(STEPS).hexdigest(), "function": "make_step", "file": "planted_steps.py"}
FP8 = {"strategy": "fsdp", "precision": "fp8", "fp8_filter": "layers.*.attn.*", "fp8_recipe": "rowwise"}
ONCE = {"reshard_after_forward": False, "accumulation_steps": 2}
SPECS: dict[str, dict[str, Any]] = {
    "none": {"strategy": "none"},
    "naive, sharded": {"strategy": "naive", "sharded_optimizer": True, "gradient_clip_norm": 0.1},
    "flat, narrow": {"strategy": "flat", "precision": "bf16", "parameter_dtype": "bf16"},
    "overlapped, no optimizer": {"strategy": "overlapped", "mode": "forward_backward"},
    "bucketed": {"strategy": "bucketed", "bucket_size_mb": None, "measure_steps": 3, "warmup_steps": 1, "trace": True},
    "bucketed, small": {"strategy": "bucketed", "bucket_size_mb": 0.004, "accumulation_steps": 3},
    "fsdp, checkpointing": {"strategy": "fsdp", "activation_checkpointing": True, "gradient_clip_norm": 0.1},
    "fsdp, compiled": {
        **LARGEST,
        "model": {**MODEL, "num_layers": 1},
        "context_length": 8,
        "attention": "eager",
        "fused": [],
        "optimizer": "torch_fused_adamw",
        "backend": "gloo",
    },
    "fsdp, cast": {"strategy": "fsdp", "precision": "bf16", "cast_before_communication": True},
    "fsdp, fp8": FP8,
    "torch_ddp, fp8": {**FP8, "strategy": "torch_ddp"},
    "torch_ddp": {"strategy": "torch_ddp", "bucket_size_mb": None, "accumulation_steps": 3},
    "torch_ddp, sharded": {"strategy": "torch_ddp", "sharded_optimizer": True, "precision": "fp16"},
    "torch_ddp, master weights": {"strategy": "torch_ddp", "sharded_optimizer": True, **MASTER},
    "fsdp, gathered once": {"strategy": "fsdp", **ONCE, "precision": "fp16"},
    "torch_fsdp, gathered once": {"strategy": "torch_fsdp", **ONCE, "precision": "bf16", "gradient_clip_norm": 0.1},
    "torch_fsdp": {"strategy": "torch_fsdp", "optimizer": "torch_fused_adamw"},
    "a model of one's own": {"strategy": "flat", "precision": "bf16", "code": {**CODE, "function": "Float32"}},
    "a look, fsdp": {"strategy": "fsdp", "prefetch": 0, "accumulation_steps": 2},
    **{f"{late}, own": {"step_code": CODE, "arguments": {"late": late}} for late in ("host", "input", "documents")},
    "begins late, own": {"step_code": CODE, "arguments": {"late": "groups"}},
    "uneven, own": {"step_code": {**CODE, "function": "make_uneven_step"}, "warmup_steps": 0, "measure_steps": 6},
    "apart, own": {"step_code": {**CODE, "function": "make_apart_step"}},
    "only times, flat": {"strategy": "flat", "measure_steps": 2},
    "flat": {"strategy": "flat"},
    "sends slowly, flat": {"strategy": "flat", "measure_steps": 3},
    "sends nothing, flat": {"strategy": "flat"},
    "has state, bucketed": {"strategy": "bucketed", "accumulation_steps": 2, "optimizer": "torch_adamw"},
    "forgets one, flat": {"strategy": "flat", "precision": "bf16"},
    "lacks a rank of 64, flat": {"strategy": "flat", "precision": "bf16", "parameter_dtype": "bf16"},
    "does not fit, flat": {"strategy": "flat"},
    "does not fit later, flat": {"strategy": "flat"},
    "one process does not fit, flat": {"strategy": "flat"},
    "no host memory, flat": {"strategy": "flat"},
}
LACKING = () if find_spec("torchao") else ("fsdp, fp8", "torch_ddp, fp8")
RIGHT = [
    pytest.param(name, marks=pytest.mark.skipif(name in LACKING, reason="torchao is not installed"))
    for name in SPECS
    if name.split(", ")[0] in DdpSpec.model_fields["strategy"].annotation.__args__  # type: ignore[union-attr]
]


def parsed(**fields: Any) -> DdpSpec:
    return spec_adapter.validate_json(json.dumps({"kind": "ddp", **SMALL, **fields}))


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Pool]:
    """Two ranks of this module's own, since measuring leaves hooks and code in them. They are forks of a process that
    has imported torch and its compiler; tests/acceptance has jobs whose ranks `launch` starts."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def measured(two_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[Any], Path]:
    """What two ranks return for each spec, what they reported meanwhile, and their folder."""
    folder = tmp_path_factory.mktemp("ranks")
    variables = uploaded.write(folder / "code", [STEPS])
    found: list[dict[str, Any]] = [{}, {}]
    reports: list[Any] = []
    for name, fields in SPECS.items():
        if name not in LACKING:
            answers = two_ranks(run_one, name, parsed(**fields).model_dump(mode="json"), str(folder), variables)
            for rank, (result, reported) in zip(found, answers, strict=True):
                rank[name] = result
                reports += reported
    return found, reports, folder


@pytest.fixture
def run(measured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the runner for one of the specs; its ranks are those that have measured already."""
    found, reports, _ = measured

    def run(name, *, why_no_profiler=None, diagnosed=False, stage="look", rounds=None, **fields) -> Report:
        def already(function: Any, specs: Any, scratch: str, extent: str, *, reported: Any, **options: Any) -> None:
            assert function is run_rank
            assert options["world_size"] == 2
            for message in reports:
                reported(0, message)
            ranks = [copy.deepcopy(rank[name]) for rank in found]
            for rank in ranks:
                if rank.get("overlap", {}).get("trace") is not None:
                    rank["overlap"]["trace"] = shutil.copy(rank["overlap"]["trace"], scratch)
            if why_no_profiler is not None:
                ranks[1]["overlap"] = {"why_not": why_no_profiler}
            for index, rank in enumerate(ranks):
                reported(index, {"found": [rank] * len(specs)})

        monkeypatch.setattr(_ranks, "launch", already)
        spec = parsed(**SPECS[name], **fields)
        if diagnosed:
            changes = ["gather_earlier", "gather_once", "compile_model"]
            of_step = KINDS["diagnosis"].model_validate({"step": spec.model_dump(), "changes": changes})
            params = {"stage": stage, "changes": [], "fields": {}, "warmup_steps": 0, "measure_steps": 2}
            params |= {} if rounds is None else {"rounds": rounds}
            return reported(of_step, tmp_path, Unit("x", params))
        return reported(spec, tmp_path)

    return run


def values(report: Report) -> dict[str, Any]:
    rows = {row["metric"]: row for row in report.rows}
    assert len(rows) == len(report.rows)
    return rows


def test_steps_of_ones_own_that_differ(run: Any) -> None:
    """The mean work in the median time would be 1300 tokens per second. Two optimizers have the parameters, and others
    around them their state; which gradients there were before them is not known."""
    report = run("uneven, own")
    assert not {"communication", "operations"} & {*report.tables}
    rows = {name: row["median"] for name, row in values(report).items()}
    assert 0 < rows["tokens_per_s"] <= 2 * (8 + 2) / (40e-3 + 2 * 5e-3)
    assert rows["heavy_ms"] is None
    assert rows["communication_ms"] >= 2
    assert (rows["parameters"], rows["parameters_mib"]) == (36, 36 * 4 / 2**20)
    assert rows["optimizer_state_mib"] == (2 * 36 * 4 + 2 * 4 + 2 * 16) / 2**20
    assert (rows["gradients_mib"], rows["memory_before_optimizer_mib"]) == (None, None)


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([({"bf16": 1.0}, ""), ({"bf16": 1.0}, "")], ({"bf16": 1.0}, "")),
        ([({"bf16": 0.5, "fp8": 0.5}, ""), ({"fp8": 1.0, "bf16": 0.0}, "")], ({"bf16": 0.25, "fp8": 0.75}, "")),
        ([({"bf16": 1.0}, ""), ({}, "the profiler saw none")], ({}, "rank 1: the profiler saw none")),
        ([({"bf16": 1.0}, ""), ({"fp32": 1.0}, "")], ({}, "the ranks' products are of several precisions: bf16, fp32")),
    ],
)
def test_only_the_same_precisions_on_all_ranks_have_a_peak(ranks: list[Any], found: Any) -> None:
    assert precisions_of_ranks(ranks) == found


@pytest.mark.parametrize(
    ("fields", "times_ms", "told"),
    [
        ({"step_code": CODE}, [0.0, 0.0], True),
        ({"step_code": CODE}, [0.0, 0.1], False),
        ({"step_code": CODE, "world_size": 1}, [0.0], False),
        ({"step_code": CODE}, None, False),
        ({"strategy": "none"}, [0.0], False),
    ],
)
def test_a_step_of_ones_own_whose_ranks_exchange_nothing_is_suspect(fields, times_ms, told) -> None:
    spec = parsed(**fields)
    found = Values(metrics(spec, ()))
    steps = [{"communication_ms": time_ms, "exposed_ms": time_ms} for time_ms in times_ms or ()]
    overlap = {"why_not": "unknown" if times_ms is None else None, "steps": steps}
    add_overlap(found, spec, [{"overlap": overlap, "operations": []}], 1.0)
    assert [check.name for check in check_communicates(found, spec) if not check.ok] == ["communicates"] * told
    # Of steps that share gradients now and then a median would be 0.
    known = spec.step_code is not None and times_ms not in (None, [0.0, 0.1])
    assert (found.samples("communication_percent", None) is not None) == known


@pytest.mark.parametrize(
    ("steps", "told"), [([[4.0, 4.0], [1.0, 5.0]], True), ([[1.4], [1.0]], False), ([[], []], False)]
)
def test_steps_that_take_longer_under_the_profiler_are_told(steps: list[list[float]], told: bool) -> None:
    """Communication of 3.7 ms, of which 7 were exposed, in a step of 11."""
    ranks = [{"overlap": {"steps": [{"step_ms": time_ms} for time_ms in rank]}} for rank in steps]
    assert [check.detail[:50] for check in check_profiled(ranks, 1.0)] == [
        "the step takes 1 ms, under the profiler 4.5, of wh"
    ] * told


@pytest.mark.parametrize(("fields", "graphs"), [({"step_code": CODE}, 2), ({"step_code": CODE}, 0), ({}, 2)])
def test_what_a_step_of_ones_own_compiles_while_it_is_measured_is_told(fields: dict[str, Any], graphs: int) -> None:
    before, after = (asdict(Compilation(graphs=number)) for number in (graphs // 2, graphs))
    found = check_graphs(parsed(**fields), [[{"graphs_before": before, "graphs_after": after, "warmup": 3}]])
    assert [check.name for check in found if not check.ok] == ["recompiles"] * bool(fields and graphs)


def test_ranks_that_train_different_models_are_suspect(run: Any) -> None:
    check = run("apart, own").check("replicas")
    assert (check["ok"], check["severity"]) == (False, "suspect")
    assert re.match(r"ranks 0 and 1 train different models: (weight|bias) \[", check["detail"])


@pytest.mark.parametrize("how", ["steps alone", "other rate", "ours, other rate"])
def test_ranks_that_a_wrapper_does_not_keep_equal_are_told(two_ranks: Pool, how: str) -> None:
    (check,) = check_replicas(two_ranks(replicas, how))
    assert (check.name, check.severity) == ("replicas", "suspect")
    assert re.match(
        r"ranks 0 and 1 train different models: \d.(weight|bias) \[.*\] differs by .* of its norm", check.detail
    )


@pytest.mark.parametrize("how", ["", "ours", "frozen", "ignored", "ours, sharded", "local"])
def test_ranks_that_are_equal_or_are_not_meant_to_be_are_not_told(two_ranks: Pool, how: str) -> None:
    assert check_replicas(found := two_ranks(replicas, how)) == []
    assert all(elements for _, elements in found[0])
    assert len(found[0]) == (1 if how == "local" else 2)


def test_one_process_draws_and_keeps_what_each_rank_does_and_a_parameter_without_gradient_is_named(run: Any) -> None:
    report = run("has state, bucketed")
    assert values(report)["gradient_error"]["median"] <= 1e-5
    assert values(report)["parameter_error"]["median"] <= 1e-4
    (verdict,) = report.verdicts.values()
    checks = {check["name"]: check for check in verdict["checks"]}
    assert checks["parity"]["ok"]
    assert (checks["gradients"]["ok"], checks["gradients"]["severity"]) == (False, "suspect")
    assert checks["gradients"]["detail"].startswith("1 trainable parameters got none, unused first")


def test_a_model_of_ones_own_computes_in_the_jobs_precision(run: Any) -> None:
    check = run("a model of one's own").check("precision")
    assert check["detail"] == "bf16 was asked for, and the model's products are 100% fp32"


@pytest.mark.parametrize("name", RIGHT)
def test_every_strategy_equals_one_process_on_the_whole_batch(run: Any, name: str) -> None:
    report = run(name)
    found, spec = values(report), parsed(**SPECS[name])
    assert found["step_ms"]["outcome"] == "ok"
    check = report.check("parity")
    assert check["ok"], check
    assert report.check("cores")
    if spec.strategy == "none":
        assert found["gradient_error"]["reason"] == "strategy none does not communicate"
        assert check["severity"] == "not_judged"
        return
    # Two ranks add two numbers, in any order: every bit is the same, but where they add sums in 8 bits, or where
    # micro-batches are more numbers, which processors add in their own order.
    limit = 0.01 if spec.casts else 1e-5 if spec.accumulation_steps > 1 else 1e-6
    assert found["gradient_error"]["median"] <= limit
    if spec.mode == "train_step":
        assert found["parameter_error"]["median"] <= 10 * limit
    else:
        assert "changes no parameters" in found["parameter_error"]["reason"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("host, own", "its host is "),
        ("input, own", "its input takes "),
        ("documents, own", f"{MORE:.2f} times the others' tokens"),
    ],
)
def test_a_straggler_is_named_with_its_cause(run: Any, name: str, said: str) -> None:
    report = run(name)
    first, second, *groups = report.table_rows("stragglers")
    assert (first["operation"], second["operation"]) == ("all", "all")
    assert said in second["what"]
    assert second["late_ms"] > 5 * first["late_ms"]
    assert first["waiting_ms"] > 0.5 * second["late_ms"]
    assert {(row["operation"], row["phase"], row["collectives"]) for row in groups} == {("all_reduce", "backward", 2)}
    check = report.check("stragglers")
    assert said in check["detail"]
    assert (check["ok"], check["severity"]) == (False, "note")
    aligned_ms = float(check["detail"].partition("clocks aligned to ")[2].split()[0])
    assert 0 <= aligned_ms < second["late_ms"]


def test_a_step_that_begins_later_is_no_straggler(run: Any) -> None:
    report = run("begins late, own")
    first, second, *_ = report.table_rows("stragglers")
    check = report.check("stragglers")
    assert "the step made 1 process group of its own, but ranks are compared as if all met" in check["detail"]
    assert first["early_ms"] > 0.5e3 * BEGINS_LATE_S
    assert second["early_ms"] < 0.5 * first["early_ms"]
    assert second["late_ms"] < 0.5e3 * BEGINS_LATE_S
    if "late in" not in f"{first['what']} {second['what']}":  # a busy host may have delayed either later, too
        assert first["what"] == "its steps begin earlier, and nobody is late"


def test_a_diagnosis_finds_what_a_step_of_ranks_is_lost_to(run: Any) -> None:
    """The same ranks, as `flopwatch why ddp` sees them."""
    report = run("a look, fsdp", diagnosed=True)
    causes = report.table_rows("seen")
    (step,) = [row["median"] for row in report.rows if row["metric"] == "step_ms"]
    assert sum(row["lost_ms"] for row in causes) == pytest.approx(step)
    gathers = [row["where"] for row in report.table_rows("waits") if str(row["where"]).startswith("all_gather before ")]
    assert gathers, "what waits for a gather is named"
    assert len(report.table_rows("gaps")) == 10
    changes = {row["change"]: row for row in report.table_rows("candidates")}
    assert json.loads(changes["gather_earlier"]["fields"]) == {"prefetch": 1}
    assert json.loads(changes["gather_once"]["fields"]) == {"reshard_after_forward": False}
    assert changes["compile_model"]["why_not"] == "fsdp gathers block by block: choose compile_scope blocks"


def test_a_changed_step_of_ranks_is_timed_alone_and_its_losses_are_kept(run: Any) -> None:
    report = run("only times, flat", diagnosed=True, stage="screen")
    (row,) = report.table_rows("turns")
    assert (row["stage"], row["samples"], row["outcome"]) == ("screen", 2, "ok")
    assert row["step_ms"] > 0
    losses = [(row["step"], row["name"]) for row in report.table_rows("values") if row["what"] == "returned"]
    assert losses[:2] == [(1, "rank 0 loss"), (2, "rank 0 loss")]


SIDES = [{"changes": [], "fields": {}}, {"changes": ["gather_once"], "fields": {"batch_size": 1}}]


def test_the_sides_of_a_round_are_timed_in_the_same_ranks(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run("only times, flat", diagnosed=True, stage="turn", rounds=SIDES * 2)
    rows = report.table_rows("turns")
    assert [(row["changes"], row["samples"], row["outcome"]) for row in rows] == [
        ("", 2, "ok"),
        ("gather_once", 2, "ok"),
    ] * 2
    assert "values" not in report.tables, "the screening has them"

    def crash(*_: Any) -> None:
        raise Crashed("rank 1 died")

    monkeypatch.setattr("workers.jobs.ddp.times", crash)
    rows = run("only times, flat", diagnosed=True, stage="turn", rounds=SIDES * 2).table_rows("turns")
    assert [(row["changes"], row["outcome"], row["reason"]) for row in rows] == [
        ("gather_once", "refused", "rank 1 died")
    ] * 2
    other = {"changes": ["gather_earlier"], "fields": {}}
    rows = run("only times, flat", diagnosed=True, stage="turn", rounds=[*SIDES, other]).table_rows("turns")
    assert [(row["changes"], row["outcome"], row["reason"]) for row in rows] == [
        (name, "failed", "rank 1 died") for name in ("gather_once", "gather_earlier")
    ], "nobody knows which of them it was"


@pytest.mark.parametrize("strategy", ["fsdp", "torch_fsdp"])
def test_rotary_angles_are_float32_in_blocks_and_in_their_recomputation(two_ranks: Pool, strategy: str) -> None:
    fields = {"precision": "bf16", "parameter_dtype": "bf16", "activation_checkpointing": True}
    spec = parsed(strategy=strategy, **fields).model_dump(mode="json")
    assert two_ranks(dtypes_in_blocks, spec) == [[["torch.bfloat16"], ["torch.float32"], ["torch.float32"]]] * 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sends nothing, flat", "gradient_error"),
        ("lacks a rank of 64, flat", "gradient_error"),  # as "flat, narrow", whose errors are below the limit
        ("forgets one, flat", f"of {FORGOTTEN} exceeds 0.01"),
    ],
)
def test_a_strategy_that_is_wrong_has_no_speed(run: Any, name: str, reason: str) -> None:
    report = run(name)
    found = values(report)
    assert found["gradient_error"]["median"] > 1 / 64
    for metric, row in found.items():
        if not metric.endswith("_error"):
            assert (row["outcome"], row["median"]) == ("wrong", None)
            assert "not equal to one process on the whole batch: " in row["reason"]
            assert reason in row["reason"]
    (verdict,) = report.verdicts.values()
    assert verdict["verdict"] == "wrong"


@pytest.mark.parametrize("attention", ["triton", "eager"])
def test_a_fall_back_to_older_kernels_is_noted(run: Any, monkeypatch: pytest.MonkeyPatch, attention: str) -> None:
    """Preset 8b runs `triton`."""
    monkeypatch.setattr(validity, "why_not_hopper", lambda device: f"older kernels on {device}")
    (verdict,) = run("flat", attention=attention).verdicts.values()
    notes = [check for check in verdict["checks"] if check["name"] == "attention_kernels"]
    note = {"name": "attention_kernels", "ok": False, "detail": "older kernels on cpu", "severity": "note"}
    assert notes == ([note] if attention == "triton" else [])


def test_times_are_the_slowest_ranks(run: Any, measured: Any) -> None:
    report = run("bucketed")
    found = values(report)
    ranks = [rank["bucketed"]["turns"] for rank in measured[0]]
    sides = ["bucketed", "silent", "none"]
    orders = [[turn["strategy"] for turn in turns] for turns in ranks]
    assert orders[1] == orders[0], "all ranks draw the same"
    assert [orders[0][begin : begin + 3] for begin in (0, 3, 6)] == rounds_of(sides, 3, 0)
    assert [len(turn["step_ms"]) for turn in ranks[0]] == [1] * 9
    slowest: dict[str, list[float]] = {side: [] for side in sides}
    for number, turn in enumerate(ranks[0]):
        slowest[turn["strategy"]].append(max(rank[number]["step_ms"][0] for rank in ranks))
    names = {"bucketed": "step_ms", "silent": "computation_step_ms", "none": "alone_step_ms"}
    for side, metric in names.items():
        assert (found[metric]["n"], found[metric]["max"]) == (3, max(slowest[side]))
    for side, metric in (("silent", "exposed_communication_ms"), ("none", "net_cost_ms")):
        differences = [own - other for own, other in zip(slowest["bucketed"], slowest[side], strict=True)]
        assert (found[metric]["min"], found[metric]["max"]) == pytest.approx((min(differences), max(differences)))
    assert not report.check("exposed_communication")["ok"], "3 of 6 rounds"
    assert found["synchronization_ms"]["n"] == 3
    assert found["tokens_per_s"]["median"] == pytest.approx(1e3 * 2 * 2 * 8 / found["step_ms"]["median"])


def test_no_load_sits_on_one_side_in_all_rounds() -> None:
    """A load in one of three turns, while every second round reversed the one before, did for 4 % of the seeds."""

    def is_on_one_side(orders: Sequence[Sequence[str]], shift: int) -> bool:
        turns = [side for order in orders for side in order]
        loaded = [side for turn, side in enumerate(turns) if (turn + shift) % 3 < 1]
        return {loaded.count("own"), loaded.count("other")} == {0, 6}

    sides, places = ["own", "other", "third"], [(seed, shift) for seed in range(400) for shift in range(3)]
    assert sum(is_on_one_side(rounds_of(sides, 6, seed), shift) for seed, shift in places) <= 0.01 * len(places)
    assert any(is_on_one_side([sides] * 6, shift) for shift in range(3)), "the control"


@pytest.mark.parametrize("name", ["bucketed", "bucketed, small"])
def test_buckets_have_a_prediction_on_gpus_only(run: Any, measured: Any, tmp_path: Path, name: str) -> None:
    """What the ranks measured as it is, and as if GPUs had measured it, with all-reduces of 1 ms and 1 GB/s."""
    on_cpu = run(name)
    assert {"predicted_exposed_ms", "buckets"} & set(values(on_cpu)) == {"buckets"}
    assert "bucket-size" not in on_cpu.tables
    total = 4 * PARAMETERS
    times = {str(size): [1 + size / 1e6] * 3 for size in (4096, 8192, total)}
    ranks = [{**rank[name], "all_reduce": times} for rank in measured[0]]
    spec = parsed(**SPECS[name]).model_copy(update={"backend": "nccl"})
    found, report = Values(metrics(spec)), Report(tmp_path)
    add_exposed(found, spec, ranks)
    best_mb, doubt = report_buckets(spec, ranks, turns_of(ranks, "silent"), found, report)
    (fit,) = report.table_rows("fit")
    assert (fit["operation"], fit["sizes"]) == ("all_reduce", 3)
    own, best, *curve = report.table_rows("bucket-size")
    assert found.samples("predicted_exposed_ms", None) == [own["predicted_exposed_ms"]]
    assert (best["size_mb"], best["note"], own["note"]) == (best_mb, doubt, doubt)
    assert {row["note"] for row in curve} == {None}
    assert own["buckets"] == values(on_cpu)["buckets"]["median"]
    assert (own["buckets"] == 1) is (SPECS[name]["bucket_size_mb"] is None)
    assert own["exposed_communication_ms"] == values(on_cpu)["exposed_communication_ms"]["median"]
    assert own["size_mb"] == pytest.approx(SPECS[name]["bucket_size_mb"] or total / MIB)
    assert own["communication_ms"] == pytest.approx(own["buckets"] + total / 1e6)
    assert own["communication_ms"] == pytest.approx(own["hidden_ms"] + own["predicted_exposed_ms"])
    assert best["low_mb"] <= best["size_mb"] <= best["high_mb"] <= total / MIB
    assert best["predicted_exposed_ms"] == min(row["predicted_exposed_ms"] for row in curve)
    assert (curve[-1]["size_mb"], curve[-1]["buckets"]) == (total / MIB, 1)


@pytest.mark.parametrize(
    ("bend", "measured_ms", "note"),
    [(1.0, 6.0, None), (1.0, 80.0, "80 ms exposed, not"), (9.0, 6.0, NO_LINE)],
)
def test_a_prediction_that_may_be_wrong_says_so(bend: float, measured_ms: float, note: str | None) -> None:
    """All-reduces of 1 ms and 1 GB/s, the middle ones `bend` times as long: a bucket of 4 MB leaves 5.19 ms exposed."""
    times = {4096: [1.004e-3] * 3, 2**16: [bend * 1.066e-3] * 3, 2**22: [5.19e-3] * 3}
    spec = parsed(strategy="bucketed", bucket_size_mb=None)
    own, best, *_ = bucket_rows(spec, fit(times), [2**22], 1e-3, [measured_ms])
    assert best[-1] == own[-1]
    assert own[-1] is None if note is None else note in str(own[-1])


def test_slower_communication_is_exposed(measured: Any) -> None:
    """How much of it nobody can say: a busy host's steps vary by more."""
    found = Values(metrics(parsed(**SPECS["sends slowly, flat"])))
    add_exposed(found, parsed(strategy="flat"), [rank["sends slowly, flat"] for rank in measured[0]])
    assert statistics.median(found.samples("exposed_communication_ms", None) or ()) > SLOWER_MS / 2


def same_optimizer(ranks: Any, name: str) -> bool:
    """Whether every rank updates the same with communication and without it."""
    sides = [rank[name]["optimizers"] for rank in ranks]
    return all(side.get("silent") == side.get(parsed(**SPECS[name]).strategy) for side in sides)


@pytest.mark.parametrize("name", RIGHT[1:])
def test_the_optimizers_time_is_no_communication(measured: Any, name: str) -> None:
    """The side without communication has the same optimizer, of the same parameters, and the same part of its state."""
    assert same_optimizer(measured[0], name)
    assert ("silent" in measured[0][0][name]["optimizers"]) == (parsed(**SPECS[name]).mode == "train_step")


@pytest.mark.parametrize(
    ("error_ms", "silent_ms", "is_ok"), [(0.1, 45, True), (4.0, 45, False), (60.0, 45, False), (0.1, 51, False)]
)
def test_an_uncertain_or_impossible_exposed_time_is_suspect(error_ms: float, silent_ms: float, is_ok: bool) -> None:
    """Steps of 50 ms whose rounds differ by so much, or which are faster than those without communication."""

    def turns(side: str, times: Sequence[float]) -> list[dict[str, Any]]:
        return [{"strategy": side, "step_ms": [time]} for time in times]

    spec = parsed(strategy="flat")
    shared = [50 + error_ms * sign for sign in (-1, 1, -1, 1, -1, 1)]
    ranks = [
        {
            "turns": [*turns("flat", shared), *turns("silent", [silent_ms] * 6), *turns("none", [40.0] * 6)],
            "alone": None,
        }
    ]
    collected = Values(metrics(spec))
    (check,) = add_exposed(collected, spec, ranks)
    assert check.ok is is_ok, check.detail
    assert "e+" not in check.detail
    assert collected.samples("net_cost_ms", None) == pytest.approx([time - 40 for time in shared])


@pytest.mark.parametrize(
    ("busy", "is_ok"),
    [
        ([{"busy_ms": 44.0, "launches": 9}, {"busy_ms": 43.0, "launches": 9}], True),
        ([{"busy_ms": 44.0, "launches": 9}, {"busy_ms": 30.0, "launches": 9}], False),
        ([{"busy_ms": 44.0, "launches": 9}, "the profiler failed"], False),
    ],
)
def test_a_device_that_waits_for_its_host_is_seen_without_communication(busy: list[Any], is_ok: bool) -> None:
    """Hosts issue in 40 ms what takes 45 without communication; with it the step takes 80, which tells nothing."""
    turns = [
        {"strategy": side, "step_ms": [step_ms], "host_us": [40_000.0]}
        for side, step_ms in (("flat", 80), ("silent", 45))
    ]
    check = check_host(parsed(strategy="flat"), [{"turns": turns, "busy": one} for one in busy])
    assert check.ok is is_ok, check.detail
    assert "without communication, issuing a step takes 40 of its 45 ms" in check.detail
    first = (
        "the host issues for 40 ms a step in which the device works for 30: cuda_graph=true or compile=true may help"
    )
    assert check.detail.startswith(first) == (busy[1] == {"busy_ms": 30.0, "launches": 9})


def test_communication_is_seen_beside_computation(run: Any) -> None:
    report = run("bucketed")
    found = values(report)
    assert found["communication_ms"]["n"] == 2
    assert found["communication_ms"]["median"] > 0
    assert found["communication_percent"]["median"] > 0
    timeline = report.table_rows("timeline")
    assert {"compute", "communication", "exposed"} <= {row["stream"] for row in timeline}
    assert {(row["step"], row["rank"]) for row in timeline} == {(1, 0), (1, 1), (2, 0), (2, 1)}
    assert all(0 <= row["start_ms"] <= row["end_ms"] for row in timeline)
    exposed = sum(row["end_ms"] - row["start_ms"] for row in timeline if row["stream"] == "exposed")
    communicated = sum(row["end_ms"] - row["start_ms"] for row in timeline if row["stream"] == "communication")
    assert 0 <= exposed <= communicated


def test_communication_is_timed_without_a_profiler(run: Any) -> None:
    report = run("bucketed", why_no_profiler="CUPTI is taken")
    found = values(report)
    assert found["communication_ms"]["median"] > 0
    assert found["uncovered_communication_ms"]["reason"] == "CUPTI is taken"
    assert {row["rank"] for row in report.table_rows("timeline")} == {0}


@pytest.mark.parametrize(
    ("name", "operations"),
    [
        ("bucketed, small", {"all_reduce"}),
        ("fsdp, checkpointing", {"all_gather", "reduce_scatter", "all_reduce"}),
        ("torch_ddp", set()),  # torch's own are not told
    ],
)
def test_operations_of_our_strategies_tell_when_they_ran(run: Any, name: str, operations: set[str]) -> None:
    rows = run(name).table_rows("operations")
    assert {row["operation"] for row in rows} == operations
    assert all(0 <= row["start_ms"] <= row["end_ms"] for row in rows)
    if operations == {"all_reduce"}:
        sent = sum(row["size"] for row in rows if row["rank"] == 0)
        assert 4 * PARAMETERS <= sent <= 8 * PARAMETERS  # buckets are aligned, and ranks tell what they have


def test_traces_show_ranks_steps_and_collectives(run: Any) -> None:
    report = run("bucketed")
    files = report.files
    together = json.loads(gzip.decompress(files.pop("trace-all-ranks.json.gz").read_bytes()))
    assert list(files) == ["trace.json.gz", "trace-rank-1.json.gz"]
    for rank, path in enumerate(files.values()):
        loaded = json.loads(gzip.decompress(path.read_bytes()))
        names = {event.get("name") for event in loaded["traceEvents"]}
        assert {"step_1", "step_2", "ProfilerStep#2", "gloo:all_reduce", "layers.1"} <= names
        about = loaded["distributedInfo"]
        assert (about["rank"], about["world_size"], about["backend"]) == (rank, 2, "gloo")
        assert loaded["host_name"] == ""
    events = together["traceEvents"]
    names = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"}
    assert names == {(0, "rank 0"), (1, "rank 1")}


@pytest.mark.parametrize("name", ["bucketed", "torch_fsdp", "fsdp, compiled"])
def test_kernels_and_classes_of_each_rank(run: Any, name: str) -> None:
    report = run(name)
    kernels, classes = report.table_rows("kernels"), report.table_rows("classes")
    for rank in (0, 1):
        mine = [row for row in kernels if row["rank"] == rank]
        assert "aten::mm" in {row["name"] for row in mine}
        assert any(row["name"].startswith("gloo:") and row["class"] == "communication" for row in mine)
        assert sum(row["share_percent"] for row in mine) == pytest.approx(100)
        shares = {row["class"]: row["share_percent"] for row in classes if row["rank"] == rank}
        assert sum(shares.values()) == pytest.approx(100)
        assert {"matmul", "communication", "optimizer"} <= shares.keys()


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("bucketed", [("all_reduce", 4 * PARAMETERS, 4 * PARAMETERS)]),
        (
            "torch_ddp, sharded",
            [("all_reduce", 4 * PARAMETERS, 4 * PARAMETERS), ("all_gather", 4 * PARAMETERS, 2 * PARAMETERS)],
        ),
        (
            "fsdp, cast",
            [
                ("all_gather", 2 * (2 * MATRICES - 61 * 16), 2 * MATRICES - 61 * 16),  # the output layer's stay
                ("reduce_scatter", 2 * MATRICES, MATRICES),
                # Of the norms' weights, which every rank keeps, and which of 21 parameters have gradients.
                ("all_reduce", 4 * 80 + 8 + 21, 4 * 80 + 8 + 21),
            ],
        ),
        (
            "torch_fsdp",  # the root unit, of embedding, last norm and output layer, is gathered once
            [
                ("all_gather", 4 * (2 * PARAMETERS - ROOT), 2 * (2 * PARAMETERS - ROOT)),
                ("reduce_scatter", 4 * PARAMETERS, 2 * PARAMETERS),
            ],
        ),
    ],
)
def test_the_volume_of_communication_by_strategy(run: Any, name: str, rows: list[tuple[Any, ...]]) -> None:
    report = run(name)
    found = [tuple(row.values()) for row in report.table_rows("communication")]
    assert found == rows
    assert values(report)["communication_mib"]["median"] == pytest.approx(sum(row[2] for row in rows) / MIB)


@pytest.mark.parametrize(
    ("name", "share", "state"),
    [
        ("bucketed", 1.0, 2.0),
        ("naive, sharded", 1.0, 1.0),
        ("torch_ddp, sharded", 1.0, 1.0),
        ("fsdp, checkpointing", 0.5, 1.0),
        ("torch_fsdp", 0.5, 1.0),
        ("torch_ddp, master weights", 0.5, 1.5),  # the parameters have two bytes
    ],
)
def test_sharding_halves_what_two_ranks_keep(run: Any, name: str, share: float, state: float) -> None:
    report = run(name)
    whole = 4 * PARAMETERS / MIB
    found = values(report)
    assert found["parameters"]["median"] == PARAMETERS
    assert found["parameters_mib"]["median"] == pytest.approx(share * whole, rel=0.05)
    assert found["gradients_mib"]["median"] == pytest.approx(share * whole, rel=0.05)
    assert found["optimizer_state_mib"]["median"] == pytest.approx(state * whole, rel=0.05)
    # Live memory: parameters at first, later the state of the optimizer, too.
    assert found["memory_after_init_mib"]["median"] >= 0.95 * share * whole
    assert found["memory_before_optimizer_mib"]["median"] >= 0.95 * 2 * share * whole
    assert found["memory_after_optimizer_mib"]["median"] >= 0.95 * (share + state) * whole
    assert [(row["rank"], row["device"]) for row in report.table_rows("ranks")] == [(0, "cpu"), (1, "cpu")]


@pytest.mark.parametrize("name", ["does not fit, flat", "does not fit later, flat"])
def test_where_one_process_does_not_fit_only_the_net_cost_is_unknown(run: Any, name: str) -> None:
    rows = values(run(name))
    for metric in ("step_ms", "computation_step_ms", "exposed_communication_ms"):
        assert rows[metric]["outcome"] == "ok"
    for metric in ("alone_step_ms", "net_cost_ms"):
        assert rows[metric]["median"] is None
        assert "one process alone does not fit into the memory of rank 1" in rows[metric]["reason"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("one process does not fit, flat", "one process does not fit into rank 0's memory: out of memory in making"),
        ("no host memory, flat", "MiB of the host's memory, and less is free"),
    ],
)
def test_where_one_process_does_not_fit_parity_is_unknown(run: Any, name: str, reason: str) -> None:
    report = run(name)
    found = values(report)
    assert found["step_ms"]["outcome"] == "ok"
    for metric in PARITY:
        assert found[metric]["outcome"] == "unknown"
        assert reason in found[metric]["reason"]
    (verdict,) = report.verdicts.values()
    assert verdict["verdict"] == "suspect"


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run the runner with ranks that fail."""

    def run(error: RanksFailed, *reports: tuple[int, dict[str, Any]]) -> Report:
        def fail(*_arguments: Any, folder: Path, reported: Any, **_options: Any) -> None:
            process_group.log_file(folder, 1).write_text("first words\nthe last words\n")
            for rank, message in reports:
                reported(rank, message)
            raise error

        monkeypatch.setattr(_ranks, "launch", fail)
        (folder := tmp_path / error.reason).mkdir()
        return reported(parsed(strategy="flat"), folder)

    return run


STARTED = (1, {"started": True})


@pytest.mark.parametrize(("outcome", "words"), [("oom", True), ("wrong", False)])
def test_what_a_rank_has_said_before_it_failed_is_the_result(failing: Any, capfd, outcome: str, words: bool) -> None:
    """Rank 0 lost its peer first; what the peer itself said is the reason."""
    told = (int(words), {"failed": outcome, "detail": "too much in backward of step 3"})
    report = failing(RanksFailed(1 - words, "raised RuntimeError: connection closed by peer", trace="…"), STARTED, told)
    assert {(row["outcome"], row["median"]) for row in report.rows} == {(outcome, None)}
    assert report.rows[0]["reason"] == f"rank {int(words)}: too much in backward of step 3"
    assert ("the last words" in (log := capfd.readouterr().err)) == words, "of rank 1"
    assert "connection closed by peer" not in log, "a consequence"


def test_what_a_rank_cannot_do_is_the_jobs_failure(failing: Any) -> None:
    error = RanksFailed(1, "raised Unsupported: no such kernel", trace="Traceback …")
    with pytest.raises(Unsupported, match="rank 1: no such kernel"):
        failing(error, STARTED, (1, {"failed": "unsupported", "detail": "no such kernel"}))


@pytest.mark.parametrize(("step_ms", "steps"), [(1e4, 10), (100.0, 30)])
def test_by_default_the_rounds_of_a_side_take_three_seconds_on_a_processor(step_ms: float, steps: int) -> None:
    """The first of them begins when times are steady, and later ones after a few steps."""
    spec, device = parsed(strategy="none", warmup_steps=None, measure_steps=None), torch.device("cpu")
    quiet = SimpleNamespace(index=0, step_done=lambda: None, report=lambda message: None)
    taken, warmups = [], []
    for number in range(3):
        context: Any = SimpleNamespace(
            spec=spec, device=device, on_gpu=False, rank=quiet, steps=None, measured_steps=0,
            exchange=lambda value: [step_ms], report_progress=lambda message: None,
            agree_on_memory=lambda strategy: nullcontext(),
        )  # fmt: skip
        trained = strategies.build(spec, "none", device, strategies.rank_batches(spec, 0, device))
        turn = timing.measure_steps(context, trained, memory_meter(device), number=number, rounds=3)
        taken.append(len(turn.step_ms))
        warmups.append(turn.warmup)
    assert sum(taken) == steps
    assert warmups[0] > LATER_WARMUP == warmups[1] == warmups[2]


@pytest.mark.parametrize(
    ("share", "off_by", "is_ok"),
    [
        (SMALL_SHARE / 2, 0.017, True),  # rounding of one small gradient of a deep model in bf16
        (1e-9, 1.0, True),  # a gradient that is zero but for rounding
        (2 * SMALL_SHARE, 1 / 64, False),  # the others of 64 ranks
        (SMALL_SHARE / 10, 0.7, False),  # a rank's own gradient instead of the mean
    ],
)
def test_a_small_gradient_is_judged_by_its_share_of_all(share: float, off_by: float, is_ok: bool) -> None:
    spec = parsed(strategy="flat", precision="bf16")
    alone = {"large": torch.tensor([3.0, 4.0]), "small": torch.tensor([5 * share])}
    errors = gradient_errors({**alone, "small": alone["small"] * (1 + off_by)}, alone)
    assert errors["large"] == 0
    assert errors["small"] == pytest.approx(off_by * min(share / SMALL_SHARE, 1), rel=1e-3)
    assert (errors["small"] <= tolerance(spec, "gradient_error")) is is_ok
    assert small_gradients(alone) == ({"small"} if share < SMALL_SHARE else set())


class Half(torch.nn.Sequential):
    def forward(self, x: torch.Tensor) -> Any:
        return self[1](x)


def test_torch_ddp_names_the_parameter_without_a_gradient() -> None:
    model = Half(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = strategies.torch_ddp(model, None)
        wrapped(torch.ones(2)).sum().backward()
        with pytest.raises(RunnerError, match=r"0\.weight got none: .* bucketed"):
            wrapped(torch.ones(2))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.alone  # fills two GPUs
@pytest.mark.parametrize(
    "fields",
    [
        {
            "strategy": "bucketed",
            "sharded_optimizer": True,
            "optimizer": "torch_fused_adamw",
            "trace": True,
            "snapshot": True,
        },
        {"strategy": "torch_ddp", "precision": "bf16", "compile": True},
        {"strategy": "fsdp", "precision": "bf16", "cast_before_communication": True, "activation_checkpointing": True},
        {**LARGEST, "model": {**MODEL, "d_model": 128}, "context_length": 256},
        {"strategy": "torch_fsdp", "precision": "bf16", "compile": True},
    ],
    ids=["bucketed", "torch_ddp", "fsdp", "fsdp, compiled", "torch_fsdp"],
)
def test_two_gpus(fields: dict[str, Any], tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs; there are {torch.cuda.device_count()}")
    report = reported(parsed(**{"backend": "nccl", "warmup_steps": 2, "measure_steps": 4, **fields}), tmp_path)
    found = values(report)
    for metric in ("step_ms", "exposed_communication_ms", "communication_ms", "host_us", "gradient_error"):
        assert found[metric]["outcome"] == "ok", found[metric]
    assert found["memory_before_optimizer_mib"]["median"] > found["parameters_mib"]["median"]
    assert {row["stream"] for row in report.table_rows("timeline")} >= {"compute", "communication"}
    assert len(report.fingerprint["other_devices"]) == 1
    assert ("trace-rank-1.json.gz" in report.files) == bool(fields.get("trace"))
    assert {row["rank"] for row in report.table_rows("kernels")} == {0, 1}
    for rank in range(2 * bool(fields.get("snapshot"))):
        snapshot = pickle.loads(report.files[f"snapshot-rank-{rank}.pickle"].read_bytes())
        assert sum(map(len, snapshot["device_traces"])) > 100
    assert list((tmp_path / "ranks").iterdir())


GRAPHED: dict[str, dict[str, Any]] = {
    "naive": {"strategy": "naive", "optimizer": "torch_fused_adamw"},
    "flat": {"strategy": "flat", "gradient_clip_norm": 0.1},
    "forgets one, flat": {"strategy": "flat"},
    "overlapped": {"strategy": "overlapped", "mode": "forward_backward"},
    "bucketed, graph": {"strategy": "bucketed", "bucket_size_mb": 0.004, "accumulation_steps": 2},
    "sharded": {"strategy": "bucketed", "sharded_optimizer": True, "optimizer": "torch_fused_adamw"},
    "fsdp, graph": {"strategy": "fsdp", "precision": "bf16", "optimizer": "torch_fused_adamw"},
    "fsdp, master": {"strategy": "fsdp", **MASTER, "gradient_clip_norm": 0.1, "activation_checkpointing": True},
    "torch_ddp": {"strategy": "torch_ddp", "optimizer": "torch_adamw"},
}


@pytest.fixture(scope="module")
def graphed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, DdpSpec], list[dict[str, Any]]]:
    """Specs of steps as CUDA graphs, and what two ranks return for them."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs; there are {torch.cuda.device_count()}")
    folder, common = tmp_path_factory.mktemp("graphs"), {"backend": "nccl", "cuda_graph": True, "measure_steps": 6}
    specs = {name: parsed(**{**common, "warmup_steps": 2, **fields}) for name, fields in GRAPHED.items()}
    as_json = {name: spec.model_dump(mode="json") for name, spec in specs.items()}
    return specs, launch(run_all, as_json, str(folder), world_size=2, backend="nccl", folder=folder)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("name", GRAPHED)
def test_a_cuda_graph_holds_the_collectives(name: str, graphed: Any, tmp_path: Path) -> None:
    """Its parameters and gradients are those of one process, and the host issues it faster than without. One that
    forgets a gradient is found: the control."""
    specs, ranks = graphed
    spec, found = specs[name], [rank[name] for rank in ranks]
    parity, trains = found[0]["parity"], specs[name].mode == "train_step"
    wrong = {error for error in PARITY if parity[error] is not None and parity[error] > tolerance(spec, error)}
    assert wrong == (set(PARITY) if name.startswith("forgets") else set()), parity
    assert (parity["parameter_error"] is not None) == trains
    collected = Values(metrics(spec))
    add_values(collected, spec, [torch.device("cuda", rank) for rank in range(2)], found, tmp_path)
    host_us, eager_us = (collected.samples(metric, None) for metric in ("host_us", "eager_host_us"))
    if not name.startswith("forgets"):
        assert statistics.median(host_us or ()) < 0.5 * statistics.median(eager_us or ())
        assert collected.samples("backward_ms", "backward")
        assert collected.samples("eager_exposed_communication_ms", None)
        assert bool(collected.samples("gradients_mib", None)) == (not trains)
    if name in PROFILED:
        profiled = ranks_of(found)
        assert not profiled.differ
        assert profiled.collectives


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["naive", "flat", "overlapped", "bucketed", "fsdp", "torch_ddp", "torch_fsdp"])
def test_one_gpu(strategy: str, tmp_path: Path) -> None:
    """One rank over NCCL: all three sides take their turns."""
    fields = {"strategy": strategy, "world_size": 1, "backend": "nccl", "precision": "bf16", "measure_steps": 6}
    rows = values(reported(parsed(**fields), tmp_path))
    for metric in ("step_ms", "computation_step_ms", "exposed_communication_ms", "net_cost_ms"):
        assert rows[metric]["outcome"] == "ok", rows[metric]


def test_errors_that_are_no_numbers() -> None:
    """No comparison with a limit may take them for small."""
    one, zero = torch.ones(3), torch.zeros(3)
    assert relative_error(one * 3, one * 2, start=one) == pytest.approx(1.0)
    for wrong in (None, one * float("nan")):
        assert relative_error(wrong, one) == float("inf")
    assert (relative_error(one, zero), relative_error(zero, zero)) == (float("inf"), 0.0)
    assert largest_error({"a": 0.5, "b": float("nan"), "c": float("inf")})[1] == "b"
    unknown = {"gradient_error": float("nan"), "parameter_error": None, "why_not": None}
    for precision, ok in (("fp32", False), ("fp16", True)):  # whose scale is yet to be found
        spec = parsed(strategy="flat", precision=precision)
        assert check_parity(Values(metrics(spec)), spec, unknown).ok == ok
