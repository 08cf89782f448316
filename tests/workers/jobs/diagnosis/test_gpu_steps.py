"""What a look says of a GPU's step, from recordings and a trace of lines that are made by hand: times in µs."""

import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.specs import KINDS
from tests.workers.measure.profiling.test_idle import recorded
from tests.workers.reporting import Report
from workers.jobs.diagnosis import look, turn
from workers.measure.profiling.attribution import Interval
from workers.measure.profiling.idle import WORKING, Stretch, in_a_row, sums
from workers.measure.profiling.lines import LineTrace, OwnCode, Place
from workers.measure.profiling.recording import DeviceEvent, HostEvent, Recording
from workers.outcome import RunnerError

US = 1000
LINE = {number: Place("train.py", number, "step") for number in range(1, 9)}


def host(name: str, begin: int, end: int, kind: str = "launch", **known: Any) -> HostEvent:
    return HostEvent(name, kind, known.pop("thread", 1), begin * US, end * US, begin, **known)  # type: ignore[arg-type]


def kernel(launch: int, begin: int, end: int, name: str = "add_kernel") -> DeviceEvent:
    return DeviceEvent(name, "kernel", 7, begin * US, end * US, launch, 0)


def places(recording: Recording, lines: dict[int, int]) -> look.Places:
    """Return the places of a traced step that is in a line from each of these moments on."""
    own = OwnCode(lambda file: file, lambda file: [])
    trace = LineTrace(own)
    trace._times = array("q", [0, 0, *(at * US for at in lines)])
    trace._stacks = [(), (), *((LINE[line],) for line in lines.values())]
    return look.Places(own, trace, SimpleNamespace(recording=recording))  # type: ignore[arg-type]


STEP = host("step_1", 0, 1000, "range")


def test_a_moment_of_a_backward_pass_is_due_to_the_line_that_made_the_node() -> None:
    made = host("aten::linear", 10, 20, "operator", sequence=5)
    node = host("AddmmBackward0", 500, 600, "backward", thread=2, sequence=5, forward_thread=1)
    found = places(Recording([STEP, made, node], []), {1: 1, 15: 2, 400: 3})
    assert found.due(550 * US) == found.due(450 * US) == LINE[1], "in it, or before it"
    assert found.due(800 * US) == LINE[3], "long after it"
    assert found.due(17 * US) == LINE[2]


def test_attention_that_is_written_out_is_known_from_product_to_product() -> None:
    calls = [
        host(name, at, at + 5, "operator")
        for name, at in (("aten::bmm", 20), ("aten::_softmax", 60), ("aten::bmm", 80))
    ]
    found = places(Recording([STEP, *calls], []), {1: 1, 20: 2, 40: 3, 60: 4, 80: 5, 100: 6})
    assert [line for line in LINE if found.writes_attention(LINE[line])] == [2, 3, 4, 5]
    assert not places(Recording([STEP, *calls[:2]], []), {1: 1, 20: 2}).writes_attention(LINE[2]), "a softmax alone"
    torchs = host("aten::scaled_dot_product_attention", 15, 95, "operator")
    assert not places(Recording([STEP, torchs, *calls], []), {1: 1, 20: 2}).writes_attention(LINE[2]), "torch's own"


def test_a_gap_is_found_between_the_same_launches_of_the_slower_traced_step() -> None:
    plain = [host("cudaLaunchKernel", at, at + 2) for at in (10, 20, 110, 120)]
    waits = [host("cudaDeviceSynchronize", at, at + 1) for at in (1, 35, 135)]
    theirs = Recording(
        sorted([*plain, *waits], key=lambda one: one.begin_ns),
        [kernel(at, at + 5, at + 9) for at in (10, 20, 110, 120)],
    )
    calls = [host("cudaLaunchKernel", at, at + 2) for at in (300, 700)]
    traced = Recording(
        [*calls, host("cudaDeviceSynchronize", 800, 820)], [kernel(300, 310, 320), kernel(700, 710, 720)]
    )
    steps = [Interval("step_1", 1, 5 * US, 50 * US), Interval("step_2", 2, 105 * US, 150 * US)]
    moments = look._same_moments(theirs, steps, traced, Interval("step_1", 1, 100 * US, 900 * US))

    def at(time: float, cause: str) -> float:
        of_step = moments(Stretch(0, 0, cause, round(time * US)))
        return sum(of_step) / len(of_step) / US

    assert at(15, "launches") == at(115, "launches") == 700, "the launch that ends the gap"
    assert at(10, "launches") == 300, "a slow start: its own launch"
    assert at(1, "synchronisation") == at(35, "synchronisation") == at(135, "synchronisation") == 800, "the call itself"
    assert at(110, "copies") == at(10, "copies") == 300, "the launch of the copy itself"
    for time, begin, end in ((30, 702, 800), (130, 702, 800), (40, 820, 900), (140, 820, 900)):
        own = [one / US for one in moments(Stretch(0, 0, "host", time * US))]
        assert (min(own), max(own)) == (pytest.approx(begin, abs=2), pytest.approx(end, abs=2)), "before or behind it"
    assert at(106, "input") == at(7, "input") == (100 + 300) / 2, "at the beginning of a step"
    assert look._same_moments(theirs, steps[:1], traced, Interval("step_1", 1, 100 * US, 600 * US)) is None, (
        "one launch"
    )


def test_a_line_that_breaks_a_graph_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = SimpleNamespace(filename="train.py", name="step", lineno=2)
    reasons = [SimpleNamespace(user_stack=[frame]), SimpleNamespace(user_stack=[])]
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(graph_break_reasons=reasons))  # type: ignore[arg-type]
    found = look._where(
        {("synchronisation", LINE[2]): 2.0, ("launches", LINE[4]): 3.0}, places(Recording([STEP], []), {})
    )
    assert found == {
        ("synchronisation", "train.py:2 step (graph break)"): 2.0,
        ("launches", "train.py:4 step (graph breaks at train.py:2)"): 3.0,
    }


def test_only_torchs_own_folders_tell_a_cause() -> None:
    folder = str(Path(torch.__file__).parent)
    for of, file, cause in (
        (folder, "optim/mine.py", "optimizer"),
        ("/home/me/torch", "optim/mine.py", ""),
        (folder, "_tensor_str.py", "host"),  # what a print runs is none of the step's own work
    ):
        assert look._cause_of("step", [(f"{of}/{file}", "update", 3)], set()) == cause


def test_a_counterfactual_with_other_products_is_thrown_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernels = [kernel(1, 1, 2, "sm90_gemm"), kernel(2, 3, 4), kernel(3, 5, 6, "flash_fwd_kernel")]
    kernels.append(kernel(9, 9, 10, "sm90_gemm"))  # an update that multiplies matrices is taken away
    events = [host("cudaLaunchKernel", 1, 2), host("Optimizer.step#Muon.step", 8, 12, "range"), host("cuLaunch", 9, 10)]
    profile: Any = SimpleNamespace(recording=Recording(events, kernels))
    monkeypatch.setattr(turn, "profile_steps", lambda *_arguments, **_options: (profile, [], {}))
    assert turn.kept_kernels(profile) == 2
    closure: Any = SimpleNamespace(recording=Recording([*events, host("MmBackward0", 9, 11, "backward")], kernels))
    assert turn.kept_kernels(closure) == 3, "a closure's passes stay without the update"
    training: Any = SimpleNamespace(own=None)
    turn._check_kernels(training, 2, Report(tmp_path))
    with pytest.raises(RunnerError, match=r"2 matrix products .* 3"):
        turn._check_kernels(training, 3, Report(tmp_path))


@pytest.mark.parametrize("step_ms", [10.0, 14.0, 20.0])
def test_busy_and_idle_time_of_a_real_step_without_a_profiler_add_up_to_it(step_ms: float) -> None:
    recording, windows = recorded("item")
    parts = in_a_row(recording, windows)
    times, busy_percent = look._times(recording, windows, parts, step_ms)
    assert sum(times.values()) == pytest.approx(step_ms)
    assert min(times.values()) >= 0
    working = 1e-6 * sum(sums(part)[one] for part in parts for one in WORKING) / len(parts)
    assert busy_percent == pytest.approx(100 * working / step_ms), "a profiler does not slow the device down"
    # What waiting costs is more than the gaps behind it: the host would have run ahead.
    assert times["synchronisation"] > 0.1 * step_ms
    assert times["synchronisation"] <= step_ms - working + 1e-6 * 98 * 5000


def test_what_the_host_computes_after_it_has_waited_is_not_lost_to_waiting() -> None:
    events, work = [], []
    for begin in range(0, 4000, 1000):
        launch = host("cudaLaunchKernel", begin, begin + 2)
        events += [
            launch,
            host("cudaStreamSynchronize", begin + 3, begin + 102),
            host("aten::sort", begin + 110, begin + 980, "operator"),
        ]
        work.append(kernel(launch.id, begin + 5, begin + 100))
    recording = Recording(events, work)
    steps = [Interval(f"step_{begin}", 1, begin * US, (begin + 1000) * US) for begin in range(1000, 4000, 1000)]
    times, _ = look._times(recording, steps, in_a_row(recording, steps), 1.0)
    assert times["synchronisation"] == pytest.approx(0.1, abs=0.01), "the device would work meanwhile"
    assert times["host"] == pytest.approx(0.8, abs=0.01)


def on_gpu(recording: Recording, lines: dict[int, int], step_ms: float, **fields: Any) -> Any:
    from workers.jobs._training.building import Training

    spec = KINDS["benchmark"].model_validate({"kind": "benchmark", "device": "cuda", **fields})
    training = Training(spec, torch.device("cuda"), *[None] * 3)  # type: ignore[arg-type]
    return look._on_gpu(training, places(recording, lines).profile, places(recording, lines), step_ms)


def test_what_the_host_does_between_two_launches_is_told_by_its_lines() -> None:
    launches = [host("cudaLaunchKernel", at, at + 2) for at in (20, 900)]
    waits, collects = host("cudaStreamSynchronize", 80, 100), host("garbage collection", 300, 500, "range")
    events = [STEP, host("graph", 10, 990, "range"), launches[0], waits, collects, launches[1]]
    recording = Recording(events, [kernel(20, 25, 90), kernel(900, 905, 990)])
    lost, _, _ = on_gpu(recording, {1: 1, 30: 2, 101: 3, 300: 4, 500: 5}, 0.98, cuda_graph=True)
    assert [where for cause, where in lost if cause == "host"] == [
        "train.py:3-5 step (line 5: 72 % of it; not in every step)",
        "train.py:4 step: garbage collection",
    ], "not line 2, which runs while the device works"
    looped = places(recording, {1: 1, 300: 4, 500: 5})
    looped._trace.calls[LINE[4]] = 200
    assert looped.collecting == "train.py:4 step: garbage collection", "without what is noted of the line"


def test_a_whole_step_of_ours_that_is_a_cuda_graph_has_one_phase() -> None:
    launch = host("cudaGraphLaunch", 20, 30)
    events = [STEP, host("graph", 10, 990, "range"), launch]
    recording = Recording(events, [kernel(launch.id, 40, 500), kernel(launch.id, 600, 980)])
    lost, gaps, busy_percent = on_gpu(recording, {1: 1, 15: 2, 35: 3}, 0.95, cuda_graph=True)
    assert sum(lost.values()) == pytest.approx(0.95)
    assert busy_percent == pytest.approx(100 * 0.84 / 0.95)
    assert {cause for cause, _ in lost} == {"kernels", "launches"}
    assert gaps[0][2::2] == ["kernels", "train.py:2 step"], "the line that launches it"


def test_kernels_of_a_closure_are_none_of_the_update() -> None:
    update, node = host("Optimizer.step#SGD.step", 12, 980, "range"), host("MmBackward0", 25, 40, "backward")
    launches = [host("cudaLaunchKernel", at, at + 2) for at in (21, 61)]
    events = [STEP, host("graph", 10, 990, "range"), update, launches[0], node, launches[1]]
    recording = Recording(events, [kernel(21, 25, 500), kernel(61, 500, 900)])
    lost, _, _ = on_gpu(recording, {1: 1, 15: 2, 55: 3}, 0.9, cuda_graph=True)
    of = {cause: where[:15] for cause, where in lost if cause in ("optimizer", "kernels")}
    assert of == {"kernels": "train.py:2 step", "optimizer": "train.py:3 step"}


def test_kernels_of_operators_in_float64_are_told_as_such() -> None:
    works = [host("aten::mul", at, at + 9, "operator", shapes=shapes) for at, shapes in ((20, "f64[8]"), (60, "[8]"))]
    launches = [host("cudaLaunchKernel", at, at + 2) for at in (21, 61)]
    events = sorted([STEP, host("graph", 10, 990, "range"), *works, *launches], key=lambda one: one.begin_ns)
    recording = Recording(events, [kernel(21, 25, 500), kernel(61, 500, 900)])
    lost, _, _ = on_gpu(recording, {1: 1, 15: 2, 55: 3}, 0.9, cuda_graph=True)
    of = {cause: where[:15] for cause, where in lost if cause in ("precision", "kernels")}
    assert of == {"precision": "train.py:2 step", "kernels": "train.py:3 step"}
