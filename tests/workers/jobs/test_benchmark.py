"""The runner of `benchmark` in this process, with a reporter that keeps what it is told."""

from __future__ import annotations

import csv
import functools
import gzip
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from app.specs.benchmark import BenchmarkSpec
from kernels.attention.cpu.build import CompilerMissing
from kernels.registry import ATTENTION, BrokenEntryPoint, Implementation, Registry
from workers.jobs import benchmark
from workers.jobs._base import Unit
from workers.jobs.benchmark import RUNNER
from workers.measure.ceilings import Ceilings
from workers.measure.measurement import Measurement
from workers.model.registry import MODELS
from workers.outcome import InvalidEnvironment, Unsupported

MODEL = {"d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 61}
RATES = ["tokens_per_s", "tflops", "mfu", "ceiling_percent"]
METRICS = {
    "forward": ["forward_ms", "step_ms", "first_step_ms", *RATES, "peak_memory_mib"],
    "forward_backward": ["forward_ms", "backward_ms", "step_ms", "first_step_ms", *RATES, "peak_memory_mib"],
    "train_step": [
        *("forward_ms", "backward_ms", "optimizer_ms", "step_ms", "first_step_ms"),
        *(*RATES, "peak_memory_mib"),
    ],
    "generate": ["prefill_ms", "decode_ms_per_token", "step_ms", "first_step_ms", *RATES, "peak_memory_mib"],
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Report:
    """Keeps everything, as it would travel."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.steps: list[tuple[int, int, str]] = []
        self.rows: dict[str, dict[str, Any]] = {}
        self.fingerprint: dict[str, Any] = {}
        self.verdict: dict[str, Any] = {}
        self.files: dict[str, Path] = {}

    def progress(self, done: int, total: int, message: str) -> None:
        self.steps.append((done, total, message))

    def measure(self, measurement: Measurement) -> None:
        wire = json.loads(json.dumps(measurement.to_wire()))
        assert wire["metric"] not in self.rows
        self.rows[wire["metric"]] = wire

    def artifact(self, path: Path, *, name: str, kind: str, media_type: str) -> None:
        self.files[name] = path

    def environment(self, fingerprint: Mapping[str, Any]) -> None:
        self.fingerprint = json.loads(json.dumps(fingerprint))

    def validity(self, verdict: Mapping[str, Any]) -> None:
        self.verdict = json.loads(json.dumps(verdict))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLOPWATCH_DATA_DIR", str(tmp_path / "data"))

    def run(unit: int = 0, **fields: Any) -> Report:
        defaults = {"model": MODEL, "context_length": 8, "batch_size": 2, "warmup_steps": 1, "measure_steps": 3}
        spec = BenchmarkSpec(**{**defaults, **fields})
        report = Report(tmp_path)
        RUNNER.run(spec, RUNNER.plan(spec)[unit], report)
        return report

    precision = torch.get_float32_matmul_precision()
    yield run
    torch.set_float32_matmul_precision(precision)


def test_the_agent_imports_the_runner_without_torch() -> None:
    code = (
        "import sys; from workers.jobs.benchmark import RUNNER; from app.specs.benchmark import BenchmarkSpec\n"
        "RUNNER.plan(BenchmarkSpec()); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_unit_is_forked_and_replicates_are_executed() -> None:
    (single,) = RUNNER.plan(BenchmarkSpec())
    assert (single.start, single.params, single.title) == ("fork", {"replicate": 0}, "small, context 256")
    units = RUNNER.plan(BenchmarkSpec(replicates=3))
    assert [(unit.start, unit.params["replicate"]) for unit in units] == [("exec", 0), ("exec", 1), ("exec", 2)]
    assert units[1].title == "small, context 256, replicate 2 of 3"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("mode", METRICS)
def test_every_mode_reports_its_metrics(run, mode: str, precision: str, device: str) -> None:
    report = run(mode=mode, precision=precision, device=device, gradient_clip_norm=1.0, new_tokens=4)
    assert list(report.rows) == METRICS[mode]
    for name, row in report.rows.items():
        if name in {"mfu", "ceiling_percent", "peak_memory_mib"} and row["outcome"] == "unknown":
            assert row["median"] is None
            assert row["reason"]
            continue
        assert row["outcome"] == "ok"
        assert row["median"] > 0
        assert row["n"] == (1 if name in {"first_step_ms", "peak_memory_mib"} else 3)
    assert report.rows["ceiling_percent"]["outcome"] == "unknown"
    assert report.steps[-1] == (4, 4, "measuring")


def test_phases_add_up_and_rates_follow_from_the_step(run) -> None:
    report = run(context_length=64, batch_size=4, measure_steps=5)
    value = {name: row["min"] for name, row in report.rows.items()}
    assert value["forward_ms"] + value["backward_ms"] + value["optimizer_ms"] <= report.rows["step_ms"]["max"]
    assert report.rows["tokens_per_s"]["max"] == pytest.approx(4 * 64 / (1e-3 * value["step_ms"]))
    weights = 2 * (4 * 16**2 + 3 * 16 * 24) + 16 * 61
    flops = 3 * 2 * 4 * (64 * weights + 2 * 64**2 * 16)
    assert report.rows["tflops"]["max"] == pytest.approx(1e-12 * flops / (1e-3 * value["step_ms"]))
    units = {name: row["unit"] for name, row in report.rows.items()}
    assert units["forward_ms"] == units["first_step_ms"] == "ms"
    assert (units["tokens_per_s"], units["tflops"], units["peak_memory_mib"]) == ("tokens/s", "TFLOP/s", "MiB")


def test_the_share_of_a_measured_ceiling(run, tmp_path: Path) -> None:
    Ceilings(tmp_path / "data" / "ceilings").record(torch.device("cpu"), {"fp32": 2.0}, None)
    report = run(device="cpu")
    assert report.rows["ceiling_percent"]["max"] == pytest.approx(50 * report.rows["tflops"]["max"])
    assert run(device="cpu", precision="bf16").rows["ceiling_percent"]["reason"].endswith("in bf16 is on record")


def test_generate_counts_new_tokens(run) -> None:
    report = run(mode="generate", new_tokens=6, measure_steps=4)
    value = {name: row["min"] for name, row in report.rows.items()}
    assert report.rows["tokens_per_s"]["max"] == pytest.approx(2 * 6 / (1e-3 * value["step_ms"]))
    assert value["prefill_ms"] + 5 * value["decode_ms_per_token"] <= report.rows["step_ms"]["max"]


def test_without_warmup_the_first_step_is_a_sample(run) -> None:
    report = run(warmup_steps=0, measure_steps=1)
    assert report.rows["first_step_ms"]["median"] == report.rows["step_ms"]["median"]
    assert report.rows["step_ms"]["std"] is None


def test_rows_carry_the_case_and_the_result_its_environment(run) -> None:
    report = run(unit=1, replicates=2, attention="sdpa_math")
    for row in report.rows.values():
        assert row["case"]["model"] == "d16-f24-l2-h2"
        assert row["case"]["attention"] == "sdpa_math"
        assert row["case"]["replicate"] == 1
        assert row["case"]["device"] == report.fingerprint["device"]["name"]
    assert report.fingerprint["settings"]["float32_matmul_precision"] == "highest"
    assert report.verdict["verdict"] in {"valid", "suspect"}
    assert {check["name"] for check in report.verdict["checks"]} >= {"variation", "drift", "host_load"}


def test_samples_are_also_a_file(run) -> None:
    report = run()
    with gzip.open(report.files["samples-0.csv.gz"], "rt") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert max(float(row["step_ms"]) for row in rows) == report.rows["step_ms"]["max"]


@pytest.mark.parametrize("name", sorted(set(ATTENTION.names()) - {"compiled"}))  # which compiles for half a minute
def test_every_implementation_serves_in_the_model(run, name: str) -> None:
    implementation = ATTENTION.load(name)
    if "float32" not in implementation.dtypes.get("cpu", ()):
        with pytest.raises(Unsupported, match="does not"):
            run(attention=name, device="cpu")
        return
    report = run(attention=name, device="cpu", mode="train_step" if implementation.has_backward else "forward")
    assert report.rows["step_ms"]["outcome"] == "ok"


def test_the_same_seed_gives_the_same_weights_and_batches(run, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    build_step = benchmark.build_step

    def spy(*arguments: Any) -> Any:
        model, step = build_step(*arguments)
        forward = step.phases["forward"]

        def recorded() -> None:
            forward()
            losses.append(step.loss.item())

        step.phases["forward"] = recorded
        return model, step

    monkeypatch.setattr(benchmark, "build_step", spy)
    for seed in (1, 1, 2):
        run(seed=seed, mode="forward_backward")
    assert losses[0:4] == losses[4:8]
    assert losses[0:4] != losses[8:12]


def test_compiling_is_recorded(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiler's first half only; the whole takes too long for every run of the tests."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    checks = {check["name"]: check for check in run(compile=True, activation_checkpointing=True).verdict["checks"]}
    for name in ("recompiles", "eager_fallback", "graph_breaks", "compile_cache"):
        assert checks[name]["ok"], checks[name]
    assert checks["eager_fallback"]["detail"] == "1 graphs, 0 functions left to eager"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch 2.11's own
@pytest.mark.parametrize("mode", METRICS)
def test_compiling_on_a_gpu(run, mode: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    report = run(mode=mode, compile=True, device="cuda", precision="bf16")
    checks = {check["name"]: check for check in report.verdict["checks"]}
    for name in ("recompiles", "eager_fallback", "graph_breaks"):
        assert checks[name]["ok"], checks[name]
    assert report.rows["first_step_ms"]["median"] > report.rows["step_ms"]["max"]


@pytest.mark.parametrize("phase", ["making the model", "forward", "backward", "optimizer"])
def test_running_out_of_memory_is_a_result(run, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build_step = benchmark.build_step

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    def sabotaged(*arguments: Any) -> Any:
        if phase == "making the model":
            fail()
        model, step = build_step(*arguments)
        step.phases[phase] = fail
        return model, step

    monkeypatch.setattr(benchmark, "build_step", sabotaged)
    report = run()
    assert list(report.rows) == METRICS["train_step"]
    for row in report.rows.values():
        assert row["outcome"] == "oom"
        assert f"out of memory in {phase}" in row["reason"]
        assert "Tried to allocate 20.00 GiB" in row["reason"]
        assert all(row[name] is None for name in ("n", "mean", "std", "median", "min", "max", "samples"))
    assert report.fingerprint
    assert report.verdict["checks"]
    assert not report.files


def test_a_model_that_really_does_not_fit_is_a_result(tmp_path: Path) -> None:
    code = f"""
import resource, sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_benchmark_runner import Report, RUNNER, BenchmarkSpec
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
model = {{"d_model": 65536, "d_ff": 1, "num_layers": 1, "num_heads": 1, "vocab_size": 4194304}}  # 1 TiB of embeddings
spec = BenchmarkSpec(model=model, device="cpu")
report = Report(Path({str(tmp_path)!r}))
RUNNER.run(spec, RUNNER.plan(spec)[0], report)
print({{row["outcome"] for row in report.rows.values()}}, report.rows["step_ms"]["reason"])
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.startswith("{'oom'} out of memory in making the model")


@pytest.mark.gpu
@pytest.mark.alone
def test_out_of_memory_on_a_gpu_is_a_result(run) -> None:
    report = run(context_length=1_048_576, batch_size=64, device="cuda", mode="forward")
    assert {row["outcome"] for row in report.rows.values()} == {"oom"}
    assert "CUDA out of memory" in report.rows["forward_ms"]["reason"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "magic"}, "unknown attention implementation 'magic'; known are .*eager"),
        ({"model": {**MODEL, "name": "magic"}}, "unknown model 'magic'; known are .*transformer_lm"),
        ({"attention": "sdpa_cudnn", "device": "cpu"}, "'sdpa_cudnn' does not run on cpu, only on cuda"),
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
    with pytest.raises(Unsupported, match="no such attention kernel"):
        run(attention="sdpa_flash", device="cuda", precision="bf16", model=wide)


def test_an_attention_without_backward_runs_forward_only(run, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = ATTENTION.load("eager")
    forward_only = Implementation("forward_only", eager.function, eager.dtypes, has_backward=False)
    monkeypatch.setattr(ATTENTION, "load", lambda name: forward_only)
    assert run(mode="forward").rows["forward_ms"]["outcome"] == "ok"
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
        logits: torch.Tensor = self.head(self.embedding(token_ids))
        return logits


def test_a_users_model_needs_neither_flops_nor_a_cache(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODELS, "load", lambda name: Plain)
    report = run()
    assert report.rows["step_ms"]["outcome"] == "ok"
    assert report.rows["tflops"]["reason"] == "model 'transformer_lm' does not tell its FLOPs"
    with pytest.raises(Unsupported, match="no key-value cache"):
        run(mode="generate")


def test_errors_of_the_model_pass_unchanged(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_model: Any, _token_ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the loss is a pineapple")

    monkeypatch.setattr(Plain, "forward", fail)
    monkeypatch.setattr(MODELS, "load", lambda name: Plain)
    with pytest.raises(RuntimeError, match="pineapple"):
        run()


def test_a_missing_compiler_is_an_invalid_environment() -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    error = RuntimeError("backend='inductor' raised")
    error.__cause__ = InvalidCxxCompiler()
    assert isinstance(benchmark.translated(error), InvalidEnvironment)
    assert isinstance(benchmark.translated(CompilerMissing("no c++")), InvalidEnvironment)
    assert benchmark.translated(RuntimeError("x")) is None


def test_an_environment_that_forbids_tf32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    with pytest.raises(InvalidEnvironment, match="NVIDIA_TF32_OVERRIDE"):
        benchmark.set_precision("tf32")


def test_a_unit_without_parameters_is_the_first_replicate(tmp_path: Path) -> None:
    spec = BenchmarkSpec(model=MODEL, context_length=4, warmup_steps=0, measure_steps=1, mode="forward", device="cpu")
    report = Report(tmp_path)
    RUNNER.run(spec, Unit("alone"), report)
    assert report.rows["step_ms"]["case"]["replicate"] == 0
