"""The runner of `estimate` in this process."""

import ast
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from app.specs import spec_adapter
from app.specs.estimate import EstimateSpec
from kernels.registry import ATTENTION
from tests.workers.reporting import Report, reported
from workers.jobs import estimate
from workers.jobs.estimate import RUNNER
from workers.model import accounting
from workers.outcome import Unsupported

GIB = 2**30
STACK = {"architecture": "feed_forward_stack", "batch_size": 1, "context_length": 1024}
"""CS336's problem communication_accounting with a batch of 1024 tokens."""
OWN = {"model": {"d_model": 96, "d_ff": 64, "num_layers": 5, "num_heads": 6, "vocab_size": 77}}
SPECS: list[dict[str, Any]] = [
    {},
    STACK,
    {**STACK, "activation_checkpointing": True, "precision": "fp32"},
    {"model": {"size": "xl"}, "context_length": 512, "attention": "fused"},
    {"precision": "bf16", "parameter_dtype": "bf16", "communication_dtype": "fp32"},
    {**OWN, "precision": "fp32", "mesh": {"tensor": 1}},
    {"model": {**OWN["model"], "num_kv_heads": 2, "window": 7}, "attention": "fused", "mesh": {"tensor": 2}},
    {**OWN, "precision": "fp16", "activation_checkpointing": True, "mesh": {"tensor": 2, "flops_per_s": 1e12}},
]


def parsed(**fields: Any) -> EstimateSpec:
    return spec_adapter.validate_json(json.dumps({"kind": "estimate", **fields}))


@pytest.fixture
def run(tmp_path: Path):
    return lambda **fields: reported(parsed(**fields), tmp_path, *RUNNER.plan(parsed(**fields)))  # of one unit


def medians(report: Report) -> dict[str, float | None]:
    """Values by column: metric, or phase and metric."""
    return {
        row["metric"] if row["phase"] is None else f"{row['phase']}_{row['metric']}": row["median"]
        for row in report.rows
    }


def test_the_assignments_answers(run) -> None:
    """Worked by hand: 16 bytes for each of 126 · 2 · 16 384 · 53 248 parameters, and two bytes for each of 126 ·
    (16 384 + 53 248) numbers of each of 1024 tokens."""
    report = run(**STACK)
    found = medians(report)
    state, saved = 16 * 219_848_638_464, 1024 * 126 * 69_632 * 2
    assert found["parameters"] == 219_848_638_464
    assert [found[f"{part}_gib"] for part in ("parameters", "gradients", "optimizer_state")] == [
        pytest.approx(state / share / GIB) for share in (4, 4, 2)
    ]
    assert found["activations_gib"] == pytest.approx(saved / GIB)
    assert found["total_gib"] == pytest.approx((state + saved) / GIB)
    assert found["replica_devices"] == pytest.approx((state + saved) / 80e9)
    assert found["saved_by_16_bits_gib"] == pytest.approx(saved / GIB), "bf16 halves the activations"
    assert found["saved_by_sharding_gib"] == pytest.approx(saved / 2 * 15 / 16 / GIB)
    assert found["fewest_shards"] == 41
    assert found["summed_device_tokens"] == pytest.approx(395.34, abs=0.005)
    assert found["summed_global_tokens"] == pytest.approx(25_302, abs=0.5)
    assert found["overlapped_device_tokens"] == pytest.approx(319.44, abs=0.005)
    assert found["overlapped_global_tokens"] == pytest.approx(20_444, abs=0.5)
    assert found["sharded_activations_device_gib"] == pytest.approx((state / 16 + saved / 2 + saved / 32) / GIB)
    assert {row["outcome"] for row in report.rows} == {"ok"}


@pytest.mark.parametrize("fields", SPECS, ids=str)
def test_each_shown_formula_has_the_shown_value_which_is_accountings(run, fields: dict[str, Any]) -> None:
    """Python computes what people read, from the values that the tables show."""
    spec, report = parsed(**fields), run(**fields)
    names: dict[str, Any] = {row["symbol"]: row["value"] for row in report.table_rows("symbols")}
    names |= {"max": max, "floor": lambda number: number // 1}
    rows = report.table_rows("formulas")
    for row in rows:
        assert row["source"]
        symbol, is_named, text = row["formula"].rpartition(" = ")
        plain = text.replace("·", " * ").replace("²", "**2")
        ast.parse(plain, mode="eval")
        if row["value"] is None:
            assert row["note"]
            continue
        assert eval(plain, {}, names) == pytest.approx(row["value"], rel=1e-12), row
        if is_named:
            names[symbol] = row["value"]
    assert len(rows) == (27 if fields.get("architecture") else 20)
    assert "m" in names
    shape, step = estimate.sizes(spec, on_gpu=False)
    assert names["n"] == accounting.parameters(shape)
    assert names["P"] == names["G"] == names["O"] / 2 == step.parameter_bytes * accounting.parameters(shape)
    assert names["A"] == accounting.activations(shape, step)
    each = 4 if spec.communication_dtype == "fp32" else 2
    assert names["g"] == each * accounting.block_weights(shape)


def test_the_peak_is_what_was_measured_on_a_gpu(run) -> None:
    """Less the rounding of the allocator: docs/measurements.md, "The fastest step". Others are in test_step_memory."""
    found = medians(run(model={"size": "xl"}, context_length=512, precision="bf16", device="cuda"))
    assert 0.97 < 1024 * (found["step_peak_gib"] or 0) / 44_720 < 1


@pytest.mark.parametrize("fields", SPECS, ids=str)
def test_tables_and_metrics_agree(run, fields: dict[str, Any]) -> None:
    report = run(**fields)
    found = medians(report)
    memory = report.table_rows("memory")
    by_category = {row["category"]: row for row in memory if row["what"] is None}
    assert by_category["total"]["gib"] == pytest.approx(found["total_gib"])
    parts = [name for name in by_category if not name.startswith("total")]
    assert sum(by_category[name]["bytes"] for name in parts) == by_category["total"]["bytes"]
    of_activations = [row["bytes"] for row in memory if row["category"] == "of the activations"]
    assert sum(of_activations) == by_category["activations"]["bytes"]
    for row in report.table_rows("per-device"):
        assert row["total_gib"] == pytest.approx(found[f"{row['strategy']}_device_gib"])
        if row["total_gib"] is None:
            assert row["note"]
            continue
        parts = sum(row[name] for name in estimate.PARTS) + (row["workspaces_gib"] or 0)
        assert parts == pytest.approx(row["total_gib"])
        assert row["share_percent"] == pytest.approx(100 * row["total_gib"] * GIB / 80e9)
        assert row["fits"] == (row["share_percent"] <= 100)


def test_a_batch_hides_communication_from_the_threshold_on(run) -> None:
    """395.3 tokens per device of a tensor-parallel group of 4: 1581.4 tokens for each data-parallel rank."""
    for tokens, hides in ((1581, False), (1582, True)):
        rows = {row["way"]: row for row in run(**{**STACK, "context_length": tokens}).table_rows("batch")}
        assert rows["mesh, summed"]["this_batch_hides"] is hides
        assert rows["mesh, overlapped"]["this_batch_hides"] is True
        assert rows["fully sharded alone"]["this_batch_hides"] is True
        assert rows["mesh, summed"]["global_sequences"] == pytest.approx(25_302 / tokens, rel=1e-4)
        assert (rows["mesh, summed"]["devices"], rows["fully sharded alone"]["devices"]) == (64, 16)


@pytest.mark.parametrize(
    ("fields", "unknown", "reason"),
    [
        (
            {"model": {"size": "xl"}, "attention": "fused"},
            ("tensor_", "mesh_", "summed_", "overlapped_"),
            "model.num_heads (25) cannot be",
        ),
        ({"stack": {"d_ff": 6}, **STACK}, ("tensor_", "mesh_", "summed_", "overlapped_"), "stack.d_ff (6) cannot be"),
        ({**STACK, "mesh": {"tensor": 32}}, ("summed_", "overlapped_"), "take a mesh.tensor below 20.84"),
        ({"model": {"size": "tiny"}}, ("summed_", "overlapped_"), "take mesh.tensor=1"),
        ({**STACK, "mesh": {"fsdp": 1}}, ("summed_", "overlapped_"), "every batch hides communication"),
        ({**STACK, "context_length": 16_384}, ("fewest_",), "reaches the limit however many shards there are"),
    ],
    ids=str,
)
def test_what_has_no_value_is_null_with_a_reason(run, fields, unknown, reason) -> None:
    report = run(**fields)
    without = {name for name, value in medians(report).items() if value is None and name != "free_gib"}
    assert {f"{name.partition('_')[0]}_" for name in without} == set(unknown)
    rows = [row for row in report.rows if row["metric"] != "free_gib"]
    reasons = {row["reason"] for row in rows if row["outcome"] != "ok"}
    assert {row["outcome"] for row in rows} == {"ok", "oom" if unknown == ("fewest_",) else "unknown"}
    assert len(reasons) == 1
    assert reason in reasons.pop()


XL = {"model": {"size": "xl"}, "context_length": 2048, "device": "cuda"}


def answer_of(report: Report) -> tuple[str, dict[str, dict[str, Any]]]:
    """The sentences, and the rows of the table `fits` by strategy."""
    sentences = "\n".join(row["answer"] for row in report.table_rows("answer"))
    return sentences, {row["strategy"]: row for row in report.table_rows("fits")}


@pytest.mark.parametrize(
    ("length", "words"), [(256, " (61.76 GiB)"), (4096, " with activation_checkpointing=true (61")]
)
def test_parameters_in_16_bits_are_the_last_that_may_help(run, length: int, words: str) -> None:
    asked = {"model": {"size": "8b"}, "batch_size": 1, "context_length": length, "attention": "fused", "device": "cuda"}
    advice = answer_of(run(**asked))[0].splitlines()[1]
    assert advice.startswith(f"To fit on one GPU: parameter_dtype=bf16{words}")
    fields = {"parameter_dtype": "bf16", "activation_checkpointing": "checkpointing" in words}
    assert "fits on one GPU" in answer_of(run(**asked, **fields))[0]


@pytest.mark.parametrize(("batch", "now"), [(32, "Fewest devices: 16, with tensor (mesh.tensor=16)"),
                                            (200, "As it is, no number of devices suffices")])  # fmt: skip
def test_the_fewest_devices_are_those_with_one_change_too(run, batch: int, now: str) -> None:
    asked = {"model": {"size": "2.7b"}, "batch_size": batch, "context_length": 2048, "device": "cuda"}
    line = next(line for line in answer_of(run(**asked))[0].splitlines() if line.startswith(now))
    number, _, where = line.removeprefix(f"{now}; ").partition(" suffice with activation_checkpointing=true, with ")
    fits = answer_of(run(**asked, activation_checkpointing=True))[1]
    assert int(number) == min(row["fewest_devices"] for row in fits.values() if row["fewest_devices"])
    assert fits[where.partition(" (")[0]]["fewest_devices"] == int(number)


def test_each_alternative_is_whole(run) -> None:
    asked = {"model": {"size": "8b"}, "batch_size": 1, "context_length": 2048, "mesh": {"fsdp": 16}, "device": "cuda"}
    assert answer_of(run(**asked))[1]["none"]["what_helps"] == (
        "parameter_dtype=bf16 with attention=triton (63.87 GiB) or "
        "parameter_dtype=bf16 with activation_checkpointing=true (61.76 GiB)"
    )


@pytest.mark.parametrize(("device", "attention"), [("cuda", "triton"), ("cpu", "sdpa_flash")])
def test_jobs_take_the_attention_that_helps(run, device: str, attention: str) -> None:
    fields = {**XL, "device": device, "device_gb": 75}
    assert f"attention={attention} (" in answer_of(run(**fields))[1]["none"]["what_helps"]
    assert ATTENTION.load(attention).why_not(device, "bfloat16", backward=True) is None


def meshes(strategy: str, devices: int) -> list[dict[str, int]]:
    """The meshes of so many devices that a strategy uses."""
    if strategy in ("none", "data"):
        return [{"fsdp": 1, "tensor": 1}] if devices == 1 else []
    if strategy == "tensor":
        return [{"fsdp": 1, "tensor": devices}]
    splits = range(1, devices + 1) if strategy == "mesh" else [1]
    return [{"fsdp": devices // tensor, "tensor": tensor} for tensor in splits if devices % tensor == 0]


@pytest.mark.parametrize(
    ("strategies", "fields"),
    [
        (["data", "fully_sharded", "sharded_activations", "sharded_optimizer", "tensor"], {**STACK, "device_gb": 640}),
        (
            ["sharded_activations", "mesh"],
            {
                "model": {"size": "xl"},
                "batch_size": 1,
                "attention": "fused",
                "device_gb": 16,
                "parameter_dtype": "bf16",
            },
        ),
        (
            ["sharded_optimizer", "fully_sharded"],
            {"model": {"size": "2.7b"}, "activation_checkpointing": True, "device_gb": 24, "optimizer": "torch_adamw"},
        ),
    ],
    ids=str,
)
def test_the_fewest_devices_suffice_and_one_less_does_not(run, fields: dict[str, Any], strategies: list[str]) -> None:
    fields = {**fields, "device": "cuda"}
    report = run(**fields, mesh={"tensor": 1})
    for strategy in strategies:
        row = answer_of(report)[1].get(strategy)  # of a stack, "none" is "data"
        fewest = row and row["fewest_devices"]
        if fewest is None:
            assert strategy in ("none", "data", "sharded_optimizer", "tensor")
            assert row is None or not row["fits"]
            continue
        for devices, fits in ((fewest, True), (fewest - 1, False), (fewest // 2, False)):
            rows = [answer_of(run(**fields, mesh=mesh))[1][strategy] for mesh in meshes(strategy, devices) if devices]
            for row in rows:
                if row["fits"] is not None:
                    assert row["fewest_devices"] == fewest, "it depends on the mesh"
                    assert row["fits"] == (row["device_gib"] * GIB <= fields["device_gb"] * 1e9)
            assert any(row["fits"] for row in rows) is fits
        if strategy == "fully_sharded" and "architecture" not in fields:
            assert medians(report)["fewest_shards"] == fewest


def test_what_no_number_of_devices_can_hold(run) -> None:
    """25 heads cannot be divided by more than 25, and one key head not at all."""
    one_head = {**XL, "model": {"size": "xl", "num_kv_heads": 1}, "device_gb": 20}
    for fields in ({**XL, "device_gb": 1}, one_head):
        sentences, fits = answer_of(run(**fields))
        assert "As it is, no number of devices suffices" in sentences
        assert {row["fewest_devices"] for row in fits.values()} == {None}
    assert answer_of(run(**{**one_head, "model": {"size": "xl"}}))[1]["mesh"]["fewest_devices"] == 25


@pytest.mark.parametrize(
    "fields",
    [
        XL,
        {"model": {"size": "medium"}, "context_length": 1024, "device": "cuda", "device_gb": 16},
        {**OWN, "batch_size": 64, "device_gb": 0.1},
    ],
    ids=str,
)
def test_what_helps_does_help(run, fields: dict[str, Any]) -> None:
    """Each change that is named lets the strategy fit on the same devices."""
    checked = 0
    for strategy, row in answer_of(run(**fields))[1].items():
        for change in (row["what_helps"] or "").split(" or "):
            settings = dict(part.partition(" (")[0].split("=") for part in change.split(" with ") if "=" in part)
            changed = {name: json.loads(value) if value[0] in "tf0123456789" and name != "attention" else value
                       for name, value in settings.items()}  # fmt: skip
            mesh = {"fsdp": changed.pop("mesh.fsdp")} if "mesh.fsdp" in changed else {}
            if changed or mesh:
                checked += 1
                assert answer_of(run(**{**fields, **changed, "mesh": mesh}))[1][strategy]["fits"], change
    assert checked


def test_somebody_elses_model_has_no_formulas(run) -> None:
    with pytest.raises(Unsupported, match=r"model.name: there are formulas for 'transformer_lm' only, not for 'own'"):
        run(model={"size": "tiny", "name": "own"})
    assert run(**STACK, model={"size": "tiny", "name": "own"}).rows, "a stack has no such model"


def test_attention_alone_says_where_it_runs_out_of_memory(run) -> None:
    report = run(**EstimateSpec.presets["classic"], attention_layer={"head_dim": 16})
    found = medians(report)
    assert found["peak_memory_mib"] == found["backward_peak_memory_mib"] > found["forward_peak_memory_mib"]
    assert found["forward_peak_memory_mib"] == 16_392 + 4 * 8
    sentences = [row["answer"] for row in report.table_rows("answer")]
    where = "fits on a GPU of 80 GB (74.51 GiB): forward"
    assert sentences[0].startswith(f"attention-h1-d16, 8 × 16384 tokens, fp32, eager, {where}")
    assert sentences[2] == f"The backward pass exceeds it from {found['backward_oom_length']:.0f} tokens on."
    longer = run(**EstimateSpec.presets["classic"] | {"context_length": int(found["backward_oom_length"] or 0)})
    assert "does not fit" in longer.table_rows("answer")[0]["answer"]
    symbols: dict[str, Any] = {row["symbol"]: row["value"] for row in report.table_rows("symbols")}
    for row in report.table_rows("formulas"):
        plain = row["formula"].replace("·", " * ").replace("²", "**2")
        assert eval(plain, {}, symbols) == row["value"]
    rows = report.table_rows("moments")
    assert sum(row["mib"] for row in rows if row["moment"] == "backward") == found["peak_memory_mib"]


EVERYTHING: dict[str, Any] = {
    "model.size": "tiny",
    "model.rope_theta": 5e5,
    "stack.d_ff": 512,
    "attention_layer.num_heads": 4,
    "optimizer": "triton_adamw",
    "master_weights": True,
    "parameter_dtype": "bf16",
    "activation_checkpointing": True,
    "attention": "fused",
    "fused_linear_cross_entropy": True,
    "communication_dtype": "fp32",
    "mesh.fsdp": 2,
    "shard_limit_gb": 3.0,
}
"""A value of each field that is not its default."""


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "train_step"])
@pytest.mark.parametrize("architecture", ["transformer", "feed_forward_stack", "attention"])
def test_exactly_the_fields_without_effect_change_no_answer(run, architecture: str, mode: str) -> None:
    def answer(paths: Collection[str]) -> tuple[EstimateSpec, Any]:
        fields: dict[str, Any] = {"architecture": architecture, "mode": mode, "device": "cpu"}
        fields["model"] = {"size": "small"}
        for path in paths:
            *parent, name = path.split(".")
            (fields.setdefault(parent[0], {}) if parent else fields)[name] = EVERYTHING[path]
        report = run(**fields)
        values = [(row["metric"], row["median"], row["reason"]) for row in report.rows]
        return EstimateSpec.model_validate(fields), (report.tables, values)

    spec, whole = answer(EVERYTHING)
    idle = set(spec.without_effect()) - {"mode"}
    assert answer([path for path in EVERYTHING if path not in idle])[1] == whole
    for path in EVERYTHING:
        if path not in {*idle, "parameter_dtype", "optimizer"}:
            assert answer([other for other in EVERYTHING if other != path])[1] != whole, path


@pytest.mark.parametrize(
    ("mesh", "outcome", "words"),
    [
        ({}, "oom", "does not fit on one GPU"),
        ({"fsdp": 8}, "oom", "does not fit with fully_sharded on 8 GPUs"),
        ({"tensor": 2}, "ok", "fits with tensor on 2 GPUs"),
        ({"fsdp": 2, "tensor": 2}, "ok", "fits with mesh on 4 GPUs"),
    ],
    ids=str,
)
def test_a_step_fits_if_it_does_on_the_devices_that_are_asked_for(run, mesh, outcome: str, words: str) -> None:
    """A search goes by the outcomes: without a mesh it must not count what other strategies would fit."""
    report = run(model={"size": "tiny"}, context_length=512, device="cuda", device_gb=0.4, mesh=mesh)
    assert words in answer_of(report)[0].splitlines()[0]
    assert {row["outcome"] for row in report.rows if row["metric"] == "free_gib"} == {outcome}
    assert ("oom" in {row["outcome"] for row in report.rows}) == (outcome == "oom")
