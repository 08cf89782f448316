"""The runner of `attention` in this process: right, wrong and failing implementations beside each other."""

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from app.specs.attention import BLOCK_SIZES, AttentionSpec
from kernels.attention.reference import attention
from kernels.registry import ATTENTION, BrokenEntryPoint, Implementation
from tests.workers.reporting import Report, reported
from workers import uploaded
from workers.jobs._base import Unit
from workers.jobs._grid.operations import combined
from workers.jobs.attention import RUNNER
from workers.measure.ceilings import Ceilings
from workers.measure.check import Check
from workers.outcome import Unsupported

PLUGINS = Path(__file__).parents[2] / "plugins"
KNOWN_SOMEWHERE = {
    "ceiling_percent",
    "host_us",
    "intermediates_mib",
    "memory_before_backward_mib",
    "memory_reserved_mib",
    "peak_memory_mib",
    "working_memory_mib",
}
"""Metrics that some devices or implementations do not tell."""


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """tests/plugins is installed: its distributions' entry points are found."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    vars(ATTENTION).pop("_entries", None)
    yield
    vars(ATTENTION).pop("_entries", None)


@pytest.fixture
def run(tmp_path: Path):
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
        return reported(spec, tmp_path, unit)

    return run


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With device `auto`, jobs run on the CPU. One that asks for it would not be a valid spec with an implementation of
    GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_metric_of_a_cell(run, dtype: str, device: str) -> None:
    report = run(implementations=["eager", "own"], dtypes=[dtype], device=device, causal=[False, True])
    assert len({tuple(row["case"].values()) for row in report.rows}) == 4
    cell = report.cell(implementation="own", causal=True)
    assert list(cell) == [
        ("forward_ms", "forward"), ("backward_ms", "backward"), ("forward_backward_ms", "forward_backward"),
        ("tflops", None), ("tflops", "forward"), ("tflops", "backward"),
        ("ceiling_percent", None), ("ceiling_percent", "forward"), ("ceiling_percent", "backward"),
        ("host_us", None), ("host_us", "forward"), ("host_us", "backward"),
        ("memory_before_backward_mib", None), ("peak_memory_mib", None), ("memory_reserved_mib", None),
        ("intermediates_mib", None), ("working_memory_mib", None),
        ("output_error", None), ("gradient_error", None),
    ]  # fmt: skip
    for (name, phase), row in cell.items():
        on_gpu = device == "cuda" and name not in {"ceiling_percent", "intermediates_mib", "working_memory_mib"}
        assert row["outcome"] == "ok" or (name in KNOWN_SOMEWHERE and row["outcome"] == "unknown" and not on_gpu), row
        if row["outcome"] == "ok":
            assert row["n"] == (3 if name in {f"{phase}_ms", "host_us"} else 1)
        assert row["device_key"].endswith(report.fingerprint["device"]["name"])
    assert cell["output_error", None]["median"] < (1e-5 if dtype == "fp32" else 2e-2)
    assert report.steps[0] == (0, 4, f"eager, {dtype}, length 48, head dimension 16, not causal")
    assert report.steps[-1] == (4, 4, "done")
    assert report.cursors == [0, 1, 2, 3]


def test_each_case_has_a_key_and_a_verdict_of_its_own(run) -> None:
    report = run(implementations=["own"], causal=[False, True], sequence_lengths=[48, 64], device="cpu")
    keys = {row["case_key"] for row in report.rows}
    assert len(keys) == 4
    assert keys == report.verdicts.keys() == report.titles.keys()
    for verdict in report.verdicts.values():
        assert [check["name"] for check in verdict["checks"]] == [
            "measured", "recompiles", "variation", "drift", "steady", "host_bound", "ceiling", "host_load",
        ]  # fmt: skip
        assert verdict["checks"][3]["detail"].count("too few to judge") == 3, "it tells of every pass"
    assert report.verdict == {}, "cases have verdicts, and the unit has nothing else"


@pytest.mark.parametrize("severities", [("note", "note"), ("note", "suspect"), ("suspect", "invalid")])
def test_passes_together_are_as_bad_as_the_worst(severities: tuple[Any, Any]) -> None:
    """Of checks that failed only those say why which are as bad; a note, or one that passed, does not."""
    found = {
        "forward": [Check("host_bound", False, "by far", severities[0])],
        "backward": [Check("host_bound", False, "by a bit", severities[1])],
        "forward_backward": [Check("host_bound", True, "no", "invalid")],
    }
    told = "forward: by far; backward: by a bit" if severities[0] == severities[1] else "backward: by a bit"
    assert combined(found) == [Check("host_bound", False, told, severities[1])]


@pytest.mark.parametrize(("call", "valid"), [(15, True), (16, False)], ids=["warming up", "measured"])
def test_compiling_while_timed_makes_a_case_invalid(run, monkeypatch, call, valid) -> None:
    calls = 0

    def compiles(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == call:
            torch.compile(lambda x: x + 1, backend="eager", dynamic=False)(q.detach())
        return attention(q, k, v, causal)

    install(monkeypatch, compiles=compiles)
    report = run(implementations=["compiles", "own"], mode="forward", device="cpu")
    assert (report.verdict_on(implementation="compiles")["verdict"] == "invalid") is not valid
    assert report.check("recompiles", implementation="compiles")["ok"] is valid
    assert report.check("recompiles", implementation="own")["ok"]


def test_rates_follow_from_times_and_the_ceiling(run, tmp_path: Path) -> None:
    Ceilings(tmp_path / "ceilings").record(torch.device("cpu"), {"fp32": 0.5}, None)
    report = run(causal=[False, True], num_heads=3, device="cpu")
    for causal in (False, True):
        cell = report.cell(causal=causal)
        forward = 4 * 2 * 3 * 48**2 * 16 / (2 if causal else 1)
        for phase, name, factor in (
            ("forward", "forward", 1),
            ("backward", "backward", 2),
            (None, "forward_backward", 3),
        ):
            rate = cell["tflops", phase]
            assert rate["n"] == 1, "work divided by the median time, not a mean of rates"
            assert rate["mean"] == pytest.approx(1e-9 * factor * forward / cell[f"{name}_ms", name]["median"])
            assert cell["ceiling_percent", phase]["median"] == pytest.approx(100 * rate["median"] / 0.5)


def test_a_call_that_returns_before_its_work_is_done_is_invalid(run, monkeypatch, tmp_path) -> None:
    """It computes where it is checked; where it is timed, it returns at once."""
    outputs: dict[float, torch.Tensor] = {}

    def early(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        frame: Any = sys._getframe()
        while frame is not None and frame.f_code.co_name != "host_lap_ms":
            frame = frame.f_back
        if frame is not None:
            return outputs[q[0, 0, 0, 0].item()]
        out = outputs[q[0, 0, 0, 0].item()] = attention(q, k, v, causal)
        return out

    install(monkeypatch, early=early)
    sizes = {"mode": "forward", "device": "cpu", "sequence_lengths": [512], "head_dims": [64], "num_heads": 8}
    # With its margin it is 1 TFLOP/s: more than a CPU reaches here, and less than a call seems to that takes a ms.
    Ceilings(tmp_path / "ceilings").record(torch.device("cpu"), {"fp32": 0.1}, None)
    report = run(implementations=["early", "own"], **sizes)
    check = report.check("ceiling", implementation="early")
    assert (check["ok"], check["severity"]) == (False, "invalid")
    assert "the work was not done in the measured time" in check["detail"]
    assert report.cell(implementation="early")["forward_ms", "forward"]["outcome"] == "ok"
    assert report.verdict_on(implementation="early")["verdict"] == "invalid"
    assert report.check("ceiling", implementation="own")["ok"]


def test_an_implementation_without_backward_is_timed_forward(run) -> None:
    cell = run(implementations=["forward_only"], device="cpu").cell()
    measured = {("forward_ms", "forward"), ("tflops", "forward"), ("output_error", None)}
    assert {name for name, row in cell.items() if row["outcome"] == "ok"} == measured
    unsupported = {name for name, row in cell.items() if row["outcome"] == "unsupported"}
    assert unsupported >= {("tflops", None), ("peak_memory_mib", None), ("gradient_error", None)}
    assert unsupported >= {name for name in cell if name[1] in {"backward", "forward_backward"}}
    cell = run(mode="forward", implementations=["forward_only"]).cell()
    assert {phase for _, phase in cell} == {"forward", None}
    assert cell["tflops", None]["median"] == cell["tflops", "forward"]["median"], "the whole work is the forward pass"


@pytest.mark.parametrize(
    ("fields", "pairs", "feature"),
    [
        ({"num_heads": 4, "num_kv_heads": 2}, 4 * 48 * 48 / 2, "num_kv_heads"),
        ({"window": 3}, 1 + 2 + 46 * 3, "window"),
        ({"document_lengths": [20, 0, 28]}, 20 * 21 / 2 + 28 * 29 / 2, "document_lengths"),
        ({"query_length": 2, "bottom_right": True}, 47 + 48, "bottom_right"),
        ({"softcap": 2.0, "scale": 0.5}, 48 * 48 / 2, "scale, softcap"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_problem_is_judged_and_counted(run, fields: dict[str, Any], pairs: float, feature: str) -> None:
    report = run(implementations=["eager", "tiled", "own"], device="cpu", **fields)
    for name in ("eager", "tiled"):
        cell = report.cell(implementation=name)
        assert {cell[metric, None]["outcome"] for metric in ("output_error", "gradient_error")} == {"ok"}
        for phase, products in (("forward", 2), ("backward", 4)):
            flops = cell["tflops", phase]["median"] * cell[f"{phase}_ms", phase]["median"] * 1e9
            assert flops == pytest.approx(2 * products * 2 * 16 * pairs)
    refused = report.cell(implementation="own")["forward_ms", "forward"]
    assert (refused["outcome"], refused["reason"]) == ("unsupported", f"attention 'own' does not take {feature}")


@pytest.mark.parametrize("fields", [{"window": 48}, {"document_lengths": [48, 0]}])
def test_a_mask_that_hides_nothing_needs_and_costs_nothing(run, fields: dict[str, Any]) -> None:
    cell = run(implementations=["own"], device="cpu", **fields).cell()
    assert cell["forward_ms", "forward"]["outcome"] == "ok"
    flops = cell["tflops", "forward"]["median"] * cell["forward_ms", "forward"]["median"] * 1e9
    assert flops == pytest.approx(4 * 2 * 16 * 48 * 48 / 2)


@pytest.mark.parametrize("name", ["wrong_element", "wrong_gradient"])
def test_a_wrong_kernels_time_is_shown_as_wrong(run, name: str) -> None:
    report = run(implementations=[name, "own"], sequence_lengths=[300], causal=[False], batch_size=1)
    cell = report.cell(implementation=name)
    errors = {metric: row for (metric, _), row in cell.items() if metric.endswith("error")}
    assert {row["outcome"] for row in errors.values()} == {"ok"}
    assert max(row["median"] for row in errors.values()) > 1e-3
    for (metric, _), row in cell.items():
        if metric not in errors:
            assert row["outcome"] == "wrong"
            assert row["median"] is None
            assert "relative error" in row["reason"]
    blamed = "the gradient of k" if name == "wrong_gradient" else "the output"
    assert blamed in cell["forward_ms", "forward"]["reason"]
    assert report.verdict_on(implementation=name)["verdict"] == "wrong"
    assert report.cell(implementation="own")["forward_ms", "forward"]["outcome"] == "ok"


def install(monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
    """These implementations are there besides those that are installed."""
    load, own = ATTENTION.load, ATTENTION.load("own")
    added = {
        name: one if isinstance(one, Implementation) else Implementation(name, one, own.dtypes)
        for name, one in given.items()
    }
    monkeypatch.setattr(ATTENTION, "load", lambda name: added.get(name) or load(name))


class BadGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, causal: bool) -> torch.Tensor:
        return attention(q, k, v, causal)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (*[gradient[..., :-1]] * 3, None)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda *inputs: None, "the output is missing"),
        (lambda *inputs: attention(*inputs).to("meta"), "the output is on meta, not cpu"),
        (lambda q, k, v, causal: attention(q, k.detach(), v, causal), "the gradient of k is missing"),
        (BadGradients.apply, "the backward pass: Function BadGradientsBackward returned an invalid gradient at"),
    ],
    ids=["none", "device", "unused", "shape of gradient"],
)  # fmt: skip
def test_what_cannot_be_the_result_is_wrong(run, monkeypatch, function, reason) -> None:
    install(monkeypatch, unfit=function)
    report = run(implementations=["unfit", "own"], device="cpu")
    cell = report.cell(implementation="unfit")
    assert {row["outcome"] for row in cell.values()} == {"wrong"}
    assert cell["forward_ms", "forward"]["reason"].startswith(reason)
    assert report.cell(implementation="own")["forward_ms", "forward"]["outcome"] == "ok"


def test_what_goes_wrong_in_one_cell_costs_no_other(run, no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, load: Any = ATTENTION.load) -> Any:
        if name == "wrong":
            raise BrokenEntryPoint("it could not be loaded: TypeError: dtypes of cpu")
        return load(name)

    monkeypatch.setattr(ATTENTION, "load", load)
    report = run(implementations=["sdpa_cudnn", "wrong", "own"])
    for name, outcome, reason in (
        ("sdpa_cudnn", "unsupported", "only on cuda"),
        ("wrong", "invalid_environment", "dtypes of cpu"),
        ("own", "ok", ""),
    ):
        row = report.cell(implementation=name)["forward_ms", "forward"]
        assert row["outcome"] == outcome
        assert reason in (row["reason"] or "")


def test_an_oracle_out_of_memory_fails_nobody(run, monkeypatch: pytest.MonkeyPatch) -> None:
    make_reference = type(RUNNER).make_reference

    def hungry(self: Any, spec: AttentionSpec, cell: Any, device: torch.device) -> Any:
        if cell.sequence_length == 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return make_reference(self, spec, cell, device)

    monkeypatch.setattr(type(RUNNER), "make_reference", hungry)
    report = run(implementations=["eager", "own"], sequence_lengths=[48, 64], causal=[False], device="cpu")
    for name in ("eager", "own"):
        long = report.cell(implementation=name, sequence_length=64)
        assert {row["outcome"] for row in long.values()} == {"unknown"}
        assert "no memory for the inputs and their float64 oracle" in long["forward_ms", "forward"]["reason"]
        short = report.cell(implementation=name, sequence_length=48)
        assert short["forward_ms", "forward"]["outcome"] == "ok"


def test_a_job_that_measured_nothing_is_not_valid(run, no_gpu: None) -> None:
    report = run(implementations=["hungry", "sdpa_cudnn"], mode="forward")
    detail = "0 of 2 cells measured: 1 oom, 1 unsupported"
    assert report.verdict == {
        "verdict": "suspect",
        "checks": [{"name": "measured", "ok": False, "detail": detail, "severity": "suspect"}],
    }


def scales_in_place(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Right whenever it is called, but for what it leaves behind."""
    out = attention(q.clone(), k, v, causal)
    q.data.mul_(1.01)
    return out


def forgets_a_bit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Changes one bit of one key in place, too little to matter to any result."""
    out = attention(q, k.clone(), v, causal)
    k.data.view(-1)[:1].view(torch.int32 if k.dtype == torch.float32 else torch.int16).bitwise_xor_(1)
    return out


@pytest.mark.parametrize("mode", ["forward", "forward_backward"])
def test_changed_inputs_do_not_harm_the_neighbour(run, monkeypatch: pytest.MonkeyPatch, mode: str, device: str) -> None:
    install(monkeypatch, scales=scales_in_place, flips=forgets_a_bit)
    names = ["own", "scales", "eager", "flips", "sdpa_math"]
    report = run(implementations=names, mode=mode, device=device)
    found = {name: report.cell(implementation=name)["forward_ms", "forward"] for name in names}
    assert {name: row["outcome"] for name, row in found.items()} == {
        "own": "ok", "scales": "wrong", "eager": "ok", "flips": "wrong", "sdpa_math": "ok",
    }  # fmt: skip
    assert found["scales"]["reason"].startswith("it changed q in place")
    assert found["flips"]["reason"].startswith("it changed k in place")
    assert {row["outcome"] for row in report.cell(implementation="sdpa_math").values()} <= {"ok", "unknown"}


def test_who_keeps_its_first_result_is_wrong(run, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[tuple[int, ...], torch.Tensor] = {}

    def keeps(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        where = (q.data_ptr(), k.data_ptr(), v.data_ptr())
        if where not in kept:
            kept[where] = attention(q, k, v, causal)
        return kept[where]

    install(monkeypatch, keeps=keeps)
    report = run(implementations=["keeps", "own"], mode="forward", device="cpu")
    cell = report.cell(implementation="keeps")
    reason = "with nearly equal scores: the output: relative error"
    for (metric, _), row in cell.items():
        if metric == "output_error":
            assert row["median"] > 0.5, "the larger of both"
        else:
            assert row["outcome"] == "wrong"
            assert row["reason"].startswith(reason)
    assert report.cell(implementation="own")["forward_ms", "forward"]["outcome"] == "ok"


def counting(spoiled: Any) -> tuple[dict[str, int], Any]:
    """Return how often each pass was called, and attention that is wrong where `spoiled` (pass, call) says so."""
    calls = {"forward": 0, "backward": 0}

    class Spoils(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, out: torch.Tensor) -> torch.Tensor:
            calls["forward"] += 1
            return out * (1.5 if spoiled("forward", calls["forward"]) else 1)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            calls["backward"] += 1
            return gradient * (1.5 if spoiled("backward", calls["backward"]) else 1)

    return calls, lambda *inputs: Spoils.apply(attention(*inputs))


@pytest.mark.parametrize("wrong", ["forward", "backward"])
def test_who_is_wrong_only_when_timed_is_wrong(run, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """Calls 1 to 7 are checked, the eighth warms up, the last one is checked again."""

    def spoiled(which: str, call: int) -> bool:
        frame: Any = sys._getframe()
        while which == "forward" and frame is not None and frame.f_code.co_name != "time_passes":
            frame = frame.f_back
        # The backward pass runs in autograd's thread on a GPU; here the calls are counted.
        return which == wrong and (frame is not None if which == "forward" else 8 <= call <= 13)

    install(monkeypatch, spoils=counting(spoiled)[1])
    report = run(implementations=["spoils", "own"], device="cpu")
    row = report.cell(implementation="spoils")["forward_ms", "forward"]
    blamed = "the output" if wrong == "forward" else "the gradient of q"
    assert row["outcome"] == "wrong"
    assert row["reason"].startswith(
        f"right when it was checked, wrong in a call that was timed: {blamed}: relative err"
    )
    assert report.cell(implementation="own")["forward_ms", "forward"]["outcome"] == "ok"


@pytest.mark.parametrize("wrong", ["forward", "backward"])
def test_who_is_wrong_only_later_is_wrong(run, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    calls, function = counting(lambda _which, _call: False)
    install(monkeypatch, counted=function)
    run(implementations=["counted"], device="cpu")
    # The memory is measured after the last check.
    last = calls[wrong] - 1
    install(monkeypatch, tires=counting(lambda which, call: which == wrong and call >= last)[1])
    row = run(implementations=["tires"], device="cpu").cell()["forward_ms", "forward"]
    blamed = "the output" if wrong == "forward" else "the gradient of q"
    assert row["outcome"] == "wrong"
    expected = f"right at first, wrong after timing, with nearly equal scores: {blamed}: relative error"
    assert row["reason"].startswith(expected)


def test_a_job_that_names_what_is_not_known_is_unsupported(run) -> None:
    for others in ([], ["own"]):
        with pytest.raises(Unsupported, match=r"unknown attention implementation 'no_such'; known are .*own"):
            run(implementations=[*others, "no_such"])


def test_threads_are_a_coordinate_and_change_what_computes(run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return attention(q, k, v, causal)

    install(monkeypatch, counts=counts)
    before = torch.get_num_threads()
    report = run(implementations=["counts", "cpu_fused"], threads=[1, 3], device="cpu", mode="forward")
    assert set(seen) == {1, 3}
    assert torch.get_num_threads() == before
    assert len({row["case_key"] for row in report.rows}) == 4
    working = [report.cell(implementation="cpu_fused", threads=number)["working_memory_mib", None] for number in (1, 3)]
    assert working[1]["median"] == 3 * working[0]["median"]
    checked = report.check("cores", implementation="counts", threads=3)
    assert checked["ok"] is (len(os.sched_getaffinity(0)) >= 3)


ARGUMENTS = """
import torch
from torch.nn.functional import scaled_dot_product_attention

def mine(q, k, v, is_causal=False, *, block, name="plain"):
    if block > 64:
        raise RuntimeError(f"a block of {block}")
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal)
"""


def test_own_code_gets_its_arguments(run, upload) -> None:
    fields = {"code": upload(ARGUMENTS, "mine"), "device": "cpu", "mode": "forward"}
    report = run(arguments={"block": 16, "name": "x"}, **fields)
    own, other = report.cell(implementation="mine@mine.py"), report.cell(implementation="eager")
    assert {cell["forward_ms", "forward"]["outcome"] for cell in (own, other)} == {"ok"}
    cases = [cell["forward_ms", "forward"]["case"] for cell in (own, other)]
    assert [case["arguments.block"] for case in cases] == [16, None]
    failed = run(arguments={"block": 128}, **fields).cell(implementation="mine@mine.py")["forward_ms", "forward"]
    assert (failed["outcome"], failed["reason"]) == ("failed", "RuntimeError: a block of 128 (mine.py:7, in mine)")
    with pytest.raises(uploaded.BrokenCode, match=r"is_causal, blocks=\): missing a required.*'block'"):
        run(arguments={"blocks": 16}, **fields)


def test_each_cell_is_profiled_and_the_accessors_are_checked(run) -> None:
    names = ["cpu_naive", "cpu_fused", "eager"]
    report = run(implementations=names, profile=True, device="cpu", mode="forward", batch_size=1, num_heads=4)
    rows = report.table_rows("profile")
    assert {row["implementation"] for row in rows} == set(names)
    naive = {row["name"]: row for row in rows if row["implementation"] == "cpu_naive"}
    own = naive["flopwatch::cpu_naive"]
    assert (own["calls"], own["memory_mib"]) == (1, 4 * 4 * 48 * 16 / 2**20), "the output remains"
    assert naive["aten::empty"]["self_memory_mib"] == 4 * 48 * 48 / 2**20, "the scores of a head"
    assert own["total_ms"] > own["self_ms"] > 0
    assert sum(row["share_percent"] for row in naive.values()) == pytest.approx(100)
    eager = {row["name"]: row for row in rows if row["implementation"] == "eager"}
    assert {"scores", "softmax", "values", "aten::bmm"} <= set(eager)
    assert eager["scores"]["total_ms"] >= eager["scores"]["self_ms"]
    counts = report.cell(implementation="eager")
    for metric in ("instructions", "l1_load_misses", "cache_misses", "dram_lines"):
        measured = counts[metric, None]
        assert measured["outcome"] == "ok" or "perf_event_open" in measured["reason"]
    accesses = report.table_rows("accessor")
    assert {row["access"] for row in accesses} == {"read", "write"}
    for row in accesses:
        assert row["equal"]
        assert row["offset"] == ((row["b"] * 4 + row["h"]) * 1024 + row["i"]) * 32 + row["j"]


def test_nothing_is_profiled_without_being_asked_or_if_it_is_wrong(run, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, zeros=lambda q, k, v, causal: torch.zeros_like(q))
    assert run(device="cpu", mode="forward").tables == {}
    report = run(implementations=["zeros"], profile=True, device="cpu", mode="forward")
    assert report.tables == {}
    assert report.cell()["cache_misses", None]["outcome"] == "wrong"


def test_a_wrong_accessor_is_seen(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the check."""
    from kernels.attention import cpu

    monkeypatch.setattr(cpu, "read", lambda tensor, at: 9.0)
    rows = run(implementations=["cpu_fused"], profile=True, device="cpu", mode="forward").table_rows("accessor")
    assert [row["equal"] for row in rows] == [False, True] * 4


def test_the_spec_knows_the_default_block_sizes() -> None:
    """Else what is called by the spec's numbers is no longer the library's own."""
    from kernels.attention.cpu import operations

    flash = inspect.signature(operations.flash).parameters
    assert {
        "cpu_flash": {"br": flash["br"].default, "bc": flash["bc"].default},
        "cpu_blocked": {"br": inspect.signature(operations.blocked).parameters["block"].default},
    } == BLOCK_SIZES


@pytest.mark.gpu
def test_an_illegal_access_ends_the_process(tmp_path: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from tests.workers.jobs.test_attention import AttentionSpec, Report, RUNNER
from workers.outcome import Crashed
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


def test_do_bench_says_that_it_times_gpus_only(run, no_gpu: None) -> None:
    measured = run(do_bench=True, mode="forward").cell(implementation="eager")
    assert measured["do_bench_ms", None]["reason"] == "triton.testing.do_bench times GPUs only"
    assert ("do_bench_ms", None) not in run(mode="forward").cell(implementation="eager")


@pytest.mark.gpu
@pytest.mark.alone
def test_do_bench_finds_the_time_of_both_passes(run) -> None:
    """At a size that keeps the device busy for longer than the host issues it."""
    measured = run(do_bench=True, device="cuda", sequence_lengths=[4096], batch_size=8).cell(implementation="eager")
    assert measured["do_bench_ms", None]["median"] == pytest.approx(
        measured["forward_backward_ms", "forward_backward"]["median"], rel=0.3
    )
