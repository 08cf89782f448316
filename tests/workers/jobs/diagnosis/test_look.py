"""What a look at a step finds, on slownesses that are planted in it."""

import gc
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.specs import KINDS
from tests.forked import PROJECT, forkserver
from tests.workers.reporting import Report, reported
from workers.jobs._base import Unit
from workers.jobs._training import measuring
from workers.jobs.diagnosis import RUNNER
from workers.jobs.diagnosis import look as stage
from workers.jobs.profile import own_lines
from workers.measure.profiling import lines
from workers.measure.profiling.products import Product
from workers.measure.profiling.sampling import Sample, Samples
from workers.outcome import Failed

SOURCE = """
import gc
import hashlib
import itertools
import sys
import time

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset


class Rows(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                for row, gradient in zip(parameter, parameter.grad):
                    row.sub_(gradient, alpha=0.01)


class Plain:
    def __init__(self, parameters):
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self):
        for parameter in self.parameters:
            for row, gradient in zip(parameter, parameter.grad):
                row -= 0.01 * gradient

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


class Slow(Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.randn(16)


class Attention(nn.Module):
    def forward(self, x):
        q = x.repeat(1, 8).view(1, 256, -1).sin()
        scores = q @ q.transpose(1, 2)
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -1e9)
        weights = scores.softmax(-1)
        return x + (weights @ q).view(256, 8, -1).sum(1)


class Gram(nn.Module):
    def forward(self, x):
        wide = x.repeat(16, 1).double()[None]
        mixed = (wide.transpose(1, 2) @ wide).softmax(-1)
        return (wide @ mixed)[0].view(16, 256, -1).sum(0).float()


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(512, dtype=torch.float64))

    def forward(self, x):
        return (x.double() @ self.weight @ self.weight).float()


class Exact(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        wide = gradient.double()
        for _ in range(60):
            wide = wide.sin()
        return wide.float()


def evaluate(model, data):
    return [model(data) for _ in range(100)]


def shrunk(x):
    return 0.1 * x


def layer(x):
    return 0.1 * x


def make_step(device, slow):
    torch.set_num_threads(1)  # others use the host's cores
    middle = {"precision": Wide, "attention": Attention, "gram": Gram}.get(slow, nn.ReLU)()
    width = {"precision": 512, "backward": 8, "optimizer": 256}.get(slow, 128)
    rows = torch.randn(500, 8)
    parts = [torch.randn(2 + number if slow in ("nested", "direct") else 8, 8) for number in range(100)]
    model = nn.Sequential(nn.Linear(16, width), middle, nn.Linear(width, 4))
    kept = [[number] for number in range(30_000)] if slow == "collections" else []  # for the collector to scan
    optimizers = {"optimizer": Rows, "plain": Plain}
    optimizer = optimizers.get(slow, torch.optim.SGD)(model.parameters())
    batches = iter(DataLoader(Slow(), batch_size=4)) if slow == "input" else None
    numbers = itertools.count()
    data = torch.randn({"precision": 256, "attention": 256, "gram": 256, "backward": 65536}.get(slow, 4), 16)

    def step():
        x = next(batches) if batches else data
        loss = (Exact.apply(model(x)) if slow == "backward" else model(x)).square().mean()
        if slow == "loop":
            loss = loss + sum((row * row).sum() for row in rows)
        loss.backward()
        if slow != "accumulation" or next(numbers) % 2:
            optimizer.step()
            optimizer.zero_grad()
        if slow == "rounds":
            decayed = torch.zeros(4, 16)
            for number in range(64):
                decayed = decayed + 0.9 * x
                decayed -= shrunk(x)
            for number in range(64):
                decayed = 0.9 * layer(decayed)
            loss = loss + decayed.sum()
        if slow.startswith("nested"):
            for number, part in enumerate(parts):
                rate = 0.1 * number
                for row in part:
                    row.sub_(row, alpha=rate)
        if slow == "direct":
            for part in parts:
                for row in part:
                    row.sub_(row, alpha=0.1)
        if slow == "checkpoint":
            torch.optim.SGD(model.parameters())
            for _ in DataLoader([1]):
                torch.autograd.set_detect_anomaly(True)
            loss = loss + checkpoint(model, data, use_reentrant=False).sum()
        if slow == "rare" and sys.gettrace() is None:  # the traced step is none of those that evaluate
            evaluate(model, data)
        if slow == "host":
            sum(range(500_000))
        if kept:
            gc.collect()
        if slow == "compile":
            torch._dynamo.reset()
            torch.compile(model, backend="aot_eager")(x)
        if slow == "waits":
            # A line waits if it has less of the processor than others, of which it takes samples: hashing, other than
            # `sum`, keeps the sampler waiting for Python's lock no longer than until the next line.
            hashlib.sha256(bytes(10_000_000))
            time.sleep(0.2)
        return loss

    return step
"""


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upload) -> Iterator[Callable[..., Report]]:
    def look(**fields: Any) -> Report:
        code = upload(SOURCE, "make_step", "train.py")
        step = {"kind": "benchmark", "step_code": code, "device": "cpu", "warmup_steps": 1, "measure_steps": 5}
        spec = KINDS["diagnosis"].model_validate({"step": {**step, **fields}})
        monkeypatch.setattr(own_lines, "SAMPLES", 200)  # what is planted takes most of them
        monkeypatch.setattr(own_lines, "MAX_SAMPLED_S", 20.0)  # a busy host takes few in 2 s, and each counts for much
        return reported(spec, tmp_path)

    gc.freeze()  # a look visits all objects again and again: in a job's process few exist before
    threads = torch.get_num_threads()
    yield look
    torch.set_num_threads(threads)


@pytest.fixture
def uneven(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each look: whether its steps update different numbers of times."""
    seen: list[bool] = []
    candidates = stage.candidates
    monkeypatch.setattr(
        stage, "candidates", lambda spec, look, lost: seen.append(look.uneven) or candidates(spec, look, lost)
    )
    return seen


@pytest.mark.parametrize(
    ("slow", "lost_to", "where", "change"),
    [
        ("optimizer", "optimizer", "Rows.step", "no_optimizer"),
        ("plain", "optimizer", "Plain.step", "no_optimizer"),
        ("input", "input", "Slow.__getitem__", "loader_workers"),
        ("precision", "precision", "Wide.forward", "float32"),
        ("gram", "precision", "Gram.forward", "float32"),
        ("backward", "precision", "Exact.backward", "float32"),
        ("loop", "kernels", "make_step.step", None),
        ("host", "host", "make_step.step", None),
        ("waits", "host", "make_step.step (", None),
        ("attention", "attention", "Attention.forward", None),
        ("collections", "host", "make_step.step: garbage collection", "gc_freeze"),
        ("rare", "host", "make_step.step (not in every step)", None),
        ("compile", "host", "make_step.step (torch.compile compiles here)", None),
    ],
)
def test_what_is_planted_is_named_first_with_its_function(look, uneven, slow, lost_to, where, change, monkeypatch):
    unfrozen: list[bool] = []
    monkeypatch.setattr(gc, "unfreeze", lambda: unfrozen.append(True))
    report = look(arguments={"slow": slow})
    assert uneven == [False]
    assert unfrozen, "else imports before the fork are hidden from a step's `gc.collect()`: it took 56 ms, and 85 ms"
    (turn,) = report.table_rows("turns")
    assert turn["stage"] == "look"
    assert 0.1 * turn["step_ms"] < turn["profiled_ms"], "of a step, on a host that others may use meanwhile"
    cause, at, _ = report.tables["seen"]["rows"][0]
    assert cause == lost_to
    assert at.startswith("train.py:")
    assert where in at
    if slow in ("waits", "input"):
        assert at.endswith("it waits)"), "on a busy host perhaps after the line that takes most"
    by_cause: dict[str, float] = defaultdict(float)
    for cause, _, ms in report.tables["seen"]["rows"]:
        by_cause[cause] += ms
    (row,) = [row for row in report.rows if row["metric"] == "step_ms"]
    assert sum(by_cause.values()) == pytest.approx(row["median"], rel=1e-6), "the causes add up to the step"
    assert ("precision" in by_cause) == (slow in ("precision", "gram", "backward")), "0.01 * gradient is none"
    assert ("attention" in by_cause) == (slow == "attention"), "a product over channels weighs no values"
    rare = [at for _, at, _ in report.tables["seen"]["rows"] if at.endswith("step (not in every step)")]
    assert len(rare) == (slow == "rare"), "one row"
    loops = {cause for cause, at, _ in report.tables["seen"]["rows"] if "small operators" in at}
    assert loops == ({"kernels"} if slow == "loop" else set()), "with the time between them"
    if slow in ("optimizer", "plain"):
        assert "times a step)" in at, "the loop over rows"
    candidates = {name: why_not for name, _, why_not, *_ in report.tables["candidates"]["rows"]}
    if change is not None:
        assert candidates[change] is None
    if change in ("loader_workers", "float32"):
        assert change == next(name for name, why_not in candidates.items() if why_not is None), "it is tried first"
    assert ("loader_workers" in candidates) == (slow == "input"), "a step without a loader is not offered one"


def test_a_loop_over_small_operators_is_one_cause_with_all_its_lines_and_what_they_call(look) -> None:
    rows = look(arguments={"slow": "rounds"}).tables["seen"]["rows"]
    loops = [cause for cause, at, _ in rows if at.endswith("64 times a step; small operators)")]
    assert loops == ["kernels"], rows
    called = {at.split(" ")[1] for cause, at, _ in rows if cause == "kernels" and " " in at}
    assert called & {"shrunk", "layer"} == {"layer"}, "rounds need each other there"


@pytest.mark.parametrize(("slow", "rounds"), [("nested", 5150), ("direct", 5150), ("nested, few", 100)])
def test_of_loops_in_each_other_the_inner_one_is_named_where_it_alone_has_many_rounds(look, slow, rounds) -> None:
    rows = look(arguments={"slow": slow}).tables["seen"]["rows"]
    first = next(at for cause, at, _ in rows if cause == "kernels" and "small operators" in at)
    text = SOURCE.splitlines()[int(first.split(":")[1].split("-")[0]) - 1].strip()
    assert text.startswith("for number, part" if "few" in slow else "for row"), first
    assert f"{rounds} times a step; small operators)" in first


def with_kernels(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], float]:
    """Let kernels have a share of the step, whatever a busy host leaves to them."""
    known = stage.candidates
    lost = {("kernels", "train.py:1"): 1e3}
    monkeypatch.setattr(stage, "candidates", lambda spec, seen, of: known(spec, seen, {**of, **lost}))
    return lost


@pytest.mark.parametrize("slow", ["checkpoint", "loop"])
def test_a_step_that_checkpoints_nothing_is_not_tried_without_it(look, slow, monkeypatch) -> None:
    lost = with_kernels(monkeypatch)
    # Other tests of this process have compiled; a job's process has not.
    monkeypatch.setattr(stage, "compilation", lambda: SimpleNamespace(graphs=0))
    lost.update({("optimizer", "train.py:1"): 1e3, ("input", "train.py:1"): 1e3})
    candidates = {row[0]: row[2] for row in look(arguments={"slow": slow}).tables["candidates"]["rows"]}
    torch.set_anomaly_enabled(False)
    for name in ("no_checkpointing", "no_anomaly_detection"):
        assert (name in candidates) == (slow == "checkpoint")
    for name in ("loader_workers", "loader_prefetch", "batches_from_memory", "fused_optimizer", "no_optimizer"):
        assert (": make it once" in str(candidates.get(name))) == (slow == "checkpoint"), name


def test_a_step_that_is_not_followed_to_its_end_may_checkpoint_there(look, monkeypatch) -> None:
    with_kernels(monkeypatch)
    monkeypatch.setattr(lines, "MAX_EVENTS", 2)
    names = [row[0] for row in look(arguments={"slow": "checkpoint"}).tables["candidates"]["rows"]]
    assert "no_checkpointing" in names


@pytest.mark.parametrize(("ms", "first"), [(40.0, "fused_optimizer"), (20.0, "autocast_bf16")])
def test_what_may_bring_most_is_tried_first(ms: float, first: str) -> None:
    step = {"kind": "benchmark", "model": {"size": "tiny"}, "precision": "fp32", "device": "cpu"}
    spec = KINDS["diagnosis"].model_validate({"step": step})
    known = stage.Look(spec.step, torch.device("cpu"), None)
    lost = defaultdict(float, {("kernels", "x.py:1"): 100.0 - ms, ("optimizer", "x.py:2"): ms})
    assert next(name for name, _, why_not, *_ in stage.candidates(spec, known, lost) if why_not is None) == first


def test_what_shortens_operators_is_tried_on_float64_too_and_is_no_cure_of_it() -> None:
    names = ["one_thread", "compile_blocks", "float32"]
    spec = KINDS["diagnosis"].example().model_copy(update={"changes": names})
    lost = defaultdict(float, {("precision", "x.py:1"): 100.0})
    rows = stage.candidates(spec, stage.Look(spec.step, torch.device("cpu"), None), lost)
    assert {row[0]: row[1] for row in rows} == {
        "one_thread": "kernels",
        "compile_blocks": "kernels",
        "float32": "precision",
    }


def test_neither_a_learning_rates_schedule_nor_a_closure_is_an_update_of_parameters() -> None:
    step, schedule, wrapper = (
        (f"{stage._torch_folder()}/optim/{file}.py", function, 1)
        for file, function in [("adamw", "AdamW.step"), ("lr_scheduler", "LRScheduler.step"), ("lr_scheduler", "wrap")]
    )
    assert stage._cause_of("", [wrapper, step], set()) == "optimizer"
    model = (f"{stage._torch_folder()}/nn/modules/module.py", "Module._call_impl", 1)
    assert stage._cause_of("", [wrapper, step, ("train.py", "closure", 1), model], {"AdamW.step"}) == "", "a closure's"
    assert stage._cause_of("", [schedule, ("train.py", "rate", 1)], set()) == "", "a step without the optimizer has it"
    averaged = (f"{stage._torch_folder()}/optim/swa_utils.py", "AveragedModel.update_parameters", 1)
    assert stage._cause_of("", [averaged, ("train.py", "step", 1)], set()) == ""


def test_garbage_collection_has_the_time_that_was_measured_also_where_samples_came_late() -> None:
    lost = defaultdict(float, {("host", "x.py:1"): 30.0, ("optimizer", "x.py:2"): 60.0, ("kernels", "x.py:3"): 10.0})
    stage._collected(lost, 80.0, "garbage")
    assert lost["host", "garbage"] == 80
    assert sum(lost.values()) == pytest.approx(100)
    assert max(lost, key=lambda one: lost[one]) == ("host", "garbage")


@pytest.mark.parametrize(
    ("taken", "is_rare"),
    [([161.0], True), ([161.0, *[0.2] * 90], True), ([150.0, 20.0, 90.0], False), ([161.0, *[5.0] * 60], False)],
)
def test_a_long_collection_in_few_of_the_steps_is_told_to_be_rare(taken: list[int], is_rare: bool) -> None:
    places: Any = SimpleNamespace(collecting="train.py:4 step: garbage collection")
    assert stage._collecting(places, taken, 3).endswith("garbage collection (not in every step)") == is_rare


def test_threads_that_compute_beside_the_step_are_told_with_their_line() -> None:
    own = lines.OwnCode(lambda file: file if file == "x.py" else None, lambda _file: [])
    samples = Samples(stacks={("", ()): Sample(wall_ns=100)}, others_ns=Counter({("one", (("x.py", "watch", 2),)): 40}))
    assert stage.beside(samples, own) == "other threads compute for 40 % of it, most in x.py:2 watch"
    samples.others_ns["two", (("/lib/y.py", "run", 3),)] = 50
    assert str(stage.beside(samples, own)).endswith("90 % of it, most in thread two")
    samples.stacks["", ()].wall_ns = 10_000
    assert stage.beside(samples, own) is None


def test_the_second_product_of_attention_weighs_values_by_what_the_first_one_gave() -> None:
    scores = Product(8, 256, 64, 256, "fp32", 4)
    assert stage._weighs(scores, Product(8, 256, 256, 64, "fp32", 4))
    over_channels = Product(1, 128, 192, 128, "fp32", 4)
    assert not stage._weighs(over_channels, Product(1, 192, 128, 128, "fp32", 4))


HANGS = """
import time, sys
from pathlib import Path
from workers.changes import CHANGES
from workers.changes._base import Change
from workers.jobs._base import Unit
from workers.jobs.diagnosis import RUNNER
from app.specs import KINDS
from tests.workers.reporting import Report
CHANGES.load = lambda name: Change(("host",), "", lambda look: None)
from workers.jobs._training import building
building.prepare = lambda step: time.sleep(60)
spec = KINDS["diagnosis"].example()
params = {"stage": "screen", "changes": sys.argv[1:], "fields": {}, "warmup_steps": 0, "measure_steps": 1}
RUNNER.run(spec, Unit("x", {**params, "limit_s": 0.2}), Report(Path(".")))
"""


def test_a_changed_step_that_hangs_is_ended_and_refused(tmp_path: Path) -> None:
    variables = {**os.environ, "PYTHONPATH": str(PROJECT)}
    assert forkserver().start(["-c", HANGS, "threads"], variables, tmp_path / "log").wait(50) == -signal.SIGALRM
    unit = Unit("x", {"stage": "screen", "changes": ["threads"], "limit_s": 75.0})
    rest = RUNNER.resume(KINDS["diagnosis"].example(), unit, 0, Failed("crashed", "was killed by SIGALRM"))
    assert "longer than 75 s" in rest.params["crashed"]


def test_a_look_sees_whether_all_steps_update_the_same(look, uneven, monkeypatch) -> None:
    monkeypatch.setattr(stage, "MEASURED_S", 0.0)
    report = look(arguments={"slow": "accumulation"}, measure_steps=None)
    assert uneven == [True]
    (turn,) = report.tables["turns"]["rows"]
    assert turn[3] == measuring.FEWEST_STEPS, "slow steps are not looked at for long"


def test_a_changed_step_that_fails_is_a_refused_change(tmp_path: Path) -> None:
    step = {"kind": "benchmark", "model": {"size": "tiny"}, "device": "cpu"}
    params = {"stage": "screen", "changes": ["cuda_graph"], "fields": {"cuda_graph": True}}
    params |= {"warmup_steps": 0, "measure_steps": 1, "limit_s": 60.0}
    report = reported(KINDS["diagnosis"].model_validate({"step": step}), tmp_path, Unit("x", params))
    ((_, changes, _, _, _, _, outcome, reason, *_),) = report.tables["turns"]["rows"]
    assert (changes, outcome) == ("cuda_graph", "refused")
    assert "a CPU has no CUDA graphs" in reason


def test_a_changed_step_that_crashes_its_process_is_a_refused_change(tmp_path: Path) -> None:
    spec = KINDS["diagnosis"].example()
    unit = Unit("x", {"stage": "screen", "changes": ["threads"], "limit_s": 75.0})
    rest = RUNNER.resume(spec, unit, 0, Failed("crashed", "killed by SIGSEGV"))
    report = reported(spec, tmp_path, rest)
    ((_, changes, step_ms, _, _, _, outcome, reason, *_),) = report.tables["turns"]["rows"]
    assert (changes, step_ms, outcome, reason) == ("threads", None, "refused", "killed by SIGSEGV")
    as_it_is = Unit("x", {"stage": "screen", "changes": []})
    assert RUNNER.resume(spec, as_it_is, 0, Failed("crashed", "killed by SIGSEGV")) is None
