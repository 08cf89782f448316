"""The runner of `attention` in this process: right, wrong and failing implementations beside each other."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from app.specs.attention import AttentionSpec
from kernels.attention.reference import attention
from kernels.registry import ATTENTION, BrokenEntryPoint, Implementation
from tests.workers.reporting import Report
from workers.jobs import cells
from workers.jobs._base import Resumable, Unit
from workers.jobs.attention import RUNNER
from workers.measure.ceilings import Ceilings
from workers.measure.compilation import compilation
from workers.outcome import Crashed, Failed, Unsupported

PLUGINS = Path(__file__).parents[1] / "plugins"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CPU_ONLY = {"intermediates_mib", "working_memory_mib"}
BACKWARD = {"backward", "forward_backward"}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """tests/plugins is installed: its distributions' entry points are found."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    vars(ATTENTION).pop("_entries", None)
    yield
    vars(ATTENTION).pop("_entries", None)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLOPWATCH_DATA_DIR", str(tmp_path / "data"))

    def run(unit: Unit | None = None, **fields: Any) -> Report:
        defaults = {
            "implementations": ["eager"],
            "batch_size": 2,
            "head_dims": [16],
            "sequence_lengths": [48],
            "dtypes": ["fp32"],
            "warmup_steps": 1,
            "measure_steps": 3,
        }
        spec = AttentionSpec(**{**defaults, **fields})
        report = Report(tmp_path)
        RUNNER.run(spec, unit or RUNNER.plan(spec)[0], report)
        return report

    precision = torch.get_float32_matmul_precision()
    yield run
    torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_metric_of_a_cell(run, dtype: str, device: str) -> None:
    report = run(implementations=["eager", "sdpa_math", "own"], dtypes=[dtype], device=device, causal=[False, True])
    assert len({tuple(row["case"].values()) for row in report.rows}) == 6
    cell = report.cell(implementation="own", causal=True)
    assert list(cell) == [
        ("forward_ms", "forward"), ("backward_ms", "backward"), ("forward_backward_ms", "forward_backward"),
        ("tflops", "forward"), ("tflops", "backward"), ("tflops", "forward_backward"),
        ("ceiling_percent", "forward"), ("ceiling_percent", "backward"), ("ceiling_percent", "forward_backward"),
        ("memory_before_backward_mib", "backward"), ("peak_memory_mib", None),
        ("intermediates_mib", "forward"), ("working_memory_mib", "forward"),
        ("output_error", "forward"), ("gradient_error", "backward"),
    ]  # fmt: skip
    for (name, _), row in cell.items():
        if name in {"ceiling_percent", "memory_before_backward_mib", "peak_memory_mib"} | CPU_ONLY:
            assert row["outcome"] in {"ok", "unknown"}
            continue
        assert row["outcome"] == "ok", row
        assert row["n"] == (1 if name.endswith("error") else 3)
        assert row["case"]["device"] == report.fingerprint["device"]["name"]
    assert cell["output_error", "forward"]["median"] < (1e-5 if dtype == "fp32" else 2e-2)
    assert report.steps[0] == (0, 6, f"eager, {dtype}, length 48, head dimension 16, no mask")
    assert report.steps[-1] == (6, 6, "done")
    assert {check["name"] for check in report.verdict["checks"]} >= {"variation", "recompiles", "host_load"}


def test_rates_follow_from_times_and_the_ceiling(run, tmp_path: Path) -> None:
    Ceilings(tmp_path / "data" / "ceilings").record(torch.device("cpu"), {"fp32": 0.5}, None)
    report = run(causal=[False, True], num_heads=3, device="cpu")
    for causal in (False, True):
        cell = report.cell(causal=causal)
        forward = 4 * 2 * 3 * 48**2 * 16 / (2 if causal else 1)
        for phase, factor in (("forward", 1), ("backward", 2), ("forward_backward", 3)):
            fastest = cell[f"{phase}_ms", phase]["min"]
            assert cell["tflops", phase]["max"] == pytest.approx(1e-9 * factor * forward / fastest)
            percent = 100 * cell["tflops", phase]["max"] / 0.5
            assert cell["ceiling_percent", phase]["max"] == pytest.approx(percent)


def test_forward_only_keeps_no_gradients(run) -> None:
    report = run(mode="forward", implementations=["forward_only", "own"])
    assert {row["phase"] for row in report.rows} == {"forward", None}
    assert {row["metric"] for row in report.rows} >= {"forward_ms", "tflops", "output_error"}
    assert report.cell(implementation="forward_only")["forward_ms", "forward"]["outcome"] == "ok"


def test_an_implementation_without_backward_is_timed_forward(run) -> None:
    cell = run(implementations=["forward_only"]).cell()
    assert cell["forward_ms", "forward"]["outcome"] == "ok"
    assert {row["outcome"] for (_, phase), row in cell.items() if phase in BACKWARD} == {"unsupported"}


@pytest.mark.parametrize("name", ["wrong", "wrong_row", "wrong_gradient"])
def test_a_wrong_kernels_time_is_shown_as_wrong(run, name: str) -> None:
    report = run(implementations=[name, "own"], sequence_lengths=[1500], causal=[False], batch_size=1)
    cell = report.cell(implementation=name)
    errors = {metric: row for (metric, _), row in cell.items() if metric.endswith("error")}
    assert {row["outcome"] for row in errors.values()} == {"ok"}
    assert max(row["median"] for row in errors.values()) > 1e-3
    for (metric, _), row in cell.items():
        if metric not in errors:
            assert row["outcome"] == "wrong"
            assert row["median"] is None
            assert "relative error" in row["reason"]
    blamed = "the gradient of input 1" if name == "wrong_gradient" else "the output"
    assert blamed in cell["forward_ms", "forward"]["reason"]
    assert report.cell(implementation="own")["forward_ms", "forward"]["outcome"] == "ok"


class SpoiledGradients(torch.autograd.Function):
    """Right forward; its gradients are what `spoil` makes of a tensor like the inputs."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, causal: bool, spoil: Any) -> torch.Tensor:
        ctx.spoil = spoil
        return attention(q, k, v, causal)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (*(ctx.spoil(gradient) for _ in range(3)), None, None)


@pytest.mark.parametrize(
    ("function", "dtype", "reason"),
    [
        (lambda *inputs: (attention(*inputs), None), "fp32", "the output is a tuple, not a tensor"),
        (lambda *inputs: None, "fp32", "the output is missing"),
        (lambda *inputs: attention(*inputs)[..., :-1], "fp32", "the output has the shape (2, 1, 48, 15), not (2, 1,"),
        (lambda *inputs: attention(*inputs).float(), "bf16", "the output is of torch.float32, not torch.bfloat16 as"),
        (lambda *inputs: attention(*inputs).to("meta"), "fp32", "the output is on meta, not cpu"),
        (lambda *inputs: attention(*inputs).detach(), "fp32", "the output is detached from the inputs"),
        (lambda q, k, v, causal: attention(q, k.detach(), v, causal), "fp32", "the gradient of input 1 is missing"),
        (lambda *inputs: SpoiledGradients.apply(*inputs, lambda gradient: None), "fp32",
         "the gradient of input 0 is missing"),
        (lambda *inputs: SpoiledGradients.apply(*inputs, lambda gradient: gradient[..., :-1]), "fp32",
         "the backward pass: Function SpoiledGradientsBackward returned an invalid gradient at index 0"),
    ],
    ids=["tuple", "none", "shape", "dtype", "device", "detached", "unused", "no gradients", "shape of gradient"],
)  # fmt: skip
def test_what_cannot_be_the_result_is_wrong(
    run, monkeypatch: pytest.MonkeyPatch, function: Any, dtype: str, reason: str
) -> None:
    load = ATTENTION.load
    unfit = Implementation("unfit", function, load("own").dtypes)
    monkeypatch.setattr(ATTENTION, "load", lambda name: unfit if name == "unfit" else load(name))
    report = run(implementations=["unfit", "own"], dtypes=[dtype], device="cpu")
    cell = report.cell(implementation="unfit")
    assert {row["outcome"] for row in cell.values()} == {"wrong"}
    assert cell["forward_ms", "forward"]["reason"].startswith(reason)
    assert report.cell(implementation="own")["forward_ms", "forward"]["outcome"] == "ok"


def test_forward_only_a_detached_output_is_right(run, monkeypatch: pytest.MonkeyPatch) -> None:
    load = ATTENTION.load
    detached = Implementation("detached", lambda *inputs: attention(*inputs).detach(), load("own").dtypes)
    monkeypatch.setattr(ATTENTION, "load", lambda name: detached if name == "detached" else load(name))
    cell = run(implementations=["detached"], mode="forward", device="cpu").cell()
    assert cell["forward_ms", "forward"]["outcome"] == "ok"


def test_one_that_cannot_be_loaded_costs_no_other(run, monkeypatch: pytest.MonkeyPatch) -> None:
    load = ATTENTION.load

    def broken(name: str) -> Any:
        if name == "wrong":
            raise BrokenEntryPoint("attention implementation 'wrong' could not be loaded: TypeError: dtypes of cpu")
        return load(name)

    monkeypatch.setattr(ATTENTION, "load", broken)
    report = run(implementations=["wrong", "own"], mode="forward", device="cpu")
    row = report.cell(implementation="wrong")["forward_ms", "forward"]
    assert (row["outcome"], row["reason"].rpartition(": ")[2]) == ("invalid_environment", "dtypes of cpu")
    assert report.cell(implementation="own")["forward_ms", "forward"]["outcome"] == "ok"
    assert "1 of 2 cells measured: 1 invalid_environment" in {check["detail"] for check in report.verdict["checks"]}
    assert report.verdict["verdict"] == "suspect"


def test_vanishing_gradients_are_right_up_to_round_off_only(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """At length 1 the gradients of queries and keys are differences of equals, here of a thousand products each."""

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        blamed = 1e-3 * q.sum()
        return attention(q, k, v, causal) + blamed - blamed.detach()

    load = ATTENTION.load
    unfit = Implementation("unfit", wrong, load("own").dtypes)
    monkeypatch.setattr(ATTENTION, "load", lambda name: unfit if name == "unfit" else load(name))
    names = ["cpu_flash", "tiled", "eager", "own", "unfit"]
    report = run(implementations=names, sequence_lengths=[1], head_dims=[1, 1024], batch_size=8, device="cpu")
    for head_dim in (1, 1024):
        found = {name: report.cell(implementation=name, head_dim=head_dim)["forward_ms", "forward"] for name in names}
        assert {name: row["outcome"] for name, row in found.items()} == {**dict.fromkeys(names, "ok"), "unfit": "wrong"}
        assert "the gradient of input 0: relative error" in found["unfit"]["reason"]


def test_what_goes_wrong_in_one_cell_costs_no_other(run) -> None:
    names = ["hungry", "raises", "sdpa_cudnn", "no_such", "own"]
    report = run(implementations=names, device="cpu")
    outcomes = {name: report.cell(implementation=name)["forward_ms", "forward"] for name in names}
    assert {name: row["outcome"] for name, row in outcomes.items()} == {
        "hungry": "oom",
        "raises": "failed",
        "sdpa_cudnn": "unsupported",
        "no_such": "unsupported",
        "own": "ok",
    }
    assert "Tried to allocate 20.00 GiB" in outcomes["hungry"]["reason"]
    assert outcomes["raises"]["reason"] == "ValueError: the keys are a pineapple"
    assert "only on cuda" in outcomes["sdpa_cudnn"]["reason"]
    assert "unknown attention implementation 'no_such'" in outcomes["no_such"]["reason"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"implementations": ["sdpa_cudnn", "no_such"]}, "only on cuda"),
        ({"dtypes": ["tf32"]}, "tf32 is a GPU format"),
        ({"dtypes": ["fp16"], "implementations": ["own"]}, "does not take float16 on cpu"),
    ],
)
def test_what_cannot_run_here_costs_no_oracle(
    run, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], reason: str
) -> None:
    def make_problem(*_: Any) -> Any:
        raise AssertionError("for nothing")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(type(RUNNER), "make_problem", make_problem)
    report = run(**fields)
    assert {row["outcome"] for row in report.rows} == {"unsupported"}
    assert reason in report.rows[0]["reason"]


def test_an_oracle_for_which_the_memory_does_not_suffice_is_nobodys_failure(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_problem = type(RUNNER).make_problem

    def hungry(self: Any, spec: AttentionSpec, cell: Any, device: torch.device) -> Any:
        if cell.sequence_length == 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return make_problem(self, spec, cell, device)

    monkeypatch.setattr(type(RUNNER), "make_problem", hungry)
    report = run(implementations=["eager", "own"], sequence_lengths=[48, 64, 72], causal=[False], device="cpu")
    for name in ("eager", "own"):
        long = report.cell(implementation=name, sequence_length=64)
        assert {row["outcome"] for row in long.values()} == {"unknown"}
        assert "no memory for the inputs and their float64 oracle" in long["forward_ms", "forward"]["reason"]
        for length in (48, 72):
            cell = report.cell(implementation=name, sequence_length=length)
            assert cell["forward_ms", "forward"]["outcome"] == "ok"


@pytest.mark.parametrize(
    ("names", "mode", "detail", "ok"),
    [
        (["own", "eager"], "forward", "2 of 2 cells measured", True),
        (["own", "sdpa_cudnn"], "forward", "1 of 2 cells measured: 1 unsupported", True),
        (["own", "hungry"], "forward", "1 of 2 cells measured: 1 oom", True),
        (["forward_only"], "forward_backward", "1 of 1 cells measured", True),
        (["hungry", "sdpa_cudnn"], "forward", "0 of 2 cells measured: 1 oom, 1 unsupported", False),
        (["sdpa_cudnn"], "forward", "0 of 1 cells measured: 1 unsupported", False),
        (["own", "wrong", "raises"], "forward", "1 of 3 cells measured: 1 failed, 1 wrong", False),
    ],
)
def test_a_job_that_measured_nothing_or_met_a_fault_is_not_valid(
    run, names: list[str], mode: str, detail: str, ok: bool
) -> None:
    verdict = run(implementations=names, mode=mode, device="cpu").verdict
    check = next(check for check in verdict["checks"] if check["name"] == "measured")
    assert (check["detail"], check["ok"]) == (detail, ok)
    assert ok or verdict["verdict"] == "suspect"


def test_a_cell_that_loses_its_memorys_figures_has_that_fault(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has times, but something is wrong with it."""

    def fail(*_: Any) -> Any:
        raise ValueError("no such memory")

    monkeypatch.setattr("workers.measure.operations.measure_memory", fail)
    report = run(device="cpu")
    assert report.cell()["forward_ms", "forward"]["outcome"] == "ok"
    assert "0 of 1 cells measured: 1 failed" in {check["detail"] for check in report.verdict["checks"]}


def test_a_job_of_nothing_known_is_unsupported(run) -> None:
    with pytest.raises(Unsupported, match=r"unknown attention implementation 'no_such'; known are .*own"):
        run(implementations=["no_such"])


def test_tf32_is_for_gpus(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = run(dtypes=["tf32", "fp32"])
    assert report.cell(dtype="tf32")["forward_ms", "forward"]["outcome"] == "unsupported"
    assert report.cell(dtype="fp32")["forward_ms", "forward"]["outcome"] == "ok"


def test_after_a_crash_the_rest_goes_on_in_a_fresh_unit(run) -> None:
    fields = {"implementations": ["eager", "dies", "own"]}
    assert isinstance(RUNNER, Resumable)
    spec = AttentionSpec(**fields)
    rest = RUNNER.resume(spec, RUNNER.plan(spec)[0], 1, Failed("crashed", "the job's process was killed by SIGSEGV"))
    report = run(rest, **fields)
    assert report.steps[0][:2] == (1, 3)
    assert report.cell(implementation="dies")["forward_ms", "forward"]["outcome"] == "crashed"
    assert "SIGSEGV" in report.cell(implementation="dies")["forward_ms", "forward"]["reason"]
    assert report.cell(implementation="own")["forward_ms", "forward"]["outcome"] == "ok"
    assert {row["case"]["implementation"] for row in report.rows} == {"dies", "own"}
    assert report.verdict["verdict"] == "suspect"
    assert "1 of 2 cells measured: 1 crashed" in {check["detail"] for check in report.verdict["checks"]}


def test_a_lost_device_context_ends_the_process(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_device: torch.device) -> None:
        raise Crashed("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(cells, "check_device_answers", lost)
    with pytest.raises(Crashed, match="illegal memory access"):
        run(implementations=["raises", "own"])


def test_nothing_compiled_survives_a_cell(run, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo

    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    run(implementations=["eager", "own"])
    assert len(resets) == 2


@pytest.mark.skipif("cpu_flash" not in ATTENTION.names(), reason="the C++ family is not registered")
def test_the_cpu_family_tells_its_intermediates_and_takes_block_sizes(run) -> None:
    names = ["cpu_naive", "cpu_blocked", "cpu_fused", "cpu_flash"]
    fields = {"batch_size": 1, "num_heads": 4, "head_dims": [32], "sequence_lengths": [1024], "device": "cpu"}
    steps = {"warmup_steps": 0, "measure_steps": 1, "causal": [False]}
    report = run(implementations=names, mode="forward", br=[16, 64], bc=[32], **fields, **steps)

    def mib(metric: str, **coordinates: Any) -> float:
        return float(report.cell(**coordinates)[metric, "forward"]["median"])

    for block in (16, 64):
        assert mib("intermediates_mib", implementation="cpu_blocked", br=block) == 4.5
    assert mib("intermediates_mib", implementation="cpu_naive") == 4.5
    assert mib("working_memory_mib", implementation="cpu_fused") == torch.get_num_threads() * 4 / 1024
    small, large = (mib("working_memory_mib", implementation="cpu_flash", br=block, bc=32) for block in (16, 64))
    assert small < large < 1
    assert {row["outcome"] for row in report.rows if row["metric"] == "forward_ms"} == {"ok"}


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """`tunes` is an implementation that is right once it was tuned for a problem, and wrong before; what it was asked
    for.
    """
    asked: list[tuple[Any, ...]] = []
    own = ATTENTION.load("own")

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        factor = 1 if (tuple(q.shape), causal) in {(shape, mask) for shape, mask, _ in asked} else 2
        return factor * own.function(q, k, v, causal)

    def tune(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, *, backward: bool, tell: Any) -> str:
        tell("half way")
        compilations = compilation().graphs
        torch.compile(lambda x: x + 1, backend="eager", dynamic=False)(q)
        assert compilation().graphs > compilations, "a search compiles, which is no recompilation of what is measured"
        asked.append((tuple(q.shape), causal, backward))
        return f"blue tiles for {q.shape[2]}"

    load = ATTENTION.load
    tunes = Implementation("tunes", function, own.dtypes, tune=tune)
    monkeypatch.setattr(ATTENTION, "load", lambda name: tunes if name == "tunes" else load(name))
    return asked


def test_autotuning_comes_before_each_cells_first_call(run, tuned: list[Any], capsys: pytest.CaptureFixture) -> None:
    report = run(implementations=["tunes", "own"], sequence_lengths=[48, 64], autotune=True, device="cpu")
    assert tuned == [((2, 1, 48, 16), True, True), ((2, 1, 64, 16), True, True)], "once per problem"
    assert {row["outcome"] for row in report.rows if row["metric"] == "forward_ms"} == {"ok"}
    assert {row["case"]["autotune"] for row in report.rows} == {True}
    title = "tunes, fp32, length 48, head dimension 16, causal"
    assert report.steps[:3] == [(0, 4, title), (0, 4, f"{title}: tuning, half way"), (0, 4, f"{title}: tuned")]
    log = capsys.readouterr()
    assert f"{title}: tuned: blue tiles for 48\n" in log.err
    assert "tiles for" not in log.out, "where `flopwatch run --json` prints its result"
    assert "own, fp32" not in log.err, "an implementation without anything to tune is not affected"
    assert next(check for check in report.verdict["checks"] if check["name"] == "recompiles")["ok"]


def test_nothing_is_tuned_unless_asked(run, tuned: list[Any]) -> None:
    report = run(implementations=["tunes"], device="cpu")
    assert tuned == []
    assert report.cell()["forward_ms", "forward"]["outcome"] == "wrong"
    assert {row["case"]["autotune"] for row in report.rows} == {False}


def test_only_what_is_measured_is_tuned(run, tuned: list[Any]) -> None:
    report = run(implementations=["tunes"], mode="forward", causal=[False], autotune=True, device="cpu")
    assert tuned == [((2, 1, 48, 16), False, False)]
    assert report.cell()["forward_ms", "forward"]["outcome"] == "ok"


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), "oom", "out of memory in tuning"),
        (ValueError("the tiles are a pineapple"), "failed", "ValueError: the tiles are a pineapple"),
    ],
)
def test_a_search_that_fails_is_the_cells_outcome(
    run, monkeypatch: pytest.MonkeyPatch, error: Exception, outcome: str, reason: str
) -> None:
    """Times that are not of what was asked for would be worse than none."""

    def tune(*_inputs: Any, **_options: Any) -> str:
        raise error

    load = ATTENTION.load
    own = dataclasses.replace(load("own"), tune=tune)
    monkeypatch.setattr(ATTENTION, "load", lambda name: own if name == "own" else load(name))
    report = run(implementations=["own", "eager"], autotune=True, device="cpu")
    cell = report.cell(implementation="own")["forward_ms", "forward"]
    assert cell["outcome"] == outcome
    assert reason in cell["reason"]
    assert report.cell(implementation="eager")["forward_ms", "forward"]["outcome"] == "ok"


@pytest.mark.gpu
def test_triton_is_tuned_on_a_gpu_before_it_is_measured(run, capsys: pytest.CaptureFixture) -> None:
    from kernels.attention import triton_candidates, triton_tilings

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_candidates, "ROWS", (32, 64))
        patch.setattr(triton_candidates, "STAGES", (2,))
        report = run(implementations=["triton"], dtypes=["bf16"], sequence_lengths=[512], head_dims=[64],
                     autotune=True, device="cuda")  # fmt: skip
    assert report.cell()["backward_ms", "backward"]["outcome"] == "ok"
    assert "triton, bf16, length 512, head dimension 64, causal: tuned: forward " in capsys.readouterr().err
    assert any("tuning, forward: best" in message for _, _, message in report.steps)
    triton_tilings.forget()


@pytest.mark.gpu
def test_an_illegal_access_ends_the_process_after_the_cells_before_it(tmp_path: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from tests.workers.test_attention_runner import AttentionSpec, Crashed, Report, RUNNER
fields = {{"implementations": ["own", "poisons", "eager"], "sequence_lengths": [48], "dtypes": ["fp32"]}}
spec = AttentionSpec(**fields, head_dims=[16], warmup_steps=0, measure_steps=1, device="cuda")
report = Report(Path({str(tmp_path)!r}))
try:
    RUNNER.run(spec, RUNNER.plan(spec)[0], report)
except Crashed as error:
    print(error, {{row["case"]["implementation"] for row in report.rows}}, report.steps[-1][0])
    sys.stdout.flush()
    os._exit(0)  # what torch does at the end with a context that is lost is no matter here
"""
    path = os.pathsep.join([str(PLUGINS.parents[1]), str(PLUGINS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert out.stdout.startswith("CUDA error")
    assert out.stdout.strip().endswith("{'own'} 1")


@pytest.mark.gpu
def test_memory_on_a_gpu_is_the_cells_own(run) -> None:
    report = run(sequence_lengths=[512, 1024], device="cuda", causal=[False], batch_size=1)
    before = {
        length: report.cell(sequence_length=length)["memory_before_backward_mib", "backward"]["median"]
        for length in (512, 1024)
    }
    weights = 4 * (1024**2 - 512**2) / 2**20  # eager keeps the weights, one float32 per pair
    assert before[1024] - before[512] == pytest.approx(weights, rel=0.3)
