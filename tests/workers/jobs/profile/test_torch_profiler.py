"""The runner of `profile` in this process, with a reporter that keeps what it is told."""

import dataclasses
import functools
import gzip
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch

from app.specs._training import PHASES
from app.specs.profile import ProfileSpec
from kernels.registry import ATTENTION
from tests.workers.reporting import Report, reported, with_ceilings
from workers.jobs import ceiling
from workers.jobs._values import Values
from workers.jobs.profile import RUNNER, torch_profiler
from workers.measure import warmup
from workers.measure.ceilings import Ceilings
from workers.measure.profiling import recording, tables, trace
from workers.measure.profiling.attention import Part, Roofline
from workers.measure.profiling.attribution import RecordedWork
from workers.measure.profiling.products import Product
from workers.measure.profiling.recording import Profile, Recording
from workers.measure.profiling.usage import ProductUsage
from workers.model import accounting
from workers.model.accounting import ATTENTION_PARTS
from workers.outcome import InvalidEnvironment

MODEL = {"d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 61}
FIELDS: dict[str, Any] = {
    "model": MODEL,
    "context_length": 8,
    "batch_size": 2,
    "warmup_steps": 1,
    "measure_steps": 3,
    "profile_steps": 2,
    "stacks": False,
}


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(with_ceilings(tmp_path, 0.05, 10.0))


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Report]:
    """The report of a whole step on a device, of which several tests read the tables."""

    @functools.cache
    def run(device: str) -> Report:
        return reported(
            ProfileSpec(**FIELDS, device=device), with_ceilings(tmp_path_factory.mktemp(device), 0.05, 10.0)
        )

    return run


@pytest.fixture
def run(report: Report, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(torch_profiler, "MAX_PROFILED_S", math.inf)  # a busy host's steps are slow

    def run(**fields: Any) -> Report:
        spec = ProfileSpec(**{**FIELDS, **fields})
        RUNNER.run(spec, RUNNER.plan(spec)[0], report)
        return report

    return run


def metrics(report: Report) -> dict[tuple[str, str | None], dict[str, Any]]:
    """What was measured, by metric and phase."""
    rows = {(row["metric"], row["phase"]): row for row in report.rows}
    assert len(rows) == len(report.rows)
    return rows


def shares(report: Report, scope: str) -> dict[str, float]:
    return {row["class"]: row["share_percent"] for row in report.table_rows("classes") if row["scope"] == scope}


@pytest.mark.parametrize("mode", ["train_step", "generate"])  # others are a part of the first
def test_modes_have_their_tables_and_metrics(run: Any, mode: str, device: str) -> None:
    report = run(mode=mode, new_tokens=3, device=device)
    phases = PHASES[mode]
    of_waits = {"waits"} if device == "cuda" else set()  # told where a GPU has waited
    assert set(report.tables) - of_waits == {
        *(f"kernels-{phase}" for phase in phases),
        *(f"operators-{phase}" for phase in phases),
        *(["kernels-step"] if len(phases) > 1 else []),
        *("classes", "kernels", "work", "ranges", "attention", "products", "ceilings", "summary", "values"),
    }
    for phase in phases:
        kernels = report.table_rows(f"kernels-{phase}")
        assert sum(row["share_percent"] for row in kernels) == pytest.approx(100)
        assert [row["total_ms"] for row in kernels] == sorted((row["total_ms"] for row in kernels), reverse=True)
        assert all((row["launch_to_start_us"] is None) == (device == "cpu") for row in kernels)
    spec = ProfileSpec(**{**FIELDS, "mode": mode})
    expected = [
        (metric.name, metric.phase)
        for metric in [*torch_profiler.timing_metrics(PHASES[mode]), *torch_profiler.profile_metrics(spec)]
    ]
    assert [(row["metric"], row["phase"]) for row in report.rows] == expected
    gpu_only = {"gpu_busy_percent", "profiled_idle_ms", "largest_gap_ms", "launches", "host_bound"}
    for (metric, _), row in metrics(report).items():
        if metric in gpu_only and device == "cpu":
            assert (row["outcome"], row["reason"]) == ("unknown", "known on GPUs only")
        elif metric != "gpu_busy_percent":  # steps this small may keep a GPU busier under the profiler than without
            assert row["outcome"] == "ok", row
    parts = {row["part"]: row for row in report.table_rows("attention", phase=phases[0])}
    for what, of_softmax, of_product in (("time", "total_ms", "product_ms"), ("flops", "gflop", "gflop")):
        ratio = metrics(report)[f"softmax_to_products_{what}", phases[0]]["median"]
        products = sum(parts[name][of_product] for name in ("scores", "values"))
        assert ratio == pytest.approx(parts["softmax"][of_softmax] / products)
    assert metrics(report)["profiled_step_ms", None]["n"] == 2
    assert metrics(report)["unprofiled_step_ms", None]["n"] == 3


def test_each_scope_has_the_share_of_each_class(usual: Callable[[str], Report], device: str) -> None:
    report = usual(device)
    for scope in ("forward", "forward_backward", "step"):
        assert tuple(shares(report, scope)) == torch_profiler.CLASSES
        assert sum(shares(report, scope).values()) == pytest.approx(100)
        for name, share in shares(report, scope).items():
            assert metrics(report)[f"{name}_share_percent", scope]["median"] == pytest.approx(share)
        for name in ("matmul", "softmax", "normalisation", "elementwise", "copy", "reduction"):
            assert shares(report, scope)[name] > 0
    assert shares(report, "forward")["optimizer"] == shares(report, "forward_backward")["optimizer"] == 0
    assert shares(report, "step")["optimizer"] > 0


def test_work_of_both_passes_belongs_to_layers_and_parts(run: Any, device: str) -> None:
    report = run(device=device, activation_checkpointing=True)
    times = {(row["range"], row["phase"]): row["total_ms"] for row in report.table_rows("ranges")}
    for phase in ("forward", "backward"):
        for part in ("scores", "softmax", "values", "norm"):
            layers = [times[f"layers.{index}/{part}", phase] for index in range(2)]
            # The last norm stands in no layer.
            assert times[part, phase] == pytest.approx(sum(layers)) or part == "norm"
            assert all(time > 0 for time in layers)
        whole = sum(row["total_ms"] for row in report.table_rows(f"kernels-{phase}"))
        outer = [f"layers.{index}" for index in range(2)] + ["outside"]
        no_layer = times["norm", phase] - sum(times[f"layers.{index}/norm", phase] for index in range(2))
        assert sum(times[name, phase] for name in outer) + no_layer == pytest.approx(whole)
    assert {name for name, phase in times if phase == "optimizer"} == {"Optimizer.step#AdamW.step"}


@pytest.mark.parametrize(
    ("fields", "scores", "softmax"),
    [
        ({}, 0, 0),
        ({"activation_checkpointing": True}, 12, 12),
        ({"activation_checkpointing": True, "checkpoint_layers": 5}, 5, 5),
        ({"activation_checkpointing": True, "checkpoint_scope": "selective", "checkpoint_layers": 5}, 0, 12),
    ],
)
def test_what_is_recomputed_counts_where_it_is(fields: dict[str, Any], scores: int, softmax: int) -> None:
    spec = ProfileSpec(**fields)
    assert [torch_profiler.layers_recomputed(spec, part) for part in ATTENTION_PARTS] == [scores, softmax, scores]


def test_the_parts_of_attention_beside_the_roofline(usual: Callable[[str], Report], device: str) -> None:
    report = usual(device)
    parts = {(row["part"], row["phase"]): row for row in report.table_rows("attention")}
    assert set(parts) == {(part, phase) for part in ATTENTION_PARTS for phase in ("forward", "backward")}
    products = 2 * 2 * 2 * 2 * 8 * 8 * 8  # 2 · layers · batch · heads · queries · keys · head dimension
    scores = parts["scores", "forward"]
    assert scores["gflop"] == pytest.approx(1e-9 * products)
    assert scores["useful_gflop"] == pytest.approx(0.5e-9 * products)
    assert scores["tflops"] == pytest.approx(1e-9 * products / scores["total_ms"])
    assert 0 < scores["product_ms"] < scores["total_ms"]
    assert parts["softmax", "forward"]["product_ms"] == 0
    assert scores["ridge"] == pytest.approx(5.0)  # 0.05 TFLOP/s by 10 GB/s
    assert (scores["bound"], parts["softmax", "backward"]["bound"]) == ("memory-bound", "memory-bound")
    row = metrics(report)["scores_tflops", "forward"]
    assert row["median"] == pytest.approx(scores["tflops"])
    assert "whole square" in scores["note"]


def test_products_of_matrices_by_shape_beside_the_roofline(usual: Callable[[str], Report], device: str) -> None:
    report = usual(device)
    products = report.table_rows("products")
    forward = [row for row in products if row["phase"] == "forward"]
    shape = accounting.Shape(*(MODEL[name] for name in ("vocab_size", "d_model", "num_layers", "num_heads", "d_ff")))
    # Eager attention computes the whole square of scores, of which the model's FLOPs count the causal half.
    square = 2 * accounting.attention_flops((2, 2, 8, 8), shape.problem)
    flops = accounting.forward_flops(shape, 2, 8) + square
    assert sum(row["gflop"] for row in forward) == pytest.approx(1e-9 * flops)
    backward = [row["gflop"] for row in products if row["phase"] == "backward"]
    assert sum(backward) == pytest.approx(2e-9 * flops)
    (head,) = (row for row in forward if row["product"] == "16×16 · 16×61")
    assert (head["operator"], head["dtype"], head["calls"]) == ("aten::mm", "fp32", 1)
    assert head["traffic_mib"] * 2**20 == 4 * (16 * 16 + 16 * 61 + 16 * 61)
    assert head["intensity"] == pytest.approx(2 * 16 * 16 * 61 / (4 * (16 * 16 + 2 * 16 * 61)))
    assert head["bound"] == "memory-bound"
    limit = 1e-3 * head["intensity"] * 10  # TFLOP/s at 10 GB/s
    assert head["limit_percent"] == pytest.approx(100 * head["tflops"] / limit)
    limits = {row["limit"]: row for row in report.table_rows("ceilings")}
    assert (limits["products"]["value"], limits["products"]["precision"]) == (0.05, "fp32")
    assert (limits["copies"]["value"], limits["copies"]["unit"]) == (10.0, "GB/s")
    assert limits["vendor's peak"]["source"]


def test_a_roof_below_the_points_is_too_low(tmp_path: Path) -> None:
    for rates, low in (((1e-9, 1e-6), "products"), ((100.0, 1e5), None)):
        fresh = reported(ProfileSpec(**{**FIELDS, "mode": "forward", "device": "cpu"}), with_ceilings(tmp_path, *rates))
        sources = {row["limit"]: row["source"] for row in fresh.table_rows("ceilings")}
        said = {limit for limit, source in sources.items() if "too low, since work reached" in source}
        assert said == ({low} if low else set()) or (low == "products" and said == {"products", "copies"})
        summary = {row["what"]: row["value"] for row in fresh.table_rows("summary")}
        assert (f"ceiling of {low}" in summary) == (low is not None)
        if low:
            assert summary[f"ceiling of {low}"] > 100


def test_products_in_another_type_than_the_jobs_have_no_limit(run: Any) -> None:
    products = run(precision="bf16", device="cpu", mode="forward").table_rows("products")
    assert {row["dtype"] for row in products} == {"bf16"}
    assert all(row["limit_percent"] is not None for row in products)
    usage = [ProductUsage("aten::mm", Product(1, 2, 3, 4, "fp32", 4), 1.0, Part("2×3 · 3×4", "forward", 1, 1, None))]
    (row,) = tables.product_rows(usage, 2.0, {"bf16": Roofline(1.0, 1.0)}, "bf16")
    assert row[-2:] == [None, None]


def test_parts_that_do_not_exist_are_null_with_the_reason(run: Any) -> None:
    report = run(mode="forward_backward", attention="sdpa_math")
    assert len(report.table_rows("attention")) == 6
    for row in report.table_rows("attention"):
        assert row["total_ms"] is None
        assert "'sdpa_math' does not name its parts" in row["note"]
    for part in ATTENTION_PARTS:
        measured = metrics(report)[f"{part}_ms", "backward"]
        assert (measured["outcome"], measured["median"]) == ("unknown", None)
        assert "does not name its parts" in measured["reason"]


def test_the_cost_of_another_attention_is_unknown(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    load = ATTENTION.load

    def with_named_parts(name: str) -> Any:
        return dataclasses.replace(load("eager"), name=name) if name == "named" else load(name)

    monkeypatch.setattr(ATTENTION, "load", with_named_parts)
    for row in run(mode="forward", attention="named").table_rows("attention"):
        assert row["total_ms"] > 0
        assert row["gflop"] is row["useful_gflop"] is row["tflops"] is row["bound"] is None
        assert "what attention 'named' computes in its parts is not known" in row["note"]


@pytest.mark.parametrize("scope", ["blocks", pytest.param("model", marks=pytest.mark.long)])
def test_naming_compiles_nothing_anew(run, fresh_compiler, monkeypatch, scope) -> None:
    """With the compiler's first half only; the whole takes too long for every run of the tests."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    report = run(compile=True, compile_scope=scope)
    counts = {name: metrics(report)[name, None]["median"] for name in ("graphs_compiled", "graph_breaks", "recompiles")}
    assert counts == {"graphs_compiled": 1, "graph_breaks": 0, "recompiles": 0}
    named = {(row["range"], row["phase"]) for row in report.table_rows("ranges")}
    assert (("layers.1", "backward") in named) == (scope == "blocks"), "a model that is compiled whole has no layers"
    assert all("the compiler fuses" in row["note"] for row in report.table_rows("attention"))


def test_trace_stacks_and_flame_graph_which_name_neither_the_host_nor_its_folders(run: Any, device: str) -> None:
    report = run(device=device, stacks=True)
    assert set(report.files) == {"trace.json.gz", "stacks.txt", "flamegraph.svg"}
    with gzip.open(report.files["trace.json.gz"], "rt") as file:
        texts = [file.read(), *(report.files[name].read_text() for name in ("stacks.txt", "flamegraph.svg"))]
    loaded = json.loads(texts[0])
    assert (loaded["traceName"], loaded.get("host_name", "")) == ("trace.json", "")
    names = {event.get("name") for event in loaded["traceEvents"]}
    assert {"step_1", "step_2", "forward", "backward", "optimizer"} <= names
    assert {"layers.0", "layers.1", "scores", "softmax", "values", "norm"} <= names
    assert metrics(report)["trace_steps", None]["median"] == 2
    lines = texts[1].splitlines()
    assert {line.partition(";")[0].partition(" ")[0] for line in lines} == {"forward", "backward", "optimizer"}
    assert any("workers/model/transformer.py" in line for line in lines)
    assert len(list(ET.fromstring(texts[2]))) > 20
    assert not (report.scratch / "trace.json").exists()
    for folder in (str(Path(torch_profiler.__file__).parents[3]), sys.prefix, str(report.scratch)):
        assert not any(folder in text for text in texts)


def test_a_trace_over_the_cap_is_left_out_and_says_so(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trace.write

    def with_a_small_cap(raw: Path, target: Path, max_bytes: int) -> None:
        assert max_bytes == 1 << 20
        whole(raw, target, 100)

    monkeypatch.setattr(trace, "write", with_a_small_cap)
    report = run(trace_max_mib=1, mode="forward")
    assert report.files == {}
    assert "raise it" in metrics(report)["trace_steps", None]["reason"]
    (row,) = [row for row in report.table_rows("summary") if row["what"] == "trace"]
    assert row["note"].startswith("not kept: the trace has ")


def test_a_failed_profile_keeps_its_times(run: Any, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the profiler broke down")

    monkeypatch.setattr(recording, "record", break_down)
    with pytest.raises(RuntimeError, match="broke down"):
        run()
    kept = ["unprofiled_step_ms", *["unprofiled_ms"] * len(PHASES[ProfileSpec(**FIELDS).mode]), "host_bound"]
    assert [row["metric"] for row in report.rows] == kept
    assert metrics(report)["unprofiled_step_ms", None]["outcome"] == "ok"
    assert report.verdict_on()["verdict"] in {"valid", "suspect"}


def test_without_kernels_another_profiler_holds_cupti(run, report, monkeypatch) -> None:
    empty = Profile(Recording([], []), lambda _path: None)
    monkeypatch.setattr(recording, "record", lambda *_, **__: empty)
    monkeypatch.setattr(torch_profiler, "profile_steps", lambda *_, **__: (empty, [1.0], {}))
    monkeypatch.setattr(torch_profiler.Profiling, "on_gpu", True)
    with pytest.raises(InvalidEnvironment, match="another profiler may hold CUPTI"):
        run()
    assert set(report.tables) <= {"values"}


def test_out_of_memory_under_the_profiler_is_a_result(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(recording, "record", too_large)
    by_metric = metrics(run())
    assert by_metric["unprofiled_step_ms", None]["outcome"] == "ok"
    assert by_metric["profiled_step_ms", None]["outcome"] == "oom"
    assert "the profiled steps" in by_metric["profiled_step_ms", None]["reason"]


def test_a_ceiling_that_is_missing_is_measured_and_recorded_unless_disturbed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(warmup, "LIMIT_WINDOWS", 3)  # a busy host's times are never steady
    monkeypatch.setattr(ceiling, "COPY_MIB", {"cpu": 1})
    monkeypatch.setattr(ceiling, "MATRIX_SIZES", {"cpu": {"fp32": 32}})
    monkeypatch.setattr(ceiling, "why_not_to_record", lambda field, *_: f"{field} was disturbed")
    spec = ProfileSpec(**{**FIELDS, "mode": "forward", "device": "cpu"})
    assert [row["source"] for row in reported(spec, tmp_path).table_rows("ceilings")][:2] == [
        "measured now, and not recorded: matrix_size was disturbed",
        "measured now, and not recorded: copy_mib was disturbed",
    ]
    monkeypatch.setattr(ceiling, "why_not_to_record", lambda *_: None)  # a busy host disturbs so short calls
    report = reported(spec, tmp_path)
    known = Ceilings(report.ceilings).read(torch.device("cpu"))
    assert known.copy_gb_per_s is not None
    assert set(known.tflops) == {"fp32"}
    assert {row["bound"] for row in report.table_rows("attention")} <= {"memory-bound", "compute-bound"}
    assert sum("ceiling" in message for *_, message in report.steps) == 2
    again = reported(spec, tmp_path)
    assert not any("ceiling" in message for *_, message in again.steps), "it is on record now"


def test_without_a_ceiling_the_side_is_null_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_profiler, "measure_missing_ceilings", lambda *_: {})
    report = reported(ProfileSpec(**{**FIELDS, "mode": "forward", "device": "cpu"}), tmp_path)
    for row in report.table_rows("attention"):
        assert row["bound"] is row["ridge"] is None
        assert "no measured ceiling" in row["note"]
        assert row["tflops"] > 0


def test_tables_that_are_cut_say_so_and_by_what_rule(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_ROWS", 2)
    assert tables.left_out([2.0, 1.0]) is None
    report = run(mode="forward", device="cpu")
    notes = {row["what"]: row for row in report.table_rows("summary") if row["what"].startswith("rows of")}
    assert set(notes) == {
        f"rows of {name}" for name in ("kernels-forward", "operators-forward", "products, forward", "kernels", "work")
    }
    for table in ("kernels-forward", "operators-forward", "products", "kernels", "work"):
        assert len(report.table_rows(table)) == 2
    note = notes["rows of kernels-forward"]["note"]
    assert re.fullmatch(r"the 2 of \d+ that take the most time; the others take [\d.e-]+ ms together", note)
    assert sum(row["share_percent"] for row in report.table_rows("kernels-forward")) < 100, "shares are of all"


def with_made_kernels(profile: Profile) -> Profile:
    """The profile of a CPU with a launch and a kernel for each operator that computes."""
    host, device = list(profile.recording.host), []
    for event in profile.recording.host:
        if event.kind == "operator" and event.name in ("aten::mm", "aten::bmm", "aten::_softmax", "aten::addcdiv_"):
            launch = 1_000_000 + event.id
            host.append(dataclasses.replace(event, name="cudaLaunchKernel", kind="launch", id=launch))
            name = {"aten::_softmax": "softmax_warp_forward", "aten::addcdiv_": "vectorized_elementwise_kernel"}
            begin = event.begin_ns + 2_000
            kernel = name.get(event.name, "ampere_sgemm_32x32_nn")
            device.append(recording.DeviceEvent(kernel, "kernel", 7, begin, begin + 3_000, launch, event.id))
    host.sort(key=lambda event: (event.begin_ns, -event.end_ns))
    return Profile(Recording(host, device), profile.save)


def test_the_reports_of_a_gpu_with_made_kernels(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the way from a GPU's events to its tables, on a host without one."""
    record = recording.record

    def made(work: Any, *, on_gpu: bool, python: bool = False, shapes: bool = True) -> Profile:
        return with_made_kernels(record(work, on_gpu=False, python=python, shapes=shapes))

    monkeypatch.setattr(recording, "record", made)
    monkeypatch.setattr(torch_profiler.Profiling, "on_gpu", True)
    report = run(stacks=True)
    by_metric = metrics(report)
    products = 2 * 7 + 1  # of two layers, each with four projections and three matrices of the feed-forward; the head
    (sgemm,) = [row for row in report.table_rows("kernels-forward") if "sgemm" in row["name"]]
    assert sgemm["calls"] == products + 2 * 2
    assert sgemm["mean_us"] == sgemm["median_us"] == pytest.approx(3)
    assert (sgemm["std_us"], sgemm["launch_to_start_us"]) == (0, pytest.approx(2))
    (operator,) = [row for row in report.table_rows("operators-forward") if row["name"] == "aten::mm"]
    assert operator["device_ms"] == pytest.approx(3e-3 * products)
    backward = report.table_rows("kernels-backward")
    assert sum(row["calls"] for row in backward if "sgemm" in row["name"]) == 2 * sgemm["calls"]
    assert by_metric["top_kernel_calls", "forward"]["median"] == products + 2 * 2
    assert by_metric["launches", None]["median"] == sum(
        row["calls"] for phase in PHASES["train_step"] for row in report.table_rows(f"kernels-{phase}")
    )
    assert by_metric["profiled_idle_ms", None]["median"] > by_metric["largest_gap_ms", None]["median"] > 0
    waits = {row["class"]: row for row in report.table_rows("waits")}
    assert waits.keys() <= {"running", "optimizer", "launches", "host"}, "the made kernels run 2 µs after their launch"
    step_ms = by_metric["unprofiled_step_ms", None]["median"]
    assert sum(row["total_ms"] for row in waits.values()) == pytest.approx(step_ms)
    assert sum(row["share_percent"] for row in waits.values()) == pytest.approx(100)
    assert waits["running"]["total_ms"] == pytest.approx(3e-3 * by_metric["launches", None]["median"], rel=0.2)
    attention = report.table_rows("attention")
    scores = next(row for row in attention if (row["part"], row["phase"]) == ("scores", "backward"))
    assert scores["total_ms"] == scores["product_ms"] == pytest.approx(2 * 2 * 3e-3)
    ranges = {(row["range"], row["phase"]): row["total_ms"] for row in report.table_rows("ranges")}
    assert ranges["layers.0", "backward"] == pytest.approx(2 * (7 + 2) * 3e-3)
    lines = report.files["stacks.txt"].read_text().splitlines()
    assert all("sgemm" in line or "softmax" in line or "elementwise" in line for line in lines)
    microseconds = sum(int(line.rpartition(" ")[2]) for line in lines)
    assert microseconds == 3 * by_metric["launches", None]["median"], "the stacks hold one step, each kernel once"


@pytest.mark.parametrize(
    ("kernel", "known"), [("vectorized_elementwise_kernel", False), ("vectorized_layer_norm_kernel", True)]
)
def test_norms_in_a_graph_need_their_own_kernels(report: Report, kernel: str, known: bool) -> None:
    spec = ProfileSpec(**{**FIELDS, "cuda_graph": True, "mode": "forward", "device": "cuda"})
    timed = torch_profiler.Timed(spec, None, 1.0, None)  # type: ignore[arg-type]
    profiling = torch_profiler.Profiling(timed, Values(torch_profiler.profile_metrics(spec)), report)
    profiling._add_classes(
        [RecordedWork(name, "kernel", 0, 9, 9, 1, torch_profiler.GRAPH) for name in (kernel, "sgemm")]
    )
    assert ("normalisation" in shares(report, "forward")) is known
    assert shares(report, "forward")["matmul"] == 50
    profiling.values.set_missing("unknown", "not measured here")
    profiling.values.report(spec.case(), "cuda", report)
    row = metrics(report)["normalisation_share_percent", "forward"]
    assert row["outcome"] == ("ok" if known else "unknown")
    assert known or "written out" in row["reason"]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_on_a_gpu_the_softmax_under_autocast_is_float32(on_gpu: bool) -> None:
    spec = ProfileSpec(**{**FIELDS, "precision": "bf16"})
    scores = 2 * 2 * 2 * 8 * 8  # layers · batch · heads · queries · keys
    cost, _ = torch_profiler.cost_of(spec, "softmax", "forward", 2, on_gpu=on_gpu)
    assert cost.bytes == (2 + (4 if on_gpu else 2)) * scores


@pytest.mark.gpu
def test_a_cuda_graph_is_one_phase(run: Any) -> None:
    report = run(device="cuda", cuda_graph=True, optimizer="torch_fused_adamw")
    assert {name for name in report.tables if "-" in name} == {"kernels-graph", "operators-graph"}
    by_metric = metrics(report)
    assert by_metric["work_ms", "graph"]["outcome"] == "ok"
    for phase in ("forward", "backward", "optimizer"):
        assert "one phase" in by_metric["work_ms", phase]["reason"]
    assert shares(report, "step")["matmul"] > 0
    assert "one phase" in by_metric["matmul_share_percent", "forward"]["reason"]
    assert "one phase" in by_metric["optimizer_share_percent", "step"]["reason"]
    assert "written out" in by_metric["normalisation_share_percent", "step"]["reason"]
    assert not {"optimizer", "normalisation"} & set(shares(report, "step")), "what nobody can tell is no 0"
    assert all("CUDA graph" in row["note"] for row in report.table_rows("attention"))


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["triton", "sdpa_flash"])
def test_fused_attention_is_one_class(run: Any, attention: str) -> None:
    model = {**MODEL, "d_model": 128, "d_ff": 256}
    report = run(device="cuda", precision="bf16", attention=attention, context_length=64, model=model)
    assert shares(report, "forward")["attention"] > 0
    assert shares(report, "forward_backward")["attention"] > 0
    assert all("does not name its parts" in row["note"] for row in report.table_rows("attention"))
