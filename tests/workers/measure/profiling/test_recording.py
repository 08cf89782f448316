from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from kernels.ranges import named, record_ranges
from workers.measure.profiling.recording import NODE, AnotherProfiler, device_events, host_events, record


def event(name: str, device: Any = DeviceType.CPU, **fields: Any) -> Any:
    """An event as torch 2.11 gives it: without `is_python_function` and `activity_type`."""
    values = {
        "is_async": False,
        "is_user_annotation": False,
        "start_thread_id": 1,
        "end_thread_id": 1,
        "linked_correlation_id": 0,
        "correlation_id": 3,
        "scope": 0,
        "sequence_nr": -1,
        "fwd_thread_id": 0,
        "shapes": [[2, 3], [3, 5]],
        "dtypes": ["float", "float"],
        "start_ns": 10,
        "duration_ns": 5,
        "device_resource_id": 7,
        **fields,
    }
    return SimpleNamespace(
        name=lambda: name,
        device_type=lambda: device,
        **{key: lambda value=value: value for key, value in values.items()},
    )


def test_kinds_of_host_events() -> None:
    events = [
        event("aten::mm", sequence_nr=4),
        event("forward", is_user_annotation=True),
        event("autograd::engine::evaluate_function: MmBackward0", sequence_nr=4, fwd_thread_id=1),
        event("MmBackward0", scope=1),
        event("cudaLaunchKernel", linked_correlation_id=3),
        event("cuLaunchKernelEx"),
        event("async", is_async=True),
        event("two threads", end_thread_id=2),
        event("python", is_python_function=True),
        event("Activity Buffer Request"),
        event("sgemm", DeviceType.CUDA),
    ]
    kinds = [(one.name.partition(":")[0], one.kind) for one in host_events(events)]
    assert kinds == [
        ("aten", "operator"),
        ("forward", "range"),
        ("autograd", "backward"),
        ("MmBackward0", "backward"),
        ("cudaLaunchKernel", "launch"),
        ("cuLaunchKernelEx", "launch"),
    ]


def test_a_number_is_no_input_in_float64() -> None:
    rows, number = torch.ones(4), torch.tensor(0.9, dtype=torch.float64)

    def doubles(work: Callable[[], object]) -> set[str]:
        with torch.profiler.profile(record_shapes=True) as profiler:
            work()
        return {one.name for one in host_events(profiler.profiler.kineto_results.events()) if one.double}  # type: ignore[union-attr]

    assert doubles(lambda: (0.9 * rows, rows * number, rows / 3, rows.sub_(number), torch.tensor(0.9) + 1.5)) == set()
    assert "aten::mul" in doubles(lambda: 2 * torch.ones(1, dtype=torch.float64))
    assert "aten::mm" in doubles(lambda: torch.ones(2, 2).double() @ torch.ones(2, 2).double())


def test_kinds_of_device_events() -> None:
    events = [
        event("sgemm", DeviceType.CUDA, linked_correlation_id=3, correlation_id=900),
        event("Memcpy DtoD (Device -> Device)", DeviceType.CUDA),
        event("Memset (Device)", DeviceType.CUDA),
        event("forward", DeviceType.CUDA, is_user_annotation=True),
        event("Context Sync", DeviceType.CUDA),
        event("aten::mm"),
    ]
    kernel, copy, fill = device_events(events)
    assert (kernel.kind, copy.kind, fill.kind) == ("kernel", "copy", "fill")
    assert (kernel.launch, kernel.operator, kernel.stream, kernel.begin_ns, kernel.end_ns) == (900, 3, 7, 10, 15)


def work() -> torch.Tensor:
    x = torch.ones(4, 4, requires_grad=True)
    with record_ranges(), named("scores"):
        y = x @ x
    y.sum().backward()
    return x


@pytest.mark.parametrize("python", [False, True])
def test_a_recording_of_real_work(python: bool) -> None:
    profile = record(work, on_gpu=False, python=python)
    host = profile.recording.host
    kinds = {one.name: one.kind for one in host}
    assert (kinds["aten::mm"], kinds["scores"], kinds["MmBackward0"]) == ("operator", "range", "backward")
    assert {kind for name, kind in kinds.items() if name.startswith(NODE)} == {"backward"}
    assert ("python" in kinds.values()) == python
    assert profile.recording.device == []
    assert [one.begin_ns for one in host] == sorted(one.begin_ns for one in host)
    assert not any(" at 0x" in one.name for one in host), "addresses would make equal functions different"


@pytest.mark.parametrize("profiler", [torch.profiler.profile, torch.autograd.profiler.profile])
def test_work_with_a_profiler_of_its_own_is_refused(profiler: Any) -> None:
    def profiled() -> None:
        with profiler():
            work()

    with pytest.raises(AnotherProfiler, match="of its own"):
        record(profiled, on_gpu=False)
    with profiler(), pytest.raises(AnotherProfiler, match="of its own"):
        record(work, on_gpu=False)
    profiled()
    assert any(one.name == "scores" for one in record(work, on_gpu=False).recording.host), "both work again"


def test_shapes_name_types_but_float32() -> None:
    many = {"shapes": [[2, 3], [3], [], [4]], "dtypes": ["double", "c10::BFloat16", "Scalar", "float"]}
    assert [one.shapes for one in host_events([event("aten::mm", **many)])] == ["f64[2, 3] bf16[3] [4]"]
    double = torch.ones(2, 2, dtype=torch.float64)
    host = record(lambda: void(double @ double), on_gpu=False).recording.host
    assert "f64[2, 2] f64[2, 2]" in {one.shapes for one in host if one.name == "aten::mm"}


@pytest.mark.gpu
def test_a_gpu_recording_links_kernels_to_operators() -> None:
    x = torch.randn(512, 512, device="cuda")
    x @ x
    recording = record(lambda: void(x @ x), on_gpu=True).recording
    launches = {one.id: one for one in recording.host if one.kind == "launch"}
    operators = {one.id: one.name for one in recording.host if one.kind == "operator"}
    kernels = [one for one in recording.device if one.kind == "kernel"]
    assert kernels
    for kernel in kernels:
        assert operators[kernel.operator] == "aten::mm"
        assert launches[kernel.launch].begin_ns <= kernel.begin_ns


def void(_result: object) -> None:
    """Discard a result."""
