"""The runner of `benchmark` in this process, with a reporter that keeps what it is told."""

import functools
import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from app.specs import Case
from app.specs.benchmark import BenchmarkSpec
from kernels.building import CompilerMissing
from kernels.registry import ATTENTION, BrokenEntryPoint, Implementation, Registry
from tests.workers.reporting import Report, reported
from workers import uploaded
from workers.jobs._training import building
from workers.jobs._training.metrics import add_busy, metrics_of, precisions_of
from workers.jobs._values import Values
from workers.jobs.benchmark import RUNNER
from workers.measure import memory, warmup
from workers.measure.busy import Busy
from workers.measure.ceilings import Ceilings
from workers.model import TransformerLM, accounting
from workers.model.batches import RandomBatches
from workers.model.float8 import LinearLayer
from workers.model.generation import generate
from workers.model.registry import MODELS
from workers.outcome import InvalidEnvironment, Unsupported
from workers.torch_host import as_runner_error, set_precision

MODEL = {"d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 61}
PARAMETERS = 2 * 61 * 16 + 2 * (4 * 16**2 + 3 * 16 * 24 + 2 * 16) + 16
STEP = [("step_ms", "step"), ("first_step_ms", "first_step"), ("device_ms", "step")]
WHOLE = [
    (name, None)
    for name in (
        *("tokens_per_s", "tflops", "mfu", "ceiling_percent", "host_us", "gpu_busy_percent"),
        *("peak_memory_mib", "memory_reserved_mib", "device_memory_mib", "parameters"),
    )
]
FORWARD, BACKWARD, OPTIMIZER = ("forward_ms", "forward"), ("backward_ms", "backward"), ("optimizer_ms", "optimizer")
METRICS = {
    "forward": [FORWARD, *STEP, *WHOLE],
    "forward_backward": [FORWARD, BACKWARD, *STEP, *WHOLE],
    "train_step": [FORWARD, BACKWARD, OPTIMIZER, *STEP, *WHOLE],
    "generate": [("prefill_ms", "prefill"), ("decode_ms_per_token", "decode"), *STEP, *WHOLE],
}
EACH_STEP = {"forward_ms", "backward_ms", "optimizer_ms", "prefill_ms", "decode_ms_per_token", "step_ms", "host_us"}
GPU_ONLY = {"host_us", "device_ms", "gpu_busy_percent", "memory_reserved_mib", "device_memory_mib"}
MAY_BE_UNKNOWN = {"mfu", "ceiling_percent", "peak_memory_mib", "device_ms", "gpu_busy_percent"}


@pytest.fixture
def run(tmp_path: Path):
    def run(unit: int = 0, **fields: Any) -> Report:
        defaults = {"model": MODEL, "context_length": 8, "batch_size": 2, "warmup_steps": 1, "measure_steps": 3}
        spec = BenchmarkSpec(**{**defaults, **fields})
        return reported(spec, tmp_path, RUNNER.plan(spec)[unit])

    return run


def metrics(report: Report) -> dict[str, dict[str, Any]]:
    """What was measured, by metric: in this kind each name stands once."""
    rows = {row["metric"]: row for row in report.rows}
    assert len(rows) == len(report.rows)
    return rows


@pytest.mark.parametrize(
    ("busy", "device_ms", "percent"),
    [
        (Busy(5.0, 10), [5.0], [50.0]),
        (Busy(10.05, 10), [10.05], [pytest.approx(100.5)]),
        (Busy(12.0, 10), [12.0], "kept the device busy for 12 ms, and the measured ones took 10"),
        ("no profiler", "no profiler", "no profiler"),
    ],
)
def test_device_time_has_its_share_of_wall_time(busy: Any, device_ms: Any, percent: Any) -> None:
    values = Values(metrics_of(BenchmarkSpec(mode="forward")))
    add_busy(values, 10.0, busy)
    values.set_missing("failed", "not asked")
    report = Report(Path())
    values.report(Case("benchmark", {}), "1x GPU", report)
    for name, expected in (("device_ms", device_ms), ("gpu_busy_percent", percent)):
        row = metrics(report)[name]
        if isinstance(expected, str):
            assert (row["outcome"], row["median"]) == ("unknown", None)
            assert expected in row["reason"]
        else:
            assert (row["outcome"], [row["median"]]) == ("ok", expected)


@pytest.mark.parametrize(
    ("mode", "precision"),
    [("forward", "fp32"), ("forward_backward", "bf16"), ("train_step", "fp16"), ("generate", "fp32")],
)
def test_every_mode_reports_its_metrics(run, mode: str, precision: str, device: str) -> None:
    report = run(mode=mode, precision=precision, device=device, gradient_clip_norm=1.0, new_tokens=4)
    assert [(row["metric"], row["phase"]) for row in report.rows] == METRICS[mode]
    for name, row in metrics(report).items():
        if (name in MAY_BE_UNKNOWN or (device == "cpu" and name in GPU_ONLY)) and row["outcome"] == "unknown":
            assert row["median"] is None
            assert row["reason"]
            continue
        assert row["outcome"] == "ok"
        assert row["median"] > 0
        assert row["n"] == (3 if name in EACH_STEP else 1)
    assert metrics(report)["ceiling_percent"]["outcome"] == "unknown"
    assert metrics(report)["parameters"]["median"] == PARAMETERS
    assert report.steps[-1] == (4, 4, "measuring")


@pytest.mark.parametrize("mode", ["train_step", "generate"])
def test_in_a_loop_the_step_is_the_loops_and_phases_are_of_isolated_steps(run, mode: str, device: str) -> None:
    report = run(mode=mode, device=device, pacing="loop", new_tokens=4)
    place = METRICS[mode].index(("step_ms", "step")) + 1
    expected = [*METRICS[mode][:place], ("isolated_step_ms", "isolated_step"), *METRICS[mode][place:]]
    assert [(row["metric"], row["phase"]) for row in report.rows] == expected
    rows = metrics(report)
    assert rows["step_ms"]["n"] == rows["isolated_step_ms"]["n"] == 3
    assert rows["step_ms"]["median"] != rows["isolated_step_ms"]["median"]
    tokens = 2 * (4 if mode == "generate" else 8)
    assert rows["tokens_per_s"]["median"] == pytest.approx(1e3 * tokens / rows["step_ms"]["median"])
    assert report.steps[-1] == (7, 7, "measuring in a loop")


def test_micro_batches_count_in_tokens_and_flops(run) -> None:
    single, several = (metrics(run(accumulation_steps=number)) for number in (1, 3))
    for name in ("tokens_per_s", "tflops"):
        work = [rows[name]["median"] * rows["step_ms"]["median"] for rows in (single, several)]
        assert work[1] == pytest.approx(3 * work[0])
    assert several["accumulation_ms"]["n"] == 3
    phases = sum(several[name]["mean"] for name in ("accumulation_ms", "forward_ms", "backward_ms", "optimizer_ms"))
    assert phases == pytest.approx(several["step_ms"]["mean"], rel=0.3)
    assert "accumulation_ms" not in single


@pytest.mark.parametrize(("ceiling", "ok"), [(100.0, True), (1e-9, False)])
def test_a_steps_share_of_a_ceiling_above_which_it_is_invalid(run, tmp_path: Path, ceiling: float, ok: bool) -> None:
    Ceilings(tmp_path / "ceilings").record(torch.device("cpu"), {"fp32": ceiling}, None)
    report = run(device="cpu")
    rows = metrics(report)
    assert rows["ceiling_percent"]["median"] == pytest.approx(100 / ceiling * rows["tflops"]["median"])
    check = report.check("ceiling")
    assert (check["ok"], check["severity"]) == (ok, "suspect" if ok else "invalid")
    assert report.verdict_on()["verdict"] == "invalid" or ok
    assert "the ceiling measured at" in check["detail"]
    other = run(device="cpu", precision="bf16")
    assert other.check("ceiling")["severity"] == "not_judged"
    assert metrics(other)["ceiling_percent"]["reason"].endswith("in bf16 is on record")


def test_generated_tokens_are_those_of_a_plain_loop(run) -> None:
    how: dict[str, Any] = {"temperature": 0.9, "top_k": 7, "seed": 5}
    report = run(mode="generate", new_tokens=6, device="cpu", **how)
    again = run(mode="generate", new_tokens=6, device="cpu", measure_steps=1, **how)
    times = metrics(report)
    assert times["prefill_ms"]["min"] + 5 * times["decode_ms_per_token"]["min"] <= times["step_ms"]["max"]
    rows = report.table_rows("generated")
    assert rows == again.table_rows("generated"), "however many steps were timed"
    torch.manual_seed(5)
    model = TransformerLM(61, 14, 16, 2, 2, 24)
    prompt, _ = RandomBatches(61, 2, 8, torch.device("cpu"), 5).next()
    generator = torch.Generator().manual_seed(5)
    made = generate(model, prompt, 6, temperature=0.9, top_k=7, use_cache=False, generator=generator).tolist()
    for row, own, tokens in zip(rows, prompt.tolist(), made, strict=True):
        assert row["prompt_ids"] == " ".join(map(str, own))
        assert row["token_ids"] == " ".join(map(str, tokens[8:]))
        assert "the weights are random, of seed 5" in row["note"]


def test_without_a_number_steps_warm_up_until_they_are_steady(run, monkeypatch) -> None:
    monkeypatch.setattr(warmup, "LIMIT_WINDOWS", 3)  # a busy host's never are
    report = run(warmup_steps=None)
    assert metrics(report)["step_ms"]["n"] == 3
    detail = report.check("steady")["detail"]
    assert int(detail.rsplit(" ", 1)[1]) >= 5, detail
    asked = run(warmup_steps=2).check("steady")
    assert asked["ok"]
    assert (asked["detail"], asked["severity"]) == ("a warm-up of 2 was asked for", "not_judged")


def test_parameters_that_get_no_gradient_make_a_result_suspect(run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "gradients" not in {check["name"] for check in run(mode="train_step").verdict_on()["checks"]}
    build_step = building.build_step

    def with_one_more(spec, device, model, *others):
        model.register_parameter("unused", torch.nn.Parameter(torch.zeros(1)))
        return build_step(spec, device, model, *others)

    monkeypatch.setattr(building, "build_step", with_one_more)
    check = run(mode="train_step").check("gradients")
    assert (check["ok"], check["severity"]) == (False, "suspect")
    assert check["detail"].startswith("1 trainable parameters got none, unused first")


COMPILER = ("recompiles", "eager_fallback", "graph_breaks", "compile_cache")


@pytest.mark.parametrize("scope", ["blocks", "model"])
def test_compiling_is_recorded(run, fresh_compiler: None, monkeypatch: pytest.MonkeyPatch, scope: str) -> None:
    """With the compiler's first half only; the whole takes too long for every run of the tests."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    report = run(compile=True, compile_scope=scope, activation_checkpointing=True)
    for name in COMPILER:
        assert report.check(name)["ok"], report.check(name)
    assert report.check("eager_fallback")["detail"] == "1 graphs, 0 functions left to eager"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch 2.11's own
@pytest.mark.parametrize("mode", METRICS)
def test_compiling_on_a_gpu(run, fresh_compiler: None, mode: str) -> None:
    report = run(mode=mode, compile=True, device="cuda", precision="bf16", warmup_steps=3)
    for name in COMPILER:
        assert report.check(name)["ok"], report.check(name)
    assert metrics(report)["first_step_ms"]["median"] > metrics(report)["step_ms"]["max"]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["forward", "forward_backward", "train_step"])
def test_a_step_as_a_cuda_graph_has_all_its_metrics(run, mode: str) -> None:
    report = run(mode=mode, device="cuda", precision="bf16", cuda_graph=True)
    assert [(row["metric"], row["phase"]) for row in report.rows] == METRICS[mode]
    for name, row in metrics(report).items():
        assert row["outcome"] == "ok" or name == "ceiling_percent", row["reason"]
    assert metrics(report)["first_step_ms"]["median"] > metrics(report)["step_ms"]["max"], "it holds the capture"


def test_running_out_of_memory_is_a_result(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(building, "build_step", fail)
    report = run()
    assert [(row["metric"], row["phase"]) for row in report.rows] == METRICS["train_step"]
    for row in report.rows:
        assert row["outcome"] == "oom"
        assert "out of memory in making the model" in row["reason"]
        assert "Tried to allocate 20.00 GiB" in row["reason"]
        assert all(row[name] is None for name in ("n", "mean", "std", "median", "min", "max", "samples"))
    assert report.fingerprint
    judged = report.verdict_on()
    assert judged["verdict"] == "suspect", "there is nothing to trust"
    assert judged["checks"][0]["detail"].endswith("; take a smaller model, batch or context")
    assert not report.files


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "magic"}, "unknown attention implementation 'magic'; known are .*eager"),
        ({"model": {**MODEL, "name": "magic"}}, "unknown model 'magic'; known are .*transformer_lm"),
        ({"attention": "sdpa_cudnn", "device": "cpu"}, "'sdpa_cudnn' does not run on cpu, only on cuda"),
        (
            {"attention": "cpu_naive", "mode": "forward", "device": "cpu", "model": {**MODEL, "window": 2}},
            "'cpu_naive' does not take window",
        ),
    ],
)
def test_what_this_worker_lacks_is_unsupported(run, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        run(**fields)


def test_a_host_without_a_gpu_does_neither_cuda_nor_tf32(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match="sees no GPU"):
        run(device="cuda")
    with pytest.raises(Unsupported, match="tf32 is a GPU format"):
        run(precision="tf32")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch warns of each reason before it raises
def test_a_shape_that_a_kernel_refuses_is_unsupported(run) -> None:
    with pytest.raises(Unsupported, match="does not take float32 on cuda"):
        run(attention="sdpa_flash", device="cuda")
    wide = {**MODEL, "d_model": 1024, "num_heads": 1}  # head dimension 1024: no fused kernel takes it
    with pytest.raises(Unsupported, match="no such kernel"):
        run(attention="sdpa_flash", device="cuda", precision="bf16", model=wide)


def test_an_attention_without_backward_runs_forward_only(run, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = ATTENTION.load("eager")
    forward_only = Implementation("forward_only", eager.function, eager.dtypes, has_backward=False)
    monkeypatch.setattr(ATTENTION, "load", lambda name: forward_only)
    assert metrics(run(mode="forward"))["forward_ms"]["outcome"] == "ok"
    with pytest.raises(Unsupported, match="has no backward pass"):
        run(mode="train_step")


def test_a_broken_plugin_is_an_invalid_environment(run, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Registry("model", "flopwatch.none", {"transformer_lm": "no_such_module:Model"})
    monkeypatch.setattr(MODELS, "load", broken.load)
    with pytest.raises(InvalidEnvironment, match=r"'transformer_lm'.*No module named 'no_such_module'") as caught:
        run()
    assert isinstance(caught.value.__cause__, BrokenEntryPoint)


class Plain(torch.nn.Module):
    """A user's model, with what every model must have and nothing more."""

    def __init__(self, vocab_size: int, d_model: int, **_others: Any) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, d_model)
        self.head = torch.nn.Linear(d_model, vocab_size)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(token_ids))


class Unknown(Plain):
    """A user's model that does not know its FLOPs for all sizes."""

    def forward_flops(self, batch_size: int, context_length: int) -> None:
        return None


@pytest.mark.parametrize("model", [Plain, Unknown])
def test_a_users_model_needs_neither_flops_nor_a_cache(model, run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODELS, "load", lambda name: model)
    report = run()
    assert metrics(report)["step_ms"]["outcome"] == "ok"
    for name in ("tflops", "mfu", "ceiling_percent"):
        assert metrics(report)[name]["reason"].startswith("model 'transformer_lm' has no forward_flops(), or frozen")
    with pytest.raises(Unsupported, match="no key-value cache"):
        run(mode="generate")
    with pytest.raises(Unsupported, match="takes no argument 'targets', which fused_linear_cross_entropy needs"):
        run(fused_linear_cross_entropy=True)
    with pytest.raises(Unsupported, match=rf"model 'transformer_lm': {model.__name__} has no blocks .* 'layers'"):
        run(compile=True)


class Frozen(Plain):
    """A user's model that trains its embedding alone."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.head.requires_grad_(False)

    def forward_flops(self, batch_size: int, context_length: int) -> int:
        return 2 * batch_size * context_length * self.head.weight.numel()


@pytest.mark.parametrize("mode", ["forward", "train_step"])
def test_frozen_layers_have_no_product_for_their_weight(mode: str, run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODELS, "load", lambda name: Frozen)
    assert (metrics(run(mode=mode))["tflops"]["median"] is None) == (mode == "train_step")


class Older(Plain):
    """A user's model, written before there were options: it takes what every model was given then."""

    def __init__(self, vocab_size, context_length, d_model, num_layers, num_heads, d_ff) -> None:
        super().__init__(vocab_size, d_model)


def test_options_a_model_lacks_are_unsupported(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODELS, "load", lambda name: Older)
    assert metrics(run())["step_ms"]["outcome"] == "ok"
    assert metrics(run(model={**MODEL, "window": 8}))["step_ms"]["outcome"] == "ok", "it hides nothing"
    for fields, option in (
        ({"activation_checkpointing": True}, "activation_checkpointing"),
        ({"attention": "sdpa_math"}, "attention"),
        ({"model": {**MODEL, "rope_theta": 500.0}}, "rope_theta"),
        ({"model": {**MODEL, "num_kv_heads": 1}}, "num_kv_heads"),
        ({"model": {**MODEL, "window": 7}}, "window"),
    ):
        with pytest.raises(Unsupported, match=f"takes no argument '{option}', which this job sets"):
            run(**fields)


def test_a_model_that_hands_on_what_it_does_not_know_gets_the_options_that_the_job_sets() -> None:
    def model(*, attention, **others) -> None: ...

    set_by_job = BenchmarkSpec(model={**MODEL, "rope_theta": 500.0}, activation_checkpointing=True)
    assert building.options_of(model, BenchmarkSpec(), abs).keys() == {"attention"}
    set_options = {"attention", "rope_theta", "activation_checkpointing"}
    assert building.options_of(model, set_by_job, abs).keys() == set_options


@pytest.mark.parametrize(
    ("model_class", "words"),
    [
        (torch.nn.Linear, r"model 'transformer_lm' is called with vocab_size, .*: Linear.__init__.* got an unexpected"),
        (dict, "model 'transformer_lm' is of type dict, and no torch.nn.Module"),
        (
            lambda **sizes: TransformerLM(**sizes).to(torch.bfloat16),
            "model 'transformer_lm' makes parameters in torch.bfloat16, and .* in float32, or set parameter_dtype=bf16",
        ),
        (lambda **sizes: TransformerLM(**sizes).half(), r"in torch.float16, and .*: make them in float32$"),
        (
            lambda **sizes: TransformerLM(**sizes).to("meta"),
            "model 'transformer_lm' makes parameters on the meta device, where nothing is computed",
        ),
    ],
)
def test_what_is_no_model_is_refused(run, model_class, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODELS, "load", lambda name: model_class)
    with pytest.raises(Unsupported, match=words):
        run()
    monkeypatch.setattr(uploaded, "load", lambda code: model_class)
    with pytest.raises(uploaded.BrokenCode, match=words.replace("transformer_lm", "Mine@m.py")):
        run(code={"sha256": "a" * 64, "function": "Mine", "file": "m.py"})


def test_fused_parts_need_a_gpu_and_a_model_that_has_them(run, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = BenchmarkSpec(fused=["rope", "rms_norm"])
    options = building.options_of(TransformerLM, spec, abs)
    assert options["fused"] == ("rms_norm", "rope")
    with pytest.raises(Unsupported, match="model 'transformer_lm' takes no argument 'fused', which this job sets"):
        building.options_of(Older, spec, abs)
    assert "fused" not in building.options_of(Older, BenchmarkSpec(), abs)
    with pytest.raises(Unsupported, match="fused: this worker's process sees no GPU"):
        building.check_fused(torch.device("cpu"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(Unsupported, match="fused: Triton is not installed: install triton"):
        building.check_fused(torch.device("cuda"))


def test_a_missing_compiler_is_an_invalid_environment() -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    error = RuntimeError("backend='inductor' raised")
    error.__cause__ = InvalidCxxCompiler()
    assert isinstance(as_runner_error(error), InvalidEnvironment)
    assert isinstance(as_runner_error(CompilerMissing("no c++")), InvalidEnvironment)
    assert as_runner_error(RuntimeError("x")) is None


def test_memory_counts_from_before_the_model(monkeypatch) -> None:
    """Else an exec'd process would count torch's compiler, which optimizers import, as memory of the model."""
    events: list[str] = []

    def meter(device: torch.device) -> memory.MemoryMeter:
        events.append("meter" if "torch._dynamo" in sys.modules else "meter too early")
        return memory.HostMemory()

    monkeypatch.setattr(memory, "memory_meter", meter)
    spec = BenchmarkSpec(model=MODEL, context_length=8, device="cpu")
    device, build_model = building.prepare(spec)

    def build() -> torch.nn.Module:
        events.append("model")
        return build_model()

    training = building.build(spec, device, build)
    assert events == ["meter", "model"]
    assert isinstance(training.meter, memory.HostMemory)


@pytest.mark.parametrize(
    ("device", "cuda_graph"), [("cpu", False), pytest.param("cuda", True, marks=pytest.mark.gpu)], ids=str
)
def test_the_loss_of_the_first_steps_is_kept(run, device: str, cuda_graph: bool) -> None:
    rows, again, other = (
        run(mode="train_step", device=device, cuda_graph=cuda_graph, seed=seed).table_rows("values")
        for seed in (0, 0, 1)
    )
    assert [(row["step"], row["name"]) for row in rows if row["what"] == "returned"] == [
        (step, "loss") for step in (1, 2, 3, 4)
    ]
    losses, same, others = ([row["value"] for row in its if row["name"] == "loss"] for its in (rows, again, other))
    assert losses == pytest.approx(same, rel=1e-6)
    assert losses[0] != pytest.approx(others[0], rel=1e-6)
    assert len(set(losses)) == 4, "each step has a batch of its own"
    assert losses[0] == pytest.approx(math.log(MODEL["vocab_size"]), rel=0.1)
    assert {row["name"]: row["value"] for row in rows if row["what"] == "work"}["tokens"] == 16


FP8 = {"precision": "fp8", "model": {**MODEL, "d_ff": 32, "vocab_size": 64}, "context_length": 16, "device": "cpu"}


def test_fp8_on_a_cpu_is_emulated_and_says_which_layers_compute_in_it(run) -> None:
    pytest.importorskip("torchao")
    report = run(**FP8, fp8_filter=["layers.*.ffn.*"], fp8_recipe="rowwise")
    assert metrics(report)["step_ms"]["outcome"] == "ok"
    chosen = {row["layer"]: (row["fp8"], row["layers"], row["tokens"]) for row in report.table_rows("linear_layers")}
    assert chosen["layers.*.ffn.w1"] == (True, 2, 32)
    assert chosen["lm_head"] == (False, 1, 32)
    assert "emulates fp8" in report.check("emulated")["detail"]
    assert "set compile" in report.check("compiled")["detail"]


def test_mfu_of_several_precisions_is_the_ideal_time_by_the_measured_one(run, tmp_path, monkeypatch) -> None:
    """The products of the feed-forward layers are in fp8, all others in bf16, at twice the time."""
    pytest.importorskip("torchao")
    peaks = {"fp8": 4.0, "bf16": 2.0}
    monkeypatch.setattr("workers.jobs._training.metrics.peak_tflops", lambda _, name: (peaks.get(name, 1e9), ""))
    Ceilings(tmp_path / "ceilings").record(torch.device("cpu"), {"fp8": 2.0, "fp8_rowwise": 1.0, "bf16": 0.5}, None)
    ffn, flops = 3 * 2 * 32 * (2 * 3 * 16 * 32), 3 * accounting.forward_flops(accounting.Shape(64, 16, 2, 2, 32), 2, 16)
    for recipe, in_fp8, ceiling in (("tensorwise", ffn, 2.0), ("rowwise_with_gw_hp", ffn * 2 / 3, 1.0)):
        rows = metrics(run(**FP8, fp8_filter=["layers.*.ffn.*"], fp8_recipe=recipe))
        ideal_s = 1e-12 * (in_fp8 / 4.0 + (flops - in_fp8) / 2.0)
        assert rows["mfu"]["median"] == pytest.approx(ideal_s / (1e-3 * rows["step_ms"]["median"]))
        best_s = 1e-12 * (in_fp8 / ceiling + (flops - in_fp8) / 0.5)
        assert rows["ceiling_percent"]["median"] == pytest.approx(100 * best_s / (1e-3 * rows["step_ms"]["median"]))


@pytest.mark.parametrize(
    ("fields", "shares"),
    [
        ({}, {"fp8": 1.0}),
        ({"model": {**MODEL, "name": "other"}}, {}),
        ({"code": {"sha256": "a" * 64, "function": "f"}}, {}),
    ],
)
def test_only_of_our_models_the_share_of_fp8_is_known(fields: dict[str, Any], shares: dict[str, float]) -> None:
    layers = [LinearLayer("one", 32, 16, 16, in_fp8=True)]
    found, why = precisions_of(BenchmarkSpec(precision="fp8", **fields), layers, 3.0 * layers[0].flops)
    assert (found, bool(why)) == (shares, not shares)


def test_what_fp8_does_not_take_is_refused(run) -> None:
    pytest.importorskip("torchao")
    words = r"chooses none of the linear layers .*: choose precision bf16, or fp8_filter all"
    with pytest.raises(Unsupported, match=words):
        run(**FP8, fp8_filter=["auto"])


def test_an_environment_that_forbids_tf32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    with pytest.raises(InvalidEnvironment, match="NVIDIA_TF32_OVERRIDE"):
        set_precision("tf32")
