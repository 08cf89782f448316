"""Profiles of a step of the user's own: its lines, its parts, its threads and its own profiler."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from app.specs.profile import ProfileSpec
from tests.workers.reporting import Report, reported, uploading, with_ceilings
from workers.jobs.profile import own_lines
from workers.measure.profiling.lines import LineTrace, OwnCode
from workers.measure.profiling.sampling import Sample, Samples
from workers.uploaded import BrokenCode

SOURCE = """\
import threading
import time

import torch

import flopwatch


def tokens():
    numbers = {}
    for number in range(30_000):
        numbers[str(number % 100)] = number
    return len(numbers)


class SlowSGD(torch.optim.Optimizer):
    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    for row, gradient in zip(parameter.view(-1, 4), parameter.grad.view(-1, 4)):
                        row -= 1e-3 * gradient


def make_step(device):
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)).to(device)
    optimizer = SlowSGD(model.parameters(), {})
    waiting = threading.Thread(target=threading.Event().wait, name="feeder", daemon=True)
    waiting.start()

    def step():
        with flopwatch.phase("data"):
            tokens()
            x = torch.randn(16, 32, device=device)
        with flopwatch.phase("forward"):
            with torch.profiler.record_function("My Loss"):
                loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def spin(ms):
    begin = time.perf_counter()
    while time.perf_counter() < begin + 1e-3 * ms:
        pass


def make_ending_step(device, batches=40):
    x, numbers = torch.ones(2, device=device), iter(range(batches))

    def step():
        next(numbers)
        spin(1)
        x.add(1)

    return step


def make_threaded_step(device):
    x = torch.ones(2, device=device)

    def step():
        thread = threading.Thread(target=spin, args=(5,))
        thread.start()
        thread.join()
        x.add(1)

    return step


def make_profiled_step(device):
    model = torch.nn.Linear(8, 8).to(device)

    def step():
        with torch.profiler.profile():
            model(torch.randn(2, 8, device=device))

    return step


"""
Run = Callable[..., Report]


@contextlib.contextmanager
def runs(folder: Path) -> Iterator[Run]:
    """Run steps of the code above; their files are in the folder."""
    with pytest.MonkeyPatch.context() as patch, uploading(folder / "code") as upload:
        patch.setattr(own_lines, "SAMPLES", 300)

        def run(function: str = "make_step", **fields: Any) -> Report:
            # A job's process is a fresh one: where something was compiled, no module is named.
            torch._dynamo.utils.counters.clear()
            code = upload(SOURCE, function, "train.py")
            fields = {"device": "cpu", "warmup_steps": 1, "measure_steps": 3, "profile_steps": 2, **fields}
            return reported(ProfileSpec(**{"step_code": code, **fields}), with_ceilings(folder))

        yield run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with runs(tmp_path) as run:
        yield run


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Report:
    with runs(tmp_path_factory.mktemp("profiled")) as run:
        return run(measure_steps=5)


def line_of(code: str) -> int:
    return next(number for number, line in enumerate(SOURCE.splitlines(), 1) if line.strip().startswith(code))


def test_the_lines_that_take_the_time_are_named(profiled: Report) -> None:
    report = profiled
    rows = report.table_rows("lines")
    step_ms = next(row["median"] for row in report.rows if row["metric"] == "unprofiled_step_ms")
    assert sum(row["self_ms"] for row in rows) == pytest.approx(step_ms)
    assert sum(row["self_percent"] for row in rows) == pytest.approx(100)
    top = {(row["file"], row["line"], row["function"]): row for row in rows[:4]}
    python = top["train.py", line_of("numbers[str"), "tokens"]
    operators = top["train.py", line_of("row -="), "SlowSGD.step"]
    assert (python["calls"], python["operators"]) == (30_000, 0)
    runs = (32 * 64 + 64 + 64 * 32 + 32) // 4
    assert (operators["calls"], operators["operators"]) == (runs, 2 * runs)
    totals = {row["line"]: row["total_ms"] for row in rows}
    assert totals[line_of("optimizer.step()")] >= operators["self_ms"]
    assert {row["device_self_ms"] for row in rows} == {None}, "on a CPU"
    summary = {row["what"]: row for row in report.table_rows("summary")}
    assert next(iter(summary)) == "unprofiled step"
    assert 0 < summary["Python itself"]["value"] <= step_ms


def test_an_iterator_that_ends_leaves_fewer_samples(run: Run) -> None:
    report = run("make_ending_step")
    summary = {row["what"]: row for row in report.table_rows("summary")}
    assert 0 < summary["sampled steps"]["value"] < 40
    assert summary["samples"]["value"] < own_lines.SAMPLES / 2
    assert "an iterator in the step, such as a loader, has ended" in summary["samples"]["note"]
    assert {"stacks.txt", "trace.json.gz"} <= set(report.files)


def test_parts_of_the_step_are_ranges(profiled: Report) -> None:
    names = {row["range"] for row in profiled.table_rows("ranges")}
    assert {"My Loss", "My Loss/Linear.0", "My Loss/Linear.1", "outside"} <= names
    assert any(name.startswith("Optimizer.step#SlowSGD.step") for name in names)
    times = {row["phase"]: row["median"] for row in profiled.rows if row["metric"] == "unprofiled_ms"}
    assert set(times) == {"data", "forward", "rest"}
    assert times["rest"] > times["forward"]


def test_waiting_threads_are_in_no_phase(profiled: Report) -> None:
    lines = profiled.files["stacks.txt"].read_text().splitlines()
    assert {line.partition(";")[0].partition(" ")[0] for line in lines} <= {"data", "forward", "rest", "other threads"}
    assert not any("wait" in line for line in lines if "threading" in line)


def test_threads_whose_operators_no_table_has_are_told(run: Run, profiled: Report) -> None:
    told = {row["what"]: row for row in run("make_threaded_step").table_rows("summary")}
    assert told["other threads"]["value"] > 0.2, "ms of a step"
    assert "other threads" not in {row["what"] for row in profiled.table_rows("summary")}


def test_a_step_with_a_profiler_of_its_own_is_told_so(run: Run) -> None:
    with pytest.raises(BrokenCode, match=r"the step opens a torch\.profiler of its own, .* leave it out"):
        run("make_profiled_step", warmup_steps=0)
    assert not torch.autograd.profiler._is_profiler_enabled
    # The line trace could not end, and follows every line of Python: all later tests would take many times as long.
    sys.settrace(None)


LATE, SLOWER = "samples came late, by 30% of the time", "they took 2 ms each, longer than those measured"


@pytest.mark.parametrize(
    ("samples", "times", "said"),
    [
        (Samples(steps=3, late_ns=900_000), 1.0, [LATE]),
        (Samples(steps=3, late_ns=900_000, prompt=True), 1.0, []),  # it waits for the interpreter alone
        (Samples(steps=3), 1.1, []),
        (Samples(steps=3), 2.0, [SLOWER]),
    ],
)
def test_late_samples_and_sampled_steps_that_were_slower_are_told(samples, times, said) -> None:
    samples.stacks["forward", (("train.py", "step", 4),)] = Sample(round(3 * times * 1e6))
    trace = LineTrace(OwnCode(lambda name: name, lambda name: []))
    (row, *_) = own_lines.summary_of(samples, [], 1.0, trace)
    assert row[:3] == ["sampled steps", 3, "steps"]
    assert [words for words in (LATE, SLOWER) if words in str(row[3])] == said
