"""Each moment of a step on a GPU has one class, from recordings that are made by hand: times in µs."""

import gc
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.ranges import record_ranges
from workers.measure.profiling.attribution import Attribution, Interval
from workers.measure.profiling.idle import (
    COLLECTS,
    READS,
    RUNNING,
    WORKING,
    collections_named,
    host_reads,
    in_a_row,
    reads_named,
    stretches,
    sums,
    synchronisations,
    unprofiled,
)
from workers.measure.profiling.recording import NODE, DeviceEvent, HostEvent, Recording, record

US = 1000


class Made:
    """A recording that grows."""

    def __init__(self) -> None:
        self.host: list[HostEvent] = []
        self.device: list[DeviceEvent] = []

    def on_host(self, name: str, begin: float, end: float, kind: str = "operator") -> int:
        number = len(self.host) + 1
        self.host.append(HostEvent(name, kind, 1, round(begin * US), round(end * US), number))  # type: ignore[arg-type]
        return number

    def launch(self, at: float, begin: float, end: float, name: str = "add_kernel", *, stream: int = 7) -> int:
        launch = self.on_host("cudaLaunchKernel", at, at + 2, "launch")
        self.runs(launch, begin, end, name, stream=stream)
        return launch

    def runs(self, launch: int, begin: float, end: float, name: str = "add_kernel", *, stream: int = 7) -> None:
        kind = "copy" if name.startswith("Memcpy") else "kernel"
        self.device.append(DeviceEvent(name, kind, stream, round(begin * US), round(end * US), launch, 0))

    @property
    def recording(self) -> Recording:
        host = sorted(self.host, key=lambda event: (event.begin_ns, -event.end_ns))
        return Recording(host, sorted(self.device, key=lambda event: event.begin_ns))

    def classes(self, end: float, begin: float = 0) -> dict[str, float]:
        found = stretches(self.recording, Interval("step_1", 1, round(begin * US), round(end * US)))
        assert [one.begin_ns for one in found[1:]] == [one.end_ns for one in found[:-1]]
        return {cause: ns / US for cause, ns in sums(found).items()}


@pytest.fixture
def made() -> Made:
    return Made()


def test_work_that_is_launched_while_the_device_is_idle_waits_for_the_host(made: Made) -> None:
    made.on_host("aten::add", 0, 40)
    made.launch(30, 35, 100)
    assert made.classes(100) == {"launches": 35, RUNNING: 65}


def test_a_gap_over_several_operators_is_one_part(made: Made) -> None:
    for begin in (0, 25, 65):
        made.on_host("aten::add", begin, begin + 20)
    made.launch(80, 85, 100)
    found = stretches(made.recording, Interval("step_1", 1, 0, 100 * US))
    assert [(one.cause, one.ns / US) for one in found] == [("launches", 80), ("launches", 5), (RUNNING, 15)]


def test_a_long_time_without_an_operator_is_the_hosts_own(made: Made) -> None:
    made.launch(0, 5, 10)
    made.on_host("aten::add", 310, 330)
    made.launch(320, 325, 400)
    assert made.classes(400) == {"launches": 5 + 10 + 5, "host": 300, RUNNING: 80}


def test_a_long_operator_on_a_cpu_is_the_hosts_own(made: Made) -> None:
    made.launch(0, 5, 10)
    made.on_host("aten::sort", 20, 310)
    made.on_host("aten::linear", 310, 450)
    made.launch(440, 445, 500)
    assert made.classes(500) == {"launches": 5 + 130 + 5, "host": 300, RUNNING: 5 + 55}


def test_what_torch_compiles_in_a_step_is_the_hosts_own_whatever_operators_it_runs(made: Made) -> None:
    made.launch(0, 5, 10)
    made.on_host("aten::linear", 20, 900)
    made.on_host("entire_frame_compile (dynamo_timed)", 100, 800, "range")
    for at in (200, 700):
        made.on_host("aten::mm", at, at + 40)
        made.on_host("cudaStreamIsCapturing", at + 10, at + 12, "launch")
    made.launch(890, 895, 1000)
    assert made.classes(1000) == {"launches": 5 + 90 + 90 + 5, "host": 700, RUNNING: 5 + 105}
    found = stretches(made.recording, Interval("step_1", 1, 0, 1000 * US))
    assert {one.at_ns / US for one in found if one.cause == "host"} == {100}, "its line is that of the compiled call"


def test_many_short_operators_on_a_cpu_are_the_hosts_own(made: Made) -> None:
    made.launch(0, 5, 10)
    for at in range(20, 5000, 10):
        made.on_host("aten::add", at, at + 8)
    made.launch(5000, 5005, 6000)
    classes = made.classes(6000)
    assert classes.pop("host") == pytest.approx(4990 - 2 * 250, abs=20), "but for those near launches"
    assert classes.keys() == {"launches", RUNNING}


@pytest.mark.parametrize(("name", "cause"), [
    ("MineBackward", "host"), ("CheckpointFunction", "host"), ("AddmmBackward0", "launches"),
    ("CompiledFunctionBackward", "launches"), ("Torch-Compiled Region: 0/0", "host"),
])  # fmt: skip
def test_what_is_done_in_python_inside_of_operators_is_the_hosts_own(made: Made, name: str, cause: str) -> None:
    made.launch(0, 5, 10)
    if "Backward" in name:
        made.on_host(f"{NODE}{name}", 20, 400, "backward")
    made.on_host(name, 22, 400, "backward" if "Backward" in name else "operator")
    made.on_host("aten::mul", 330, 390)
    made.launch(380, 385, 500)
    found = stretches(made.recording, Interval("step_1", 1, 0, 500 * US))
    assert max((one for one in found if one.cause != RUNNING), key=lambda one: one.ns).cause == cause


def test_giving_memory_back_waits_and_reads_nothing(made: Made) -> None:
    made.launch(0, 5, 60)
    made.on_host("aten::to", 10, 90)
    made.on_host("cudaFree", 20, 80, "launch")
    made.launch(95, 100, 150)
    assert made.classes(150) == {"launches": 5 + 5, "synchronisation": 35, RUNNING: 55 + 50}
    assert host_reads(made.recording) == []


def test_what_the_host_computes_after_it_has_waited_is_its_own_and_what_it_issues_is_kept(made: Made) -> None:
    made.launch(0, 5, 60)
    made.on_host("cudaStreamSynchronize", 10, 62, "launch")
    made.on_host("aten::sort", 65, 365)
    made.on_host("aten::add", 365, 400)
    made.launch(395, 400, 500)
    found = stretches(made.recording, Interval("step_1", 1, 0, 500 * US))
    told = [(one.cause, one.at_ns / US, one.ns / US, one.then) for one in found[2:5]]
    assert told == [
        ("synchronisation", 10, 2, None),
        ("host", (62 + 365) / 2, 303, None),
        ("synchronisation", 10, 30, "launches"),
    ]


def test_a_copy_from_pageable_memory_waits_as_a_synchronisation_does(made: Made) -> None:
    made.launch(0, 5, 60)
    copy = made.on_host("cudaMemcpyAsync", 20, 90, "launch")
    made.runs(copy, 70, 80, "Memcpy HtoD (Pageable -> Device)")
    made.launch(120, 125, 150)
    found = made.classes(150)
    assert found["copies"] == 10
    assert found["synchronisation"] > 0


def test_gaps_inside_a_cuda_graph_are_never_the_hosts(made: Made) -> None:
    graph = made.on_host("cudaGraphLaunch", 0, 3, "launch")
    for begin in range(5, 500, 10):
        made.runs(graph, begin, begin + 6)
    assert made.classes(501) == {"launches": 5, "kernels": 4 * 49, RUNNING: 6 * 50}


def test_time_with_copies_or_collectives_alone_has_classes_of_its_own(made: Made) -> None:
    made.launch(0, 0, 50)
    made.launch(1, 20, 80, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", stream=20)
    made.launch(2, 70, 100, "Memcpy DtoH (Device -> Pinned)", stream=30)
    assert made.classes(100) == {RUNNING: 50, "communication": 30, "copies": 20}


def test_the_host_in_an_optimizer_or_collecting_garbage_is_told_apart(made: Made) -> None:
    made.on_host("Optimizer.step#AdamW.step", 0, 300, "range")
    made.launch(195, 200, 400)
    made.on_host(COLLECTS, 410, 480, "range")
    made.launch(495, 500, 600)
    assert made.classes(600) == {"optimizer": 195 + 5, "launches": 10 + 15 + 5, "host": 70, RUNNING: 300}


def test_a_closures_passes_are_none_of_the_update_that_follows_them(made: Made) -> None:
    made.on_host("Optimizer.step#AdamW.step", 0, 300, "range")
    made.on_host("MmBackward0", 50, 100, "backward")
    made.launch(195, 200, 300)
    assert made.classes(300) == {"launches": 100, "optimizer": 95 + 5, RUNNING: 100}


def test_steps_in_a_row_last_from_the_end_of_one_ones_work_to_that_of_the_next(made: Made) -> None:
    made.launch(0, 5, 100)  # a warm-up step, which the host issues in 10
    made.launch(12, 100, 180)
    made.launch(22, 190, 250)
    host = sorted(made.host, key=lambda event: event.begin_ns)
    steps = [Interval("step_1", 1, 10 * US, 20 * US), Interval("step_2", 2, 20 * US, 30 * US)]
    first, second = in_a_row(Recording(host, made.device), steps)
    assert sums(first) == {RUNNING: 80 * US}
    assert sums(second) == {"launches": 10 * US, RUNNING: 60 * US}, "from 180 to 250"


def test_what_the_next_step_issues_behind_a_call_that_waits_is_that_steps_own(made: Made) -> None:
    made.launch(10, 15, 100)
    made.on_host("cudaDeviceSynchronize", 20, 101, "launch")
    made.launch(160, 165, 200)
    steps = [Interval("step_1", 1, 0, 110 * US), Interval("step_2", 2, 120 * US, 200 * US)]
    _, second = in_a_row(made.recording, steps)
    told = [(one.cause, one.begin_ns / US, one.at_ns / US, one.then) for one in second[:3]]
    assert told == [
        ("synchronisation", 100, 20, None), ("synchronisation", 101, 20, "launches"),
        ("synchronisation", 120, 20, "launches"),
    ]  # fmt: skip


def test_work_that_was_launched_long_before_it_ran_waited_for_something_else(made: Made) -> None:
    made.launch(0, 0, 10)
    made.launch(2, 90, 100, stream=20)
    assert made.classes(100) == {RUNNING: 20, "unexplained": 80}


def test_a_profiler_lengthens_gaps_and_no_work() -> None:
    profiled = {RUNNING: 50.0, "copies": 20.0, "launches": 90.0, "optimizer": 30.0, "input": 5.0}
    assert unprofiled(profiled, 115.0) == {**profiled, "launches": 30.0, "optimizer": 10.0}
    assert unprofiled(profiled, 73.0) == {**profiled, "launches": 0.0, "optimizer": 0.0, "input": 3.0}
    assert unprofiled({RUNNING: 50.0, "input": 40.0}, 60.0) == {RUNNING: 50.0, "input": 10.0}
    assert unprofiled({RUNNING: 50.0, "input": 4.0}, 60.0) == {RUNNING: 50.0, "input": 10.0}
    assert unprofiled({RUNNING: 50.0}, 60.0) == {RUNNING: 50.0}
    assert unprofiled(profiled, 60.0)["launches"] == 0, "steps vary"


def test_runs_of_the_garbage_collector_are_timed_and_named_for_the_profiler() -> None:
    with collections_named() as taken, record_ranges():
        profile = record(gc.collect, on_gpu=False)
    named = [event for event in profile.recording.host if event.name == COLLECTS]
    assert 1 <= len(named) <= len(taken), "the profiler lets some run itself"
    before = len(taken)
    gc.collect()
    assert len(taken) == before, "only inside of the context"
    traced: list[Any] = []

    class Tracing(TorchDispatchMode):
        def __torch_dispatch__(self, *call: Any) -> None:
            traced.append(call)

    with record_ranges(), collections_named() as taken, Tracing():
        gc.collect()
    assert taken, "timed"
    assert not traced, "a compiler would take the range for an operator"


def test_naming_a_collection_imports_nothing() -> None:
    """It may happen inside of an import, which would fail."""
    code = """
import gc, sys
from kernels.ranges import record_ranges
from workers.measure.profiling.idle import collections_named
with collections_named() as taken, record_ranges():
    before = set(sys.modules)
    gc.collect()
    assert taken and set(sys.modules) == before, set(sys.modules) - before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


RECORDED = Path(__file__).with_name("h100_steps.json.gz")
"""Two steps each of an H100, by torch 2.11: `loader` begins each on an idle device and reads a DataLoader that is
slower than the step; `item` are steps in a row behind a warm-up step, with `.item()` of each of 98 gradients."""
HOST, DEVICE = ("operator", "backward", "range", "launch"), ("kernel", "copy", "fill")


def recorded(name: str) -> tuple[Recording, list[Interval]]:
    with gzip.open(RECORDED, "rt") as file:
        found = json.load(file)[name]
    names = found["names"]
    recording = Recording(
        [
            HostEvent(names[of], HOST[kind], thread, begin, begin + taken, number)  # type: ignore[arg-type]
            for of, kind, thread, begin, taken, number in found["host"]
        ],
        [
            DeviceEvent(names[of], DEVICE[kind], stream, begin, begin + taken, launch, 0)  # type: ignore[arg-type]
            for of, kind, stream, begin, taken, launch in found["device"]
        ],
    )
    return recording, Attribution(recording, found["phases"], on_gpu=True).windows


def busy_ns(recording: Recording, begin: int, end: int) -> int:
    """Return how long any work runs between two moments, counted apart from the code under test."""
    busy, until = 0, begin
    for one in sorted(recording.device, key=lambda one: one.begin_ns):
        busy += max(0, min(one.end_ns, end) - max(one.begin_ns, until))
        until = max(until, one.end_ns)
    return busy


@pytest.mark.parametrize("name", ["loader", "item"])
def test_real_steps_are_busy_and_idle_for_as_long_as_they_last(name: str) -> None:
    recording, windows = recorded(name)
    steps = in_a_row(recording, windows) if name == "item" else [stretches(recording, one) for one in windows]
    for step in steps:
        begin, end = step[0].begin_ns, step[-1].end_ns
        assert sums(step).total() == end - begin
        assert sum(sums(step)[one] for one in WORKING) == busy_ns(recording, begin, end)
        assert sums(step)["unexplained"] < 0.001 * (end - begin)
    if name == "item":
        assert steps[0][-1].end_ns == steps[1][0].begin_ns


def test_a_real_step_that_waits_for_its_loader_is_told_from_one_that_waits_for_numbers() -> None:
    recording, windows = recorded("loader")
    for window in windows:
        times = sums(stretches(recording, window))
        assert times["input"] == max(times.values()) > 60e6, "8 samples, of 8 ms each"
        assert times["synchronisation"] < 0.01 * times["input"]
    recording, windows = recorded("item")
    assert len([one for one in synchronisations(recording) if one.name == "cudaStreamSynchronize"]) == 3 * 98
    for step in in_a_row(recording, windows):
        times = sums(step)
        assert times["input"] == times["communication"] == 0
        assert len({one.at_ns for one in step if one.cause == "synchronisation"}) == 98, "one gap for each"
        assert times["synchronisation"] > 4e6
        assert times["host"] < 0.12 * times["launches"], "short operators between launches, such as views, are theirs"


def test_a_number_is_read_from_the_beginning_of_the_operator_that_reads_it(made: Made) -> None:
    made.launch(0, 5, 50)
    made.on_host("aten::item", 10, 80)
    made.on_host("aten::_local_scalar_dense", 12, 79)
    copy = made.on_host("cudaMemcpyAsync", 20, 60, "launch")
    made.runs(copy, 52, 53, "Memcpy DtoH (Device -> Pageable)")
    made.on_host("aten::to", 100, 170)
    batch = made.on_host("cudaMemcpyAsync", 110, 165, "launch")
    made.runs(batch, 115, 160, "Memcpy HtoD (Pageable -> Device)")
    made.on_host("aten::copy_", 200, 230)
    made.runs(made.on_host("cudaMemcpyAsync", 210, 212, "launch"), 215, 220, "Memcpy DtoH (Device -> Pinned)")
    made.launch(240, 245, 250)
    recording = made.recording
    assert host_reads(recording) == [(10 * US, 80 * US)], "a copy to the device is none, nor one that nobody waits for"
    assert [one.begin_ns for one in synchronisations(recording)] == [20 * US, 110 * US]
    found = stretches(recording, Interval("step_1", 1, 0, 250 * US))
    assert {one.at_ns for one in found if one.cause == "synchronisation" and one.end_ns < 115 * US} == {20 * US}


def test_texts_of_tensors_are_named_for_the_profiler_and_only_inside() -> None:
    plain = torch.Tensor.__repr__
    with reads_named(), record_ranges():
        profile = record(lambda: print(torch.ones(2), f"{torch.ones(()):.1f}"), on_gpu=False)
    assert sum(one.name == READS for one in profile.recording.host) >= 2
    assert torch.Tensor.__repr__ is plain
