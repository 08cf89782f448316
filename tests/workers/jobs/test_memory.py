"""The runner of `memory` in this process, with a reporter that keeps what it is told."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.specs.memory import MemorySpec
from tests.workers.reporting import Report, reported
from tests.workers.viewer import check_that_the_viewer_reads
from workers.jobs._training import building
from workers.jobs._values import Metric, Values
from workers.jobs.memory import recording
from workers.jobs.memory.recording import Session
from workers.jobs.memory.results import (
    EACH_PHASE,
    WHOLE,
    add_fragmentation,
    check_accounted,
    check_fragmentation,
    check_unknown,
    results,
)
from workers.jobs.memory.tables import report_tables
from workers.measure.allocations.categories import CATEGORIES
from workers.measure.allocations.free import Free
from workers.measure.allocations.ledger import Allocation, Ledger
from workers.measure.allocations.recording import Counters, RecordedStretch

MODEL = {"d_model": 16, "d_ff": 24, "num_layers": 3, "num_heads": 2, "vocab_size": 61}
PARAMETERS = 2 * 61 * 16 + 3 * (4 * 16**2 + 3 * 16 * 24 + 2 * 16) + 16
BATCH, CONTEXT = 2, 8
PHASES = {
    "forward": ["initialisation", "forward"],
    "forward_backward": ["initialisation", "forward", "backward"],
    "train_step": ["initialisation", "forward", "backward", "optimizer"],
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GPU_ONLY = {"memory_reserved_mib", "end_reserved_mib", "fragmentation_mib", "largest_free_mib", "rounding_mib"}
MIB = 2**20


def recorded(folder: Path, **fields: Any) -> Report:
    defaults = {"model": MODEL, "context_length": CONTEXT, "batch_size": BATCH, "device": "cpu", "warmup_steps": 1}
    return reported(MemorySpec(**{**defaults, **fields}), folder)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Report]:
    return functools.partial(recorded, tmp_path)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Report]:
    """Run a job once for all tests that read its report."""

    @functools.cache
    def run(**fields: Any) -> Report:
        return recorded(tmp_path_factory.mktemp("recorded"), **fields)

    return run


def value(report: Report, metric: str, phase: str | None = None) -> dict[str, Any]:
    return report.cell()[metric, phase]


def used(report: Report, phase: str, moment: str) -> dict[str, int]:
    """Bytes by category, at a phase's peak or end."""
    return {row["category"]: row[f"{moment}_bytes"] for row in report.table_rows(f"categories-{phase}")}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("mode", "precision"), [("forward", "fp32"), ("forward_backward", "fp16"), ("train_step", "bf16")]
)
def test_every_mode_reports_its_phases(run, mode: str, precision: str, device: str) -> None:
    fields = {"warmup_steps": None, "measure_steps": 2, "gradient_clip_norm": 1.0}
    report = run(mode=mode, precision=precision, device=device, **fields)
    metrics = [(row["metric"], row["phase"]) for row in report.rows]
    assert metrics == [
        *((name, None) for name, _ in WHOLE if name != "growth_mib_per_step"),
        *((name, phase) for phase in PHASES[mode] for name in EACH_PHASE),
    ]
    for row in report.rows:
        assert not row["metric"].endswith("_ms"), "recording has slowed the step down"
        if device == "cpu" and row["metric"] in GPU_ONLY:
            assert (row["outcome"], row["median"]) == ("unknown", None)
            assert row["reason"].startswith("known on GPUs only")
        else:
            assert row["outcome"] == "ok", row
    step = [value(report, "peak_memory_mib", phase) for phase in PHASES[mode][1:]]
    assert {one["n"] for one in step} == {1}, "of the step whose snapshot is kept"
    assert value(report, "peak_memory_mib")["median"] == max(one["median"] for one in step)
    for phase in PHASES[mode]:
        assert value(report, "end_memory_mib", phase)["max"] <= value(report, "peak_memory_mib", phase)["max"]
    assert value(report, "parameters")["median"] == PARAMETERS
    assert sorted(report.files) == sorted(f"snapshot-{phase}.pickle" for phase in PHASES[mode])
    assert report.steps[-1] == (4, 4, "recording")
    assert report.verdict_on()["verdict"] == "valid", report.verdict_on()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", ["adamw", "torch_adamw", "torch_fused_adamw", "triton_adamw"])
def test_categories_have_the_bytes_that_are_known(once, optimizer: str, device: str) -> None:
    if (optimizer, device) == ("triton_adamw", "cpu"):
        pytest.skip("Triton has no kernels for a CPU")
    report = once(**({} if optimizer == "adamw" else {"optimizer": optimizer}), device=device)
    parameters = 4 * PARAMETERS
    tensors = 3 + 3 * 9
    # AdamW written out counts steps in Python, the others in tensors: torch's default on the host, the others' on the
    # GPU.
    is_counted = optimizer in ("torch_fused_adamw", "triton_adamw") or (device, optimizer) == ("cpu", "torch_adamw")
    steps = 4 * tensors if is_counted else 0
    rope = 2 * 4 * CONTEXT * 4
    batch = 8 * BATCH * (CONTEXT + 1)
    known = {"parameter": parameters, "optimizer_state": 2 * parameters + steps, "input": batch + rope}
    for phase, gradient in (("forward", 0), ("backward", parameters), ("optimizer", 0)):
        end = used(report, phase, "end")
        assert {name: end[name] for name in known} == known
        assert end["gradient"] == gradient
        assert end["temporary"] == 0
    assert used(report, "backward", "end")["activation"] == 4, "the loss"
    assert used(report, "initialisation", "end") | {"unknown": 0} == {
        **dict.fromkeys(CATEGORIES, 0),
        "parameter": parameters,
        "input": rope,
    }
    if device == "cpu":
        assert value(report, "unknown_percent")["median"] == 0
        assert value(report, "peak_memory_mib", "forward")["median"] * MIB == sum(
            used(report, "forward", "peak").values()
        )


@pytest.mark.parametrize("device", DEVICES)
def test_master_weights_are_optimizer_state(run, device: str) -> None:
    report = run(precision="bf16", parameter_dtype="bf16", master_weights=True, device=device)
    end = used(report, "forward", "end")
    assert (end["parameter"], end["optimizer_state"]) == (2 * PARAMETERS, 3 * 4 * PARAMETERS)
    assert used(report, "backward", "end")["gradient"] == 2 * PARAMETERS


def test_inference_keeps_no_activations(once) -> None:
    inference, training = (
        used(once(mode=mode, device="cpu"), "forward", "end") for mode in ("forward", "forward_backward")
    )
    assert inference["activation"] == 4, "the loss"
    assert training["activation"] > 3 * BATCH * CONTEXT * (5 * 16 + 4 * 24)


def test_the_shares_of_the_categories_add_up(once) -> None:
    report = once(device="cpu")
    for phase in PHASES["train_step"]:
        table = report.table_rows(f"categories-{phase}")
        assert [row["category"] for row in table] == list(CATEGORIES)
        for moment in ("peak", "end"):
            assert sum(row[f"{moment}_percent"] for row in table) == pytest.approx(100)
            for row in table:
                assert row[f"{moment}_mib"] == row[f"{moment}_bytes"] / MIB
    peak = max((used(report, phase, "peak") for phase in PHASES["train_step"][1:]), key=lambda one: sum(one.values()))
    for category in CATEGORIES:
        assert value(report, f"{category}_mib")["median"] == peak[category] / MIB


def test_the_timeline_has_the_peaks_and_fits_a_page(once) -> None:
    report = once(measure_steps=2)
    timeline = report.table_rows("timeline")
    assert len(timeline) <= 1000
    entries = [row["entry"] for row in timeline]
    assert entries == sorted(entries)
    assert list(dict.fromkeys(row["phase"] for row in timeline)) == ["preparation", *PHASES["train_step"][1:]]
    assert {row["step"] for row in timeline} == {1, 2}
    for phase in PHASES["train_step"][1:]:
        highest = max(row["total_mib"] for row in timeline if row["phase"] == phase)
        assert highest == pytest.approx(value(report, "peak_memory_mib", phase)["max"])
    for row in timeline:
        assert row["total_mib"] == pytest.approx(sum(row[f"{category}_mib"] for category in CATEGORIES))
    changes = [row for row in timeline if row["change_mib"] is not None]
    assert {row["category"] for row in changes} >= {"activation", "gradient", "temporary"}
    of_model = [row for row in changes if row["phase"] == "forward" and row["change_mib"] > 0]
    assert sum("model/transformer.py" in (row["stack"] or "") for row in of_model) > len(of_model) / 2


@pytest.mark.parametrize("device", DEVICES)
def test_the_largest_allocations_say_where_they_come_from(run, device: str) -> None:
    most = 6 if device == "cpu" else 100  # on a GPU, what earlier tests left is larger than these weights
    report = run(largest_allocations=most, device=device)
    table = report.table_rows("allocations")
    peaks = {row["phase"]: row["median"] for row in report.rows if row["metric"] == "peak_memory_mib"}
    assert peaks[table[0]["at_peak_of"]] == peaks[None], "the step's peak comes first"
    assert table[-1]["at_peak_of"] == "initialisation"
    forward = [row for row in table if row["at_peak_of"] == "forward"]
    assert len(forward) == 6 or device == "cuda"
    assert len(forward) <= most
    assert [row["size_mib"] for row in forward] == sorted((row["size_mib"] for row in forward), reverse=True)
    for row in table:
        assert row["total_mib"] == pytest.approx(row["size_mib"] * row["count"])
    (embedding,) = [
        row for row in forward if (row["name"], row["category"]) == ("token_embeddings.weight", "parameter")
    ]
    assert (embedding["size_mib"], embedding["made_in"]) == (4 * 61 * 16 / MIB, "initialisation")
    assert embedding["stack"].startswith(embedding["site"])
    assert embedding["site"].startswith("workers/model/transformer.py:")
    weights = [
        row for row in table if row["at_peak_of"] == "initialisation" and row["name"] == "layers.*.ffn.w1.weight"
    ]
    assert [row["count"] for row in weights] == [3], "those of all layers are one row"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("parameter_dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_the_residual_stream_is_as_large_as_its_formula(run, parameter_dtype: str, size: int, device: str) -> None:
    report = run(precision="bf16", parameter_dtype=parameter_dtype, device=device)
    formula = BATCH * CONTEXT * 16 * size / MIB
    assert value(report, "residual_stream_mib")["median"] == formula
    seen = value(report, "residual_stream_seen_mib")
    assert (seen["min"], seen["max"], seen["n"]) == (formula, formula, 3)
    assert value(report, "residual_streams_seen")["median"] == 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("mode", "of"), [("forward", "inference"), ("train_step", "full step")])
def test_snapshots_open_in_the_viewer(once, mode: str, of: str, device: str) -> None:
    report = once(**({} if mode == "train_step" else {"mode": mode}), device=device)
    for phase in PHASES[mode]:
        found = check_that_the_viewer_reads(report.files[f"snapshot-{phase}.pickle"])
        shown = "initialisation" if phase == "initialisation" else of
        assert (found["flopwatch"]["of"], found["flopwatch"]["phase"]) == (shown, phase)
        stages = {one["user_metadata"] for one in found["device_traces"][0]}
        assert stages - {"before the history", "preparation"} <= set(PHASES[mode])
        assert phase in stages
        assert "initialisation" not in stages or phase == "initialisation", "the history begins after the warm-up"
    table = report.table_rows("snapshots")
    assert [(row["snapshot"], row["of"]) for row in table] == [
        (f"snapshot-{phase}.pickle", phase if phase == "initialisation" else of) for phase in PHASES[mode]
    ]
    assert all(row["complete"] for row in table)
    for row in table:
        assert row["size_mib"] == report.files[row["snapshot"]].stat().st_size / MIB


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_the_peak_is_that_of_the_step_whose_snapshot_is_kept(once, warmup_steps: int) -> None:
    """Without a warm-up, the first step's peak is lower: there is no optimizer state yet."""
    report = once(measure_steps=2, warmup_steps=warmup_steps)
    reached = 0.0
    for phase in PHASES["train_step"][1:]:
        found = check_that_the_viewer_reads(report.files[f"snapshot-{phase}.pickle"])
        reached = max(reached, value(report, "peak_memory_mib", phase)["median"])
        assert peak_of(found) == pytest.approx(reached * MIB)
    assert value(report, "peak_memory_mib")["median"] == reached
    timeline = report.table_rows("timeline")
    first, second = (max(row["total_mib"] for row in timeline if row["step"] == step) for step in (1, 2))
    assert (first < second) == (warmup_steps == 0)


def peak_of(snapshot: dict[str, Any]) -> int:
    """The most bytes that are allocated in a snapshot's history, as pytorch.org/memory_viz draws it."""
    total = highest = 0
    for one in snapshot["device_traces"][0]:
        total += {"alloc": one["size"], "free_completed": -one["size"]}.get(one["action"], 0)
        highest = max(highest, total)
    return highest


@pytest.mark.parametrize("device", DEVICES)
def test_stacks_in_snapshots_begin_with_the_models_step(once, device: str) -> None:
    report = once(device=device)
    found = check_that_the_viewer_reads(report.files["snapshot-optimizer.pickle"])
    stacks = [
        one.get("frames", ()) for one in found["device_traces"][0] if one["user_metadata"] in ("forward", "optimizer")
    ]
    outermost = {stack[-1]["filename"] for stack in stacks if len(stack) > 1}
    assert outermost == {"workers/model/steps.py"}
    files = {frame["filename"] for stack in stacks for frame in stack}
    assert not [name for name in files if name.startswith("/")]
    # Graphs that other tests of this process have captured leave segments in pools of their own.
    assert (0, 0) in {segment["segment_pool_id"] for segment in found["segments"]}
    assert isinstance(found["allocator_settings"], dict)


@pytest.mark.parametrize("device", DEVICES)
def test_a_history_that_is_too_long_is_told(run, once, device: str) -> None:
    """On the CPU only the snapshots are shorter; on a GPU the analysis may lose a peak, and then says so."""
    report = run(history_entries=1_000, device=device)
    check = report.check("history")
    assert not check["ok"]
    assert check["detail"].startswith("truncated: snapshots hold the last 1000 entries only")
    assert "raise history_entries" in check["detail"]
    complete = {row["phase"]: row["complete"] for row in report.table_rows("snapshots")}
    assert complete["initialisation"]
    assert not complete["optimizer"]
    found = check_that_the_viewer_reads(report.files["snapshot-optimizer.pickle"])
    assert found["flopwatch"]["history_lost"]
    for metric in ("peak_memory_mib", "end_memory_mib"):
        assert value(report, metric, "backward")["outcome"] == "ok"
        peaks = [value(of, metric, "backward")["median"] for of in (report, once(device=device))]
        assert device == "cuda" or peaks[0] == peaks[1]
    assert value(report, "unknown_percent")["outcome"] == (
        "ok" if device == "cpu" else value(report, "parameter_mib")["outcome"]
    )


@pytest.mark.parametrize("phase", ["making the model", "forward", "backward"])
def test_running_out_of_memory_is_a_result_with_a_snapshot(run, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build_step = building.build_step

    def fail(work: Any) -> None:
        work()
        torch.empty(1 << 60)

    def sabotaged(*arguments: Any) -> Any:
        if phase == "making the model":
            fail(lambda: None)
        step = build_step(*arguments)
        step.phases[phase] = functools.partial(fail, step.phases[phase])
        return step

    monkeypatch.setattr(building, "build_step", sabotaged)
    report = run()
    for row in report.rows:
        if row["phase"] == "initialisation" and phase != "making the model":
            continue
        assert row["outcome"] == "oom"
        assert row["reason"].startswith(f"out of memory in {phase}")
        assert row["median"] is None
    found = check_that_the_viewer_reads(report.files["snapshot-oom.pickle"])
    stage = "initialisation" if phase == "making the model" else phase
    assert found["flopwatch"]["phase"] == stage
    assert found["device_traces"][0][-1]["user_metadata"] == stage
    filled = used(report, "oom", "end")
    if phase != "making the model":
        assert filled["parameter"] == 4 * PARAMETERS
        assert filled["gradient"] == (4 * PARAMETERS if phase == "backward" else 0)
        assert (filled["activation"] > 1000) == (phase == "forward")
    assert report.table_rows("snapshots")[-1]["snapshot"] == "snapshot-oom.pickle"
    assert "oom" in {row["at_peak_of"] for row in report.table_rows("allocations")}


def test_a_recording_ends_with_an_error(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise ValueError("no data")

    monkeypatch.setattr(building, "build_step", fail)
    with pytest.raises(ValueError, match="no data"):
        run()
    assert not torch.autograd._profiler_enabled()


@pytest.mark.gpu
@pytest.mark.alone
def test_out_of_memory_on_a_gpu_is_a_result_with_a_snapshot(run) -> None:
    report = run(context_length=1_048_576, batch_size=64, device="cuda", mode="forward")
    assert value(report, "peak_memory_mib")["outcome"] == "oom"
    found = check_that_the_viewer_reads(report.files["snapshot-oom.pickle"])
    assert "oom" in {one["action"] for one in found["device_traces"][0]}
    assert used(report, "oom", "end")["parameter"] == 4 * PARAMETERS


@pytest.mark.gpu
def test_on_a_gpu_the_peaks_are_the_allocators(run) -> None:
    torch._C._cuda_clearCublasWorkspaces()  # of graphs of former tests, which the job would take for its own
    for mode in PHASES:
        for precision in ("fp32", "bf16"):
            report = run(
                model={"size": "medium"},
                context_length=256,
                batch_size=4,
                device="cuda",
                mode=mode,
                precision=precision,
            )
            assert report.check("accounted")["ok"], report.check("accounted")
            assert report.check("unknown")["ok"], (mode, precision, report.check("unknown"))
            for phase in PHASES[mode]:
                assert value(report, "fragmentation_mib", phase)["outcome"] == "ok"
                reserved = value(report, "memory_reserved_mib", phase)["median"]
                assert reserved >= value(report, "peak_memory_mib", phase)["median"]


def test_what_a_step_of_ones_own_trains_outside_of_modules_is_a_parameter() -> None:
    own: Any = SimpleNamespace(plain_optimizers=list)
    training: Any = SimpleNamespace(step=own, own=own, device=torch.device("cpu"), modules=torch.nn.Module())
    bare, leaf, kept = torch.nn.Parameter(torch.ones(2)), torch.ones(3, requires_grad=True), torch.ones(5)
    owners = recording.owners_in(training)()
    found = [CATEGORIES[owners[one.untyped_storage().data_ptr()].category] for one in (bare, leaf, kept)]
    assert found == ["parameter", "parameter", "input"]


def test_of_a_peak_that_the_history_lost_nothing_is_said(tmp_path: Path) -> None:
    """As on a GPU: the history holds the end of the backward pass only, and the allocator has counted the peak."""
    spec = MemorySpec(model=MODEL, mode="forward_backward", history_entries=1_000)
    counters = Counters(8000, 4000, 7900, 9000, 9000)
    stretches = [
        Ledger().follow(phase, [], {}, lost=phase == "backward", reserved=9000) for phase in ("forward", "backward")
    ]
    below = Counters(100, 100, 0, 200, 200)
    step = [
        RecordedStretch(stretch, count, None, 1_000, True)
        for stretch, count in zip(stretches, (below, counters), strict=True)
    ]
    session = Session(spec, step[0], [step], parameters=1, files={"backward": 5})
    values, checks = results(session)
    assert values.samples("peak_memory_mib", None) == [8000 / MIB], "the allocator has counted it"
    report = Report(tmp_path)
    values.report(spec.case(), "1x GPU", report)
    for metric in ("parameter_mib", "unknown_percent", "rounding_mib", "fragmentation_mib", "largest_free_mib"):
        assert value(report, metric)["outcome"] == "unknown"
        assert value(report, metric)["reason"].endswith("raise history_entries")
    report_tables(session, report)
    assert {row["peak_bytes"] for row in report.table_rows("categories-backward")} == {None}
    assert {row["peak_bytes"] for row in report.table_rows("categories-forward")} == {0}
    assert "backward" not in {row["at_peak_of"] for row in report.table_rows("allocations")}
    (history,) = [check for check in checks if check.name == "history"]
    assert "of backward the beginning was not seen" in history.detail


@pytest.mark.parametrize(("counted", "ok"), [(1000, True), (1100, False)])
def test_a_history_unlike_the_allocators_is_suspect(counted: int, ok: bool) -> None:
    stretch = Ledger([Allocation(0, 1000, None)]).follow("forward", [], {})
    (check,) = check_accounted([RecordedStretch(stretch, Counters(0, 0, counted, 0, 0))])
    assert (check.ok, check.severity) == (ok, "suspect")
    assert check_accounted([RecordedStretch(stretch)]) == []


def test_much_of_unknown_use_is_told_with_its_place() -> None:
    frames = [{"filename": "/a/b/model/linear.py", "line": 5, "name": "forward"}]
    workspace = Allocation(16 * MIB, 36 * MIB, None, name="cuBLAS workspace")
    alive = [Allocation(0, 3 * MIB, None, frames), Allocation(8 * MIB, MIB, None), workspace]
    check = check_unknown(Ledger(alive).follow("forward", [], {}))
    assert not check.ok
    assert check.severity == "note"
    assert check.detail.startswith("10.00 % of the peak has no known use")
    assert check.detail.endswith("the largest allocation has 3 MiB: linear.py:5 forward")
    named = check_unknown(Ledger([workspace]).follow("forward", [], {}))
    assert named.ok
    assert named.detail == "0.00 % of the peak has no known use"


@pytest.mark.parametrize(
    ("stuck", "expandable", "ok", "told"),
    [(1320, True, False, False), (1320, False, False, True), (1080, False, True, False)],
)
def test_much_free_memory_at_the_peak_is_told_with_the_setting_that_helps(stuck, expandable, ok, told) -> None:
    stretch = replace(Ledger().follow("backward", [], {}), reserved_at_peak=12000 * MIB)
    counters = Counters(*(9600 * MIB,) * 3, *(12000 * MIB,) * 2)
    kept = {"allocator_settings": {"expandable_segments": expandable}}
    (check,) = check_fragmentation(RecordedStretch(stretch, counters, kept, free=Free(20 * MIB, stuck * MIB)))
    assert (check.ok, check.severity) == (ok, "note")
    assert "of 12,000 MiB reserved" in check.detail
    assert "the largest free block has 20 MiB" in check.detail
    assert ("expandable_segments:True" in check.detail) == told
    assert check_fragmentation(RecordedStretch(stretch)) == [], "nothing of it is known on a CPU"


def test_what_a_block_leaves_unused_is_not_free() -> None:
    """19.5 MiB in a block of 20 MiB, all that is reserved."""
    stretch = replace(Ledger().follow("backward", [], {}), reserved_at_peak=20 * MIB)
    recorded = RecordedStretch(stretch, Counters(*(20 * MIB,) * 5), {}, free=Free(MIB // 2, MIB // 2))
    (check,) = check_fragmentation(recorded)
    assert "0 MiB of 20 MiB reserved are free at the peak, 0 MiB of them between" in check.detail
    values = Values([Metric("fragmentation_mib", None, "MiB"), Metric("largest_free_mib", None, "MiB")])
    add_fragmentation(values, recorded, None)
    assert values.samples("largest_free_mib", None) == [0]


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_saved_for_the_backward_pass_are_the_activations(once, device: str) -> None:
    """Its sum is that of the recorded allocations; each block saves the weights of its attention."""
    report = once(device=device)
    rows = report.table_rows("saved")
    (activations,) = report.table_rows("categories-forward", category="activation")
    constant = sum(row["total_mib"] for row in rows if row["made_by"] == "input")  # rotary angles and the mask
    assert sum(row["total_mib"] for row in rows) - constant == pytest.approx(activations["end_mib"], rel=0.02)
    (weights,) = (row for row in rows if row["made_by"] == "SoftmaxBackward0")
    assert weights["module"] == "layers.*.attn"
    assert weights["modules"] == MODEL["num_layers"]
    assert weights["each_mib"] == pytest.approx(4 * BATCH * MODEL["num_heads"] * CONTEXT**2 / MIB)
    assert "attend" in weights["site"]
    assert sum(row["share_percent"] for row in rows) == pytest.approx(100)
