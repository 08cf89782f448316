"""A training step of the user's own in the kinds that take one."""

import csv
import gzip
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from app.specs import KINDS
from tests.workers.reporting import Report, reported, with_ceilings
from workers.jobs._training.building import Training
from workers.measure.own_step import OwnStep
from workers.measure.returned import STEPS, ReturnedNumbers

SOURCE = """
import itertools
import os
import time

import torch

import flopwatch


def make_step(device, batch_size=4, width=32):
    model = torch.nn.Sequential(torch.nn.Linear(width, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        x = torch.randn(batch_size, width, device=device)
        y = torch.randint(10, (batch_size,), device=device)
        for _ in range(2):
            with flopwatch.phase("forward"):
                loss = torch.nn.functional.cross_entropy(model(x), y)
            with flopwatch.phase("backward"):
                loss.backward()
            flopwatch.work(items=batch_size, flops=6 * batch_size * 64 * (width + 10))
        with flopwatch.phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    return step


def make_setting_step(device):
    torch.set_float32_matmul_precision("high")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return lambda: None


def make_varying_step(device):
    lengths = itertools.cycle([1, 9])

    def step():
        flopwatch.work(tokens=(length := next(lengths)))
        torch.empty(length, 2**18)
        time.sleep(1e-3 * length)

    return step


def make_bare_step(device):
    weights = [torch.randn(8, 4, requires_grad=True), torch.randn(4, requires_grad=True)]
    optimizers, calls = [torch.optim.AdamW([weight]) for weight in weights], itertools.count()

    def step():
        (torch.randn(2, 8) @ weights[0] * weights[1]).sum().backward()
        if next(calls) % 2:
            with flopwatch.phase("optimizer"):
                for optimizer in optimizers:
                    optimizer.step()

    return step


def make_side_step(device, joins=False):
    side = torch.cuda.Stream()

    def step():
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
        if joins:
            torch.cuda.current_stream().wait_stream(side)

    return step


class Signs(torch.optim.Optimizer):  # with a tensor alone as a parameter's state
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for one in [one for one in self.param_groups[0]["params"] if one.grad is not None]:
            self.state[one] = one.grad + (self.state[one] if one in self.state else 0)
            one -= 1e-3 * self.state[one].sign()


def make_divided_step(device):
    model = torch.nn.Linear(8, 8)
    copy = model.weight.detach().clone().requires_grad_()  # as of a narrow weight, in float32
    optimizer = torch.optim.AdamW([copy, model.bias])

    def step():
        model(torch.randn(2, 8)).sum().backward()
        copy.grad = model.weight.grad
        optimizer.step()
        model.weight.data.copy_(copy.data)
        model.zero_grad()

    return step


def make_averages_step(device):
    average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(8, 8))
    return lambda: average(torch.randn(2, 8))


def make_losing_step(device, lost="", optimizer="AdamW"):
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])
    average = torch.optim.swa_utils.AveragedModel(model)  # has as many parameters, which nothing trains
    optimizer = (Signs if optimizer == "Signs" else getattr(torch.optim, optimizer))(model.parameters(), lr=1e-3)

    def step():
        hidden = model[0](torch.randn(2, 8))
        loss = model[1](hidden.detach() if lost == "some" else hidden).sum()
        if lost != "all":
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)

    return step


def make_idle_step(device, evaluates=False):
    model = torch.nn.Linear(8, 8).train(not evaluates)
    return lambda: model(torch.ones(2, 8)).square().mean()


def make_unseen_step(device, fused):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=fused)
    graph = type("Graph", (torch.cuda.CUDAGraph,), {"__new__": object.__new__, "__init__": lambda _self: None})
    model.graph = None if fused else graph()

    def step():
        model(torch.randn(2, 8)).sum().backward()
        if fused:
            optimizer.step()
        for one in model.parameters():  # as a graph's replay would
            one.data -= 1e-3 * one.grad
        optimizer.zero_grad()

    return step


def make_accumulating_step(device):
    model, calls = torch.nn.Linear(8, 8), itertools.count(1)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.randn(2, 8)).sum().backward()
        if next(calls) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return step


class Around(torch.optim.Optimizer):  # its own state stays empty, or is missing
    def __init__(self, inner, bare):
        self.inner, self.param_groups = inner, inner.param_groups
        if not bare:
            super().__init__(inner.param_groups, inner.defaults)

    def step(self):
        self.inner.step()


def make_wrapped_step(device, bare=False):
    model = torch.nn.Linear(8, 8)
    optimizer = Around(torch.optim.AdamW(model.parameters()), bare)

    def step():
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        model.zero_grad()

    return step


def make_slower_step(device):
    calls = itertools.count(1)
    return lambda: time.sleep(5e-3 * (next(calls) > 4))


def make_compiled_step(device, compiles):
    @torch.compile(backend="eager")
    def twice(x):
        torch._dynamo.graph_break()
        return x + x if compiles else x.tolist()

    return lambda: twice(torch.ones(8, device=device))


def make_kept_step(device):
    model = torch.nn.Linear(64, 8).to(device)
    x = torch.randn(256, 64, device=device)
    weights = torch.randn(256, 64, device=device, requires_grad=True)
    held = [torch.randn(256, 64, device=device)]

    def step():
        held.clear()
        (model(x).sum() + weights.sum()).backward()

    return step


def make_leaking_step(device):
    kept = []

    def step():
        kept.append(torch.zeros(256, 1024, device=device))
        with flopwatch.phase("forward"):
            torch.zeros(8, device=device) + 1

    return step


def make_lacking_step(device):
    def step():
        with flopwatch.phase("forward"):
            raise torch.OutOfMemoryError("CUDA out of memory: tried to allocate 1 GiB")

    return step


def make_broken_step(device):
    return lambda: torch.tensor(float("nan"))


def make_drawing_step(device):
    import random

    import numpy as np

    def step():
        flopwatch.work(tokens=8)
        return {"torch": torch.rand(()), "rest": (random.random(), np.random.rand()), "large": torch.rand(3)}

    return step

"""
PARAMETERS = 32 * 64 + 64 + 64 * 10 + 10
Run = Callable[..., Report]


@pytest.fixture
def run(tmp_path: Path, upload) -> Run:
    def run(kind: str, function: str = "make_step", **fields: Any) -> Report:
        code = upload(SOURCE, function, None)
        spec = KINDS[kind](**{"step_code": code, "device": "cpu", "warmup_steps": 1, "measure_steps": 3, **fields})
        return reported(spec, with_ceilings(tmp_path))

    return run


def medians(report: Report) -> dict[str, float | None]:
    return {row["metric"]: row["median"] for row in report.rows}


@pytest.mark.parametrize("pacing", ["step", "loop"])
def test_a_benchmark_times_the_named_phases_and_the_rest(run: Run, device: str, pacing: str) -> None:
    report = run("benchmark", arguments={"batch_size": 16}, device=device, pacing=pacing)
    phases = [(row["metric"], row["phase"]) for row in report.rows][:5]
    assert phases == [(f"{name}_ms", name) for name in ("forward", "backward", "optimizer", "rest", "step")]
    assert all(row["n"] == 3 for row in report.rows[:5])
    numbers = medians(report)
    assert numbers["parameters"] == PARAMETERS
    seconds = 1e-3 * numbers["step_ms"]  # type: ignore[operator]
    assert numbers["items_per_s"] == pytest.approx(2 * 16 / seconds)
    assert numbers["tflops"] == pytest.approx(1e-12 * 2 * 6 * 16 * 64 * (32 + 10) / seconds)
    (tokens,) = [row for row in report.rows if row["metric"] == "tokens_per_s"]
    assert (tokens["outcome"], tokens["reason"]) == (
        "unknown",
        "the step reports no tokens; call flopwatch.work(tokens=…)",
    )
    assert {check["name"] for check in next(iter(report.verdicts.values()))["checks"]} >= {"variation", "host_bound"}
    assert report.rows[0]["case"]["arguments.batch_size"] == 16
    with gzip.open(report.files["samples.csv.gz"], "rt") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    assert {"forward_ms", "rest_ms", "step_ms"} <= set(rows[0])
    assert max(float(row["step_ms"]) for row in rows) == report.rows[4]["max"]


def test_steps_with_different_work_have_the_rate_of_all_together(run: Run) -> None:
    """The last step's work and the median time would be 1800 tokens per second, or 200."""
    numbers = medians(run("benchmark", "make_varying_step", measure_steps=10))
    assert 400 < numbers["tokens_per_s"] <= 1000  # fewer on a busy host


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_mfu_is_relative_to_the_precision_of_the_products(run, monkeypatch, precision) -> None:
    """The step computes in fp32, whatever the spec says."""
    peaks = {"fp32": 2.0, "bf16": 1000.0}
    monkeypatch.setattr("workers.jobs._training.metrics.peak_tflops", lambda _, name: (peaks.get(name, 1e9), ""))
    numbers = medians(run("benchmark", precision=precision))
    assert numbers["mfu"] == pytest.approx(numbers["tflops"] / 2.0)  # type: ignore[operator]


def test_what_a_step_sets_after_its_environment_was_recorded_and_the_cores_that_it_gives_up_are_told(run: Run) -> None:
    before = os.sched_getaffinity(0)
    torch.set_num_threads(2)
    try:
        report = run("benchmark", "make_setting_step", device="cpu")
    finally:
        os.sched_setaffinity(0, before)
    cores, settings = report.check("cores"), report.check("settings")
    assert (cores["ok"], cores["detail"]) == (False, "2 threads on 1 usable cores")
    assert (settings["ok"], settings["severity"]) == (False, "note")
    assert "float32 products from highest to high" in settings["detail"]


@pytest.mark.parametrize(
    ("kind", "metric"), [("benchmark", "optimizer_ms"), ("profile", "profiled_ms"), ("memory", "peak_memory_mib")]
)
def test_a_phase_of_some_steps_has_no_time_and_parameters_may_be_those_of_all_optimizers(run, kind, metric) -> None:
    report = run(kind, "make_bare_step")
    times = [row["median"] for row in report.rows if (row["metric"], row["phase"]) == (metric, "optimizer")]
    assert times == [None] or kind == "memory"
    assert medians(report).get("parameters") == (None if kind == "profile" else 8 * 4 + 4)


@pytest.mark.parametrize("make", ["make_divided_step", "make_averages_step"])
def test_what_optimizers_have_copies_of_is_a_parameter_and_an_average_alone(run: Run, make: str) -> None:
    assert medians(run("benchmark", make))["parameters"] == 8 * 8 + 8


@pytest.mark.parametrize(("compiles", "name"), [(True, "graph_breaks"), (False, "eager_fallback")])
def test_what_a_step_leaves_uncompiled_is_a_note(run: Run, fresh_compiler: None, compiles: bool, name: str) -> None:
    check = run("benchmark", "make_compiled_step", arguments={"compiles": compiles}).check(name)
    assert (check["ok"], check["severity"]) == (False, "note")


def test_a_step_that_runs_no_operators_has_a_profile(run: Run) -> None:
    report = run("profile", "make_slower_step")
    numbers = medians(report)
    assert numbers["work_ms"] == 0 < 5 <= (numbers["profiled_step_ms"] or 0)
    assert "optimizer" not in {row["class"] for row in report.table_rows("classes")}, "only its phase would tell"


def test_a_step_without_phases_has_in_a_loop_the_loops_times(run: Run) -> None:
    """The four steps before the loop are isolated, and quicker."""
    numbers = medians(run("benchmark", "make_slower_step", pacing="loop"))
    assert (numbers["isolated_step_ms"] or 0) < 5 <= (numbers["step_ms"] or 0)
    assert numbers["parameters"] is None


def test_a_profile_lists_kernels_and_classes_of_each_phase(run: Run, device: str) -> None:
    report = run("profile", device=device, profile_steps=2)
    phases = ("forward", "backward", "optimizer", "rest")
    assert {f"{table}-{phase}" for table in ("kernels", "operators") for phase in phases} <= set(report.tables)
    assert {"trace.json.gz", "flamegraph.svg"} <= set(report.files)
    shares = {(row["metric"], row["phase"]): row["median"] for row in report.rows}
    assert shares["optimizer_share_percent", "optimizer"] == 100
    assert shares["matmul_share_percent", "forward"] > 0
    assert shares["matmul_share_percent", "rest"] == 0
    of_step = [share for (name, phase), share in shares.items() if name.endswith("_share_percent") and phase == "step"]
    assert sum(of_step) == pytest.approx(100)
    work = sum(shares["work_ms", phase] for phase in phases)
    calls = sum(row["total_ms"] for phase in phases for row in report.table_rows(f"kernels-{phase}"))
    assert calls == pytest.approx(work, rel=0.05)


def test_memory_has_the_categories_of_the_codes_own_tensors(run: Run, device: str) -> None:
    report = run("memory", device=device, warmup_steps=2, measure_steps=1)
    phases = ("initialisation", "forward", "backward", "optimizer")
    assert {f"snapshot-{phase}.pickle" for phase in phases} == set(report.files)
    assert {f"categories-{phase}" for phase in (*phases, "rest")} <= set(report.tables)
    end = {row["category"]: row["end_bytes"] for row in report.table_rows("categories-backward")}
    assert (end["parameter"], end["gradient"]) == (4 * PARAMETERS, 4 * PARAMETERS)
    assert end["optimizer_state"] >= 2 * 4 * PARAMETERS
    forward = {row["category"]: row["end_bytes"] for row in report.table_rows("categories-forward")}
    assert forward["activation"] > 0
    assert medians(report)["parameters"] == PARAMETERS
    assert not any(row["metric"].startswith("residual") for row in report.rows)


def test_memory_that_leaks_is_found_with_its_line(run: Run, device: str) -> None:
    report = run("memory", "make_leaking_step", snapshot_steps=[3, 7], measure_steps=1, device=device)
    (row,) = report.table_rows("growth")
    assert (row["per_step_mib"], row["keeps_growing"], row["first_count"], row["last_count"]) == (1, True, 3, 7)
    assert row["code"] == "kept.append(torch.zeros(256, 1024, device=device))"
    assert medians(report)["growth_mib_per_step"] == 1
    check = report.check("growth")
    assert not check["ok"]
    assert f"1 MiB a step by {row['site']}" in check["detail"]
    assert {"snapshot-step-3.pickle", "snapshot-step-7.pickle"} <= set(report.files)
    assert value_of(report, "categories-forward", "unknown") >= 8, "what earlier steps have left is part of the peak"


def value_of(report: Report, table: str, category: str) -> float:
    return next(row["peak_mib"] for row in report.table_rows(table) if row["category"] == category)


def test_what_a_step_keeps_from_its_beginning_is_its_input(run: Run) -> None:
    report = run("memory", "make_kept_step", warmup_steps=1, measure_steps=1)
    kept = 256 * 64 * 4
    for phase, tensors in (("initialisation", 2), ("step", 1)):
        end = {row["category"]: row["end_bytes"] for row in report.table_rows(f"categories-{phase}")}
        assert end["input"] == tensors * kept, phase
    (row,) = [
        row for row in report.table_rows("allocations") if (row["at_peak_of"], row["category"]) == ("step", "input")
    ]
    assert (row["name"], row["made_in"]) == ("made before the first step", "initialisation")
    assert "make_kept_step" in row["site"]


def test_that_a_loss_is_no_number_is_said_first(run: Run) -> None:
    assert run("benchmark", "make_broken_step").verdict_on()["checks"][0]["name"] == "finite"


@pytest.mark.parametrize("kind", ["profile", "memory"])
def test_out_of_memory_is_a_result_of_every_kind(run: Run, kind: str) -> None:
    report = run(kind, "make_lacking_step", measure_steps=1)
    assert {row["outcome"] for row in report.rows if row["phase"] != "initialisation"} == {"oom"}
    assert report.verdict_on()["verdict"] == "suspect"


@pytest.mark.parametrize("kind", ["benchmark", pytest.param("profile", marks=pytest.mark.long)])
def test_numbers_that_steps_return_are_kept_and_equal_seeds_draw_the_same(run: Run, kind: str) -> None:
    reports = [run(kind, "make_drawing_step", seed=seed, measure_steps=8) for seed in (3, 3, 4)]
    one, same, other = (report.table_rows("values") for report in reports)
    assert one == same
    names = ("torch", "rest.0", "rest.1")
    assert [(row["step"], row["name"]) for row in one if row["what"] == "returned"] == [
        (step, name) for step in (1, 2, 3, 4, 5, 6, 8) for name in names
    ]
    assert one[-1] == {"what": "work", "step": None, "name": "tokens", "value": 8.0, "not_finite": None}
    assert one[-2] == {"what": "steps", "step": None, "name": "steps", "value": 9.0, "not_finite": None}
    assert all(row["value"] != its["value"] for row, its in zip(one[:-2], other[:-2], strict=True))


def test_what_a_step_returns_is_dropped_before_the_next_step_and_after_the_first_ones() -> None:
    own, alive = OwnStep(), []

    def step() -> torch.Tensor:
        assert not any(reference() is not None for reference in alive)
        returned = torch.ones(2)
        alive.append(weakref.ref(returned))
        return returned

    own.make(lambda: step)
    training = Training(KINDS["benchmark"](), None, None, own, None, own=own)  # type: ignore[arg-type]
    first = ReturnedNumbers(training.returned)
    for _ in range(STEPS + 2):
        training.take_returned(first)
        own.phases(())
    training.take_returned(first, last=True)
    own.phases(())
    assert alive[-1]() is None


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_step_that_updates_nothing_is_told_unless_it_evaluates(run: Run, evaluates: bool) -> None:
    checks = run("benchmark", "make_idle_step", arguments={"evaluates": evaluates}, measure_steps=9).verdict_on()[
        "checks"
    ]
    assert ("constant" in [check["name"] for check in checks]) is not evaluates


@pytest.mark.parametrize("fused", [False, True])
def test_updates_that_leave_no_trace_are_not_told_as_lost(run, fused: bool) -> None:
    report = run("benchmark", "make_unseen_step", arguments={"fused": fused})
    assert "gradients" not in [check["name"] for one in report.verdicts.values() for check in one["checks"]]


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        *(("benchmark", name) for name in ("AdamW", "SGD", "Signs")),
        *(("memory", name) for name in ("AdamW", "Signs")),
        ("profile", "Signs"),
    ],
)
@pytest.mark.parametrize(
    ("lost", "severity", "words"),
    [
        ("", None, ""),
        (
            "some",
            "suspect",
            "2 of 4 parameters of its optimizers got no gradient, the first ModuleList.0.weight [8, 8]: the",
        ),
        ("all", "note", "none of the 4 parameters of its optimizers got a gradient: is the backward pass forgotten?"),
    ],
)
def test_gradients_that_are_lost_are_told(run, kind, lost: str, severity: str | None, words, optimizer: str) -> None:
    if (lost, optimizer) == ("all", "Signs"):  # one of the user's own without a state is not judged
        severity = None
    report = run(kind, "make_losing_step", arguments={"lost": lost, "optimizer": optimizer})
    found = [check for one in report.verdicts.values() for check in one["checks"] if check["name"] == "gradients"]
    assert [check["severity"] for check in found] == ([] if severity is None else [severity])
    assert not found or found[0]["detail"].startswith(words)
    assert medians(report).get("parameters", 144) == 2 * (8 * 8 + 8)


@pytest.mark.parametrize(
    ("warmup_steps", "words"),
    [
        (2, "AdamW has updated nothing in 3 steps, and has no state yet"),
        (7, None),
        (8, "the recorded step updates fewer parameters than step 4, which may need more memory"),
    ],
)
def test_memory_of_a_step_without_an_update_is_suspect(run: Run, warmup_steps: int, words: str | None) -> None:
    report = run("memory", "make_accumulating_step", warmup_steps=warmup_steps, measure_steps=1)
    assert [one["verdict"] for one in report.verdicts.values()] == ["suspect" if words else "valid"]
    assert words is None or report.check("updates")["detail"].startswith(words)


def test_memory_of_a_step_with_less_than_another_is_told(run: Run) -> None:
    report = run("memory", "make_varying_step", warmup_steps=2)
    words = "step 2 had a peak of 9 MiB, the recorded step 1: record the former by warmup_steps=1 measure_steps=1"
    assert report.check("steps")["detail"] == words


@pytest.mark.parametrize("bare", [False, True])
def test_an_optimizer_that_wraps_another_is_not_idle(run, bare: bool) -> None:
    report = run("memory", "make_wrapped_step", arguments={"bare": bare}, warmup_steps=2, measure_steps=1)
    assert [one["verdict"] for one in report.verdicts.values()] == ["valid"]


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("joins", [False, True])
def test_work_on_a_stream_for_which_nobody_waits_is_told(run, joins: bool) -> None:
    report = run("benchmark", "make_side_step", arguments={"joins": joins}, device="cuda")
    found = [check for one in report.verdicts.values() for check in one["checks"] if check["name"] == "streams"]
    assert len(found) == (not joins)
    assert joins or "work on streams for which the current one does not wait" in found[0]["detail"]
