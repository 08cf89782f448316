import pytest

from tests.workers.measure.profiling.events import host, kernel, recording
from workers.measure.profiling import stacks
from workers.measure.profiling.stacks import fold, folded


def made():
    events = [
        host("agent.py(1): main", "python", 0, 3000),
        host("warmup", "range", 10, 90),
        host("forward", "range", 20, 80),
        host("aten::mm", "operator", 30, 70, id=1),
        host("step_1", "range", 100, 2000),
        host("forward", "range", 110, 400),
        host("model.py(3): forward", "python", 120, 390),
        host("kernels/ranges.py(40): named", "python", 130, 380),
        host("aten::mm", "operator", 140, 340, id=5),
        host("backward", "range", 400, 1000),
        host("MmBackward0", "backward", 500, 700, thread=2, id=6),
        host("late.py(9): exit", "python", 990, 1010),
    ]
    return recording(events, [kernel("sgemm", 600, 1600, operator=5), kernel("sgemm_b", 1600, 1900, operator=6)])


def test_the_hosts_time_is_spent_at_the_top_of_a_stack() -> None:
    times = fold(made(), ("forward", "backward"), on_gpu=False)
    assert times == {
        ("forward",): 20,
        ("forward", "model.py(3): forward"): 20 + 50,  # the function that names ranges shows as its caller
        ("forward", "model.py(3): forward", "aten::mm"): 200,
        ("backward",): 600,
        ("backward", "MmBackward0"): 200,
    }


def test_device_time_belongs_to_the_launching_stack() -> None:
    times = fold(made(), ("forward", "backward"), on_gpu=True)
    assert times == {
        ("forward", "model.py(3): forward", "aten::mm", "sgemm"): 1000,
        ("backward", "MmBackward0", "sgemm_b"): 300,
    }


def with_another_thread():
    """A step beside which another thread waits for a lock, and multiplies."""
    beside = [
        host("threading.py(295): wait", "python", 120, 900, thread=3),
        host("<built-in method acquire of _thread.lock>", "python", 130, 880, thread=3),
        host("aten::mm", "operator", 890, 895, thread=3, id=9),
    ]
    one = made()
    return recording([*one.host, *beside], [*one.device, kernel("other", 950, 990, operator=9)])


def test_other_threads_are_no_work_of_a_phase() -> None:
    """A profiler cannot tell whether they work or wait."""
    phases = ("forward", "backward")
    assert fold(with_another_thread(), phases, on_gpu=False) == fold(made(), phases, on_gpu=False)
    on_gpu = fold(with_another_thread(), phases, on_gpu=True)
    other = {frames: time for frames, time in on_gpu.items() if frames[0] == stacks.OTHERS}
    frames = ("threading.py(295): wait", "aten::mm", "other")
    assert other == {(stacks.OTHERS, *frames): 40}
    assert {**on_gpu} == {**fold(made(), phases, on_gpu=True), **other}


def test_of_too_many_stacks_the_top_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "MAX_STACKS", 2)
    text = folded({("a",): 9_000, ("b",): 1_000, ("c",): 5_000})
    assert text == "a 9\nc 5\n"
